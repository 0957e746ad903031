"""A value a tile as a map: its name, what its colours mean, and the values scaled for them. n tiles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Scale = Literal["minmax", "rank"]
Kind = Literal["factual", "counterfactual", "difference", "evidence"]
FACTUAL, COUNTERFACTUAL, DIFFERENCE = "factual", "counterfactual", "difference"
SCALES = {
    "minmax": "from the lowest to the highest value on this slide",
    "rank": "by rank among the tiles of this slide: colours say more or less, not how much",
}
SIGNED_SCALES = SCALES | {"minmax": "signed: as far to both sides of 0 as the farthest tile of this slide"}
WEIGHT_SCALES = SCALES | {"minmax": "from 0 to the highest weight on this slide"}
LEAST_LOGITS = 0.01  # all tiles together: moves no probability by more than a quarter of a point
LEAST_MOVED = 0.05  # of the 2 that attention can move
EVEN = 0.01  # values that differ by less than this share of the largest are the same


@dataclass(frozen=True, eq=False)
class TileMap:
    """A value per tile (n), NaN where it has none. `name`: the class it is of, or else its kind; `model` tells several apart.

    scores: a map of attention holds scores, from before the softmax, instead of weights.
    """

    name: str
    values: NDArray[np.float64]
    kind: Kind
    model: str = ""
    scores: bool = False

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
        """Whether a signed map says nothing: evidence of less than LEAST_LOGITS, attention moved by less than LEAST_MOVED."""
        least = {"evidence": LEAST_LOGITS, DIFFERENCE: LEAST_MOVED}.get(self.kind, 0.0)
        return self.signed and float(np.nansum(np.abs(self.values))) < least

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
            what = f"all tiles together move the logit by less than {LEAST_LOGITS}"
            if self.kind == DIFFERENCE:
                what = f"less than {LEAST_MOVED} of the attention moved, of 2"
            return f"negligible, drawn as 0: {what}"
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
        return (f"{self.model}: " if self.model else "") + words + whose

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
    found = []
    for name, column in values.items():
        usual: Any = name if name in (FACTUAL, COUNTERFACTUAL, DIFFERENCE) else "evidence"
        numbers = np.asarray(column, dtype=np.float64)
        found.append(TileMap(name, numbers, (kinds or {}).get(name, usual), model))
    return found


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
