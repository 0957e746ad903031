"""Regions that people draw on slides: one GeoJSON file per slide, which QuPath imports, and writes as well.

A file is read again before every change, and its contents that are not shown here (points, lines, cells, measurements
and colours of QuPath) stay unchanged. Coordinates are level-0 pixels. A region has a class, by default its name: QuPath
reads `classification`, with its name and colour.
"""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import shapely

from carmil.errors import CarmilError
from carmil.files import write_text
from carmil.maps.annotations import UNNAMED, class_name, classification_of, geojson_features, regions_of
from carmil.maps.colours import OUTLINES
from carmil.maps.legend import RESEARCH
from carmil.maps.regions import Ring, polygon
from carmil.words import plural

MOST_REGIONS = 1000  # of a slide to which more can be drawn
MOST_CORNERS = 5000  # of a drawn outline
LONGEST_NAME = 100  # characters
LARGEST = 2**25  # bytes of a file
_SHOWN = ("annotation", None)  # QuPath's type of objects; other programs write none


@dataclass(frozen=True, eq=False)
class DrawnRegion:
    """A region of a file. number: its id in the file; rings: closed outlines and holes, by the even-odd rule.

    classification: its class, empty if it has none."""

    number: str
    name: str
    rings: tuple[Ring, ...]
    colour: tuple[int, int, int]
    classification: str = ""


class DrawnRegions:
    """The regions drawn on one slide, in a file that need not exist yet. Not thread-safe."""

    def __init__(self, path: Path, slide: str) -> None:
        self.path, self.slide = path, slide

    @property
    def empty(self) -> dict[str, Any]:
        """Return the contents of a file without regions."""
        return {"type": "FeatureCollection", "carmil": {"slide": self.slide, "note": RESEARCH}, "features": []}

    def read(self) -> list[DrawnRegion]:
        return self._shown(self._content())

    def content(self) -> bytes:
        """Return the unchanged contents of the file."""
        self._content()  # refuses a link, and a file that is too large
        return self.path.read_bytes() if self.path.is_file() else json.dumps(self.empty).encode()

    def add(self, name: str, outline: Sequence[Any], classification: str = "") -> list[DrawnRegion]:
        """Add a region inside an outline (corners x, y), by default with its name as its class, and return all regions."""
        content, shape, name = self._content(), _shape(outline), _checked(name)
        classified = _checked(classification, "class") if classification.strip() else _class_of(name)
        if len(self._numbers(content)) >= MOST_REGIONS:
            raise CarmilError(f"this slide has {MOST_REGIONS:,} regions already: delete some first")
        feature = {
            "type": "Feature",
            "id": str(uuid.uuid4()),
            "geometry": json.loads(shapely.to_geojson(shape)),
            "properties": {
                "objectType": "annotation",
                "name": name,
                "classification": self._classification(content, classified),
            },
        }
        content["features"].append(feature)
        return self._write(content)

    def rename(self, number: str, name: str) -> list[DrawnRegion]:
        """Rename a region, and also its class if it had the same name."""
        content, name = self._content(), _checked(name)
        feature = content["features"][self._place(content, number)]
        properties = feature.get("properties")
        before = properties if isinstance(properties, dict) else {}
        feature["properties"] = {**before, "name": name}
        if classification_of(before) and classification_of(before) == _class_of(str(before.get("name") or "")):
            feature["properties"]["classification"] = self._classification(content, _class_of(name))
        return self._write(content)

    def classify(self, number: str, classification: str) -> list[DrawnRegion]:
        """Change the class of a region; an empty class is replaced by the region's name."""
        content = self._content()
        feature = content["features"][self._place(content, number)]
        name = _checked(classification, "class") if classification.strip() else _class_of(_name(feature))
        properties = feature.get("properties")
        feature["properties"] = {
            **(properties if isinstance(properties, dict) else {}),
            "classification": self._classification(content, name),
        }
        return self._write(content)

    def delete(self, number: str) -> list[DrawnRegion]:
        content = self._content()
        del content["features"][self._place(content, number)]
        return self._write(content)

    def _classification(self, content: dict[str, Any], name: str) -> dict[str, Any]:
        """Return a class in QuPath's form, with the colour of its regions in the file or else a new colour."""
        known = {region.classification: region.colour for region in self._shown(content) if region.classification}
        return {"name": name, "color": list(known.get(name, OUTLINES[len(known) % len(OUTLINES)]))}

    def _content(self) -> dict[str, Any]:
        """Return the file as a FeatureCollection; an empty one if there is no file."""
        if self.path.is_symlink():
            raise CarmilError(f"{self.path.name} is a link: expected a file in the folder of annotations")
        if not self.path.exists():
            return self.empty
        if self.path.is_file() and self.path.stat().st_size > LARGEST:
            raise CarmilError(f"{self.path.name} is larger than {LARGEST:,} bytes: open it in QuPath")
        content, features = geojson_features(self.path)
        return {**(content if "features" in content else {"type": "FeatureCollection"}), "features": features}

    def _write(self, content: dict[str, Any]) -> list[DrawnRegion]:
        regions, text = self._shown(content), f"{json.dumps(content)}\n"
        if len(text) > LARGEST:
            raise CarmilError(f"the regions of this slide would be larger than {LARGEST:,} bytes: draw fewer corners")
        write_text(self.path, text)
        return regions

    def _shown(self, content: dict[str, Any]) -> list[DrawnRegion]:
        shown, colours = list[DrawnRegion](), dict[str, tuple[int, int, int]]()
        for i, number in self._numbers(content):
            feature = content["features"][i]
            rings = [
                ring
                for one in regions_of(feature, f"{self.path.name}: feature {i}")
                if one is not None
                for ring in one.rings
            ]
            if not rings:
                continue
            name, classification = _name(feature), classification_of(feature.get("properties"))[:LONGEST_NAME]
            colour = colours.setdefault(classification or name, OUTLINES[len(colours) % len(OUTLINES)])
            shown.append(DrawnRegion(number, name, tuple(rings), _colour(feature) or colour, classification))
        return shown

    def _numbers(self, content: dict[str, Any]) -> list[tuple[int, str]]:
        """Return the position and id of every annotation; a missing or repeated id is replaced by the position."""
        numbers, known = list[tuple[int, str]](), set[str]()
        for i, feature in enumerate(content["features"]):
            properties = feature.get("properties")
            if (properties.get("objectType") if isinstance(properties, dict) else None) not in _SHOWN:
                continue
            number = feature.get("id")
            number = number if isinstance(number, str) and number not in known else f"feature {i}"
            known.add(number)
            numbers.append((i, number))
        return numbers

    def _place(self, content: dict[str, Any], number: str) -> int:
        place = next((i for i, other in self._numbers(content) if other == number), None)
        if place is None:
            raise CarmilError("there is no such region any more: open the slide again")
        return place


