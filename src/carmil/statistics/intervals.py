"""Intervals of the figures of a study that are valid for few patients and at 0 and 1.

A figure is the mean over test folds, and in each fold over seeds, of a measure of the fold's answers; its interval is
of that mean. Shares of cases have Clopper and Pearson's exact interval. All others are score intervals: all true
values t with |t - value| <= z sd(t), where sd(t) is the standard deviation that the figure would have if t were true.
At t = 1 it differs from that at the observed value, so that no interval collapses.

n answers (one row per case, fold and seed), k classes, f folds, u patients.

- accuracy, sensitivity, specificity: Clopper and Pearson's for n cases; over folds n is the size with the variance of their mean,
  t (1 - t) / n. Wilson's is too short for few cases near 1: with 3 positives it covers a sensitivity of 0.95 in 86 % of samples.
- balanced accuracy, macro F1: Wilson's interval for the number of cases at which a proportion of the same value has the same
  variance, both computed from smoothed answers (two correct and two wrong answers added to each class).
- AUC: Newcombe's method 5 (2006), Hanley and McNeil's variance with both class sizes replaced by their mean; scaled up to
  DeLong's variance if that is larger, and never above t (1 - t) / (cases of the smaller class), the maximum
  (Birnbaum and Klose 1957). One class against the rest, of k > 2: the mean over the classes, correlated by 1 / (k - 1).
- the mean over slides of a number from 0 to 1 (AUPRC): Wilson's interval for the number of cases that gives its variance.

Intervals are conditional on the classes of the cases: nothing is resampled, and no class can be missing from a
resample. Slides of one patient are not independent: variances are those of sums over patients. Near 0 and 1, where
the correlation within patients cannot be estimated from the slides, the slides of a patient are taken as fully
correlated. Seeds never make an interval narrower than that of one model.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from carmil.errors import CarmilError, unknown
from carmil.statistics.bootstrap import Interval, Test, checked_level, draws, percentiles

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SMOOTHING = 2.0  # correct and wrong answers added to a class, as in Agresti and Coull's interval
DRAWS = 1000  # draws of answers, for the variance of macro F1
CLOSE = 1e-9  # a true value closer to the figure than this is always inside the interval
FAR = 9.0  # standard deviations, beyond which p is 0
SHARES = ("accuracy", "sensitivity", "specificity")  # figures that are shares of cases
MEASURES = ("auc", "f1_macro", "balanced_accuracy", "accuracy", "sensitivity", "specificity", "mean")


@dataclass(frozen=True, eq=False)
class FoldAnswers:
    """Answers to test cases, (n) each: one row per case, fold and seed. cases: identity of the case; patients: that
    of its patient.

    scores (n, k): probabilities of the classes; answers (n): the class answered. For the measure "mean", scores
    (n) is the averaged number, and labels and answers are ignored. For `resampled_interval`, scores are any
    predictions and labels any outcomes, (n) or (n, t).
    """

    labels: NDArray
    scores: Floats
    answers: Ints
    folds: NDArray
    seeds: NDArray
    cases: NDArray
    patients: NDArray

    @classmethod
    def of(
        cls,
        labels: ArrayLike,
        scores: ArrayLike,
        answers: ArrayLike | None = None,
        *,
        folds: ArrayLike | None = None,
        seeds: ArrayLike | None = None,
        cases: ArrayLike | None = None,
        patients: ArrayLike | None = None,
    ) -> "FoldAnswers":
        """Build answers. By default: one fold and seed, the most probable class, one patient per row."""
        given, y = np.asarray(scores, dtype=np.float64), np.asarray(labels)
        y = y.astype(np.int64) if y.ndim == 1 else y
        if not len(y):
            raise CarmilError("no cases: expected at least one label and its answer")
        if not np.isfinite(given).all():
            raise CarmilError("a score is not finite: leave out such cases first")
        if answers is None:
            answers = given.argmax(1) if given.ndim == 2 else y
        own = np.arange(len(y)) if cases is None else np.asarray(cases)
        one = np.zeros(len(y), dtype=np.int64)
        rows = (
            one if folds is None else np.asarray(folds),
            one if seeds is None else np.asarray(seeds),
            own,
            own if patients is None else np.asarray(patients),
        )
        for what in (given, np.asarray(answers), *rows):
            if len(what) != len(y):
                raise CarmilError(f"{len(y)} labels, {len(what)} answers: expected the same cases in the same order")
        return cls(y, given, np.asarray(answers, dtype=np.int64), *rows)


@dataclass(frozen=True, eq=False)
class Estimate:
    """A figure, the variance it would have if a value were true, and each patient's contribution to its error (u
    numbers).

    cases: for a share of cases, the number of cases with this variance; None for other figures.
    """

    value: float
    variance: Callable[[float], float]
    influence: dict[object, float]
    cases: float | None = None

    def interval(self, level: float = 0.95) -> Interval:
        if self.cases is None:
            low, high = _limits(self, _normal(level))
        else:
            low, high = clopper_pearson(self.value, self.cases, level)
        return Interval(low=low, high=high, value=self.value, level=level)


def figure_interval(measure: str, given: FoldAnswers, level: float = 0.95) -> Interval:
    """Return the mean over folds and seeds of one of MEASURES, with its interval; NaN if no fold has the measure."""
    return estimate(measure, given).interval(level)


def resampled_interval(
    measure: Callable[[Floats, NDArray], float],
    given: FoldAnswers,
    second: FoldAnswers | None = None,
    *,
    repeats: int = 1000,
    level: float = 0.95,
) -> Interval:
    """Return the mean over folds and seeds of measure(scores, labels), with percentiles over resampled patients.

    second: answers to the same cases of another model; the value is then the difference, first minus second, on the
    same resamples. A fold without a value, such as one without an event in a resample, is left out of the mean.
    """
    answers = [given] if second is None else [given, second]
    names, patient = np.unique(np.concatenate([one.patients for one in answers]), return_inverse=True)
    patients = np.split(patient, [len(given.patients)])
    groups = [_fold_and_seed_rows(one) for one in answers]

    def value(counts: NDArray[np.int64]) -> float:
        means = [
            _mean_over_folds(measure, one, of_one, counts[numbers])
            for one, of_one, numbers in zip(answers, groups, patients, strict=False)
        ]
        return means[0] if second is None else means[0] - means[1]

    drawn = (counts for part in draws(len(names), repeats=repeats, seed=0) for counts in part)
    resampled = np.array([value(counts) for counts in drawn], dtype=np.float64)
    result = percentiles(value(np.ones(len(names), dtype=np.int64)), resampled, level)
    if second is None or not len(resampled):
        return result
    beyond = [float((side[~np.isnan(resampled)]).mean()) for side in (resampled <= 0, resampled >= 0)]
    return replace(result, p=min(1.0, 2 * max(min(beyond), 1 / (repeats + 1))))


def _fold_and_seed_rows(given: FoldAnswers) -> dict[object, list[Ints]]:
    """Return the rows of every seed, by fold."""
    return {
        fold: [
            np.flatnonzero((given.folds == fold) & (given.seeds == seed))
            for seed in np.unique(given.seeds[given.folds == fold])
        ]
        for fold in np.unique(given.folds)
    }


def _mean_over_folds(
    measure: Callable[[Floats, NDArray], float], given: FoldAnswers, groups: dict[object, list[Ints]], counts: Ints
) -> float:
    """Return the mean over folds of the mean over seeds, with each row taken counts (n) times; NaN if no fold has a value."""
    means = []
    for of_seeds in groups.values():
        taken = [np.repeat(rows, counts[rows]) for rows in of_seeds]
        values = np.array([measure(given.scores[rows], given.labels[rows]) for rows in taken if len(rows)])
        if not np.isnan(values).all():
            means.append(float(np.nanmean(values)))
    return float(np.mean(means)) if means else math.nan


def clopper_pearson(share: float, count: float, level: float = 0.95) -> tuple[float, float]:
    """Return Clopper and Pearson's interval for a share of `count` cases, which need not be a whole number."""
    from scipy.special import betaincinv

    tail = (1 - checked_level(level)) / 2
    right, wrong = share * count, (1 - share) * count
    low = float(betaincinv(right, wrong + 1, tail)) if right > CLOSE else 0.0
    return low, float(betaincinv(right + 1, wrong, 1 - tail)) if wrong > CLOSE else 1.0


