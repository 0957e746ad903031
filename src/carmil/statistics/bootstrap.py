"""Resampling of patients, and tests of whether two figures differ. `intervals` has the intervals of a study's figures.

b cases (bags, or patients of several bags), c columns, r resamples; differences are first minus second. All resamples
are drawn by `draws`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from carmil.errors import CarmilError

Floats = NDArray[np.float64]

CHUNK = 2**21  # resampled rows in memory at once


@dataclass(frozen=True)
class Interval:
    """A value and its interval. `left_out`: number of resamples without a value; `p`, two-sided, is set for a difference."""

    low: float
    high: float
    value: float
    level: float = 0.95
    left_out: int = 0
    p: float = math.nan


@dataclass(frozen=True)
class Test:
    """A two-sided test of no difference; n is the number of pairs or cases."""

    __test__ = False  # tells pytest that this is not a test class

    statistic: float
    p: float
    difference: float
    n: int


class MeanIntervals(NamedTuple):
    """The mean of each column and its interval, (c) each."""

    mean: Floats
    low: Floats
    high: Floats


def mean_intervals(
    values: ArrayLike, *units: ArrayLike, repeats: int = 1000, level: float = 0.95, seed: int = 0
) -> MeanIntervals:
    """Return the means of the columns of values (b, c), ignoring NaN, and their percentiles over resampled units, which
    are NaN for a single unit.

    units: (b) each, the unit that a case belongs to, such as its bag. Several kinds, such as bag and model, are
    drawn independently, and the weight of a case is the product of the counts of its units (the crossed
    bootstrap).
    """
    numbers = np.asarray(values, dtype=np.float64)
    known = ~np.isnan(numbers)
    filled = np.where(known, numbers, 0.0)
    places = [np.unique(np.asarray(unit), return_inverse=True)[1] for unit in units]
    counts = [int(place.max()) + 1 for place in places]
    drawn = [
        np.concatenate([*draws(count, repeats=repeats, seed=(seed, kind))]) if count > 1 else np.ones((repeats, 1))
        for kind, count in enumerate(counts)
    ]
    sums, cases = (_weighted_sums(part, drawn, places) for part in (filled, known))
    with np.errstate(invalid="ignore"):  # a column may be without a value, in a resample or entirely
        mean, resampled = filled.sum(0) / known.sum(0), sums / cases
    low, high = np.full((2, numbers.shape[1]), np.nan)
    defined = ~np.isnan(mean) & (max(counts) > 1)
    if defined.any():
        tails = (1 - level) / 2, (1 + level) / 2
        low[defined], high[defined] = np.nanquantile(resampled[:, defined], tails, axis=0)
    return MeanIntervals(mean, low, high)


def _weighted_sums(values: NDArray, drawn: list[NDArray], places: list[NDArray[np.int64]]) -> Floats:
    """Return the sums (r, c) of values (b, c), weighted by the product of the counts of their units, (r, units) per
    kind.

    Cases are first summed by their units, then over one kind of units after the other, so that no weight per case
    is stored.
    """
    kinds = tuple(each.shape[1] for each in drawn)
    cells = np.zeros((int(np.prod(kinds)), values.shape[1]))
    np.add.at(cells, np.ravel_multi_index(places, kinds), values)
    left = (drawn[0].astype(np.float64) @ cells.reshape(kinds[0], -1)).reshape(len(drawn[0]), *kinds[1:], -1)
    for each in drawn[1:]:
        left = np.einsum("rj,rj...->r...", each, left)
    return left


def paired_t(first: ArrayLike, second: ArrayLike) -> Test:
    """Return the paired t-test, t = mean(d) / (sd(d) / sqrt(n)), over the differences d of n folds.

    If all differences are equal, there is no variance to estimate: p is 1 if they are zero, else 0.
    """
    from scipy.special import stdtr

    first, second = finite_numbers(first, "first"), finite_numbers(second, "second")
    _same_length(first=first, second=second)
    n = len(first)
    if n < 2:
        raise CarmilError(f"a paired t-test of {n} pair{'s' * (n != 1)}: expected at least two folds")
    differences = first - second
    # In float64, 0.9 - 0.8 and 0.8 - 0.7 differ by rounding only.
    rounding = 8 * np.finfo(np.float64).eps * max(np.abs(first).max(), np.abs(second).max())
    mean, spread = float(differences.mean()), float(differences.std(ddof=1))
    if spread <= rounding:
        if abs(mean) <= rounding:
            return Test(statistic=0.0, p=1.0, difference=0.0, n=n)
        return Test(statistic=math.copysign(math.inf, mean), p=0.0, difference=mean, n=n)
    t = mean / (spread / math.sqrt(n))
    return Test(statistic=t, p=float(2 * stdtr(n - 1, -abs(t))), difference=mean, n=n)


def holm(p_values: ArrayLike) -> Floats:
    """Adjust m p-values by Holm's step-down method: (m - rank) p, made monotone, at most 1. NaN (no test) stays NaN."""
    given = np.asarray(p_values, dtype=np.float64)
    adjusted = np.full(given.shape, np.nan)
    defined = np.flatnonzero(~np.isnan(given))
    p = given[defined]
    if ((p < 0) | (p > 1)).any():
        raise CarmilError(f"p-value {p[(p < 0) | (p > 1)][0]:g}: expected numbers from 0 to 1")
    order = p.argsort(kind="stable")
    steps = (len(p) - np.arange(len(p))) * p[order]
    adjusted[defined[order]] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted


