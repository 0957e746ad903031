"""Tables and lines for the figures of runs and evaluations."""

from collections.abc import Sequence
from math import isnan

from carmil.runs.run import Run
from carmil.studies.cautions import cautions
from carmil.studies.evaluate import Evaluation
from carmil.studies.figures import MEAN_OVER_FOLDS, SHOWN, interval_words, line, percent
from carmil.tables import ResultTable
from carmil.words import plural


def figures_table(runs: Sequence[Run]) -> ResultTable:
    """One row per run: mean ± standard deviation over the folds, in per cent."""
    names = [name for name in SHOWN if any(name in run.metrics.summary for run in runs)]
    lines = tuple(
        (run.name, *(line(run.metrics.summary, name) if name in run.metrics.summary else "–" for name in names))
        for run in runs
    )
    return ResultTable(
        "Test folds: mean ± standard deviation over the folds, per cent",
        ("run", *(SHOWN[name] for name in names)),
        lines,
    )


def figures_lines(run: Run) -> list[str]:
    """What the figures are of, the interval of the AUC, and the cautions of the run."""
    data, settings = run.data, run.settings
    counts = ", ".join(
        f"{plural(n, 'slide')} of class {name}" for name, n in zip(run.classes, data.class_counts, strict=True)
    )
    folds = len({model.fold for model in run.models})
    chosen = "epoch and hyper-parameters"
    if len(run.classes) == 2:
        chosen = f"epoch, hyper-parameters and threshold ({settings.threshold})"
    found = [
        f"{settings.model}: {plural(folds, 'fold')} x {plural(settings.seeds, 'seed')}; "
        f"{plural(data.slides, 'slide')} of {plural(data.patients, 'patient')}: {counts}",
        f"figures are of {run.metrics.level}s; {chosen} were chosen on validation bags",
    ]
    auc = run.metrics.intervals.get("auc")
    if auc and not isnan(auc.value) and run.metrics.intervals_of == MEAN_OVER_FOLDS:
        found.append(f"AUC, mean over folds: {percent(auc.value)}, 95 % interval {interval_words(auc)} over patients")
    return [*found, *cautions(run)]


def evaluation_lines(found: Evaluation) -> list[str]:
    """What a reader should know of an evaluation: whose slides these are, and whether the figures may be chance."""
    lines = []
    if found.own:
        share = "all" if found.own == found.slides else f"{found.own} of {found.slides}"
        lines.append(
            f"{share} slides are the run's own test slides: no external validation. Figures here are of all {found.level}s "
            "pooled; those of `carmil train` are means over the folds, and differ"
        )
    return [*lines, *found.cautions]


def evaluation_table(found: Evaluation) -> ResultTable:
    """Figures of the joint answers with 95 % intervals, in per cent; for new slides also those of single models."""
    names = [name for name in SHOWN if name in found.figures]
    each = [(line(found.each, name) if name in found.each else "–",) if found.each else () for name in names]
    lines = [
        (SHOWN[name], percent(found.figures[name]), interval_words(found.intervals.get(name)), *alone)
        for name, alone in zip(names, each, strict=True)
    ]
    whose = "another cohort" if not found.own else "its own cohort" if found.own == found.slides else "two cohorts"
    title = f"{found.run.name} on {plural(found.cases, found.level)} of {whose}, per cent"
    together = "models tested on each slide" if found.own else "all models together"
    alone = ("each by itself: mean ± sd over models",) if found.each else ()
    return ResultTable(title, ("figure", together, "95 % interval of that", *alone), tuple(lines))