def wilson(share: float, count: float, level: float = 0.95) -> tuple[float, float]:
    """Return Wilson's interval for a share of `count` cases, in closed form."""
    z2 = _normal(level) ** 2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    reach = math.sqrt(z2 * (share * (1 - share) / count + z2 / (4 * count * count))) / (1 + z2 / count)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def difference_interval(first: Estimate, second: Estimate, level: float = 0.95) -> Interval:
    """Return first - second on the same patients, from the two intervals and the correlation of the two errors
    (Newcombe 1998).

    Two perfect figures have the difference 0 with an interval as wide as their own: the absence of errors in the
    sample does not imply that the two never differ.
    """
    low, high = _difference_limits(first, second, _normal(level))
    return Interval(low=low, high=high, value=first.value - second.value, level=level)


def difference_p(first: Estimate, second: Estimate) -> float:
    """Return the two-sided p of no difference: the level at which the interval of the difference touches 0."""
    difference = first.value - second.value
    if math.isnan(difference) or difference == 0:
        return difference + 1
    side = 0 if difference > 0 else 1
    z = _crossing(lambda z: _difference_limits(first, second, z)[side], 0.0, FAR)
    return math.erfc(z / math.sqrt(2))


def delong(first: Estimate, second: Estimate) -> Test:
    """Test whether two AUCs of the same patients differ (DeLong 1988; over folds, the mean of the folds' AUCs).

    If the variance is zero, as for two models that separate the classes completely, p is 1 without a difference, and
    NaN with a difference, as the test is then undefined.
    """
    difference = first.value - second.value
    patients = first.influence.keys() | second.influence.keys()
    variance = sum((first.influence.get(u, 0.0) - second.influence.get(u, 0.0)) ** 2 for u in patients)
    if variance <= 1e-28:
        alike = abs(difference) < CLOSE
        return Test(
            statistic=0.0 if alike else math.nan, p=1.0 if alike else math.nan, difference=difference, n=len(patients)
        )
    z = difference / math.sqrt(variance)
    return Test(statistic=z, p=math.erfc(abs(z) / math.sqrt(2)), difference=difference, n=len(patients))


