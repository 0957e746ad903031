"""Evidence as a DICOM segmentation of a slide that is a DICOM series.

Every map of evidence becomes two fractional segments, for and against. A fraction is the share of the map's largest absolute
value (of more for a faint map), which the description of the segment states, in the unit of the evidence. It is not a
probability. One pixel is half a tile wide, so that the edges of tiles on a grid are edges of pixels.
"""

import warnings
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carmil import __version__
from carmil.errors import CarmilError
from carmil.files import atomic_file
from carmil.maps.colours import REFUTES, SUPPORTS
from carmil.maps.legend import RESEARCH
from carmil.maps.painting import raster
from carmil.maps.tile_maps import TileMap
from carmil.slides.dicom_series import is_dicom
from carmil.slides.slide import Slide, Tiles
from carmil.untrusted import one_line_errors

LARGEST = 4096  # pixels of the longer side
LEVELS = 255  # that a fraction can have
FRAME = 256  # pixels of a side
_LABEL = 64  # letters of a label in DICOM


def check_dicom_slides(paths: Iterable[Path]) -> None:
    """Refuse slides that are not DICOM."""
    if others := [path for path in paths if not is_dicom(path)]:
        more = f" (and {len(others) - 1:,} more)" if len(others) > 1 else ""
        raise CarmilError(
            f"{others[0]}{more} is not DICOM, and a DICOM segmentation names the series it belongs to: leave out --dicom, or "
            "convert the slide to DICOM first"
        )
    if find_spec("highdicom") is None:
        raise CarmilError("--dicom needs highdicom: pip install 'carmil[dicom]'")


def check_dicom(slide: Slide, maps: Sequence[TileMap]) -> None:
    """Refuse a slide that is not DICOM, and maps without evidence, before anything is drawn."""
    check_dicom_slides([slide.path])
    if not any(one.kind == "evidence" for one in maps):
        raise CarmilError(f"{slide.name}: none of the maps is signed evidence, which --dicom writes")


