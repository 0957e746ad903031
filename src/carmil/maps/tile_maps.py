"""A value a tile as a map: its name, what its colours mean, and the values scaled for them. n tiles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from carmil.evidence.smoothing import smooth_map

Scale = Literal["minmax", "rank"]
Kind = Literal["factual", "counterfactual", "difference", "evidence"]
FACTUAL, COUNTERFACTUAL, DIFFERENCE = "factual", "counterfactual", "difference"
SCALES = {
    "minmax": "from the lowest to the highest value on this slide",
    "rank": "by rank among the tiles of this slide: colours show the order, not the size",
}
SIGNED_SCALES = SCALES | {"minmax": "symmetric around 0, up to the largest value for or against on this slide"}
WEIGHT_SCALES = SCALES | {"minmax": "from 0 to the largest weight on this slide"}
LEAST_LOGITS = 0.01  # a smaller change of a logit changes its probability by less than a quarter of a percentage point
LEAST_MOVED = 0.05  # of 2, the largest sum of |a - a_cf| on a slide
SMALL = 0.05  # of the largest size on the slide: a tile with less speaks neither for nor against
EVEN = 0.01  # values that differ by less than this share of the largest are the same


@dataclass(frozen=True, eq=False)
class TileMap:
    """A value per tile (n), NaN where it has none. `name`: the class it is of, or else its kind; `model` tells several apart.

    scores: a map of attention holds scores, from before the softmax, instead of weights. apart: of a map of evidence, how far
    the tiles move the logits of two classes apart (see `logits_apart`); None where only this class is known. smoothed: over how
    much of the plane, in words.
    """

    name: str
    values: NDArray[np.float64]
    kind: Kind
    model: str = ""
    scores: bool = False
    apart: float | None = None
    smoothed: str = ""

    def smoothed_over(self, places: ArrayLike, radius: float, words: str) -> "TileMap":
        """The map smoothed over a radius in the unit of `places` (n, 2); tiles without a value neither give nor take.

        A negligible map and one of scores, which have no total to keep, stay as they are.
        """
        if radius == 0 or self.scores or self.negligible:
            return self
        known = ~np.isnan(self.values)
        values = self.values.copy()
        values[known] = smooth_map(self.values[known], np.asarray(places)[known], radius)
        return replace(self, values=values, smoothed=words)

    @property
    def signed(self) -> bool:
        """Whether 0 is the middle: what is above speaks for, what is below against."""
        return self.kind in (DIFFERENCE, "evidence")

    @property
    def weights(self) -> bool:
        """Whether the values are attention weights: 0 or more, and a sum of one."""
        return not self.signed and not self.scores

    @property
    def negligible(self) -> bool:
        """Whether a signed map is too small to matter. Every picture, table and page asks here; such a map is drawn as 0."""
        return bool(self.why_negligible)

    @property
    def why_negligible(self) -> str:
        """Why the map is negligible; empty if it is not."""
        size = float(np.nansum(np.abs(self.values)))
        match self.kind:
            case "difference" if size < LEAST_MOVED:
                return f"less than {LEAST_MOVED:g} of the attention moved (2 is the most that can move)"
            case "evidence" if self.apart is not None and self.apart < LEAST_LOGITS:
                return f"all tiles together change the difference between any two class logits by less than {LEAST_LOGITS:g}"
            case "evidence" if size < LEAST_LOGITS:
                return f"all tiles together change the logit of {self.name} by less than {LEAST_LOGITS:g}"
        return ""

    @property
    def signs(self) -> NDArray[np.int64]:
        """(n): 1 for, -1 against, 0 neither, which is less than SMALL of the largest size, no value, or a negligible map.

        Every list, picture and file of what speaks for and against asks here. Of a map without a sign 1.
        """
        if not self.signed:
            return np.ones(len(self.values), np.int64)
        values = np.nan_to_num(self.values)
        counted = (np.abs(values) >= SMALL * np.abs(values).max(initial=0.0)) & (not self.negligible)
        return np.where(counted, np.sign(values), 0).astype(np.int64)

    @property
    def even(self) -> bool:
        """Whether all tiles have the same value, up to EVEN of the largest: none of them stands out."""
        known = self.values[~np.isnan(self.values)]
        return not len(known) or float(known.max() - known.min()) <= EVEN * float(np.abs(known).max())

    def shades(self, scale: Scale) -> NDArray[np.float64]:
        """The values scaled for colours, see `scaled`; a negligible map is 0, and an even one has no ranks."""
        if self.negligible or (self.even and scale == "rank"):
            return np.where(np.isnan(self.values), np.nan, 0.0)
        return scaled(self.values, scale, signed=self.signed, from_zero=self.weights)

    def scaling(self, scale: Scale) -> str:
        """How its colours come from its values."""
        if self.negligible:
            return f"negligible, drawn as 0: {self.why_negligible}"
        words = SIGNED_SCALES if self.signed else SCALES if self.scores else WEIGHT_SCALES
        return words[scale] + (f"; even: all tiles within {EVEN:.0%} of each other" if self.even else "")

    @property
    def title(self) -> str:
        of = "score" if self.scores else "weight"
        words = {
            FACTUAL: f"attention {of}",
            COUNTERFACTUAL: f"counterfactual attention {of}",
            DIFFERENCE: f"attention {of} minus counterfactual attention {of}",
            "evidence": "evidence",
        }[self.kind]
        whose = "" if self.name == self.kind else f" for {self.name}"
        over = f", smoothed over {self.smoothed}" if self.smoothed else ""
        return (f"{self.model}: " if self.model else "") + words + whose + over

    @property
    def ends(self) -> tuple[str, str]:
        """What the lowest and the highest colour mean."""
        return {
            FACTUAL: ("looked at least", "looked at most"),
            COUNTERFACTUAL: ("looked at least for another answer", "looked at most for another answer"),
            DIFFERENCE: ("more looked at for another answer", "more looked at for this answer"),
            "evidence": (f"against {self.name}", f"for {self.name}"),
        }[self.kind]


def leading_map(maps: Sequence[TileMap]) -> TileMap:
    """The map that colours objects and places zooms: the first of evidence, which is that of the answer; else the first."""
    return next((one for one in maps if one.kind == "evidence"), maps[0])


def tile_maps(
    values: Mapping[str, ArrayLike], kinds: Mapping[str, Kind] | None = None, *, model: str = ""
) -> list[TileMap]:
    """Maps by name: factual, counterfactual and difference are what they are called, any other is evidence for a class."""
    columns = {name: np.asarray(column, dtype=np.float64) for name, column in values.items()}
    usual: dict[str, Any] = {
        name: name if name in (FACTUAL, COUNTERFACTUAL, DIFFERENCE) else "evidence" for name in columns
    }
    of = usual | dict(kinds or {})
    apart = logits_apart([columns[name] for name in columns if of[name] == "evidence"])
    return [
        TileMap(name, column, of[name], model, apart=apart if of[name] == "evidence" else None)
        for name, column in columns.items()
    ]


def logits_apart(evidence: Sequence[ArrayLike]) -> float | None:
    """How far the tiles can move two classes apart: the sum over the tiles of the largest difference between two classes.

    evidence: (n) of each class, NaN where a tile has none. No part of the slide changes the difference between two logits by
    more; what is the same for every class changes no probability. None where this cannot be told: of one class, or of a map that
    is one for all classes, as attention is.
    """
    columns = [np.asarray(column, dtype=np.float64) for column in evidence]
    if len(columns) < 2 or len({column.shape for column in columns}) > 1:
        return None
    if np.nan_to_num(columns[0]).any() and all(
        np.array_equal(column, columns[0], equal_nan=True) for column in columns
    ):
        return None
    with np.errstate(invalid="ignore"):  # infinite values: whoever draws the map refuses it
        return float(np.nansum(np.max(columns, axis=0) - np.min(columns, axis=0)))


def scaled(values: NDArray[np.float64], scale: Scale, *, signed: bool, from_zero: bool = False) -> NDArray[np.float64]:
    """For colours: 0 to 1, or -1 to 1 with 0 where it was. NaN stays NaN; a map that is all the same becomes 0.

    from_zero: the lowest colour is 0, not the smallest value.
    """
    known = ~np.isnan(values)
    found = np.full(values.shape, np.nan)
    some = values[known]
    if not len(some):
        return found
    if signed:
        sizes = np.abs(some)
        found[known] = np.sign(some) * (_ranks(sizes) if scale == "rank" else sizes / (sizes.max() or 1.0))
        return found
    if scale == "rank":
        found[known] = _ranks(some)
    else:
        low = min(0.0, some.min()) if from_zero else some.min()
        found[known] = (some - low) / ((some.max() - low) or 1.0)
    return found


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """0 for the smallest, 1 for the largest; the same for the same."""
    from scipy.stats import rankdata

    ranks = rankdata(values) - 1
    return ranks / (len(values) - 1) if len(values) > 1 and values.min() < values.max() else np.zeros(len(values))


def limits(one: TileMap, scale: Scale) -> tuple[str, str]:
    """The values at the two ends of the colours, in brackets; by rank these are those of the outermost tiles."""
    known = one.values[~np.isnan(one.values)]
    if not len(known):
        return "", ""
    if one.signed and scale == "minmax":
        most = float(np.abs(known).max())
        return f"(−{most:.3g})", f"(+{most:.3g})"
    low = min(0.0, known.min()) if one.weights and scale == "minmax" else known.min()
    return f"({low:.3g})".replace("-", "−"), f"({known.max():.3g})".replace("-", "−")
