"""A value a tile as a map: its name, what its colours mean, and the values scaled for them. n tiles."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Scale = Literal["minmax", "rank"]
Kind = Literal["factual", "counterfactual", "difference", "evidence"]
FACTUAL, COUNTERFACTUAL, DIFFERENCE = "factual", "counterfactual", "difference"
SCALES = {
    "minmax": "raw scores, min-max over the tiles of this slide",
    "rank": "by rank among the tiles of this slide: colours say more or less, not how much",
}
SIGNED_SCALES = SCALES | {"minmax": "signed: as far to both sides of 0 as the farthest tile of this slide"}


@dataclass(frozen=True, eq=False)
class TileMap:
    """A value a tile (n), NaN where it has none. `name`: the class it is of, or else its kind; `model` tells several apart."""

    name: str
    values: NDArray[np.float64]
    kind: Kind
    model: str = ""

    @property
    def signed(self) -> bool:
        """Whether 0 is the middle: what is above supports, what is below refutes."""
        return self.kind in (DIFFERENCE, "evidence")

    def scaling(self, scale: Scale) -> str:
        """How its colours come from its values."""
        return (SIGNED_SCALES if self.signed else SCALES)[scale]

    @property
    def title(self) -> str:
        words = {
            FACTUAL: "factual attention",
            COUNTERFACTUAL: "counterfactual attention",
            DIFFERENCE: "factual minus counterfactual attention",
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
            "evidence": (f"refutes {self.name}", f"supports {self.name}"),
        }[self.kind]


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


def scaled(values: NDArray[np.float64], scale: Scale, *, signed: bool) -> NDArray[np.float64]:
    """For colours: 0 to 1, or -1 to 1 with 0 where it was. NaN stays NaN; a map that is all the same becomes 0."""
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
        found[known] = (some - some.min()) / ((some.max() - some.min()) or 1.0)
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
    return f"({known.min():.3g})".replace("-", "−"), f"({known.max():.3g})".replace("-", "−")
