"""Annotations of the cases: regions that people draw in the viewer, and the truth.

Drawn regions are files in one folder, named after the slides; no name in a request becomes a path. The truth consists
of files of other programs in that folder, which are only read, and of the cohort's labels of tiles.
"""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import shapely

from carmil.errors import CarmilError
from carmil.files import safe_names
from carmil.maps.annotations import SUFFIXES, read_annotations
from carmil.maps.colours import OUTLINES
from carmil.maps.drawn_regions import DrawnRegion, DrawnRegions
from carmil.maps.regions import Region
from carmil.truth import UNKNOWN
from carmil.viewer.cases import RunCases
from carmil.viewer.pictures import Pictures

GEOJSON = ".geojson"
_MICROMETRES = "positions are in micrometres: give the slide file (--slides)"
_LOCK = threading.Lock()  # runs that are shown together save the regions of a slide in one file
Change = Callable[[DrawnRegions], list[DrawnRegion]]


@dataclass(frozen=True, eq=False)
class CaseAnnotations:
    """drawn: regions that can be changed; truth: regions that cannot, those of files, then those of labels.

    file: where drawn regions are saved. refusal: why none can be drawn, empty if they can. problem: why a file of
    annotations is not shown, empty if none is missing.
    """

    drawn: tuple[DrawnRegion, ...] = ()
    truth: tuple[DrawnRegion, ...] = ()
    file: str = ""
    refusal: str = ""
    problem: str = ""


class Annotations:
    """The annotations of all cases of a run, in `folder`, which is created with the first drawn region; None: no region
    can be drawn. Thread-safe."""

    def __init__(self, run: RunCases, pictures: Pictures, folder: Path | None) -> None:
        self.run, self.pictures = run, pictures
        self.folder = None if folder is None else folder.resolve()
        self._names = safe_names(case.slide for case in run.cases)

    def file_name(self, number: int, ending: str) -> str:
        """Return the name of a file that belongs to a case, such as "S12-004.geojson"."""
        return f"{self._names[self.run.cases[number].slide]}{ending}"

    def of(self, number: int) -> CaseAnnotations:
        truth, problem, refusal, drawn = list(self._labelled(number)), "", self._refusal(number), list[DrawnRegion]()
        try:
            truth = [*self._other_files(number), *truth]
        except CarmilError as error:
            problem = self._nameless(error)
        if not refusal:
            try:
                with _LOCK:
                    drawn = self._regions(number).read()
            except CarmilError as error:
                refusal = self._nameless(error)
        file = "" if self.folder is None else f"{self.folder.name}/{self.file_name(number, GEOJSON)}"
        return CaseAnnotations(tuple(drawn), self._numbered(truth), file, refusal, problem)

    def change(self, number: int, change: Change) -> list[DrawnRegion]:
        """Change the drawn regions of a case and return them."""
        if refusal := self._refusal(number):
            raise CarmilError(refusal)
        try:
            with _LOCK:
                return change(self._regions(number))
        except CarmilError as error:
            raise CarmilError(self._nameless(error)) from None

    def geojson(self, number: int) -> bytes:
        """Return the drawn regions of a case as a file for QuPath."""
        if refusal := self._refusal(number):
            raise CarmilError(refusal)
        try:
            with _LOCK:
                return self._regions(number).content()
        except CarmilError as error:
            raise CarmilError(self._nameless(error)) from None

    def _regions(self, number: int) -> DrawnRegions:
        assert self.folder is not None
        return DrawnRegions(self.folder / self.file_name(number, GEOJSON), self.run.cases[number].slide)

    def _refusal(self, number: int) -> str:
        """Return why regions cannot be drawn; empty if they can."""
        if self.folder is None:
            return "no folder of annotations was given"
        if self.run.coordinates(number) is None:
            return "the positions of this slide's tiles are unknown"
        return "" if self._in_pixels(number) else f"{_MICROMETRES} to draw regions in its pixels"

    def _in_pixels(self, number: int) -> bool:
        """Return whether the positions are shown in level-0 pixels, like those of regions."""
        places = self.pictures.places(number)
        return places is not None and places.unit == "level0_px"

    def _other_files(self, number: int) -> Iterator[Region]:
        """Read the annotations of other programs, which are files with another suffix."""
        if self.folder is None or self.run.coordinates(number) is None:
            return
        for suffix in SUFFIXES:
            path = self.folder / self.file_name(number, suffix)
            if suffix == GEOJSON or not path.is_file():
                continue
            if path.resolve().parent != self.folder:
                raise CarmilError(f"{path} is a link out of the folder of annotations")
            if not self._in_pixels(number):
                raise CarmilError(f"{path} is not shown, as {_MICROMETRES}")
            zoom, recorded = self.pictures.zoom(number), self.run.cases[number].slide_file
            width = recorded.slide_width if zoom is None else zoom.width
            height = recorded.slide_height if zoom is None else zoom.height
            if not width or not height:
                raise CarmilError(f"{path} is not shown, as the size of the slide is unknown: give its file (--slides)")
            for region in read_annotations(path, width=width, height=height):
                yield Region(f"{path.name}: {region.name}", region.shape)

    def _labelled(self, number: int) -> Iterator[Region]:
        """Return regions of the tiles that the cohort's labels mark as evidence for a class, joined."""
        labels, places = self.run.bags.instance_labels, self.pictures.places(number)
        if labels is None or places is None:
            return
        first, outputs = self.run.first_row(number), self.run.outputs
        columns = labels[first : first + self.run.size(number)].reshape(self.run.size(number), -1).numpy()
        names = outputs if columns.shape[1] == len(outputs) else ("",) * columns.shape[1]
        if columns.shape[1] == 1:
            names = outputs[1:] if len(outputs) == 2 else ("",)
        for name, column in zip(names, columns.T, strict=True):
            corners = places.corners[(column > 0) & (column != UNKNOWN)]
            if len(corners):
                squares = shapely.box(*corners.T, *(corners + places.tile_size).T)
                yield Region(f"labelled {name}".strip(), shapely.union_all(squares))

    def _numbered(self, regions: list[Region]) -> tuple[DrawnRegion, ...]:
        names = list(dict.fromkeys(region.name for region in regions))
        return tuple(
            DrawnRegion(f"truth {i}", one.name, tuple(one.rings), OUTLINES[names.index(one.name) % len(OUTLINES)])
            for i, one in enumerate(regions)
        )

    def _nameless(self, error: CarmilError) -> str:
        """Return an error without the folder, which must not appear on the page."""
        return str(error).replace(f"{self.folder}/", "")


