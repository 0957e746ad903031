"""The JSON responses of the viewer. Every method may be slow and is called in a worker thread.

n instances of a case. `class` is the number of an output, whether it belongs to a class or to another kind of target.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from carmil.errors import CarmilError
from carmil.progress import Log
from carmil.targets.decision import NO_ANSWER
from carmil.viewer.annotations import Annotations, annotations_text, change_of, is_number, shown_regions
from carmil.viewer.cases import RunCases
from carmil.viewer.limits import BoundedCache
from carmil.viewer.maps import CaseMaps
from carmil.viewer.pictures import OVERLAP, TILE, Pictures
from carmil.viewer.slide_files import SlideFiles
from carmil.viewer.target_words import row_values, target_words
from carmil.viewer.tile_table import tile_table
from carmil.viewer.whatif import WhatIf, highest, inside

MOST_CORNERS = 1000  # corners of a polygon
CURVES = 2**22  # bytes of cached deletion curves


class Responses:
    """`remarks` are lines displayed on the page; `log` receives lines for the terminal.

    annotations: the folder of drawn regions; None if none can be drawn. first: the number of the run's first case among
    those of all runs that are served. earlier: the runs before it, whose pictures of the same slide files are shared.
    share: that of the memory for caches.
    """

    def __init__(
        self,
        run: RunCases,
        slides: SlideFiles,
        *,
        annotations: Path | None = None,
        remarks: Iterable[str] = (),
        first: int = 0,
        earlier: Sequence["Responses"] = (),
        share: float = 1.0,
        log: Log = lambda line: None,
    ) -> None:
        self.run, self.remarks, self.first, self.earlier = run, list(remarks), first, tuple(earlier)
        self._numbers = {case.slide: number for number, case in enumerate(run.cases)}
        self.maps, self.whatif = CaseMaps(run, share=share), WhatIf(run, share=share)
        self.pictures = Pictures(run, slides, share=share, log=log)
        self.regions = Annotations(run, self.pictures, annotations)
        self._curves: BoundedCache[bytes] = BoundedCache(CURVES, len)

    def cohort(self, runs: Sequence[str] = ()) -> bytes:
        """List the cases. runs: the names of all runs that are served, by default of this run."""
        run = self.run
        predicted = [one for case in run.cases for one in (case.predicted, case.counterfactual) if one is not None]
        return _json(
            {
                "run": run.name,
                "runs": list(runs or [run.name]),
                "target": asdict(target_words(run.target, predicted)),
                "maps": [vars(kind) for kind in self.maps.kinds.values()],
                "explainer": f"{run.method}: {self.maps.says}",
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
                "counterfactual_predicted": self._values(case.counterfactual),
                "picture": None
                if zoom is None
                else {
                    "case": self.tiles_of(number),
                    "width": zoom.width,
                    "height": zoom.height,
                    "mpp": zoom.mpp,
                    "tile": TILE,
                    "overlap": OVERLAP,
                    "levels": zoom.levels,
                    "coarsest": zoom.coarsest,
                },
                "places": places is not None,
                "unit": None if places is None else places.unit,
                "tile_size": None if places is None else places.tile_size,
                "tile_pixels": case.geometry.tile_pixels,
                "tile_mpp": case.geometry.tile_mpp,
                "extent": None if places is None or zoom is not None else list(places.extent),
                "images": self.run.pictures is not None or (zoom is not None and places is not None),
                "remark": pictures.problems.get(number),
            }
        )

    def tiles_of(self, number: int) -> int:
        """Return the number, among the cases of all runs, of the case that provides the picture tiles of this case's
        slide file. It is the case of the first run with the same file, so that two panes load its tiles once.
        """
        slide = self.run.cases[number].slide
        for other in self.earlier:
            same = other._numbers.get(slide)
            shown = same is not None and other.pictures.slides.path(slide) == self.pictures.slides.path(slide)
            if same is not None and shown and other.pictures.zoom(same) is not None:
                return other.first + same
        return self.first + number

    def places(self, number: int) -> bytes:
        places = self.pictures.places(number)
        if places is None:
            raise CarmilError("the positions of this slide's tiles are unknown")
        x, y = places.corners.T
        return _json({}, x=x, y=y)

    def map(self, number: int, name: str, of: int) -> bytes:
        response = self.maps.shown(number, name, of)
        head = {
            "low": _short(response.low),
            "high": _short(response.high),
            "diverging": response.diverging,
            "of": response.of,
            "unit": response.unit,
        }
        head |= {"negligible": response.negligible, "even": response.even}
        head |= {"faint": response.faint, "fill": _short(response.fill), "caution": response.caution}
        return _json(head, values=response.values)

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
        cautions = {
            "negligible": self.maps.negligible(number, of),
            "attention": self.maps.attention_caution(number, of),
        }
        return _json({"supporting": supporting, "refuting": refuting, **cautions})

    def deletion(self, number: int, of: int) -> bytes:
        found = self._curves.get((number, of))
        if found is None:
            curves = self.maps.deletion(number, of, quick=self.whatif.stands_alone(number))
            found = _json({}, **{name: np.array(values) for name, values in curves.items()})
            self._curves.put((number, of), found)
        return found

    def without(self, number: int, asked: dict[str, Any]) -> bytes:
        """Return the answer without the instances of a request (see `checked`), by the same rule as the case's own answer."""
        removed, case = self._removed(number, asked), self.run.cases[number]
        before, after = self.whatif.answer(number, []), self.whatif.answer(number, removed)
        head: dict[str, Any] = {
            "removed": removed,
            "before": self._values(before.factual),
            "after": self._values(after.factual),
        }
        head |= {"answer_before": case.answer, "answer_after": case.decision.answer(after.factual)}
        return _json({**head, "counterfactual_after": self._values(after.counterfactual)})

    def annotations(self, number: int) -> bytes:
        return annotations_text(self.regions.of(number))

    def annotate(self, number: int, asked: Any) -> bytes:
        """Change the drawn regions as the page requests."""
        return _json({"drawn": shown_regions(self.regions.change(number, change_of(asked)))})

    def tile_table(self, number: int) -> bytes:
        return tile_table(self.run, self.maps, self.pictures, self.regions, number).encode()

    def _values(self, predicted: ArrayLike | None) -> list[float] | None:
        """Return the numbers of the rows of an answer, see `target_words`."""
        if predicted is None:
            return None
        return [float(f"{value:.7g}") for value in row_values(self.run.target, predicted).tolist()]

    def checked(self, number: int, asked: Any) -> dict[str, Any]:
        """Validate a what-if request of the page; an invalid request is refused in one line."""
        expected = (
            'expected {"remove": [...]}, {"keep": [...]}, {"top": share, "map": name, "class": number} '
            'or {"polygon": [[x, y], ...]}'
        )
        if not isinstance(asked, dict) or set(asked) not in (
            {"remove"},
            {"keep"},
            {"top", "map", "class"},
            {"polygon"},
        ):
            raise CarmilError(expected)
        n = self.run.size(number)
        if listed := set(asked) & {"remove", "keep"}:
            (name,) = listed
            if not _all_in(asked[name], n):
                raise CarmilError(f"{name}: expected a list of instances, whole numbers from 0 to {n - 1}")
        elif "top" in asked:
            if not _all_in([asked["class"]], len(self.run.outputs)):
                raise CarmilError(f"class: expected a whole number from 0 to {len(self.run.outputs) - 1}")
            if not isinstance(asked["map"], str) or asked["map"] not in self.maps.kinds:
                raise CarmilError(f"map: expected one of {', '.join(self.maps.kinds)}")
            if not is_number(asked["top"]) or not 0 < asked["top"] <= 1:
                raise CarmilError("top: expected a share of the instances, more than 0 and up to 1")
        else:
            corners = asked["polygon"]
            if not isinstance(corners, list) or not 3 <= len(corners) <= MOST_CORNERS:
                raise CarmilError(f"polygon: expected 3 to {MOST_CORNERS} corners")
            if not all(isinstance(xy, list) and len(xy) == 2 and all(map(is_number, xy)) for xy in corners):
                raise CarmilError("polygon: expected corners [x, y]")
        return asked

    def _removed(self, number: int, asked: dict[str, Any]) -> list[int]:
        if "remove" in asked:
            return sorted(set(asked["remove"]))
        if "keep" in asked:
            return np.setdiff1d(np.arange(self.run.size(number)), asked["keep"]).tolist()
        if "top" in asked:
            return highest(self.maps.values(number, asked["map"], asked["class"]), asked["top"])
        places = self.pictures.places(number)
        if places is None:
            raise CarmilError(
                "the positions of this slide's tiles are unknown: list the tiles to remove, or remove a share"
            )
        return inside(places.centres, np.array(asked["polygon"], dtype=np.float64)).tolist()

    def _line(self, number: int) -> dict[str, Any]:
        run, case = self.run, self.run.cases[number]
        answer, leading, other = case.answer, run.leading(number), case.counterfactual
        unjudged = case.label is None or answer == NO_ANSWER or not run.target.answer_names
        return {
            "number": self.first + number,
            "slide": case.slide,
            "patient": case.patient,
            "label": case.label,
            "prediction": answer,
            "rule": case.decision.rule,
            "prediction_set": case.prediction_set,
            "outside": case.outside,
            "class": leading,
            "value": float(f"{run.target.quantities(case.predicted)[leading]:.7g}"),  # as in `predicted`
            "predicted": self._values(case.predicted),
            "counterfactual": None if other is None else case.decision.answer(other),
            "right": None if unjudged else case.label == answer,
            "fold": case.fold,
            "instances": run.size(number),
            "thumbnail": case.slide in self.pictures.slides,
        }


def _json(head: dict[str, Any], **arrays: Any) -> bytes:
    """Encode `head` and long arrays of numbers, four digits each, as a JSON object."""
    parts = [f"{json.dumps(name)}:{json.dumps(value, allow_nan=False)}" for name, value in head.items()]
    parts += [f'"{name}":[{",".join(_text(values))}]' for name, values in arrays.items()]
    return f"{{{','.join(parts)}}}".encode()


def _text(values: Any) -> list[str]:
    """Format numbers: coordinates with all digits, values of maps with four."""
    if np.array_equal(values, np.rint(values)):
        return [str(int(value)) for value in values.tolist()]
    return [f"{value:.4g}" if abs(value) < 1000 else f"{value:.2f}" for value in values.tolist()]


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _all_in(values: Any, end: int) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < end for value in values)
