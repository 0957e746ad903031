"""Labels of tiles as files that a cohort is built with."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from carmil.files import safe_name, whole_file, write_text
from carmil.slides.slide import Tiles
from carmil.slides.tile_labels import TileLabels
from carmil.truth import UNKNOWN


def write_truth(labelled: Sequence[tuple[Tiles, TileLabels]], out: Path) -> list[str]:
    """Writes out/instances.csv and out/patch_labels/SLIDE.npy; says what it did. An unknown label is empty in the table."""
    lines = io.StringIO()
    lines.write("slide,x,y,label,positive,negative\n")
    for tiles, found in labelled:
        words = np.where(found.labels == UNKNOWN, "", found.labels.astype(str))
        slide = f'"{tiles.slide.replace(chr(34), 2 * chr(34))}"'
        for (x, y), label, yes, no in zip(tiles.corners.tolist(), words, found.positive, found.negative, strict=True):
            lines.write(f"{slide},{x},{y},{label},{yes:.4g},{no:.4g}\n")
        with whole_file(out / "patch_labels" / f"{safe_name(tiles.slide)}.npy") as aside, aside.open("wb") as file:
            np.save(file, found.labels)
    write_text(out / "instances.csv", lines.getvalue())
    return [
        f"written: {out / 'instances.csv'}",
        f"         {out / 'patch_labels'}, {len(labelled)} slides: put it beside a folder features and build the cohort",
    ]