def two_class_cases(labels: ArrayLike, **scores: ArrayLike) -> tuple[NDArray, ...]:
    """Return labels (b) as bool and scores (b). Labels other than 0 and 1 are refused."""
    given = np.asarray(labels)
    measured = {name: finite_numbers(values, name) for name, values in scores.items()}
    _same_length(labels=given, **measured)
    if not len(given):
        raise CarmilError("no cases: expected at least one label and its score")
    wrong = ~np.isin(given, (0, 1))
    if wrong.any():
        raise CarmilError(f"label {given[wrong][0].item()!r} of case {wrong.argmax()}: expected 0 or 1")
    return given == 1, *measured.values()


def finite_numbers(values: ArrayLike, name: str) -> Floats:
    """Return the values (b) as finite float64."""
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise CarmilError(f"{name} has a value that is not a number: expected one number per case") from None
    if numbers.ndim != 1:
        raise CarmilError(f"{name} has shape {numbers.shape}: expected one number per case")
    lost = ~np.isfinite(numbers)
    if lost.any():
        raise CarmilError(f"{name} is {numbers[lost][0]} at case {lost.argmax()}: expected finite numbers")
    return numbers


def draws(
    b: int,
    groups: ArrayLike | None = None,
    *,
    strata: ArrayLike | None = None,
    repeats: int,
    seed: int | tuple[int, ...],
) -> Iterator[NDArray[np.int64]]:
    """Yield counts (part of r, b) of each row in a resample, in parts that fit into memory; nothing for a single unit.

    strata (b): numbers, such as classes. Units are drawn within their stratum, so that every resample has units of
    every stratum; a group with rows of several strata belongs to the largest of them, as in the folds.
    """
    unit = np.arange(b) if groups is None else _units(groups, b)
    units = int(unit.max()) + 1
    if repeats < 1:
        raise CarmilError(f"{repeats} resamples: expected at least one")
    if units < 2:
        return
    of = np.zeros(units, dtype=np.int64)
    if strata is not None:
        given = np.asarray(strata, dtype=np.int64)
        _same_length(rows=np.empty(b), strata=given)
        np.maximum.at(of, unit, given)
    rng = np.random.default_rng(seed)
    at_once = max(1, CHUNK // b)
    for start in range(0, repeats, at_once):
        some = min(at_once, repeats - start)
        counts = np.empty((some, units), dtype=np.int64)
        for stratum in np.unique(of):
            own = np.flatnonzero(of == stratum)
            taken = rng.integers(len(own), size=(some, len(own))) + len(own) * np.arange(some)[:, None]
            counts[:, own] = np.bincount(taken.ravel(), minlength=some * len(own)).reshape(some, len(own))
        yield counts[:, unit]


def _units(groups: ArrayLike, b: int) -> NDArray[np.int64]:
    """Return (b) the group of each row, counted from 0."""
    import pandas as pd

    given = np.asarray(groups)
    _same_length(rows=np.empty(b), groups=given)
    unit = pd.factorize(given)[0]
    if unit.min() < 0:
        raise CarmilError(f"row {unit.argmin()} has no group: expected one, such as its patient, for every row")
    return unit.astype(np.int64)


def percentiles(value: float, of_resamples: Floats, level: float = 0.95) -> Interval:
    """Return the interval of a value from its values on resamples; NaN are left out."""
    tail = (1 - checked_level(level)) / 2
    values = of_resamples[~np.isnan(of_resamples)]
    left_out = len(of_resamples) - len(values)
    if not len(values):
        return Interval(low=math.nan, high=math.nan, value=value, level=level, left_out=left_out)
    low, high = np.quantile(values, (tail, 1 - tail))
    return Interval(low=float(low), high=float(high), value=value, level=level, left_out=left_out)


def _same_length(**arrays: NDArray) -> None:
    (first, expected), *others = ((name, len(np.atleast_1d(array))) for name, array in arrays.items())
    for name, length in others:
        if length != expected:
            raise CarmilError(
                f"{first} has {expected} entries, {name} {length}: expected the same cases in the same order"
            )


def checked_level(level: float) -> float:
    """Return the level of an interval; refuse one outside 0 to 1."""
    if not 0 < level < 1:
        raise CarmilError(f"a level of {level:g}: expected a number between 0 and 1, such as 0.95")
    return level