def write_segmentation(slide: Slide, tiles: Tiles, maps: Sequence[TileMap], path: Path) -> Path:
    """Write the maps of evidence as one fractional segmentation."""
    shown = [one for one in maps if one.kind == "evidence"]
    layers, descriptions = [], []
    for one in shown:
        values, largest = _fractions(one, tiles)
        for sign, colour in ((1, SUPPORTS), (-1, REFUTES)):
            layers.append(np.clip(sign * values, 0, 1))
            descriptions.append(_description(len(layers), one, sign, largest, colour))
    with one_line_errors(slide.path, "expected the DICOM attributes of a whole-slide image"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about values of the source that do not follow the standard
        segmentation = _segmentation(slide, np.stack(layers, axis=-1), _pixel_side(tiles), descriptions)
    with atomic_file(path) as aside:
        segmentation.save_as(aside)
    return path


def _fractions(one: TileMap, tiles: Tiles) -> tuple[NDArray[np.float64], float]:
    """Return the map over the whole slide, divided by the value that fills the colours in pictures, and that value; 0 where
    there is no tile.

    It is the largest absolute value, or more for a faint map. A negligible map is 0 everywhere.
    """
    values = np.nan_to_num(raster(tiles, one.values, side=_pixel_side(tiles)))
    largest = float(np.nanmax(np.abs(one.values), initial=0.0)) / (one.fill or 1.0)
    return (np.zeros_like(values) if one.negligible or largest == 0 else values / largest), largest


def _pixel_side(tiles: Tiles) -> float:
    """Return the side of a pixel of the segmentation in level-0 pixels: half a tile, more on a very large slide."""
    return max(tiles.size / 2, max(tiles.width, tiles.height) / LARGEST)


def _description(number: int, one: TileMap, sign: int, largest: float, colour: tuple[int, int, int]) -> Any:
    import highdicom as hd
    from pydicom.sr.codedict import Code

    words = one.ends[sign > 0]
    description = hd.seg.SegmentDescription(
        segment_number=number,
        segment_label=words[:_LABEL],
        segmented_property_category=Code("85756007", "SCT", "Tissue"),
        segmented_property_type=Code("for" if sign > 0 else "against", "99CARMIL", words[:_LABEL]),
        algorithm_type="AUTOMATIC",
        algorithm_identification=hd.AlgorithmIdentificationSequence(
            name="carmil", family=Code("123109", "DCM", "Artificial Intelligence"), version=__version__
        ),
        display_color=hd.color.CIELabColor.from_rgb(*colour),
    )
    negligible = f"negligible, written as 0: {one.why_negligible}; " if one.negligible else ""
    faint = f"more than the largest absolute value: {one.why_faint}"
    meaning = faint if one.why_faint else "the largest absolute value on this slide"
    description.SegmentDescription = (
        f"{one.title}: {words}; {negligible}1 is {largest:.6g} in the unit of the evidence, {meaning}; not a probability; "
        f"{RESEARCH}"
    )[:1024]
    return description


def _segmentation(slide: Slide, layers: NDArray[np.float64], side: float, descriptions: list[Any]) -> Any:
    """Return the segmentation of layers (height, width, segments) over the whole slide.

    side: the side of a pixel of the segmentation, in level-0 pixels.
    """
    import highdicom as hd
    import pydicom
    from pydicom.uid import generate_uid

    source = pydicom.dcmread(slide.path, stop_before_pixels=True)
    height, width = layers.shape[:2]
    between_rows, between_columns = _spacing(source)  # not slide.mpp, which is one number and may be given by the user
    spacing = (between_rows * side, between_columns * side)
    content = [str(source.SOPInstanceUID), layers.tobytes().hex(), *(one.SegmentDescription for one in descriptions)]
    result = hd.seg.Segmentation(
        source_images=[source],
        pixel_array=layers[None].astype(np.float32),
        segmentation_type="FRACTIONAL",
        segment_descriptions=descriptions,
        series_instance_uid=generate_uid(entropy_srcs=["series", *content]),
        series_number=_SERIES,
        sop_instance_uid=generate_uid(entropy_srcs=["instance", *content]),
        instance_number=1,
        manufacturer="carmil",
        manufacturer_model_name="carmil",
        software_versions=__version__,
        device_serial_number="none",
        fractional_type="OCCUPANCY",
        max_fractional_value=LEVELS,
        content_description=f"Evidence per tile; {RESEARCH}",
        content_label="EVIDENCE",
        plane_positions=[_corner(source, spacing)],
        pixel_measures=hd.PixelMeasuresSequence(pixel_spacing=spacing, slice_thickness=_thickness(source)),
        omit_empty_frames=False,
        dimension_organization_type="TILED_FULL",
        tile_pixel_array=True,
        tile_size=(min(FRAME, height), min(FRAME, width)),
    )
    result.SeriesDescription = f"carmil: evidence per tile; {RESEARCH}"
    return result


def _corner(source: Any, spacing: tuple[float, float]) -> Any:
    """Return the centre of the first pixel of the segmentation, which lies further inside than that of the slide's
    smaller first pixel.
    """
    import highdicom as hd

    origin = source.TotalPixelMatrixOriginSequence[0]
    corner = np.array([float(origin[f"{axis}OffsetInSlideCoordinateSystem"].value) for axis in "XY"])
    own = _spacing(source)
    along_row, along_column = np.array(source.ImageOrientationSlide, dtype=float).reshape(2, 3)[:, :2]
    corner += along_row * (spacing[1] - own[1]) / 2 + along_column * (spacing[0] - own[0]) / 2
    return hd.PlanePositionSequence("SLIDE", (*corner.tolist(), 0.0), pixel_matrix_position=(1, 1))


def _spacing(source: Any) -> tuple[float, float]:
    """Return the distance between the rows and between the columns of the slide, in mm."""
    rows, columns = source.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].PixelSpacing
    return float(rows), float(columns)


_SERIES = 9000  # above the numbers that scanners give


def _thickness(source: Any) -> float:
    groups = source.get("SharedFunctionalGroupsSequence")
    measures = groups[0].get("PixelMeasuresSequence") if groups else None
    return float(measures[0].get("SliceThickness") or 0.001) if measures else 0.001
