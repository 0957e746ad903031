"""Tables of slides with their micrometres per pixel, like TRIDENT's lists (`wsi,mpp`)."""

from collections.abc import Sequence
from pathlib import Path, PurePath

from carmil.errors import CarmilError
from carmil.slides.dicom_series import slide_name
from carmil.slides.slide import LARGEST, SMALLEST
from carmil.table_files import plain_name, read_table
from carmil.words import number_in

SLIDE_COLUMNS = ("wsi", "slide", "slide_id", "slide_name", "filename", "file", "path")
MPP_COLUMNS = ("mpp", "um/px", "um_per_px", "um_per_pixel", "microns_per_pixel")


def read_mpps(path: Path, slides: Sequence[Path]) -> dict[Path, float]:
    """Return the micrometres per pixel of the slides that have one in the table.

    The table may list a slide by its name or its file's name, with or without folders; other slides in it are ignored.
    """
    table = read_table(path)
    named, given = (_column(path, list(table.columns), names) for names in (SLIDE_COLUMNS, MPP_COLUMNS))
    mpps: dict[str, tuple[int, float]] = {}
    for line, name, text in zip(table.index, table[named], table[given], strict=True):
        if not text.strip():
            continue
        value = number_in(text)
        if value is None or not SMALLEST <= value <= LARGEST:
            raise CarmilError(
                f"{path}, line {line}: {given} is {text!r}: expected {SMALLEST} to {LARGEST:g} micrometres per pixel"
            )
        short = PurePath(name.strip().replace("\\", "/")).name
        if short in mpps and mpps[short][1] != value:
            raise CarmilError(
                f"{path}: {short} has {mpps[short][1]:g} in line {mpps[short][0]} and {value:g} in line {line}"
            )
        mpps[short] = (line, value)
    rows = {
        slide: next((mpps[name] for name in (slide_name(slide), slide.name) if name in mpps), None) for slide in slides
    }
    found = {slide: row[1] for slide, row in rows.items() if row is not None}
    if not found:
        raise CarmilError(
            f"{path} has the micrometres per pixel of none of the slides: expected names like {slides[0].name}"
        )
    return found


def _column(path: Path, columns: list[str], names: Sequence[str]) -> str:
    for name in names:
        for column in columns:
            if plain_name(column) == name:
                return column
    raise CarmilError(f"{path} has the columns {', '.join(columns)}: expected one of {', '.join(names)}")