def estimate(measure: str, given: FoldAnswers) -> Estimate:
    """Return the mean over folds and seeds of a measure, with the quantities that its interval is computed from."""
    if measure not in MEASURES:
        raise CarmilError(unknown("measure", measure, MEASURES))
    groups = _groups(measure, given)
    if not groups:
        return Estimate(math.nan, lambda t: math.nan, {})
    value = float(sum(group.weight * group.value for group in groups))
    known = np.concatenate([group.rows for group in groups])
    tested = len(
        {(fold, case) for fold, case in zip(given.folds[known].tolist(), given.cases[known].tolist(), strict=True)}
    )
    cases = dict(zip(given.cases[known].tolist(), given.patients[known].tolist(), strict=True))
    again = tested / len(
        cases
    )  # number of divisions into folds that test a case, which is the same case in each of them
    sizes = np.unique(np.array(list(cases.values())), return_counts=True)[1]
    alike = float(
        (sizes**2).sum() / sizes.sum()
    )  # factor of the variance if the cases of a patient are fully correlated
    influence = _influence(groups, given)
    reference = _reference(measure, groups, given, again)
    observed, expected = sum(one * one for one in influence.values()), reference.variance(value)
    ratio = observed / expected if expected > 1e-12 else 0.0
    if measure == "mean":
        # The variance of a mean that spreads less than a proportion: its own, plus a small part of a proportion's, so
        # that equal values do not collapse.
        trace = 1 / len(sizes)
        grown = (ratio * len(sizes) + alike * trace) / (len(sizes) + trace) if expected > 1e-12 else alike
        return Estimate(value, lambda t: grown * reference.variance(t), influence)
    grown = 1.0
    if measure == "auc" or alike > 1 or again > 1:
        errors = len(cases) * value * (1 - value)
        grown = max(1.0, ratio, (errors * ratio + alike) / (errors + 1))

    def variance(t: float) -> float:
        expected = reference.variance(t)
        return min(grown * expected, alike * max(expected, reference.most(t)))

    return Estimate(value, variance, influence, 0.25 / variance(0.5) if measure in SHARES else None)


