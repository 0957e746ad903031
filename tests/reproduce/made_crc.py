"""A made-up folder in the layout of crc: nuclei whose features encode patient and kind."""

from pathlib import Path

import numpy as np

KINDS = ("epithelial", "inflammatory", "fibroblast", "others")


def made_crc(folder: Path, *, patients: int = 60, nuclei: int = 40) -> Path:
    """Write the folder: three fifths of the patients have tumour nuclei, two more patients have nuclei of unknown kind.

    Features are (kind, patient, row, 1), so that tests can tell which nuclei a slide was made of.
    """
    lines, features = ["instance_id,patient_id,cell_type,is_cancerous"], []
    for patient in range(1, patients + 3):
        known = KINDS if patient % 5 < 3 else KINDS[1:]
        for i in range(nuclei):
            kind = known[i % len(known)]
            recorded_kind = kind if patient <= patients else ""
            lines.append(f"{len(features)},{patient},{recorded_kind},{int(kind == 'epithelial')}")
            features.append((KINDS.index(kind), patient, i, 1))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "instances.csv").write_text("\n".join([*lines, ""]))
    np.save(folder / "features.npy", np.array(features, dtype=np.float16))
    pictures = (
        np.zeros((len(features), 27, 27, 3), dtype=np.uint8)
        + np.arange(len(features), dtype=np.uint8)[:, None, None, None]
    )
    np.savez(folder / "patches.npz", im=pictures)
    return folder
