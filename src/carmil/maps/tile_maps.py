"""Maps with one value per tile: their names, the meaning of their colours, and their scaling. n tiles.

Only this module decides how a map is scaled, and which tiles are for and against.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from carmil.errors import CarmilError
from carmil.evidence.concentration import effective_share, uniform_caution
from carmil.evidence.smoothing import smooth_map
from carmil.models.pooling import Offsets
from carmil.slides.slide import Tiles
from carmil.targets.target import FOR_AND_AGAINST, EvidenceWords

Scale = Literal["minmax", "rank"]
Kind = Literal["factual", "counterfactual", "difference", "evidence"]
FACTUAL, COUNTERFACTUAL, DIFFERENCE = "factual", "counterfactual", "difference"
SCALES = {
    "minmax": "from the lowest to the highest value on this slide",
    "rank": "by rank among the tiles of this slide: colours show the order, not the size",
}
SIGNED_SCALES = SCALES | {"minmax": "up to the largest value for or against on this slide"}
NUMBER_SCALES = SCALES | {"minmax": "up to the largest absolute value on this slide"}
WEIGHT_SCALES = SCALES | {"minmax": "from 0 to the largest weight on this slide"}
LEAST_LOGITS = 0.01  # a smaller change of a logit changes its probability by less than a quarter of a percentage point
LEAST_MOVED = 0.05  # of 2, the largest sum of |a - a_cf| on a slide
LEAST_TURNING = 0.1  # of what would turn the answer: evidence that moves it by less is drawn fainter
SMALL = 0.05  # of the largest absolute value on the slide: a tile below it is neither for nor against
EVEN = 0.01  # values that differ by less than this share of the largest are considered equal


@dataclass(frozen=True, eq=False)
class TileMap:
    """One value per tile (n), NaN where it has none. name: its class, or else its kind; model: set if several models
    are compared.

    scores: whether a map of attention has scores, from before the softmax, instead of weights. apart: how far the tiles
    of a map of evidence move the logits of two classes apart (see `logits_apart`); None if only this class is known.
    turning: how far the outputs must move for another answer, in the unit of evidence; None if it is not known.
    smoothed: a description of the radius of smoothing, `unsmoothed` the values before it. words: the terms for
    evidence, which depend on the run's target.
    """

    name: str
    values: NDArray[np.float64]
    kind: Kind
    model: str = ""
    scores: bool = False
    apart: float | None = None
    turning: float | None = None
    smoothed: str = ""
    unsmoothed: NDArray[np.float64] | None = None
    words: EvidenceWords = FOR_AND_AGAINST

    def smooth(self, places: ArrayLike, radius: float, words: str) -> "TileMap":
        """Return the map smoothed over a radius in the unit of `places` (n, 2); tiles without a value are ignored.

        A negligible map and a map of scores are returned unchanged, since their totals have no meaning.
        """
        if radius == 0 or self.scores or self.negligible:
            return self
        known = ~np.isnan(self.values)
        values = self.values.copy()
        values[known] = smooth_map(self.values[known], np.asarray(places)[known], radius)
        return replace(self, values=values, smoothed=words, unsmoothed=self.values)

    @property
    def signed(self) -> bool:
        """Return whether 0 is the middle of the scale: values above are for, values below against."""
        return self.kind in (DIFFERENCE, "evidence")

    @property
    def weights(self) -> bool:
        """Return whether the values are attention weights: not negative, with a sum of 1."""
        return not self.signed and not self.scores

    @property
    def why_uniform(self) -> str:
        """Return the caution that attention weights are nearly uniform on this slide; empty if they are not."""
        if not self.weights:
            return ""
        values = self.values if self.unsmoothed is None else self.unsmoothed
        known = torch.from_numpy(values[~np.isnan(values)])
        shares = (known / known.sum()).unsqueeze(1)  # some tiles may have no value
        share = float(effective_share(shares, Offsets(torch.tensor([0, len(known)]))))
        attention = "counterfactual attention" if self.kind == COUNTERFACTUAL else "attention"
        return uniform_caution(share, attention, where="on this slide", maps=f"maps of {attention}")

    @property
    def negligible(self) -> bool:
        """Return whether a signed map is too small to matter; every picture, table and page then draws it as 0."""
        return bool(self.why_negligible)

    @property
    def why_negligible(self) -> str:
        """Return why the map is negligible; empty if it is not."""
        size = float(np.nansum(np.abs(self.values)))
        match self.kind:
            case "difference" if size < LEAST_MOVED:
                return f"less than {LEAST_MOVED:g} of the attention moved (2 is the most that can move)"
            case "evidence" if self._reach < LEAST_LOGITS:
                return f"all tiles together change {self._moved} by less than {LEAST_LOGITS:g}"
            case "evidence" if size < LEAST_LOGITS:
                return f"all tiles together change {self.words.total(self.name)} by less than {LEAST_LOGITS:g}"
        return ""

    @property
    def fill(self) -> float:
        """Return the share of the colour scale that the largest value fills: less than 1 for evidence that is small
        compared with the change that another answer needs, 0 for a negligible map.
        """
        if self.negligible:
            return 0.0
        if self.kind != "evidence" or not self.turning:
            return 1.0
        return min(1.0, self._reach / (LEAST_TURNING * self.turning))

    @property
    def why_faint(self) -> str:
        """Return why the map does not fill the colour scale; empty if it does, or if it is negligible."""
        if self.fill in (0.0, 1.0):
            return ""
        return f"all tiles together change {self._moved} by at most {self._reach:.2g}; another answer needs {self.turning:.2g}"

    @property
    def _rivals(self) -> bool:
        return self.words.rivals and self.apart is not None

    @property
    def _reach(self) -> float:
        """Return the largest change that all tiles together can make to the quantity that decides the answer."""
        if self._rivals and self.apart is not None:
            return self.apart
        return float(np.nansum(np.abs(self.values)))

    @property
    def _moved(self) -> str:
        return "the difference between any two class logits" if self._rivals else self.words.total(self.name)

    @property
    def signs(self) -> NDArray[np.int64]:
        """Return signs (n): 1 for, -1 against; 0 for a value below SMALL of the largest, no value, or a negligible map.

        Every list, picture and file of tiles for and against uses them. All signs of an unsigned map are 1.
        """
        if not self.signed:
            return np.ones(len(self.values), np.int64)
        values = np.nan_to_num(self.values)
        counted = (np.abs(values) >= SMALL * np.abs(values).max(initial=0.0)) & (not self.negligible)
        return np.where(counted, np.sign(values), 0).astype(np.int64)

    @property
    def even(self) -> bool:
        """Return whether all tiles have the same value, up to EVEN of the largest."""
        known = self.values[~np.isnan(self.values)]
        return not len(known) or float(known.max() - known.min()) <= EVEN * float(np.abs(known).max())

    def shades(self, scale: Scale) -> NDArray[np.float64]:
        """Return the values scaled for colours, see `scale_values` and `fill`; a negligible map is 0, and an even map has
        no ranks.
        """
        if self.negligible or (self.even and scale == "rank"):
            return np.where(np.isnan(self.values), np.nan, 0.0)
        return self.fill * scale_values(self.values, scale, signed=self.signed, from_zero=self.weights)

    def scaling(self, scale: Scale) -> str:
        """Describe how colours are computed from values."""
        if self.negligible:
            return f"negligible, drawn as 0: {self.why_negligible}"
        words = SCALES if self.scores else WEIGHT_SCALES
        if self.signed:
            words = SIGNED_SCALES if self.words.of_answers else NUMBER_SCALES
        faint = f"; faint: {self.why_faint}" if self.why_faint else ""
        return words[scale] + faint + (f"; even: all tiles within {EVEN:.0%} of each other" if self.even else "")

    @property
    def meaning(self) -> str:
        """Return the meaning of a value, of its sign and of 0, and its unit."""
        if self.scores:
            return "attention score, before the softmax: higher is looked at more; 0 has no meaning"
        return {
            FACTUAL: "share of the slide's attention: all weights add up to 1, and 0 is none",
            COUNTERFACTUAL: "share of the attention for another answer: all weights add up to 1, and 0 is none",
            DIFFERENCE: "difference of two shares of attention: blue is more for this answer, orange more for another, 0 is equal",
            "evidence": f"contribution to {self.words.total(self.name)}: {self.words.colours}",
        }[self.kind]

    @property
    def title(self) -> str:
        of = "score" if self.scores else "weight"
        words = {
            FACTUAL: f"attention {of}",
            COUNTERFACTUAL: f"counterfactual attention {of}",
            DIFFERENCE: f"attention {of} minus counterfactual attention {of}",
            "evidence": self.words.title(self.name),
        }[self.kind]
        whose = "" if self.kind == "evidence" or self.name == self.kind else f" for {self.name}"
        over = f", smoothed over {self.smoothed}" if self.smoothed else ""
        return (f"{self.model}: " if self.model else "") + words + whose + over

    @property
    def ends(self) -> tuple[str, str]:
        """Return the meaning of the lowest and of the highest colour."""
        return {
            FACTUAL: ("looked at least", "looked at most"),
            COUNTERFACTUAL: ("looked at least for another answer", "looked at most for another answer"),
            DIFFERENCE: ("more looked at for another answer", "more looked at for this answer"),
            "evidence": (f"{self.words.negative} {self.name}", f"{self.words.positive} {self.name}"),
        }[self.kind]


def leading_map(maps: Sequence[TileMap]) -> TileMap:
    """Return the map that determines colours of objects and positions of zooms: the first map of evidence, else the first map."""
    return next((one for one in maps if one.kind == "evidence"), maps[0])


def tile_maps(
    values: Mapping[str, ArrayLike], kinds: Mapping[str, Kind] | None = None, *, model: str = ""
) -> list[TileMap]:
    """Return maps by name: factual, counterfactual, difference; any other name is that of a class, and its map is
    evidence for it.
    """
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
    """Return the largest change of the difference between two logits that the tiles can cause: the sum over tiles of
    the largest difference between two classes.

    evidence: (n) of each class, NaN where a tile has none. No part of the slide changes the difference between two logits by
    more; evidence that is equal for every class changes no probability. None where it is undefined: for a single class, or for
    maps that are the same for all classes, as attention is.
    """
    columns = [np.asarray(column, dtype=np.float64) for column in evidence]
    if len(columns) < 2 or len({column.shape for column in columns}) > 1:
        return None
    if np.nan_to_num(columns[0]).any() and all(
        np.array_equal(column, columns[0], equal_nan=True) for column in columns
    ):
        return None
    with np.errstate(invalid="ignore"):  # infinite values are refused when the map is drawn
        return float(np.nansum(np.max(columns, axis=0) - np.min(columns, axis=0)))


def scale_values(
    values: NDArray[np.float64], scale: Scale, *, signed: bool, from_zero: bool = False
) -> NDArray[np.float64]:
    """Scale values to 0 to 1, or if `signed` to -1 to 1 with 0 fixed. NaN stays NaN; a constant map becomes 0.

    from_zero: the lowest colour stands for 0, not for the smallest value.
    """
    known = ~np.isnan(values)
    scaled = np.full(values.shape, np.nan)
    some = values[known]
    if not len(some):
        return scaled
    if signed:
        sizes = np.abs(some)
        scaled[known] = np.sign(some) * (_ranks(sizes) if scale == "rank" else sizes / (sizes.max() or 1.0))
        return scaled
    if scale == "rank":
        scaled[known] = _ranks(some)
    else:
        low = min(0.0, some.min()) if from_zero else some.min()
        scaled[known] = (some - low) / ((some.max() - low) or 1.0)
    return scaled


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ranks from 0 for the smallest to 1 for the largest; equal values share a rank."""
    from scipy.stats import rankdata

    ranks = rankdata(values) - 1
    return ranks / (len(values) - 1) if len(values) > 1 and values.min() < values.max() else np.zeros(len(values))


