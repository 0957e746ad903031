"""Intervals of many means at once, by resampling what the cases belong to. p cases, c columns, r resamples."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


class MeanIntervals(NamedTuple):
    """The mean of each column and where it may lie, (c) each."""

    mean: Floats
    low: Floats
    high: Floats


def mean_intervals(
    values: ArrayLike, *units: ArrayLike, repeats: int = 1000, level: float = 0.95, seed: int = 0
) -> MeanIntervals:
    """Means of the columns of values (p, c), NaN left out, and their percentiles over resampled units; NaN of one unit.

    units: (p) each, what a case belongs to, such as its bag. Of several, such as bag and model, each is drawn by itself, and a
    case counts as often as all that it belongs to were drawn together (the crossed bootstrap).
    """
    given = np.asarray(values, dtype=np.float64)
    there = ~np.isnan(given)
    filled = np.where(there, given, 0.0)
    rng = np.random.default_rng(seed)
    drawn, places = [], []
    for unit in units:
        which = np.unique(np.asarray(unit), return_inverse=True)[1]
        count = int(which.max()) + 1
        drawn.append(rng.multinomial(count, np.full(count, 1 / count), size=repeats).astype(np.float64))
        places.append(which)
    sums, counts = (_resampled(part, drawn, places) for part in (filled, there))
    with np.errstate(invalid="ignore"):  # a column without any value, in a resample or at all
        mean = filled.sum(0) / there.sum(0)
        resampled = sums / counts
    low, high = np.full((2, given.shape[1]), np.nan)
    known = ~np.isnan(mean) & (max(each.shape[1] for each in drawn) > 1)  # a single unit says nothing of others
    if known.any():
        low[known], high[known] = np.nanquantile(resampled[:, known], ((1 - level) / 2, (1 + level) / 2), axis=0)
    return MeanIntervals(mean, low, high)


def _resampled(values: NDArray, drawn: list[Floats], places: list[NDArray[np.int64]]) -> Floats:
    """Sums (r, c) of values (p, c), each as often as all of its units were drawn (r, units of a kind).

    Cases are first summed up by their units, and then one kind of units after the other: no weight of a case is written down.
    """
    kinds = tuple(each.shape[1] for each in drawn)
    cells = np.zeros((int(np.prod(kinds)), values.shape[1]))
    np.add.at(cells, np.ravel_multi_index(places, kinds), values)
    left = (drawn[0] @ cells.reshape(kinds[0], -1)).reshape(len(drawn[0]), *kinds[1:], -1)
    for each in drawn[1:]:
        left = np.einsum("rj,rj...->r...", each, left)
    return left
