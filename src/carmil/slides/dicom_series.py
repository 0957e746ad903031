"""Names of slides, and DICOM whole-slide images: all files of a series are one slide.

A scanner or an archive writes one DICOM file per resolution, label and overview. OpenSlide, given one file, reads all files of
its series in the same folder. Here a series is identified by the path of its largest picture.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from carmil.errors import CarmilError
from carmil.untrusted import one_line_errors

WHOLE_SLIDE = "1.2.840.10008.5.1.4.1.1.77.1.6"  # VL Whole Slide Microscopy Image Storage
_DEFLATED = "1.2.840.10008.1.2.1.99"  # read as a whole, however large it becomes; no slide is stored so
_TAGS = (
    *("SOPClassUID", "SeriesInstanceUID", "SeriesDescription", "ContainerIdentifier", "ImageType"),
    *("TotalPixelMatrixColumns", "TotalPixelMatrixRows"),
)
_UNNAMED = ("", "unknown", "none", "n/a")


@dataclass(frozen=True)
class _File:
    """One file of a whole-slide image. pixels: of its largest picture, 0 for a label or an overview."""

    path: Path
    series: str
    container: str
    description: str
    pixels: int


def slide_name(path: Path) -> str:
    """Return the name of a slide: that of its file without the suffix, or of its series if it is a DICOM file.

    A series is named by the first of these that no other series in its folder has: the identifier of its container (the glass
    slide), the container and the description of the series, the description, the folder if it holds one series, the UID.
    """
    file = _header(path) if is_dicom(path) else None
    if file is None:
        return path.stem
    names = _names(_files_in(path.parent), path.parent)
    return names.get(file.series, file.series)


def series_among(paths: Iterable[Path]) -> tuple[list[Path], int]:
    """Return the largest picture of every DICOM series, and the number of DICOM files that are not part of a slide."""
    files = [(path, _header(path)) for path in paths if is_dicom(path)]
    largest: dict[tuple[Path, str], _File] = {}
    for _, file in files:
        if file is not None and file.pixels:
            key = (file.path.parent, file.series)
            if key not in largest or file.pixels > largest[key].pixels:
                largest[key] = file
    others = sum(file is None or (path.parent, file.series) not in largest for path, file in files)
    return [file.path for file in largest.values()], others


def is_dicom(path: Path) -> bool:
    """Return whether a file is DICOM, by its content: archives give such files any suffix, or none."""
    if path.suffix.lower() not in (".dcm", ".dicom", ".dic", ".ima", "") and not path.suffix[1:].isdigit():
        return False
    try:
        if not path.is_file():
            return False
        with path.open("rb") as stream:
            return stream.read(132)[128:] == b"DICM"
    except OSError:
        return False


def _files_in(folder: Path) -> list[_File]:
    headers = (_header(path) for path in sorted(folder.iterdir()) if is_dicom(path))
    return [file for file in headers if file is not None]


def _names(files: Sequence[_File], folder: Path) -> dict[str, str]:
    """Return the name of each series in a folder."""
    series = {file.series: file for file in sorted(files, key=lambda file: file.pixels)}  # the largest comes last
    candidates = defaultdict(list)
    for uid, file in series.items():
        both = [text for text in (file.container, file.description) if text]
        candidates[uid] = [*both[:1], " ".join(both), *both[1:]]
        if len(series) == 1:
            candidates[uid].append(folder.resolve().name)
    names = {}
    for uid, texts in candidates.items():
        taken = {text.casefold() for other, some in candidates.items() if other != uid for text in some}
        names[uid] = next((text for text in texts if text and text.casefold() not in taken), uid)
    return names


def _header(path: Path) -> _File | None:
    """Return the properties of a file and its series; None if it is damaged or not a whole-slide image."""
    _need_pydicom(path)
    state = path.stat()
    try:
        return _read_header(path, state.st_size, state.st_mtime_ns)
    except CarmilError:
        return None


@lru_cache(maxsize=1 << 14)
def _read_header(path: Path, size: int, changed: int) -> _File | None:
    import pydicom

    with one_line_errors(path, "expected a DICOM whole-slide image"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about values that do not follow the standard
        if str(pydicom.filereader.read_file_meta_info(path).get("TransferSyntaxUID", "")) == _DEFLATED:
            return None
        header = pydicom.dcmread(path, specific_tags=list(_TAGS), stop_before_pixels=True)
        if str(header.get("SOPClassUID", "")) != WHOLE_SLIDE or not header.get("SeriesInstanceUID"):
            return None
        pixels = int(header.get("TotalPixelMatrixColumns") or 0) * int(header.get("TotalPixelMatrixRows") or 0)
        kinds = [str(kind) for kind in header.get("ImageType") or ()]
        return _File(
            path,
            str(header.SeriesInstanceUID),
            _text(header.get("ContainerIdentifier")),
            _text(header.get("SeriesDescription")),
            max(0, pixels) if "VOLUME" in kinds else 0,
        )


def _text(value: Any) -> str:
    """Return a text on one line; empty for a placeholder such as "unknown"."""
    text = " ".join(str(value if value is not None else "").split())
    return "" if text.casefold() in _UNNAMED else text


def _need_pydicom(path: Path) -> None:
    if find_spec("pydicom") is None:
        raise CarmilError(f"{path} is DICOM, which needs pydicom: pip install 'carmil[dicom]'")
