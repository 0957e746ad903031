"""The JSON responses of the viewer. Every method may take a while and is called in a thread of its own.

n instances of a case, k classes.
"""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from carmil.errors import CarmilError
from carmil.evidence.explainers import EXPLAINERS
from carmil.progress import Log
from carmil.runs.decision import NO_ANSWER
from carmil.viewer.cases import RunCases
from carmil.viewer.limits import BoundedCache
from carmil.viewer.maps import CaseMaps
from carmil.viewer.pictures import OVERLAP, TILE, Pictures
from carmil.viewer.slide_files import SlideFiles
from carmil.viewer.whatif import WhatIf, highest, inside

MOST_CORNERS = 1000  # of a polygon
CURVES = 2**22  # bytes of deletion curves kept


class Responses:
    """`remarks` are lines for the page, `log` takes lines for the terminal."""

    def __init__(
        self, run: RunCases, slides: SlideFiles, *, remarks: Iterable[str] = (), log: Log = lambda line: None
    ) -> None:
        self.run, self.remarks = run, list(remarks)
        self.maps, self.whatif, self.pictures = CaseMaps(run), WhatIf(run), Pictures(run, slides, log=log)
        self._curves: BoundedCache[bytes] = BoundedCache(CURVES, len)

    def cohort(self) -> bytes:
        run = self.run
        return _json(
            {
                "run": run.name,
                "classes": list(run.classes),
                "maps": [vars(kind) for kind in self.maps.kinds.values()],
                "explainer": f"{run.method}: {EXPLAINERS[run.method].description}",
                "remarks": self.remarks,
                "cases": [self._line(number) for number in range(len(run))],
            }
        )

    def case(self, number: int) -> bytes:
        case, pictures = self.run.cases[number], self.pictures
        zoom, places = pictures.zoom(number), pictures.places(number)
        return _json(
            {
                **self._line(number),
                "counterfactual_probabilities": _rounded(case.counterfactual),
                "picture": None
                if zoom is None
                else {
                    "width": zoom.width,
                    "height": zoom.height,
                    "mpp": zoom.mpp,
                    "tile": TILE,
                    "overlap": OVERLAP,
                    "levels": zoom.levels,
                    "coarsest": zoom.coarsest,
                },
                "places": places is not None,
                "tile_size": None if places is None else places.tile_size,
                "tile_pixels": case.geometry.tile_pixels,
                "tile_mpp": case.geometry.tile_mpp,
                "extent": None if places is None or zoom is not None else list(places.extent),
                "images": self.run.pictures is not None or (zoom is not None and places is not None),
                "remark": pictures.problems.get(number),
            }
        )

    def places(self, number: int) -> bytes:
        places = self.pictures.places(number)
        if places is None:
            raise CarmilError("the positions of this slide's tiles are not known")
        x, y = places.corners.T
        return _json({}, x=x, y=y)

    def map(self, number: int, name: str, of: int) -> bytes:
        shown = self.maps.shown(number, name, of)
        head = {"low": _short(shown.low), "high": _short(shown.high), "diverging": shown.diverging, "of": shown.of}
        head |= {"negligible": shown.negligible, "even": shown.even}
        return _json(head, values=shown.values)

    def top(self, number: int, of: int, count: int) -> bytes:
        places = self.pictures.places(number)
        supporting, refuting = (
            [
                {
                    "instance": j,
                    "value": _short(value),
                    "x": None if places is None else float(places.corners[j, 0]),
                    "y": None if places is None else float(places.corners[j, 1]),
                }
                for j, value in side
            ]
            for side in self.maps.top(number, of, count)
        )
        negligible = self.maps.negligible(number, of)
        return _json({"supporting": supporting, "refuting": refuting, "negligible": negligible})

    def deletion(self, number: int, of: int) -> bytes:
        found = self._curves.get((number, of))
        if found is None:
            curve = self.maps.deletion(number, of, quick=self.whatif.stands_alone(number))
            found = _json({}, **{name: np.array(values) for name, values in vars(curve).items()})
            self._curves.put((number, of), found)
        return found

    def without(self, number: int, asked: dict[str, Any]) -> bytes:
        """The answer without the instances of a request (see `checked`), by the same rule as the case's own."""
        removed, case = self._removed(number, asked), self.run.cases[number]
        before, after = self.whatif.answer(number, []), self.whatif.answer(number, removed)
        head = {"removed": removed, "before": before.factual, "after": after.factual}
        head |= {"answer_before": case.answer, "answer_after": case.decision.answer(after.factual)}
        return _json({**head, "counterfactual_after": after.counterfactual})

    def checked(self, number: int, asked: Any) -> dict[str, Any]:
        """A what-if request of the page; anything else is refused in one line."""
        expected = (
            'expected {"remove": [...]}, {"top": share, "map": name, "class": number} or {"polygon": [[x, y], ...]}'
        )
        if not isinstance(asked, dict) or set(asked) not in ({"remove"}, {"top", "map", "class"}, {"polygon"}):
            raise CarmilError(expected)
        n = self.run.size(number)
        if "remove" in asked:
            if not _all_in(asked["remove"], n):
                raise CarmilError(f"remove: expected a list of instances, whole numbers from 0 to {n - 1}")
        elif "top" in asked:
            if not _all_in([asked["class"]], len(self.run.classes)):
                raise CarmilError(f"class: expected a whole number from 0 to {len(self.run.classes) - 1}")
            if not isinstance(asked["map"], str) or asked["map"] not in self.maps.kinds:
                raise CarmilError(f"map: expected one of {', '.join(self.maps.kinds)}")
            if not _is_number(asked["top"]) or not 0 < asked["top"] <= 1:
                raise CarmilError("top: expected a share of the instances, more than 0 and up to 1")
        else:
            corners = asked["polygon"]
            if not isinstance(corners, list) or not 3 <= len(corners) <= MOST_CORNERS:
                raise CarmilError(f"polygon: expected 3 to {MOST_CORNERS} corners")
            if not all(isinstance(xy, list) and len(xy) == 2 and all(map(_is_number, xy)) for xy in corners):
                raise CarmilError("polygon: expected corners [x, y]")
        return asked

    def _removed(self, number: int, asked: dict[str, Any]) -> list[int]:
        if "remove" in asked:
            return sorted(set(asked["remove"]))
        if "top" in asked:
            return highest(self.maps.values(number, asked["map"], asked["class"]), asked["top"])
        places = self.pictures.places(number)
        if places is None:
            raise CarmilError(
                "the positions of this slide's tiles are not known: list the tiles to remove, or remove a share"
            )
        return inside(places.centres, np.array(asked["polygon"], dtype=np.float64)).tolist()

    def _line(self, number: int) -> dict[str, Any]:
        case, other = self.run.cases[number], self.run.cases[number].counterfactual
        answer = case.answer
        return {
            "number": number,
            "slide": case.slide,
            "patient": case.patient,
            "label": case.label,
            "prediction": answer,
            "rule": case.decision.rule,
            "class": case.leading,
            "confidence": _short(float(case.probabilities[case.leading])),
            "probabilities": _rounded(case.probabilities),
            "counterfactual": None if other is None else case.decision.answer(other),
            "right": None if case.label is None or answer == NO_ANSWER else case.label == answer,
            "fold": case.fold,
            "instances": self.run.size(number),
        }


def _json(head: dict[str, Any], **arrays: Any) -> bytes:
    """An object with `head` and long arrays of numbers, four digits each."""
    parts = [f"{json.dumps(name)}:{json.dumps(value, allow_nan=False)}" for name, value in head.items()]
    parts += [f'"{name}":[{",".join(_text(values))}]' for name, values in arrays.items()]
    return f"{{{','.join(parts)}}}".encode()


def _text(values: Any) -> list[str]:
    """Numbers as text: coordinates with all digits, values of maps with four."""
    if np.array_equal(values, np.rint(values)):
        return [str(int(value)) for value in values.tolist()]
    return [f"{value:.4g}" if abs(value) < 1000 else f"{value:.2f}" for value in values.tolist()]


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _rounded(values: Any) -> list[float] | None:
    return None if values is None else [round(float(value), 6) for value in values]


def _is_number(value: Any) -> bool:
    """Whether a value can be a coordinate: NaN and infinity cannot, nor can a whole number of 400 digits."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e9


def _all_in(values: Any, end: int) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < end for value in values)