@dataclass(frozen=True, eq=False)
class _Group:
    """One fold and seed. weight: its share of the figure. Row i of stratum s contributes (part_i - mean of the
    stratum) / size_s.
    """

    weight: float
    value: float
    rows: Ints
    parts: Floats
    strata: Ints
    fold: object = None


@dataclass(frozen=True)
class _Reference:
    """The variance of a figure if t were true and cases independent, and its upper bound."""

    variance: Callable[[float], float]
    most: Callable[[float], float] = lambda t: math.inf


def _groups(measure: str, given: FoldAnswers) -> list[_Group]:
    """Return every fold and seed with a value; folds have equal weights, and so have the seeds of a fold."""
    groups = []
    for fold in np.unique(given.folds):
        here = np.flatnonzero(given.folds == fold)
        group = [
            part
            for seed in np.unique(given.seeds[here])
            if (part := _measured(measure, given, here[given.seeds[here] == seed], fold)) is not None
        ]
        groups.append(group)
    folds = [group for group in groups if group]
    return [
        _Group(1 / (len(folds) * len(group)), one.value, one.rows, one.parts, one.strata, one.fold)
        for group in folds
        for one in group
    ]


def _measured(measure: str, given: FoldAnswers, rows: Ints, fold: object) -> _Group | None:
    """Return the measure of some rows, or None if it is undefined."""
    y, answers = given.labels[rows], given.answers[rows]
    right = (answers == y).astype(np.float64)
    whole = partial(_Group, 1.0, fold=fold)
    match measure:
        case "mean":
            return whole(float(given.scores[rows].mean()), rows, given.scores[rows], np.zeros_like(y))
        case "accuracy":
            return whole(float(right.mean()), rows, right, np.zeros_like(y))
        case "sensitivity" | "specificity":
            of = y == int(measure == "sensitivity")
            return whole(float(right[of].mean()), rows[of], right[of], y[of]) if of.any() else None
    k = given.scores.shape[1]
    sizes = np.bincount(y, minlength=k)
    if (k == 2 or measure == "auc") and not sizes.all():
        return None
    if measure == "auc":
        areas, parts = _areas(y, given.scores[rows], sizes)
        return whole(float(areas.mean()), rows, parts, y)
    if measure == "balanced_accuracy":
        there = int((sizes > 0).sum())
        return whole(float(sum(right[y == c].mean() for c in np.flatnonzero(sizes)) / there), rows, right / there, y)
    table = np.bincount(y * k + answers, minlength=k * k).reshape(k, k).astype(np.float64)
    both = sizes + table.sum(0)
    f1 = np.divide(2 * table.diagonal(), both, out=np.zeros(k), where=both > 0)
    there = int((both > 0).sum())
    slope = (2 * right - f1[answers]) / both[answers]  # contribution of a case's answer to the F1 of the answered class
    return whole(float(f1.sum() / there), rows, slope * sizes[y] / there, y)


