"""Annotations that others drew: QuPath's GeoJSON, ASAP's and Aperio's XML, mask TIFFs. Coordinates are level-0 pixels.

Nothing in a file is executed or expanded: an XML that declares a document type, and with it entities, is refused.
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
from carmil.maps.regions import Region
from carmil.untrusted import check_not_stream, read_json

NAMELESS = "annotation"  # a region that nobody named
_ELLIPSE, _LINES = "2", ("3", "4", "5")  # Aperio's types of regions; arrows and rulers hold nothing


def read_annotations(path: Path, *, width: int, height: int) -> list[Region]:
    """All regions of the file, whichever format it has; width and height are the slide's, which a mask is stretched over."""
    check_not_stream(path)
    try:
        with path.open("rb") as file:
            start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError as error:
        raise CarmilError(f"annotations {path} cannot be read: {error.strerror or error}") from error
    if start[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        regions = read_mask(path, width=width, height=height)
    elif start[:1] in (b"{", b"["):
        regions = _read_geojson(path)
    elif start[:1] == b"<":
        regions = _read_xml(path)
    else:
        raise CarmilError(
            f"{path} is not a known kind of annotation: expected GeoJSON, XML of ASAP or Aperio, or a mask TIFF"
        )
    if not regions:
        raise CarmilError(f"{path} holds no polygon: expected at least one region")
    return regions


def region(name: str, rings: Sequence[Any], where: str, *, cut: bool = False) -> Region | None:
    """A region of rings of at least three corners each; None where nothing is left of it."""
    kept = []
    for ring in rings:
        try:
            corners = np.array([point[:2] for point in ring], dtype=np.float64)
        except (TypeError, ValueError, KeyError, IndexError, OverflowError):
            raise CarmilError(f"{where} has corners that are not pairs of numbers: expected x and y") from None
        if len(corners) and (corners.ndim != 2 or corners.shape[1] != 2 or not np.isfinite(corners).all()):
            raise CarmilError(f"{where} has corners that are not finite numbers: expected x and y in level-0 pixels")
        if len(corners) and np.abs(corners).max() >= FARTHEST:
            x, y = corners[np.abs(corners).max(axis=1).argmax()]
            raise CarmilError(f"{where} has a corner at ({x:g}, {y:g}): expected level-0 pixels below {FARTHEST:g}")
        if len(corners) > 1 and (corners[0] == corners[-1]).all():
            corners = corners[:-1]
        if len(corners) >= 3:
            kept.append(corners)
    return Region(name or NAMELESS, tuple(kept), cut) if kept else None


def _read_geojson(path: Path) -> list[Region]:
    """Features alone, in a list or in a collection; points and lines are passed over."""
    found = read_json(path, "expected GeoJSON, as QuPath writes it")
    features = found.get("features", [found]) if isinstance(found, dict) else found
    if not isinstance(features, list) or not all(isinstance(one, dict) for one in features):
        raise CarmilError(f"{path} is not GeoJSON: expected a FeatureCollection, or a list of features")
    regions = []
    for i, feature in enumerate(features):
        where = f"{path}: feature {i}"
        for rings in _polygons(feature.get("geometry", feature) or {}, where):
            regions.append(region(_named(feature.get("properties")), rings, where))
    return [one for one in regions if one is not None]


def _polygons(geometry: Any, where: str, depth: int = 0) -> Iterator[list[Any]]:
    if not isinstance(geometry, dict) or depth > 8:
        raise CarmilError(f"{where} has an unknown kind of geometry: expected Polygon or MultiPolygon")
    inside = geometry.get("geometries" if geometry.get("type") == "GeometryCollection" else "coordinates")
    match geometry.get("type"), inside:
        case "Polygon", list():
            yield inside
        case "MultiPolygon", list() if all(isinstance(part, list) for part in inside):
            yield from inside
        case "GeometryCollection", list():
            for part in inside:
                yield from _polygons(part, where, depth + 1)
        case "Polygon" | "MultiPolygon" | "GeometryCollection", _:
            raise CarmilError(f"{where} is a {geometry['type']} without coordinates")


def _named(properties: Any) -> str:
    """QuPath's classification, else the name that the object has."""
    if not isinstance(properties, dict):
        return NAMELESS
    classified = properties.get("classification")
    if isinstance(classified, dict):
        names = classified.get("names")
        classified = classified.get("name") or (": ".join(map(str, names)) if isinstance(names, list) else None)
    return str(classified or properties.get("name") or NAMELESS)


def _read_xml(path: Path) -> list[Region]:
    root = _parsed(path)
    readers: dict[str, Callable[[Element, Path], Iterator[Region | None]]] = {
        "ASAP_Annotations": _of_asap,
        "Annotations": _of_aperio,
    }
    if root.tag not in readers:
        raise CarmilError(f"{path} begins with <{root.tag}>: expected <ASAP_Annotations>, or Aperio's <Annotations>")
    return [one for one in readers[root.tag](root, path) if one is not None]


def _parsed(path: Path) -> Element:
    """The XML as a tree. Entities need a document type, and that is refused before anything of it is read."""
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


def _of_asap(root: Element, path: Path) -> Iterator[Region | None]:
    for one in root.iterfind("./Annotations/Annotation"):
        if one.get("Type", "Polygon") not in ("Polygon", "Spline", "Rectangle"):
            continue
        corners = sorted(
            one.iterfind("./Coordinates/Coordinate"), key=lambda corner: _number(corner, "Order", path, "0")
        )
        group = one.get("PartOfGroup", "")
        name = one.get("Name", "") if group in ("", "None") else group
        yield region(name, [_corners(corners, path)], f"{path}: {one.get('Name', '')!r}")


def _of_aperio(root: Element, path: Path) -> Iterator[Region | None]:
    for layer in root.iterfind("./Annotation"):
        for one in layer.iterfind("./Regions/Region"):
            kind = one.get("Type", "0")
            if kind in _LINES:
                continue
            corners = _corners(list(one.iterfind("./Vertices/Vertex")), path)
            if kind == _ELLIPSE and len(corners) == 2:
                corners = _ellipse(corners)
            name = layer.get("Name") or one.get("Text") or f"layer {layer.get('Id', '')}".strip()
            yield region(name, [corners], f"{path}: region {one.get('Id', '')}", cut=one.get("NegativeROA") == "1")


def _corners(elements: Sequence[Element], path: Path) -> list[tuple[float, float]]:
    return [(_number(one, "X", path), _number(one, "Y", path)) for one in elements]


def _number(element: Element, name: str, path: Path, default: str = "") -> float:
    words = element.get(name, default)
    try:
        return float(words)
    except ValueError:
        raise CarmilError(f"{path}: a <{element.tag}> has {name}={words!r}: expected a number") from None


def _ellipse(corners: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Aperio keeps the two corners of the box around it."""
    (x0, y0), (x1, y1) = corners
    turn = np.linspace(0, 2 * np.pi, 64, endpoint=False)
    x, y = (x0 + x1) / 2 + (x1 - x0) / 2 * np.cos(turn), (y0 + y1) / 2 + (y1 - y0) / 2 * np.sin(turn)
    return list(zip(x.tolist(), y.tolist(), strict=True))
