"""Annotations drawn in other programs: QuPath's GeoJSON, HistomicsUI's JSON, ASAP's and Aperio's XML, and masks as TIFF or
PNG. Coordinates are level-0 pixels.

Nothing in a file is executed or expanded: an XML file with a document type, which could define entities, is
refused. A new format is one entry in `READERS`, by the first bytes of its files.

A mask has one whole number per pixel, 0 where nothing is annotated; a PNG may have one colour per class instead, black or
transparent where nothing is annotated. A TIFF is read strip by strip, at the resolution that tiles need. A mask has at
most MOST_VALUES classes, and their outlines at most MOST_EDGES pixels. A file with more is a picture, or has one number per
nucleus, and is refused.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

import numpy as np
from numpy.typing import NDArray

from carmil.bags.geometry import FARTHEST
from carmil.errors import CarmilError
from carmil.maps.regions import Region, polygon
from carmil.untrusted import check_not_stream, one_line_errors, read_json
from carmil.words import number_in

LONGEST = 8192  # pixels of a mask that are sampled, along its longer side
STRIP = 256  # rows read at a time
LARGEST = 2**28  # bytes of a mask that are read, or decoded, at once
MOST_SAMPLES = 4  # numbers per pixel, of which only the first is used
PROPORTION = 0.02  # largest relative difference between the proportions of a mask and its slide
MOST_VALUES = 256  # different numbers in a mask, 0 included: those of 8 bits
MOST_EDGES = 2**22  # neighbouring pixels of different values
MOST_TRACED = (
    2**29
)  # pixels in the boxes of all regions together; of a mask with more, every other row and column is used
SUFFIXES = (".geojson", ".json", ".xml", ".tif", ".tiff", ".png")  # of files in a folder of annotations
UNNAMED = "annotation"  # the class of a region without a name
_ELLIPSE, _LINES = "2", ("3", "4", "5")  # Aperio's types of regions; arrows and rulers enclose no area


def read_mask(path: Path, width: int, height: int) -> Iterator[Region]:
    """Return one region per value, named after it, with all its parts and holes; the mask is stretched over the slide."""
    mask, sampled = _sampled(path, width / height)
    return _regions(mask, _values(mask, path), sampled, (width, height))


def read_png_mask(path: Path, width: int, height: int) -> Iterator[Region]:
    """Return one region per number, or per colour, named like #ff0000."""
    mask, coloured = _png_numbers(path, width / height)
    values = _values(mask, path)
    return _regions(mask, values, mask.shape, (width, height), "#{:06x}" if coloured else "{}")


def _png_numbers(path: Path, proportion: float) -> tuple[NDArray[Any], bool]:
    """Return one number per pixel, and whether it is a colour: red * 65536 + green * 256 + blue, 0 where transparent."""
    from PIL import Image

    advice = "expected a PNG with one number or colour per class"
    with one_line_errors(path, advice), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about pictures of more than 89 million pixels
        with Image.open(path, formats=("PNG",)) as picture:
            wide, tall = picture.size
            if wide * tall > LARGEST // 4:
                raise CarmilError(
                    f"{path} is {wide:,} x {tall:,} pixels, too large to be decoded as a whole: save it as TIFF"
                )
            _check_proportion(path, wide, tall, proportion)
            numbered = picture.mode in ("1", "L", "P", "I;16", "I")
            if numbered:
                return np.asarray(picture).astype(np.uint16), False
            pixels = np.asarray(picture.convert("RGBA")).astype(np.uint32)
    colours = pixels[..., 0] << 16 | pixels[..., 1] << 8 | pixels[..., 2]
    return np.where(pixels[..., 3] == 0, 0, colours).astype(np.uint32), True