def _areas(y: Ints, scores: Floats, sizes: Ints) -> tuple[Floats, Floats]:
    """Return the AUC of each class against the rest (of two, of the second), and each case's contribution to their
    mean, times its class's size.

    The contribution of a case to one AUC is the share of the cases on the other side that it is ranked correctly
    against, with ties as half (DeLong's components).
    """
    k, n = len(sizes), len(y)
    if k > 2:
        scores = scores / scores.sum(1, keepdims=True)
    classes = range(k) if k > 2 else (1,)
    areas, parts = [], np.zeros(n)
    for c in classes:
        own = y == c
        positives, negatives = scores[own, c], scores[~own, c]
        above = _share_below(positives, negatives)
        areas.append(above.mean())
        parts[own] += above / len(classes)
        parts[~own] += (1 - _share_below(negatives, positives)) * sizes[y[~own]] / len(negatives) / len(classes)
    return np.array(areas), parts


def _share_below(values: Floats, others: Floats) -> Floats:
    """Return, for each value, the share of the others below it; equal values count half."""
    ranked = np.sort(others)
    return (ranked.searchsorted(values, "left") + ranked.searchsorted(values, "right")) / (2 * len(others))


def _influence(groups: list[_Group], given: FoldAnswers) -> dict[object, float]:
    """Return each patient's contribution to the error of the figure: the sum over its rows, relative to the mean of
    their stratum.
    """
    rows = np.concatenate([group.rows for group in groups])
    parts = np.concatenate([group.parts for group in groups])
    strata = np.concatenate([group.strata for group in groups])
    shares = np.concatenate([group.weight / np.bincount(group.strata)[group.strata] for group in groups])
    added = np.zeros(len(rows))
    for s in np.unique(strata):
        of = strata == s
        cases = len(np.unique(given.cases[rows[of]]))
        mean = np.average(parts[of], weights=shares[of])
        added[of] = shares[of] * (parts[of] - mean) * math.sqrt(cases / max(cases - 1, 1))
    patients, at = np.unique(given.patients[rows], return_inverse=True)
    return dict(zip(patients.tolist(), np.bincount(at, weights=added).tolist(), strict=True))


def _reference(measure: str, groups: list[_Group], given: FoldAnswers, again: float) -> _Reference:
    folds: dict[object, list[_Group]] = {}
    for group in groups:
        folds.setdefault(group.fold, []).append(group)
    first = [of_seeds[0] for of_seeds in folds.values()]  # all seeds have the same cases
    match measure:
        case "auc":
            return _of_areas([np.bincount(group.strata, minlength=given.scores.shape[1]) for group in first], again)
        case "f1_macro":
            cases = _size_of_f1(list(folds.values()), given) / again
        case _:
            cases = _size_of_proportions(list(folds.values()), given) / again
    return _Reference(lambda t: t * (1 - t) / cases)


def _size_of_proportions(folds: list[list[_Group]], given: FoldAnswers) -> float:
    """Return the number of cases at which a proportion has the smoothed value and variance of this mean of proportions.

    With a single stratum it does not depend on the answers: it is the number of folds times the harmonic mean of their
    sizes.
    """
    weights: dict[int, float] = {}
    spread: dict[int, float] = {}
    right: dict[int, float] = {}
    for of_seeds in folds:
        group = of_seeds[0]
        there = np.unique(group.strata)
        for s in there.tolist():
            of = group.strata == s
            share = 1 / (len(folds) * len(there))
            weights[s] = weights.get(s, 0.0) + share
            spread[s] = spread.get(s, 0.0) + share**2 / int(of.sum())
            mean = float(np.mean([one.parts[one.strata == s].mean() for one in of_seeds])) * len(there)
            right[s] = right.get(s, 0.0) + share * mean
    value = variance = 0.0
    for s, weight in weights.items():
        cases = weight**2 / spread[s]
        p = (cases * right[s] / weight + SMOOTHING) / (cases + 2 * SMOOTHING)
        value += weight * p
        variance += spread[s] * p * (1 - p)
    return value * (1 - value) / variance


