"""Plots of risks and survival probabilities: Kaplan-Meier curves, calibration, AUC and Brier score over time.

c cases, t times. Facts about training bags always refer to those of the same fold.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from carmil.report.cases import FOLDS, Cases, TestedCases
from carmil.report.plots import Axes, Dot, Line, Plot, colour, line_svg
from carmil.runs.run import Run
from carmil.statistics.hazards import (
    StepFunction,
    count_cases,
    kaplan_meier,
    kaplan_meier_limits,
    survival_probabilities,
)
from carmil.statistics.survival import brier_over_time, dynamic_auc, survival_calibration
from carmil.studies.figures import figure_text
from carmil.targets.survival import Survival, horizons_within
from carmil.words import plural, probability_text

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Fold:
    """A test fold: its cases (members), their outcomes and risks, and facts about the training bags of its models."""

    members: NDArray[np.int64]
    time: Floats
    event: NDArray[np.bool_]
    risk: Floats
    train_time: Floats
    train_event: NDArray[np.bool_]
    baseline: StepFunction

    @property
    def reference(self) -> tuple[Floats, NDArray[np.bool_], Floats, NDArray[np.bool_]]:
        return self.train_time, self.train_event, self.time, self.event

    def survival(self, times: Floats) -> Floats:
        """Return the predicted probability that each case has no event until each time."""
        return survival_probabilities(self.baseline, self.risk, times)


def kaplan_meier_groups(tested: TestedCases) -> Plot | None:
    """Return Kaplan and Meier's estimates for the groups of higher and lower risk, with each case assigned by the rule
    of its own fold.
    """
    cases, level = tested.once, tested.run.metrics.level
    time, event = _times(cases)
    last = float(time.max())
    if last <= 0:
        return None
    target, names = _target(tested.run), cases.decisions[0].classes
    axes = Axes(target.columns[0], "share without an event", (0.0, last))
    lines: list[Line] = []
    legends, at_risk = [], []
    for group in (1, 0):
        members = cases.answer == group
        if members.any():
            legends.append((colour(len(lines)), _group_words(names[group], level, event[members])))
            lines.append(_survival_line(time[members], event[members]))
            at_risk.append([str(int((time[members] >= tick).sum())) for tick in axes.x_ticks])
    svg = line_svg(axes, lines, below=at_risk, below_label="number at risk")
    p = log_rank(time, event, cases.answer == 1)
    words = (
        f"Area: 95 % interval; ticks: censored. Every {level} is in the group in which the models of its own fold put it, "
        f"divided at the median risk of their validation {level}s: risks of different folds come from different models, and "
        f"are not compared. As these models share training {level}s, p is approximate."
    )
    caption = f"{target.title} of the two groups (Kaplan-Meier); log-rank test: {_p_words(p)}"
    return Plot(f"{caption[0].upper()}{caption[1:]}", svg, (*legends, ("", words)))


def log_rank(time: Floats, event: NDArray[np.bool_], group: NDArray[np.bool_]) -> float | None:
    """Return the p of the log-rank test between the cases inside and outside a group; None without events or a group."""
    from scipy.stats import CensoredData, logrank

    if not event.any() or group.all() or not group.any():
        return None
    inside, outside = (
        CensoredData(uncensored=time[members & event], right=time[members & ~event]) for members in (group, ~group)
    )
    return float(logrank(inside, outside).pvalue)


def calibration_at_horizon(tested: TestedCases) -> Plot | None:
    """Return observed by predicted survival at the median event time of all training bags."""
    run, cases, level = tested.run, tested.once, tested.run.metrics.level
    training = run.training(range(len(run.models)))
    if training is None or not (training.outcomes[:, 1] > 0).any():
        return None
    horizon = float(np.median(training.outcomes[training.outcomes[:, 1] > 0, 0]))
    survival = np.full(len(cases.p), np.nan)
    for fold in _folds(run, cases):
        survival[fold.members] = fold.survival(np.array([horizon]))[:, 0]
    time, event = _times(cases)
    found = survival_calibration(time, event, survival, horizon=horizon)
    dots = []
    for count, x, y, low, high in zip(found.count, found.predicted, found.observed, found.low, found.high, strict=True):
        if not np.isnan(y):
            dots.append(
                Dot(x, y, low, high, f"{count} {level}s: {probability_text(x)} predicted, {100 * y:.1f} % observed")
            )
    at = f"{horizon:.3g} {_target(run).time_unit}".strip()
    words = (
        f"dot: a quarter of the {level}s, by their predicted probability of no event until {at} (the median time of events in "
        "training), from the baseline hazard of their own fold; with the 95 % interval of Kaplan and Meier's estimate"
    )
    axes = Axes("predicted share without an event", "observed share (Kaplan-Meier)")
    svg = line_svg(axes, [Line((), dots=dots)], guides=[[(0, 0), (1, 1)]])
    return Plot(f"Calibration at {at}", svg, (("", words),), "calibration")


def auc_over_time(tested: TestedCases) -> Plot | None:
    """Return, at each time, the AUC of cases with an event so far against cases without one, for each fold and as their
    mean.
    """
    run, folds = tested.run, _folds(tested.run, tested.cases)
    times = _horizons(tested.cases, folds)
    if not len(times):
        return None
    each = [dynamic_auc(*fold.reference, fold.risk, times) for fold in folds]
    mean = mean_of_known(np.array(each))
    lines = [Line(_points(times, one), control=True) for one in each] if len(each) > 1 else []
    lines.append(Line(_points(times, mean)))
    axes = Axes(_target(run).columns[0], "AUC of events so far", (0.0, float(times[-1])))
    svg = line_svg(axes, lines, guides=[[(0, 0.5), (float(times[-1]), 0.5)]])
    key = ((colour(0), "mean of the test folds"), ("control", "each test fold")) if len(each) > 1 else ()
    words = f"{run.metrics.level}s with an event so far against those without one; dashed: chance"
    return Plot("AUC over time", svg, (*key, ("", words)))


def brier_scores(tested: TestedCases) -> Plot | None:
    """Return the Brier score of the predicted survival over time, beside that of Kaplan and Meier's estimate."""
    run, folds = tested.run, _folds(tested.run, tested.cases)
    times = _horizons(tested.cases, folds)
    if not len(times):
        return None
    scores: dict[str, list[Floats]] = {"ibs": [], "ibs_population": []}
    for fold in folds:
        population = np.tile(kaplan_meier(fold.train_time, fold.train_event).at(times), (len(fold.time), 1))
        scores["ibs"].append(brier_over_time(*fold.reference, fold.survival(times), times))
        scores["ibs_population"].append(brier_over_time(*fold.reference, population, times))
    means = {name: np.mean(each, axis=0) for name, each in scores.items()}
    names = {
        "ibs": "the models",
        "ibs_population": f"Kaplan and Meier's estimate, the same for every {run.metrics.level}",
    }
    summary, key = run.metrics.summary, []
    for i, (name, words) in enumerate(names.items()):
        over_all = f": {figure_text(name, summary[name].mean)} over all times" if name in summary else ""
        key.append((colour(i), words + over_all))
    top = max(0.3, 1.1 * float(np.max(list(means.values()))))
    end = float(times[-1])
    axes = Axes(_target(run).columns[0], "Brier score", (0.0, end), (0.0, top))
    svg = line_svg(axes, [Line(_points(times, one)) for one in means.values()], guides=[[(0, 0.25), (end, 0.25)]])
    words = (
        "mean over the test folds of the squared error of the predicted survival: lower is better; dashed: one half for "
        "everyone"
    )
    return Plot("Brier score over time", svg, (*key, ("", words)))


