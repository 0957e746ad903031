"""Tables and lines of text for the figures of runs and evaluations."""

from collections.abc import Sequence
from math import isnan

import numpy as np

from carmil.runs.facts import PredictionSets
from carmil.runs.run import DISTANCE, Run
from carmil.statistics.conformal import expected_coverage
from carmil.studies.cautions import cautions
from carmil.studies.evaluate import Evaluation
from carmil.studies.figures import (
    IN_UNITS,
    MEAN_OVER_FOLDS,
    SHOWN,
    figure_names,
    figure_text,
    interval_words,
    line,
    percent,
)
from carmil.studies.scope import outside_line
from carmil.tables import ResultTable
from carmil.targets import Classes
from carmil.words import percent_text, plural


def figures_table(runs: Sequence[Run]) -> ResultTable:
    """Tabulate one row per run: mean ± standard deviation over the folds, in per cent."""
    shown = {name: words for run in runs for name, words in figure_names(run.target).items()}
    names = [name for name in shown if any(name in run.metrics.summary for run in runs)]
    lines = tuple(
        (run.name, *(line(run.metrics.summary, name) if name in run.metrics.summary else "–" for name in names))
        for run in runs
    )
    return ResultTable(
        f"Test folds: mean ± standard deviation over the folds, {_unit(names)}",
        ("run", *(shown[name] for name in names)),
        lines,
    )


def figures_lines(run: Run) -> list[str]:
    """Return lines of text: a description of the figures, the interval of the key figure, and the run's cautions."""
    data, settings, target = run.data, run.settings, run.target
    counts = ", ".join(
        f"{plural(n, 'slide')} of {target.strata_word} {name}"
        for name, n in zip(data.classes, data.class_counts, strict=True)
    )
    outcomes = "" if data.outcomes is None else target.summary(np.array(data.outcomes, dtype=np.float64))
    slides = f"{plural(data.slides, 'slide')} of {plural(data.patients, 'patient')}: {outcomes or counts}"
    if (imported := data.imported) is not None:
        origin = f"{imported.tool}, {imported.architecture}, {imported.checkpoint}"
        measured = f"; {slides}" if data.splits else f"; no slides; classes {', '.join(data.classes)}"
        return [f"{settings.model} imported from {origin}{measured}", *_result_lines(run), *cautions(run)]
    folds = len({model.fold for model in run.models})
    chosen = "epoch and hyper-parameters"
    if any(model.threshold is not None for model in run.models):
        rule = f" ({settings.threshold})" if isinstance(target, Classes) else ""
        chosen = f"epoch, hyper-parameters and threshold{rule}"
    lines = [
        f"{settings.model}: {plural(folds, 'fold')} x {plural(settings.seeds, 'seed')}; {slides}",
        f"figures are of {run.metrics.level}s; {chosen} were chosen on validation bags",
    ]
    return [*lines, *_result_lines(run), *cautions(run)]


def _result_lines(run: Run) -> list[str]:
    """Return lines about the key figure with its interval, and about prediction sets, if the run has them."""
    name = run.target.key_figure
    key = run.metrics.intervals.get(name)
    lines = []
    if key and not isnan(key.value) and run.metrics.intervals_of == MEAN_OVER_FOLDS:
        value, interval = figure_text(name, key.value), interval_words(key, name)
        lines.append(f"{SHOWN[name]}, mean over folds: {value}, 95 % interval {interval} over patients")
    if DISTANCE in (predictions := run.predictions()):
        lines += outside_line(predictions.groupby("slide")[DISTANCE].mean().reset_index())
    if run.metrics.prediction_sets is not None:
        lines.append(sets_line(run.metrics.prediction_sets, "test patient"))
    return lines


def evaluation_lines(found: Evaluation) -> list[str]:
    """Return notes on an evaluation: whether slides were used in training, and whether the figures may be due to chance."""
    lines = []
    if found.own:
        share = "all" if found.own == found.slides else f"{found.own} of {found.slides}"
        lines.append(
            f"{share} slides are the run's own test slides: no external validation. Figures here are of all {found.level}s "
            "pooled; those of `carmil train` are means over the folds, and differ"
        )
    if found.sets is not None:
        lines.append(sets_line(found.sets, found.level))
    if found.calibration is not None:
        rule = found.calibration.rule((0,), of_patients=True)
        expected = ", ".join(
            f"{name} {percent(expected_coverage(n, rule.level))} ({plural(n, 'patient')})"
            for name, n in zip(found.run.target.answer_names, rule.calibrated.tolist(), strict=True)
        )
        lines.append(
            f"prediction sets at {percent_text(rule.level)} are calibrated on this cohort; mean coverage per class to expect, per "
            f"cent: {expected}; use them with `carmil predict --calibration`"
        )
    return [*lines, *found.cautions]


