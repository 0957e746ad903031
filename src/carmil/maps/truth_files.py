"""Write labels of tiles as files that `carmil cohort build` reads."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from carmil.csv_files import csv_text
from carmil.files import atomic_file, safe_names, write_text
from carmil.maps.tile_labels import TileLabels
from carmil.slides.slide import Tiles
from carmil.truth import UNKNOWN


def write_truth(labelled: Sequence[tuple[Tiles, TileLabels]], out: Path) -> list[str]:
    """Write out/instances.csv and out/patch_labels/SLIDE.npy; return lines for the log. An unknown label is an empty cell."""
    rows: list[tuple[object, ...]] = [("slide", "x", "y", "label", "positive", "negative")]
    names = safe_names(tiles.slide for tiles, _ in labelled)
    for tiles, found in labelled:
        words = np.where(found.labels == UNKNOWN, "", found.labels.astype(str))
        for (x, y), label, yes, no in zip(tiles.corners.tolist(), words, found.positive, found.negative, strict=True):
            rows.append((tiles.slide, x, y, label, f"{yes:.4g}", f"{no:.4g}"))
        with atomic_file(out / "patch_labels" / f"{names[tiles.slide]}.npy") as aside, aside.open("wb") as file:
            np.save(file, found.labels)
    write_text(out / "instances.csv", csv_text(rows, for_people=False))
    return [
        f"written: {out / 'instances.csv'}",
        f"         {out / 'patch_labels'}, {len(labelled)} slides: put it beside the folder features, then `carmil cohort build`",
    ]