def mean_of_known(values: Floats) -> Floats:
    """Return the mean over the first axis of the values that are known; NaN where none is."""
    known = ~np.isnan(values)
    return np.divide(np.nansum(values, axis=0), known.sum(0), out=np.full(values.shape[1], np.nan), where=known.any(0))


def _survival_line(time: Floats, event: NDArray[np.bool_]) -> Line:
    """Return Kaplan and Meier's estimate as steps from time 0, its 95 % band, and ticks where cases are censored."""
    curve, limits, counts = kaplan_meier(time, event), kaplan_meier_limits(time, event), count_cases(time, event)
    steps = [(0.0, 1.0)]
    for at, value in zip(curve.times.tolist(), curve.values.tolist(), strict=True):
        steps += [(at, steps[-1][1]), (at, value)]
    low, high = (limit.values for limit in limits)
    ends = np.append(curve.times[1:], curve.times[-1])
    known = np.flatnonzero(~np.isnan(low))
    upper = [point for i in known for point in ((curve.times[i], high[i]), (ends[i], high[i]))]
    lower = [point for i in known for point in ((curve.times[i], low[i]), (ends[i], low[i]))]
    ticks = [(at, curve.at(at)) for at in counts.times[counts.censored > 0]]
    return Line(steps, band=[*upper, *lower[::-1]], ticks=[(float(x), float(y)) for x, y in ticks])


def _target(run: Run) -> Survival:
    assert isinstance(run.target, Survival)
    return run.target


def _group_words(name: str, level: str, event: NDArray[np.bool_]) -> str:
    return f"{name}: {plural(len(event), level)}, {plural(int(event.sum()), 'event')}"


def _p_words(p: float | None) -> str:
    return "not possible" if p is None or np.isnan(p) else "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def _folds(run: Run, cases: Cases) -> list[Fold]:
    """Return the test folds whose models have a baseline hazard; none for a run without training outcomes."""
    names, folds = cases.frame["fold"].astype(str).to_numpy(), []
    time, event = _times(cases)
    for name in dict.fromkeys(names):
        own = {int(part) for part in name.split(FOLDS)}
        training = run.training([row for row, fold in enumerate(run.tested_folds) if fold in own])
        if training is None or training.baseline is None:
            continue
        at, trained = np.flatnonzero(names == name), training.outcomes
        risk = cases.p[at, 0]
        folds.append(Fold(at, time[at], event[at], risk, trained[:, 0], trained[:, 1] > 0, training.baseline))
    return folds


def _horizons(cases: Cases, folds: list[Fold]) -> Floats:
    """Return the times at which all folds can be measured."""
    ends = [min(fold.train_time[fold.train_event].max(initial=0.0), fold.time.max()) for fold in folds]
    time, event = _times(cases)
    return horizons_within(time, event, time < min(ends)) if ends else np.zeros(0)


def _times(cases: Cases) -> tuple[Floats, NDArray[np.bool_]]:
    return cases.truth[:, 0], cases.truth[:, 1] > 0


def _points(times: Floats, values: Floats) -> list[tuple[float, float]]:
    known = ~np.isnan(values)
    return list(zip(times[known].tolist(), values[known].tolist(), strict=True))