def evaluation_table(found: Evaluation) -> ResultTable:
    """Tabulate the figures of the joint answers with 95 % intervals, in per cent; for new slides also those of single models."""
    shown = figure_names(found.run.target)
    names = [name for name in shown if name in found.figures]
    each = [(line(found.each, name) if name in found.each else "–",) if found.each else () for name in names]
    lines = [
        (shown[name], figure_text(name, found.figures[name]), interval_words(found.intervals.get(name), name), *alone)
        for name, alone in zip(names, each, strict=True)
    ]
    origin = "another cohort" if not found.own else "its own cohort" if found.own == found.slides else "two cohorts"
    title = f"{found.run.name} on {plural(found.cases, found.level)} of {origin}, {_unit(names)}"
    together = "models tested on each slide" if found.own else "all models together"
    alone = ("each by itself: mean ± sd over models",) if found.each else ()
    return ResultTable(title, ("figure", together, "95 % interval of that", *alone), tuple(lines))


def sets_tables(run: Run) -> list[ResultTable]:
    """Tabulate the prediction sets of a run; empty if it has none."""
    found = run.metrics.prediction_sets
    return [] if found is None else [sets_table(found, "patient")]


def sets_table(found: PredictionSets, level: str) -> ResultTable:
    """Tabulate the coverage of prediction sets, of all cases and by class, in per cent."""
    rows = [("all", "–", "–", str(found.cases), percent(found.coverage.value), interval_words(found.coverage))]
    rows += [
        (
            name,
            str(one.calibrated),
            percent(one.expected),
            str(one.cases),
            percent(one.coverage.value),
            interval_words(one.coverage),
        )
        for name, one in found.by_class.items()
    ]
    heads = ("of", "calibration patients", "expected", f"test {level}s", "coverage", "95 % interval")
    return ResultTable(f"Prediction sets at {percent_text(found.level)}: coverage, per cent", heads, tuple(rows))


def sets_line(found: PredictionSets, level: str) -> str:
    """Return the figures of prediction sets in one sentence."""
    return (
        f"prediction sets at {percent_text(found.level)} contain the truth for {percent(found.coverage.value)} % of {found.cases} "
        f"{level}s (95 % interval {interval_words(found.coverage)}); mean size {found.size:.2f}, one class in "
        f"{percent(found.singletons)} %, none in {percent(found.empty)} %"
    )


def _unit(names: Sequence[str]) -> str:
    """Return the unit of some figures; those with a unit of their own have it in their name."""
    return "per cent unless a unit is given" if set(names) & set(IN_UNITS) else "per cent"


def adjustment_tables(run: Run) -> list[ResultTable]:
    """Tabulate how much the risk improves on covariates, and the hazard ratios of one model of both; empty without
    covariates.
    """
    one = run.metrics.adjustment
    if one is None:
        return []
    names = {"covariates": ", ".join(one.covariates), "risk": "risk", "both": "both"}
    rows = [
        (words, percent(one.c_index[name].value), interval_words(one.c_index[name])) for name, words in names.items()
    ]
    rows.append(("both minus covariates", f"{100 * one.gain.value:+.1f}", interval_words(one.gain)))
    ratios = tuple(
        (ratio.name, f"{ratio.value:.3g}", f"{ratio.low:.3g} to {ratio.high:.3g}", f"{ratio.p:.2g}")
        for ratio in one.hazard_ratios
    )
    return [
        ResultTable(
            "Cox's model of the covariates, and what the risk adds: C-index, per cent",
            ("of", "mean over folds", "95 % interval of that mean"),
            tuple(rows),
        ),
        ResultTable(
            "Hazard ratios in one model of all test cases", ("covariate", "ratio", "95 % interval", "p"), ratios
        ),
    ]
