"""Open a slide of any format; find the slides of a folder."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from carmil.bags.finding import hidden_note
from carmil.errors import CarmilError
from carmil.slides.slide import Slide

SUFFIXES = (".svs", ".tif", ".tiff", ".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".vmu", ".svslide", ".qptiff", ".btf")
_OTHERS = {
    b"\xff\xd8\xff": "a JPEG picture",
    b"\x89PNG": "a PNG picture",
    b"PK\3\4": "a zip archive",
    b"\x1f\x8b": "a gzip archive",
    b"%PDF": "a PDF",
    b"\x89HDF": "an HDF5 file",
    b"<": "a web page or XML",
}


def open_slide(path: Path, *, mpp: float | None = None) -> Slide:
    """Open the slide at `path`. mpp: micrometres per level-0 pixel, needed where the file has none; it overrides the file's."""
    path = Path(path)
    if path.is_dir():
        raise CarmilError(f"{path} is a folder: expected a slide")
    if not path.is_file():
        raise CarmilError(f"{path}: there is no such slide")
    if path.stat().st_size == 0:
        raise CarmilError(f"{path} is empty (0 bytes); copy it again")
    with path.open("rb") as stream:
        start = stream.read(16)
    try:
        from carmil.slides.openslide_slide import OpenSlideSlide, vendor
        from carmil.slides.tiff_files import is_tiff
        from carmil.slides.tiff_slide import TiffSlide
    except (ImportError, OSError) as error:
        raise CarmilError(
            f"slides need `pip install 'carmil[slides]'` ({error}); run `carmil doctor` for details"
        ) from None
    maker = vendor(path)
    if maker not in (None, "generic-tiff"):
        return OpenSlideSlide(path, mpp=mpp)
    # OpenSlide's plain TIFF supports neither SubIFDs nor inches, and does not report a truncated file
    if is_tiff(path):
        return TiffSlide(path, mpp=mpp)
    guess = next(
        (f"it looks like {words}" for mark, words in _OTHERS.items() if start.startswith(mark)), "unknown format"
    )
    raise CarmilError(f"{path} is not a slide that OpenSlide or tifffile can read: {guess}")


def is_slide(path: Path) -> bool:
    """Whether a file has the name of a slide. (DICOM slides consist of many files: name one of them explicitly.)"""
    return not path.name.startswith(".") and _has_suffix(path)


def _has_suffix(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.is_file()


def find_slides(paths: Sequence[Path], *, log: Callable[[str], None] = lambda line: None) -> list[Path]:
    """Return the slides among `paths`: files as they are, folders searched recursively. Two slides of one name are refused.

    Files of a folder whose names begin with a dot are left out, and logged in one line.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            files = [file for file in sorted(path.rglob("*")) if _has_suffix(file) and file.name[:8] != ".carmil-"]
            if hidden := [file.name for file in files if not is_slide(file)]:
                log(f"{path}: {hidden_note(hidden)}")
            inside = [file for file in files if is_slide(file)]
            if not inside:
                raise CarmilError(f"{path} holds no slide: expected files like {', '.join(SUFFIXES)}")
            found.update(dict.fromkeys(inside))
        elif path.exists():
            found[path] = None
        else:
            raise CarmilError(f"{path}: there is no such slide or folder")
    named = defaultdict(list)
    for path in found:
        named[path.stem.casefold()].append(path)
    for same in named.values():
        if len(same) > 1:
            raise CarmilError(
                f"two slides are called {same[0].stem!r} ({same[0]}, {same[1]}): their output files would have the same "
                "name, at least where case is ignored; rename one"
            )
    return list(found)