def change_of(asked: Any) -> Change:
    """Validate a request of the page to change the drawn regions; an invalid one is refused in one line."""
    match asked:
        case {"add": {"name": str(name), "outline": list(outline), **more}, **others} if not others and more.keys() <= {
            "class"
        }:
            if not all(isinstance(xy, list) and len(xy) == 2 and all(map(is_number, xy)) for xy in outline):
                raise CarmilError("outline: expected corners [x, y]")
            if not isinstance(more.get("class", ""), str):
                raise CarmilError("class: expected a text")
            classification = str(more.get("class", ""))
            return lambda regions: regions.add(name, outline, classification)
        case {"rename": {"region": str(region), "name": str(name), **rest}, **others} if not rest and not others:
            return lambda regions: regions.rename(region, name)
        case {"classify": {"region": str(region), "class": str(classification), **rest}, **others} if (
            not rest and not others
        ):
            return lambda regions: regions.classify(region, classification)
        case {"delete": {"region": str(region), **rest}, **others} if not rest and not others:
            return lambda regions: regions.delete(region)
    raise CarmilError(
        'expected {"add": {"name": name, "outline": [[x, y], ...], "class": class}}, {"rename": {"region": id, "name": name}}, '
        '{"classify": {"region": id, "class": class}} or {"delete": {"region": id}}'
    )


def is_number(value: Any) -> bool:
    """Return whether a value can be a coordinate: NaN, infinity and integers beyond the range of floats cannot."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e9


def shown_regions(regions: tuple[DrawnRegion, ...] | list[DrawnRegion]) -> list[dict[str, Any]]:
    """Return regions in the form that the page uses."""
    return [
        {
            "id": one.number,
            "name": one.name,
            "class": one.classification,
            "colour": list(one.colour),
            "rings": [np.round(ring, 2).tolist() for ring in one.rings],
        }
        for one in regions
    ]


def annotations_text(found: CaseAnnotations) -> bytes:
    head = {"drawn": shown_regions(found.drawn), "truth": shown_regions(found.truth)}
    return json.dumps({**head, "file": found.file, "refusal": found.refusal, "problem": found.problem}).encode()
