"""Annotations drawn in other programs: QuPath's GeoJSON, ASAP's and Aperio's XML, mask TIFFs. Coordinates are level-0 pixels.

Nothing in a file is executed or expanded: an XML that declares a document type, and with it entities, is refused.
A new format is one entry in `READERS`, by the bytes its files begin with.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

import numpy as np

from carmil.bags.geometry import FARTHEST
from carmil.errors import CarmilError
from carmil.maps.masks import read_mask
from carmil.maps.regions import Region, polygon
from carmil.untrusted import check_not_stream, read_json

UNNAMED = "annotation"  # the class of a region without a name
_ELLIPSE, _LINES = "2", ("3", "4", "5")  # Aperio's types of regions; arrows and rulers enclose nothing


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
        raise CarmilError(f"unknown format of annotations {path}: expected GeoJSON, ASAP or Aperio XML, or a mask TIFF")
    regions = [region for region in reader(path, width, height) if region is not None]
    if not regions:
        raise CarmilError(f"{path} holds no polygon: expected at least one region")
    return regions


def _region(name: str, rings: Sequence[Any], where: str, *, cut: bool = False) -> Region | None:
    """Return the region of an outline and its holes; None where it has no area."""
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


def _read_geojson(path: Path, width: int, height: int) -> Iterator[Region | None]:
    """Read a feature, a list of them or a collection; points and lines are skipped."""
    content = read_json(path, "expected GeoJSON, as QuPath writes it")
    features = content.get("features", [content]) if isinstance(content, dict) else content
    if not isinstance(features, list) or not all(isinstance(feature, dict) for feature in features):
        raise CarmilError(f"{path} is not GeoJSON: expected a FeatureCollection, or a list of features")
    for i, feature in enumerate(features):
        where = f"{path}: feature {i}"
        for rings in _polygons(feature.get("geometry", feature) or {}, where):
            yield _region(_class_name(feature.get("properties")), rings, where)


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
            raise CarmilError(f"{where} is a {geometry['type']} without coordinates")


def _class_name(properties: Any) -> str:
    """Return QuPath's classification, else the name of the object."""
    if not isinstance(properties, dict):
        return UNNAMED
    classification = properties.get("classification")
    if isinstance(classification, dict):
        names = classification.get("names")
        classification = classification.get("name") or (": ".join(map(str, names)) if isinstance(names, list) else None)
    return str(classification or properties.get("name") or UNNAMED)


def _read_xml(path: Path, width: int, height: int) -> Iterator[Region | None]:
    root = _parse_xml(path)
    match root.tag:
        case "ASAP_Annotations":
            return _asap_regions(root, path)
        case "Annotations":
            return _aperio_regions(root, path)
    raise CarmilError(f"{path} begins with <{root.tag}>: expected <ASAP_Annotations>, or Aperio's <Annotations>")


def _parse_xml(path: Path) -> Element:
    """Return the root. Entities need a document type, which is refused before anything of it is read."""
    builder, parser = TreeBuilder(), expat.ParserCreate()

    def refuse(*_: object) -> None:
        raise CarmilError(
            f"{path} declares a document type, which could hold entities: refused. Remove its <!DOCTYPE ...>"
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
    text = element.get(name, default)
    try:
        return float(text)
    except ValueError:
        raise CarmilError(f"{path}: a <{element.tag}> has {name}={text!r}: expected a number") from None


def _ellipse(corner: tuple[float, float], opposite: tuple[float, float]) -> list[tuple[float, float]]:
    """Return the ellipse in the box between two corners, which is what Aperio stores."""
    middle, reach = (np.add(corner, opposite) / 2, np.subtract(opposite, corner) / 2)
    turn = np.linspace(0, 2 * np.pi, 64, endpoint=False)
    return [(x, y) for x, y in middle + reach * np.stack([np.cos(turn), np.sin(turn)], axis=1)]


READERS: dict[bytes, Callable[[Path, int, int], Iterator[Region | None]]] = {
    **dict.fromkeys((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), read_mask),
    **dict.fromkeys((b"{", b"["), _read_geojson),
    b"<": _read_xml,
}
