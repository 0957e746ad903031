"""Survival functions and hazards of right-censored times.

n cases. time (n): the time of the event, or of the end of follow-up without one (censored). event (n) bool.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from carmil.errors import CarmilError
from carmil.statistics.bootstrap import Interval, checked_level

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
STEPS = 50  # of Newton's method
CLOSE = 1e-9  # a step of Newton's method that ends it
ROUNDING = 1e-12  # per case: a log likelihood that falls by less has not fallen
SINGULAR = 1e-10  # information per event about a standardised coefficient; with less, it is undetermined or infinite


@dataclass(frozen=True, eq=False)
class StepFunction:
    """A right-continuous step function: values[i] from times[i] on, and `before` before the first time.

    Users of scikit-survival know its parts as x and y, and call it: f(times).
    """

    times: Floats
    values: Floats
    before: float

    @property
    def x(self) -> Floats:
        return self.times

    @property
    def y(self) -> Floats:
        return self.values

    def __call__(self, times: ArrayLike) -> Floats:
        return self.at(times)

    def at(self, times: ArrayLike) -> Floats:
        """Return the values at these times."""
        place = np.searchsorted(self.times, np.asarray(times, dtype=np.float64), side="right")
        return np.concatenate([[self.before], self.values])[place]


@dataclass(frozen=True, eq=False)
class Counts:
    """At each distinct time, in order: the cases at risk, those with an event, and those that are censored."""

    times: Floats
    at_risk: Floats
    events: Floats
    censored: Floats


def count_cases(time: ArrayLike, event: ArrayLike) -> Counts:
    """Count the cases at each distinct time."""
    times, place = np.unique(np.asarray(time, dtype=np.float64), return_inverse=True)
    leaving = np.bincount(place, minlength=len(times)).astype(np.float64)
    events = np.bincount(place[np.asarray(event, dtype=bool)], minlength=len(times)).astype(np.float64)
    return Counts(times, leaving[::-1].cumsum()[::-1], events, leaving - events)


def kaplan_meier(time: ArrayLike, event: ArrayLike) -> StepFunction:
    """Return Kaplan and Meier's estimate of the share without an event."""
    counts = count_cases(time, event)
    return StepFunction(counts.times, (1 - counts.events / counts.at_risk).cumprod(), 1.0)


def kaplan_meier_limits(time: ArrayLike, event: ArrayLike, *, level: float = 0.95) -> tuple[StepFunction, StepFunction]:
    """Return the lower and upper limits of Kaplan and Meier's estimate S; NaN where S is 1 or 0.

    Greenwood's variance of log S, on the scale of log(-log S).
    """
    counts = count_cases(time, event)
    survival = kaplan_meier(time, event).values
    inside = (survival > 0) & (survival < 1)
    left = counts.at_risk - counts.events
    ratio = np.divide(counts.events, counts.at_risk * left, out=np.zeros_like(left), where=left > 0)
    log_survival = np.log(survival, out=np.full_like(left, np.nan), where=inside)
    width = _normal(level) * np.sqrt(ratio.cumsum()) / -log_survival
    low, high = (StepFunction(counts.times, np.exp(log_survival * np.exp(sign * width)), math.nan) for sign in (1, -1))
    return low, high


def censoring(time: ArrayLike, event: ArrayLike) -> StepFunction:
    """Return Kaplan and Meier's estimate of the share that is not censored; at equal times, events come first."""
    counts = count_cases(time, event)
    at_risk = counts.at_risk - counts.events
    lost = np.divide(counts.censored, at_risk, out=np.zeros_like(at_risk), where=at_risk > 0)
    return StepFunction(counts.times, (1 - lost).cumprod(), 1.0)


def breslow(time: ArrayLike, event: ArrayLike, risk: ArrayLike) -> StepFunction:
    """Return Breslow's estimate of the cumulative hazard of a case with a log risk of 0. risk (n): log risks."""
    counts = count_cases(time, event)
    place = np.searchsorted(counts.times, np.asarray(time, dtype=np.float64))
    weights = np.bincount(place, np.exp(np.asarray(risk, dtype=np.float64)), minlength=len(counts.times))
    hazard = np.cumsum(counts.events / weights[::-1].cumsum()[::-1])
    happened = counts.events > 0
    return StepFunction(counts.times[happened], hazard[happened], 0.0)


def mean_of_steps(functions: Sequence[StepFunction]) -> StepFunction:
    """Return the mean of step functions."""
    times = np.unique(np.concatenate([function.times for function in functions]))
    values = np.mean([function.at(times) for function in functions], axis=0)
    return StepFunction(times, values, float(np.mean([function.before for function in functions])))


def survival_probabilities(cumulative_hazard: StepFunction, risk: ArrayLike, times: ArrayLike) -> Floats:
    """Return (n, t) the probability that each case has no event until each time, exp(-H(t) exp(risk))."""
    return np.exp(-np.exp(np.asarray(risk, dtype=np.float64))[:, None] * cumulative_hazard.at(times))


