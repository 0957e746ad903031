"""Open TIFF files with tifffile, after counting their pages, which may form a cycle.

`check_tiff` inspects a file before OpenSlide opens it, which can abort the process if the file is damaged.
"""

import logging
from pathlib import Path

import tifffile

from carmil.errors import CarmilError
from carmil.untrusted import one_line_errors

MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
MOST_PAGES = 1000  # a slide has about ten: levels, a label, an overview

logging.getLogger("tifffile").addHandler(logging.NullHandler())  # our own messages name what is wrong with a file


def open_tiff(path: Path, advice: str = "is this TIFF complete?") -> tifffile.TiffFile:
    """Open a TIFF for reading. Refuse one with endless pages, which tifffile would follow for hours."""
    with one_line_errors(path, advice):
        file = tifffile.TiffFile(path)
        try:
            places: set[int] = set()
            for page in file.pages:
                if page.offset in places or len(places) == MOST_PAGES:
                    how = (
                        "whose pages form a cycle" if page.offset in places else f"with more than {MOST_PAGES:,} pages"
                    )
                    raise CarmilError(f"{path} is a TIFF {how}: {advice}")
                places.add(page.offset)
        except BaseException:
            file.close()
            raise
    return file


def is_tiff(path: Path) -> bool:
    """Whether a file begins with the signature of a TIFF."""
    with path.open("rb") as stream:
        return stream.read(4) in MAGIC


def check_tiff(path: Path) -> None:
    """Refuse a TIFF with impossible sizes, missing tiles, or pieces larger than the file."""
    with open_tiff(path) as file, one_line_errors(path, "is this TIFF complete?"):
        for number, page in enumerate(file.pages):
            if problem := _problem(page.aspage(), file.filehandle.size):
                raise CarmilError(f"{path}: page {number} {problem}; is the file complete?")


def _problem(page: tifffile.TiffPage, size: int) -> str | None:
    sides = [page.imagewidth, page.imagelength, *((page.tilewidth, page.tilelength) if page.is_tiled else ())]
    if not all(isinstance(side, int) and side > 0 for side in sides):
        return "has a size that is not a positive whole number"
    if not all(isinstance(number, int) and 0 <= number <= size for number in page.databytecounts):
        return f"stores pieces that are larger than the file, which has {size:,} bytes"
    if page.is_tiled:
        wide, tall, across, down = sides
        planes = page.samplesperpixel if page.planarconfig == tifffile.PLANARCONFIG.SEPARATE else 1
        needed, found = planes * -(-wide // across) * -(-tall // down), len(page.databytecounts)
        if min(found, len(page.dataoffsets)) < needed:
            return f"has {found:,} tiles where its size needs {needed:,}"
    return None