def _size_of_f1(folds: list[list[_Group]], given: FoldAnswers) -> float:
    """Return the same number of cases for macro F1, from its mean and variance over simulated folds of the same size,
    with answers drawn by class.
    """
    k = given.scores.shape[1]
    table = np.zeros((k, k))
    for of_seeds in folds:
        for group in of_seeds:
            flat = np.bincount(given.labels[group.rows] * k + given.answers[group.rows], minlength=k * k)
            table += flat.reshape(k, k) / len(of_seeds)
    table += np.where(np.eye(k) > 0, SMOOTHING, SMOOTHING / max(k - 1, 1))
    rng = np.random.default_rng(0)
    values = np.zeros(DRAWS)
    for of_seeds in folds:
        sizes = np.bincount(of_seeds[0].strata, minlength=k)
        drawn = np.stack([rng.multinomial(sizes[c], table[c] / table[c].sum(), size=DRAWS) for c in range(k)], 1)
        both = sizes + drawn.sum(1)  # (draws, k)
        f1 = 2 * np.diagonal(drawn, axis1=1, axis2=2) / np.maximum(both, 1)
        values += f1.sum(1) / (both > 0).sum(1) / len(folds)
    mean, variance = float(values.mean()), float(values.var())
    return mean * (1 - mean) / max(variance, 1e-12)


def _of_areas(sizes: list[Ints], again: float) -> _Reference:
    """Return Newcombe's variance of each class's AUC in each fold, sizes (f, k), and its upper bound."""
    k = len(sizes[0])
    classes = range(k) if k > 2 else (1,)
    m = np.array([[fold[c] for c in classes] for fold in sizes], dtype=np.float64)
    n = np.array([[fold.sum() - fold[c] for c in classes] for fold in sizes], dtype=np.float64)
    share = again * (1.0 if k == 2 else 2 / k**2) / len(sizes) ** 2
    middle = (m + n) / 2 - 1

    def variance(t: float) -> float:
        spread = 1 + middle * ((1 - t) / (2 - t) + t / (1 + t))
        return float(t * (1 - t) * share * (spread / (m * n)).sum())

    def most(t: float) -> float:
        return float(t * (1 - t) * share * (1 / np.minimum(m, n)).sum())

    return _Reference(variance, most)


def _limits(one: Estimate, z: float) -> tuple[float, float]:
    """Return the limits of the set of all t with |t - value| <= z sd(t)."""
    if math.isnan(one.value):
        return math.nan, math.nan
    value = min(max(one.value, 0.0), 1.0)

    def edge(far: float) -> float:
        near = value + math.copysign(CLOSE, far - value)
        return _crossing(lambda t: abs(t - value) - z * math.sqrt(one.variance(t)), near, far)

    return (edge(0.0) if value > CLOSE else 0.0), (edge(1.0) if value < 1 - CLOSE else 1.0)


def _crossing(function: Callable[[float], float], near: float, far: float) -> float:
    """Return where a function crosses zero between two points; if it does not, the point where it is closer to zero."""
    from scipy.optimize import brentq

    first, last = function(near), function(far)
    if first == 0 or first * last > 0:
        return near if abs(first) < abs(last) else far
    return float(brentq(function, near, far, xtol=1e-9))


def _difference_limits(first: Estimate, second: Estimate, z: float) -> tuple[float, float]:
    difference, r = first.value - second.value, _correlation(first, second)
    (low1, high1), (low2, high2) = _limits(first, z), _limits(second, z)

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * r * a * b + b * b, 0.0))

    low = difference - reach(first.value - low1, high2 - second.value)
    high = difference + reach(high1 - first.value, second.value - low2)
    return max(low, -1.0), min(high, 1.0)


def _correlation(first: Estimate, second: Estimate) -> float:
    """Return the correlation of the errors of two figures over patients; 0 if one of them has no error."""
    both = first.influence.keys() & second.influence.keys()
    shared = sum(first.influence[u] * second.influence[u] for u in both)
    sizes = [sum(one * one for one in each.influence.values()) for each in (first, second)]
    return 0.0 if min(sizes) <= 1e-28 else max(-1.0, min(1.0, shared / math.sqrt(sizes[0] * sizes[1])))


def _normal(level: float) -> float:
    return NormalDist().inv_cdf((1 + checked_level(level)) / 2)