@dataclass(frozen=True, eq=False)
class CoxFit:
    """Cox's model of c covariates: the log hazard ratio per unit of each (c), and their covariance (c, c)."""

    coefficients: Floats
    covariance: Floats

    def hazard_ratios(self, level: float = 0.95) -> list[Interval]:
        """Return the hazard ratio per unit of each covariate, with Wald's interval and the p of Wald's test."""
        error = np.sqrt(self.covariance.diagonal())
        width = _normal(level) * error
        with np.errstate(over="ignore"):
            low, high, value = np.exp(
                [self.coefficients - width, self.coefficients + width, self.coefficients]
            ).tolist()
        p = [math.erfc(abs(z) / math.sqrt(2)) for z in (self.coefficients / error).tolist()]
        return [Interval(low[i], high[i], value[i], level=level, p=p[i]) for i in range(len(p))]


def fit_cox(covariates: ArrayLike, time: ArrayLike, event: ArrayLike, *, penalizer: float = 0.0) -> CoxFit:
    """Fit Cox's model with Efron's ties by Newton's method. covariates (n, c).

    Maximises log L(beta) - n penalizer / 2 sum_j (s_j beta_j)^2, s_j the standard deviation of covariate j (that of
    a sample, n - 1): the meaning of `penalizer` in lifelines. A penalizer keeps the coefficients finite where a
    covariate separates the events. The covariance is the inverse of the second derivative, penalty included.
    """
    x, y = np.asarray(covariates, dtype=np.float64), np.asarray(time, dtype=np.float64)
    happened = np.asarray(event, dtype=bool)
    if not happened.any():
        raise CarmilError("no event among the cases: expected at least one to fit Cox's model")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise CarmilError("a covariate or a time is not finite: leave out such cases first")
    if (constant := np.ptp(x, axis=0) == 0).any():
        raise CarmilError(f"covariate {int(constant.argmax())} is the same for all cases: leave it out")
    deviation = x.std(0, ddof=1)
    likelihood = _PartialLikelihood.of((x - x.mean(0)) / deviation, y, happened, len(x) * penalizer)
    beta = np.zeros(x.shape[1])
    value, gradient, information = likelihood.derivatives(beta)
    for _ in range(STEPS):
        if np.linalg.eigvalsh(information)[0] < SINGULAR * happened.sum():
            break
        step = np.linalg.solve(information, gradient)
        if np.abs(step).max() < CLOSE:
            return CoxFit((beta + step) / deviation, np.linalg.inv(information) / np.outer(deviation, deviation))
        new = likelihood.derivatives(beta + step)
        while not (new[0] >= value - ROUNDING * len(x) and np.isfinite(new[2]).all()):
            step = step / 2
            new = likelihood.derivatives(beta + step)
        beta = beta + step
        value, gradient, information = new
    raise CarmilError(
        "Cox's model did not converge: a covariate separates the events or follows from the others; "
        "leave it out or set a penalizer"
    )


@dataclass(frozen=True, eq=False)
class _PartialLikelihood:
    """Cox's partial likelihood with a penalty. n cases in order of time, of which m have an event; c covariates.

    At an event the cases of its time or later are at risk. Of d events at one time, Efron counts the d cases by
    1 - i / d at the i-th event, i from 0: `discount` (m) is i / d.
    """

    x: Floats  # (n, c)
    events: Ints  # (m) the cases with an event
    first: Ints  # (m) the first case at risk
    start: Ints  # the first event of each distinct time, of the m
    tie: Ints  # (m) which of the distinct times
    discount: Floats
    penalty: float

    @classmethod
    def of(cls, x: Floats, time: Floats, event: NDArray[np.bool_], penalty: float) -> "_PartialLikelihood":
        order = np.argsort(time, kind="stable")
        events = np.flatnonzero(event[order])
        at = time[order][events]
        _, start, tie, tied = np.unique(at, return_index=True, return_inverse=True, return_counts=True)
        discount = (np.arange(len(at)) - start[tie]) / tied[tie]
        return cls(x[order], events, np.searchsorted(time[order], at), start, tie, discount, penalty)

    def derivatives(self, beta: Floats) -> tuple[float, Floats, Floats]:
        """Return the logarithm, its gradient (c) and its negative second derivative (c, c); not finite if beta is too large."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            weight = np.exp(self.x @ beta)
            sums = np.column_stack([weight, weight[:, None] * self.x])
            tied = np.add.reduceat(sums[self.events], self.start)[self.tie]
            sums = sums[::-1].cumsum(0)[::-1][self.first] - self.discount[:, None] * tied
            risk, mean = sums[:, 0], sums[:, 1:] / sums[:, :1]
            hazard = np.bincount(self.first, 1 / risk, minlength=len(weight)).cumsum()
            hazard[self.events] -= np.bincount(self.tie, self.discount / risk)[self.tie]
            expected = (weight * hazard)[:, None]  # number of events of each case
            value = float((self.x[self.events] @ beta).sum() - np.log(risk).sum() - self.penalty / 2 * (beta @ beta))
            gradient = self.x[self.events].sum(0) - mean.sum(0) - self.penalty * beta
            information = self.x.T @ (expected * self.x) - mean.T @ mean + self.penalty * np.eye(len(beta))
        return value, gradient, information


def _normal(level: float) -> float:
    return NormalDist().inv_cdf((1 + checked_level(level)) / 2)
