"""The one way TIFF files are opened with tifffile: their pages are counted first, for they may form a circle."""

import logging
from pathlib import Path

import tifffile

from carmil.errors import CarmilError
from carmil.untrusted import one_line_errors

MOST_PAGES = 1000  # a slide has about ten: levels, a label, an overview

logging.getLogger("tifffile").addHandler(logging.NullHandler())  # our own messages name what is wrong with a file


def open_tiff(path: Path, advice: str = "is this TIFF whole?") -> tifffile.TiffFile:
    """Open a TIFF for reading. Refuse one whose pages have no end: tifffile would follow them for hours."""
    with one_line_errors(path, advice):
        file = tifffile.TiffFile(path)
        try:
            places: set[int] = set()
            for page in file.pages:
                if page.offset in places or len(places) == MOST_PAGES:
                    how = "in a circle" if page.offset in places else f"with more than {MOST_PAGES:,} pages"
                    raise CarmilError(f"{path} is a TIFF {how}: {advice}")
                places.add(page.offset)
        except BaseException:
            file.close()
            raise
    return file