def _regions(
    mask: NDArray[Any],
    values: NDArray[Any],
    sampled: tuple[float, float],
    slide: tuple[int, int],
    naming: str = "{}",
) -> Iterator[Region]:
    """Trace each value of a mask over a slide of (width, height) level-0 pixels.

    sampled: the height and width of the whole mask, in steps of its sampling (see `_sampled`).
    """
    import shapely
    from scipy import ndimage
    from skimage.measure import find_contours

    numbers = np.empty(mask.shape, np.uint16)  # 0, or the index of the pixel's value + 1
    for top in range(0, len(mask), STRIP):
        strip = mask[top : top + STRIP]
        numbers[top : top + STRIP] = np.where(strip == 0, 0, np.searchsorted(values, strip) + 1)
    boxes = ndimage.find_objects(numbers, max_label=len(values))
    while sum(numbers[box].size for box in boxes if box is not None) > MOST_TRACED:
        numbers, sampled = numbers[::2, ::2], (sampled[0] / 2, sampled[1] / 2)
        boxes = ndimage.find_objects(numbers, max_label=len(values))
    scale = np.array([slide[0] / sampled[1], slide[1] / sampled[0]])
    for number, box in enumerate(boxes, start=1):
        if box is None:
            continue
        corner = np.array([box[1].start, box[0].start]) - 0.5  # x, y of the centre of the padded box's upper left pixel
        padded = np.pad(numbers[box] == number, 1).astype(np.uint8)  # closes regions at the border
        rings = [np.clip((ring[:, ::-1] + corner) * scale, 0, slide) for ring in find_contours(padded, 0.5)]
        shape = shapely.build_area(shapely.MultiLineString([ring for ring in rings if len(ring) > 3]))
        if not shape.is_empty:
            yield Region(naming.format(values[number - 1]), shape)


def _values(mask: NDArray[Any], path: Path) -> NDArray[Any]:
    """Return the values other than 0, sorted; refuse a picture that is not a mask."""
    values = np.empty(0, mask.dtype)
    for top in range(0, len(mask), STRIP):
        values = np.union1d(values, mask[top : top + STRIP])
        if len(values) > MOST_VALUES:
            raise CarmilError(
                f"{path} has more than {MOST_VALUES} different values: expected a mask with one number per class, "
                "not a picture or one number per object"
            )
    edges = np.count_nonzero(mask[1:] != mask[:-1]) + np.count_nonzero(mask[:, 1:] != mask[:, :-1])
    if edges > MOST_EDGES:
        raise CarmilError(
            f"{path} changes its value at {edges:,} pixels, more than {MOST_EDGES:,}: expected a mask of regions, not a picture"
        )
    return values[values != 0]


