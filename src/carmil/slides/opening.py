"""Open a slide of any format; find the slides of a folder."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from carmil.bags.finding import hidden_note
from carmil.errors import CarmilError
from carmil.slides.dicom_series import is_dicom, series_among, slide_name
from carmil.slides.slide import GivenMpp, Slide
from carmil.words import plural

SUFFIXES = (".svs", ".tif", ".tiff", ".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".vmu", ".svslide", ".qptiff", ".btf")
PICTURES = (".png", ".jpg", ".jpeg")
_OTHERS = {
    b"\xff\xd8\xff": "a JPEG picture",
    b"\x89PNG": "a PNG picture",
    b"PK\3\4": "a zip archive",
    b"\x1f\x8b": "a gzip archive",
    b"%PDF": "a PDF",
    b"\x89HDF": "an HDF5 file",
    b"<": "a web page or XML",
}


def open_slide(path: Path, *, mpp: float | None = None, missing_mpp: float | None = None) -> Slide:
    """Open the slide at `path`; of a DICOM series, the path of any of its files.

    mpp: micrometres per level-0 pixel, in place of the file's value. missing_mpp: used only if the file has none.
    """
    path = Path(path)
    if path.is_dir():
        raise CarmilError(f"{path} is a folder: expected a slide")
    if not path.is_file():
        raise CarmilError(f"{path} does not exist: expected a slide")
    if path.stat().st_size == 0:
        raise CarmilError(f"{path} is empty (0 bytes); copy it again")
    with path.open("rb") as stream:
        start = stream.read(16)
    try:
        from carmil.slides.openslide_slide import OpenSlideSlide, vendor
        from carmil.slides.picture_slide import PictureSlide
        from carmil.slides.tiff_slide import TiffSlide, is_tiff
    except (ImportError, OSError) as error:
        raise CarmilError(
            f"slides need `pip install 'carmil[slides]'` ({error}); run `carmil doctor` for details"
        ) from None
    given, maker = GivenMpp(mpp, missing_mpp), vendor(path)
    if maker not in (None, "generic-tiff"):
        return OpenSlideSlide(path, mpp=given)
    # OpenSlide's plain TIFF reader supports neither SubIFDs nor inches, and does not report a truncated file
    if is_tiff(path):
        return TiffSlide(path, mpp=given)
    if path.suffix.lower() in PICTURES:
        return PictureSlide(path, mpp=given)
    guess = next(
        (f"it looks like {words}" for mark, words in _OTHERS.items() if start.startswith(mark)), "unknown format"
    )
    raise CarmilError(f"{path} is not a slide that OpenSlide or tifffile can read: {guess}")


def _has_suffix(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.is_file()


def slides_in(folder: Path, *, log: Callable[[str], None] = lambda line: None) -> list[Path]:
    """Return the slides below a folder. A DICOM series is one slide, by the path of its largest picture.

    PNG and JPEG pictures are slides only if there are no others, as they often lie beside them as thumbnails. Files whose names
    begin with a dot are left out, and logged in one line, as are DICOM files that are not part of a slide.
    """
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and not file.name.startswith(".carmil-")]
    shown = [file for file in files if not file.name.startswith(".")]
    if hidden := [file.name for file in files if file.name.startswith(".") and _has_suffix(file)]:
        log(f"{folder}: {hidden_note(hidden)}")
    series, others = series_among(shown)
    if others:
        log(f"{folder}: {plural(others, 'DICOM file')} left out: not a picture of a whole slide, or damaged")
    found = sorted([*filter(_has_suffix, shown), *series])
    return found or [file for file in shown if file.suffix.lower() in PICTURES]


def find_slides(paths: Sequence[Path], *, log: Callable[[str], None] = lambda line: None) -> list[Path]:
    """Return the slides among `paths`: files as they are, folders searched recursively. Two slides of the same name
    are refused.

    Several files of a DICOM series are one slide.
    """
    slides: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            inside = slides_in(path, log=log)
            if not inside:
                raise CarmilError(
                    f"{path} contains no slide: expected DICOM, or files like {', '.join((*SUFFIXES, *PICTURES))}"
                )
            slides.update(dict.fromkeys(inside))
        elif path.exists():
            slides[_of_series(path)] = None
        else:
            raise CarmilError(f"{path} does not exist: expected a slide or folder")
    named = defaultdict(list)
    for path in slides:
        named[slide_name(path).casefold()].append(path)
    for same in named.values():
        if len(same) > 1:
            raise CarmilError(
                f"two slides are named {slide_name(same[0])!r} ({same[0]}, {same[1]}): their output files would have "
                "the same name, at least where case is ignored; rename one"
            )
    return list(slides)


def _of_series(path: Path) -> Path:
    """Return the largest picture of the series that a DICOM file belongs to; any other path as it is."""
    if not is_dicom(path):
        return path
    name = slide_name(path)
    largest, _ = series_among(sorted(path.parent.iterdir()))
    return next((one for one in largest if slide_name(one) == name), path)