def colour_limits(one: TileMap, scale: Scale) -> tuple[str, str]:
    """Return the values at the two ends of the colours, in brackets; on the scale of ranks, the lowest and highest
    value.
    """
    known = one.values[~np.isnan(one.values)]
    if not len(known):
        return "", ""
    if one.signed and scale == "minmax":
        most = float(np.abs(known).max()) / (one.fill or 1.0)
        return f"(−{most:.3g})", f"(+{most:.3g})"
    low = min(0.0, known.min()) if one.weights and scale == "minmax" else known.min()
    return f"({low:.3g})".replace("-", "−"), f"({known.max():.3g})".replace("-", "−")


@dataclass(frozen=True)
class Smoothing:
    """The radius over which a tile's value is spread, in tiles, or in micrometres if `microns`."""

    radius: float = 0.0
    microns: bool = False

    @classmethod
    def parse(cls, words: str) -> "Smoothing":
        """Parse a radius such as `2`, `2 tiles` or `300um`."""
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(tiles?|um|µm)?\s*", words)
        if match is None:
            raise CarmilError(
                f"--smooth {words!r}: expected a radius in tiles, such as 2, or in micrometres, such as 300um"
            )
        return cls(float(match[1]), match[2] in ("um", "µm"))

    def __call__(self, one: TileMap, tiles: Tiles) -> TileMap:
        pixels = self.radius / tiles.slide_mpp if self.microns else self.radius * tiles.size
        words = f"{self.radius:g} {'µm' if self.microns else 'tile' if self.radius == 1 else 'tiles'}"
        return one.smooth(tiles.corners, pixels, words)