def _sampled(path: Path, proportion: float) -> tuple[NDArray[Any], tuple[float, float]]:
    """Return every n-th pixel in both directions, and the height and width of the mask in steps of n pixels."""
    import zarr

    from carmil.slides.tiff_slide import open_tiff

    with one_line_errors(path, "expected a TIFF with one whole number per pixel"), open_tiff(path) as file:
        levels = file.series[0].levels
        level = next((i for i in reversed(range(len(levels))) if max(levels[i].shape[:2]) >= LONGEST), 0)
        height, width = _shape(levels[level], path)
        _check_proportion(path, width, height, proportion)
        step = max(1, max(height, width) // LONGEST)
        pixels: Any = zarr.open(file.aszarr(series=0, level=level), mode="r")
        mask = np.empty((-(-height // step), -(-width // step)), pixels.dtype)
        rows = max(1, min(STRIP, LARGEST // (width * step * pixels.dtype.itemsize)))  # of the mask, read at a time
        for top in range(0, len(mask), rows):
            part = np.asarray(pixels[top * step : (top + rows) * step])[::step, ::step]
            mask[top : top + rows] = part if part.ndim == 2 else part[..., 0]
    return mask, (height / step, width / step)


def _check_proportion(path: Path, width: int, height: int, proportion: float) -> None:
    if abs(width / height / proportion - 1) > PROPORTION:
        raise CarmilError(
            f"{path} is {width:,} x {height:,}, but the slide is {proportion:.3f} times as wide as high: "
            "expected a mask of this slide"
        )


def _shape(level: Any, path: Path) -> tuple[int, int]:
    """Return the height and width of a level; refuse a level that is not a mask."""
    if level.axes not in ("YX", "YXS") or level.dtype.kind not in "bui":
        raise CarmilError(
            f"{path} holds {level.dtype} with the axes {level.axes}: expected a mask with one whole number per pixel and one page"
        )
    if len(level.shape) == 3 and level.shape[2] > MOST_SAMPLES:
        raise CarmilError(
            f"{path} has {level.shape[2]:,} numbers per pixel: expected a mask with one whole number per pixel"
        )
    page = level.keyframe
    if prod(page.chunks) * level.dtype.itemsize > LARGEST:
        raise CarmilError(
            f"{path} stores {' x '.join(f'{size:,}' for size in page.chunks)} numbers in one piece, too large "
            "to be decoded as a whole; convert it to a tiled TIFF"
        )
    return level.shape[0], level.shape[1]


def read_annotations(path: Path, *, width: int, height: int) -> list[Region]:
    """Read all regions of a file in any known format; a mask is stretched over the slide's `width` and `height`."""
    check_not_stream(path)
    try:
        with path.open("rb") as file:
            start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError as error:
        raise CarmilError(f"annotations {path} cannot be read: {error.strerror or error}") from error
    reader = next((reader for signature, reader in READERS.items() if start.startswith(signature)), None)
    if reader is None:
        raise CarmilError(
            f"unknown format of annotations {path}: expected GeoJSON, HistomicsUI JSON, ASAP or Aperio XML, or a mask (TIFF, PNG)"
        )
    regions = [region for region in reader(path, width, height) if region is not None]
    if not regions:
        raise CarmilError(f"{path} holds no polygon: expected at least one region")
    return regions


def _region(name: str, rings: Sequence[Any], where: str, *, cut: bool = False) -> Region | None:
    """Return the region of an outline and its holes; None if it has no area."""
    outlines = [corners for corners in (_corners(ring, where) for ring in rings) if len(corners) >= 3]
    if not outlines:
        return None
    shape = polygon(outlines, where)
    return None if shape.is_empty else Region(name or UNNAMED, shape, cut)


def _corners(ring: Any, where: str) -> np.ndarray:
    """Return the corners (k, 2) of a ring, the first not repeated at the end."""
    try:
        corners = np.array([point[:2] for point in ring], dtype=np.float64)
    except (TypeError, ValueError, KeyError, IndexError, OverflowError):
        raise CarmilError(f"{where} has corners that are not pairs of numbers: expected x and y") from None
    if not len(corners):
        return corners
    if corners.ndim != 2 or corners.shape[1] != 2 or not np.isfinite(corners).all():
        raise CarmilError(f"{where} has corners that are not finite numbers: expected x and y in level-0 pixels")
    if np.abs(corners).max() >= FARTHEST:
        x, y = corners[np.abs(corners).max(axis=1).argmax()]
        raise CarmilError(f"{where} has a corner at ({x:g}, {y:g}): expected level-0 pixels below {FARTHEST:g}")
    return corners[:-1] if (corners[0] == corners[-1]).all() else corners


def _read_json(path: Path, width: int, height: int) -> Iterator[Region | None]:
    content = read_json(path, "expected GeoJSON, as QuPath writes it, or HistomicsUI's JSON")
    documents = content if isinstance(content, list) else [content]
    if documents and all(isinstance(one, dict) and ("annotation" in one or "elements" in one) for one in documents):
        return _histomics_regions([one.get("annotation", one) for one in documents], path)
    return _geojson_regions(content, path)


def _histomics_regions(documents: Sequence[Any], path: Path) -> Iterator[Region | None]:
    """Read the closed shapes of HistomicsUI; points, arrows and open lines are skipped.

    The class is the element's group, else its label, else the name of the annotation.
    """
    for number, document in enumerate(documents):
        elements = document.get("elements", []) if isinstance(document, dict) else None
        if not isinstance(elements, list) or not all(isinstance(element, dict) for element in elements):
            raise CarmilError(f"{path}: annotation {number} has no list of elements: expected HistomicsUI's JSON")
        for i, element in enumerate(elements):
            where = f"{path}: annotation {number}, element {i}"
            label = element.get("label")
            names = (
                element.get("group"),
                label.get("value") if isinstance(label, dict) else label,
                document.get("name"),
            )
            name = next((str(name) for name in names if name and name != "default"), "")
            if rings := _histomics_rings(element, where):
                yield _region(name, rings, where)


def _histomics_rings(element: dict[str, Any], where: str) -> list[Any]:
    """Return the outline of an element and its holes; an empty list if it encloses no area."""
    match element.get("type"):
        case "polyline" if element.get("closed", True):
            points, holes = element.get("points"), element.get("holes") or []
            if not isinstance(points, list) or not isinstance(holes, list):
                raise CarmilError(f"{where} has no list of points: expected x and y")
            return [points, *holes]
        case "rectangle" | "ellipse" | "circle" as kind:
            radius, centre = element.get("radius"), element.get("center")
            sizes = (radius, radius) if kind == "circle" else (element.get("width"), element.get("height"))
            numbers = [*(centre[:2] if isinstance(centre, list) else ()), *sizes, element.get("rotation") or 0.0]
            if len(numbers) != 5 or not all(isinstance(number, int | float) for number in numbers):
                raise CarmilError(f"{where} is a {kind} without centre and size: expected numbers")
            x, y, wide, tall, turned = map(float, numbers)
            if kind == "rectangle":
                shape = np.array([(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)])
            else:
                angles = np.linspace(0, 2 * np.pi, 64, endpoint=False)
                shape = np.stack([np.cos(angles), np.sin(angles)], axis=1) * (1.0 if kind == "circle" else 0.5)
            shape = shape * (wide, tall)
            cos, sin = np.cos(turned), np.sin(turned)
            return [(shape @ np.array([(cos, sin), (-sin, cos)]) + (x, y)).tolist()]
    return []


def _geojson_regions(content: Any, path: Path) -> Iterator[Region | None]:
    """Read a feature, a list of them or a collection; points and lines are skipped."""
    for i, feature in enumerate(_features(content, path)):
        yield from regions_of(feature, f"{path}: feature {i}")


def geojson_features(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the object of a GeoJSON file, empty if it is a list, and its features."""
    content = read_json(path, "expected GeoJSON, as QuPath writes it")
    return content if isinstance(content, dict) else {}, _features(content, path)


def _features(content: Any, path: Path) -> list[dict[str, Any]]:
    features = content.get("features", [content]) if isinstance(content, dict) else content
    if not isinstance(features, list) or not all(isinstance(feature, dict) for feature in features):
        raise CarmilError(f"{path} is not GeoJSON: expected a FeatureCollection, or a list of features")
    return features


def regions_of(feature: dict[str, Any], where: str) -> Iterator[Region | None]:
    """Return the region of every polygon of a GeoJSON feature; None for one without area."""
    for rings in _polygons(feature.get("geometry", feature) or {}, where):
        yield _region(class_name(feature.get("properties")), rings, where)


def _polygons(geometry: Any, where: str, depth: int = 0) -> Iterator[list[Any]]:
    if not isinstance(geometry, dict) or depth > 8:
        raise CarmilError(f"{where} has an unknown kind of geometry: expected Polygon or MultiPolygon")
    content = geometry.get("geometries" if geometry.get("type") == "GeometryCollection" else "coordinates")
    match geometry.get("type"), content:
        case "Polygon", list():
            yield content
        case "MultiPolygon", list() if all(isinstance(part, list) for part in content):
            yield from content
        case "GeometryCollection", list():
            for part in content:
                yield from _polygons(part, where, depth + 1)
        case "Polygon" | "MultiPolygon" | "GeometryCollection", _:
            raise CarmilError(f"{where} is a {geometry['type']} without coordinates: expected some")


def class_name(properties: Any) -> str:
    """Return QuPath's classification, or else the name of the object."""
    own = properties.get("name") if isinstance(properties, dict) else None
    return classification_of(properties) or str(own or UNNAMED)


def classification_of(properties: Any) -> str:
    """Return QuPath's classification; empty if there is none."""
    classification = properties.get("classification") if isinstance(properties, dict) else None
    if isinstance(classification, dict):
        names = classification.get("names")
        classification = classification.get("name") or (": ".join(map(str, names)) if isinstance(names, list) else None)
    return str(classification or "")


def _read_xml(path: Path, width: int, height: int) -> Iterator[Region | None]:
    root = _parse_xml(path)
    match root.tag:
        case "ASAP_Annotations":
            return _asap_regions(root, path)
        case "Annotations":
            return _aperio_regions(root, path)
    raise CarmilError(f"{path} begins with <{root.tag}>: expected <ASAP_Annotations>, or Aperio's <Annotations>")


def _parse_xml(path: Path) -> Element:
    """Return the root. Entities need a document type, and a file with one is refused before its contents are parsed."""
    builder, parser = TreeBuilder(), expat.ParserCreate()

    def refuse(*_: object) -> None:
        raise CarmilError(
            f"{path} declares a document type, which could define entities: expected XML without one; remove "
            "its <!DOCTYPE ...>"
        )

    parser.StartDoctypeDeclHandler = refuse
    parser.StartElementHandler, parser.EndElementHandler = builder.start, builder.end
    try:
        with path.open("rb") as file:
            parser.ParseFile(file)
        return builder.close()
    except (expat.ExpatError, AssertionError, ValueError, LookupError, OSError) as error:
        raise CarmilError(f"{path} is not XML ({error}): expected annotations of ASAP or Aperio") from error


def _asap_regions(root: Element, path: Path) -> Iterator[Region | None]:
    for annotation in root.iterfind("./Annotations/Annotation"):
        if annotation.get("Type", "Polygon") not in ("Polygon", "Spline", "Rectangle"):
            continue
        corners = [
            (_number(corner, "Order", path, "0"), _number(corner, "X", path), _number(corner, "Y", path))
            for corner in annotation.iterfind("./Coordinates/Coordinate")
        ]
        ring = [(x, y) for _, x, y in sorted(corners, key=lambda corner: corner[0])]
        group = annotation.get("PartOfGroup", "")
        name = annotation.get("Name", "") if group in ("", "None") else group
        yield _region(name, [ring], f"{path}: {annotation.get('Name', '')!r}")


def _aperio_regions(root: Element, path: Path) -> Iterator[Region | None]:
    for layer in root.iterfind("./Annotation"):
        for element in layer.iterfind("./Regions/Region"):
            kind = element.get("Type", "0")
            if kind in _LINES:
                continue
            ring = [(_number(v, "X", path), _number(v, "Y", path)) for v in element.iterfind("./Vertices/Vertex")]
            if kind == _ELLIPSE and len(ring) == 2:
                ring = _ellipse(*ring)
            name = layer.get("Name") or element.get("Text") or f"layer {layer.get('Id', '')}".strip()
            cut = element.get("NegativeROA") == "1"
            yield _region(name, [ring], f"{path}: region {element.get('Id', '')}", cut=cut)


def _number(element: Element, name: str, path: Path, default: str = "") -> float:
    if (number := number_in(text := element.get(name, default))) is None:
        raise CarmilError(f"{path}: a <{element.tag}> has {name}={text!r}: expected a number")
    return number


def _ellipse(corner: tuple[float, float], opposite: tuple[float, float]) -> list[tuple[float, float]]:
    """Return the ellipse in the box between two corners, as stored by Aperio."""
    middle, reach = (np.add(corner, opposite) / 2, np.subtract(opposite, corner) / 2)
    turn = np.linspace(0, 2 * np.pi, 64, endpoint=False)
    return [(x, y) for x, y in middle + reach * np.stack([np.cos(turn), np.sin(turn)], axis=1)]


READERS: dict[bytes, Callable[[Path, int, int], Iterator[Region | None]]] = {
    **dict.fromkeys((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), read_mask),
    b"\x89PNG": read_png_mask,
    **dict.fromkeys((b"{", b"["), _read_json),
    b"<": _read_xml,
}
