"""How well risks and survival probabilities agree with right-censored times.

b cases, t times. Censoring is made up for by weights (IPCW): the inverse of the probability, estimated on the training
cases, that a case is not yet censored. This estimate is constant after the last training case.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from carmil.errors import CarmilError
from carmil.statistics.hazards import censoring, kaplan_meier, kaplan_meier_limits

Floats = NDArray[np.float64]
TIED = 1e-8  # risks that differ by at most this much are equal
PAIRS = 2**22  # pairs of cases in memory at once


def concordance(time: ArrayLike, event: ArrayLike, risk: ArrayLike, *, weights: ArrayLike | None = None) -> float:
    """Return Harrell's C-index: of pairs in which the earlier time is an event, the share whose earlier case has the larger risk.

    Equal risks count one half. weights (b): the weight of the pairs in which a case is the earlier one. NaN without a pair.
    """
    y, happened = np.asarray(time, dtype=np.float64), np.asarray(event, dtype=bool)
    r = np.asarray(risk, dtype=np.float64)
    w = np.ones(len(y)) if weights is None else np.asarray(weights, dtype=np.float64)
    earlier = np.flatnonzero(happened & (w > 0))
    agreed = pairs = 0.0
    for part in np.array_split(earlier, max(1, -(-len(earlier) * len(y) // PAIRS))):
        later = (y > y[part, None]) | ((y == y[part, None]) & ~happened)
        difference = r[part, None] - r
        right = (difference > TIED) + 0.5 * (np.abs(difference) <= TIED)
        agreed += float(w[part] @ (right * later).sum(1))
        pairs += float(w[part] @ later.sum(1))
    return agreed / pairs if pairs else float("nan")


def uno_concordance(
    train_time: ArrayLike, train_event: ArrayLike, time: ArrayLike, event: ArrayLike, risk: ArrayLike, *, tau: float
) -> float:
    """Return Uno's C-index for events before tau, which does not depend on how many cases are censored."""
    early = np.asarray(time, dtype=np.float64) < tau
    weights = _inverse_weights(train_time, train_event, time, event)
    return concordance(time, event, risk, weights=np.where(early, np.square(weights), 0.0))


def dynamic_auc(
    train_time: ArrayLike, train_event: ArrayLike, time: ArrayLike, event: ArrayLike, risk: ArrayLike, times: ArrayLike
) -> Floats:
    """Return (t) the AUC at each time of cases with an event so far against cases without one; NaN if one kind is missing."""
    order = np.argsort(np.asarray(risk, dtype=np.float64))
    r, y = np.asarray(risk, dtype=np.float64)[order], np.asarray(time, dtype=np.float64)[order, None]
    at = np.asarray(times, dtype=np.float64)
    weights = _inverse_weights(train_time, train_event, time, event)[order, None]
    tied = np.flatnonzero(np.diff(r, prepend=-np.inf) > TIED)  # the first case of each distinct risk
    positive = np.add.reduceat(weights * (y <= at), tied)
    negative = np.add.reduceat((y > at).astype(np.float64), tied)
    pairs = positive.sum(0) * negative.sum(0)
    right = (positive * (negative.cumsum(0) - negative / 2)).sum(0)
    return np.divide(right, pairs, out=np.full(len(at), np.nan), where=pairs > 0)


def brier_over_time(
    train_time: ArrayLike,
    train_event: ArrayLike,
    time: ArrayLike,
    event: ArrayLike,
    survival: ArrayLike,
    times: ArrayLike,
) -> Floats:
    """Return (t) the Brier score at each time of the probabilities `survival` (b, t) of no event until then."""
    y, at = np.asarray(time, dtype=np.float64)[:, None], np.asarray(times, dtype=np.float64)
    estimate = np.asarray(survival, dtype=np.float64)
    cases = _inverse_weights(train_time, train_event, time, event)[:, None] * (y <= at)
    not_censored = censoring(train_time, train_event).at(at)
    controls = np.divide(y > at, not_censored, out=np.zeros((len(y), len(at))), where=not_censored > 0)
    return (np.square(estimate) * cases + np.square(1 - estimate) * controls).mean(0)


def integrated_brier(
    train_time: ArrayLike,
    train_event: ArrayLike,
    time: ArrayLike,
    event: ArrayLike,
    survival: ArrayLike,
    times: ArrayLike,
) -> float:
    """Return the mean of the Brier score over the range of the times, by trapezoids. times: two or more, ascending."""
    at = np.asarray(times, dtype=np.float64)
    if len(at) < 2 or (np.diff(at) <= 0).any():
        raise CarmilError("times of the integrated Brier score: expected two or more, in ascending order")
    scores = brier_over_time(train_time, train_event, time, event, survival, at)
    return float(np.trapezoid(scores, at) / (at[-1] - at[0]))


@dataclass(frozen=True, eq=False)
class SurvivalCalibration:
    """Predicted and observed survival until a horizon in groups (g) of cases, lowest prediction first.

    count: number of cases; predicted: their mean probability of no event; observed: Kaplan and Meier's estimate; low,
    high: its limits. NaN where the last case of a group is censored before the horizon; limits also where observed is 0
    or 1.
    """

    horizon: float
    count: NDArray[np.int64]
    predicted: Floats
    observed: Floats
    low: Floats
    high: Floats
    level: float


def survival_calibration(
    time: ArrayLike,
    event: ArrayLike,
    survival: ArrayLike,
    *,
    horizon: float,
    groups: int = 4,
    level: float = 0.95,
) -> SurvivalCalibration:
    """Compare predicted with observed survival in groups of equal size. survival (b): P(no event until the horizon).

    Equal predictions share a group, so that groups may differ in size, or be fewer. Limits: `kaplan_meier_limits`.
    """
    if groups < 1:
        raise CarmilError(f"{groups} groups: expected at least one")
    y, happened = np.asarray(time, dtype=np.float64), np.asarray(event, dtype=bool)
    predicted = np.asarray(survival, dtype=np.float64)
    edges = np.quantile(predicted, np.linspace(0, 1, groups + 1)[1:-1])
    _, group, count = np.unique(np.searchsorted(edges, predicted), return_inverse=True, return_counts=True)
    observed, low, high = np.full((3, len(count)), np.nan)
    for i in range(len(count)):
        cases = y[group == i], happened[group == i]
        curve = kaplan_meier(*cases)
        if horizon <= curve.times[-1] or curve.values[-1] == 0:
            observed[i] = curve.at(horizon)
            low[i], high[i] = (limit.at(horizon) for limit in kaplan_meier_limits(*cases, level=level))
    return SurvivalCalibration(horizon, count, np.bincount(group, predicted) / count, observed, low, high, level)


def _inverse_weights(train_time: ArrayLike, train_event: ArrayLike, time: ArrayLike, event: ArrayLike) -> Floats:
    """Return (b) 1 / P(not censored until the event); 0 for cases without an event, or where that probability is 0."""
    not_censored = censoring(train_time, train_event).at(time)
    known = np.asarray(event, dtype=bool) & (not_censored > 0)
    return np.divide(1.0, not_censored, out=np.zeros(len(known)), where=known)