def _shape(outline: Sequence[Any]) -> Any:
    if not 3 <= len(outline) <= MOST_CORNERS:
        raise CarmilError(f"a region has {plural(len(outline), 'corner')}: expected 3 to {MOST_CORNERS:,}")
    shape = polygon([np.array(outline, dtype=np.float64).round(2)], "the region")
    if shape.is_empty or not shape.area:
        raise CarmilError("the region has no area: draw it around some tissue")
    return shape


def _class_of(name: str) -> str:
    """Return the class of a region with this name. Colons, which mean a subclass in QuPath, are replaced."""
    return " ".join(name.replace(":", " ").split()) or UNNAMED


def _checked(name: str, what: str = "name") -> str:
    """Check a name, and return it with its spaces tidied. It is only displayed, and never part of a path."""
    text = " ".join(name.split())
    if not 0 < len(text) <= LONGEST_NAME or not text.isprintable():
        raise CarmilError(f"{what}: expected 1 to {LONGEST_NAME} printable characters")
    return text


def _name(feature: dict[str, Any]) -> str:
    """Return the name of a region, or else its class."""
    properties = feature.get("properties")
    own = properties.get("name") if isinstance(properties, dict) else None
    return (own if isinstance(own, str) and own.strip() else class_name(properties))[:LONGEST_NAME]


def _colour(feature: dict[str, Any]) -> tuple[int, int, int] | None:
    """Return the colour of an object in QuPath, or that of its class; None if it has none."""
    properties = feature.get("properties")
    if not isinstance(properties, dict):
        return None
    classification = properties.get("classification")
    given = properties.get("color", classification.get("color") if isinstance(classification, dict) else None)
    if not isinstance(given, list) or len(given) != 3:
        return None
    if not all(type(part) is int and 0 <= part <= 255 for part in given):
        return None
    return (given[0], given[1], given[2])
