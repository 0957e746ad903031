"""A folder like crc's, made up: nuclei whose features tell patient and kind, and a few patients of unknown kind."""

from pathlib import Path

import numpy as np

KINDS = ("epithelial", "inflammatory", "fibroblast", "others")


def made_crc(folder: Path, *, patients: int = 60, nuclei: int = 40) -> Path:
    """Three fifths of the patients have tumour nuclei; two more patients have no kinds at all.

    Features are (kind, patient, row, 1): so that a test reads off a slide what it was made of.
    """
    lines, features = ["instance_id,patient_id,cell_type,is_cancerous"], []
    for patient in range(1, patients + 3):
        known = KINDS if patient % 5 < 3 else KINDS[1:]
        for i in range(nuclei):
            kind = known[i % len(known)]
            told = kind if patient <= patients else ""
            lines.append(f"{len(features)},{patient},{told},{int(kind == 'epithelial')}")
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
