"""`carmil compare`: differences between runs on the same cases, with intervals and p values corrected for the number of pairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from carmil.errors import CarmilError
from carmil.runs.decision import Decision
from carmil.runs.facts import FoldFigures
from carmil.runs.run import Run
from carmil.statistics.bootstrap import Test, holm, paired_t
from carmil.statistics.intervals import FoldAnswers, delong, difference_interval, difference_p, estimate
from carmil.studies.figures import SHOWN, fold_answers
from carmil.studies.predictions import class_numbers, merge_patients
from carmil.tables import ResultTable

if TYPE_CHECKING:
    import pandas as pd

OF_ANSWERS = ("auc", "f1_macro", "balanced_accuracy")
AT_THRESHOLDS = (
    "f1_macro",
    "balanced_accuracy",
)  # depend on the threshold of two classes; of more classes they are of the most probable class
TESTS = ("t", "patients", "delong")


@dataclass(frozen=True, eq=False)
class ComparedRun:
    """A run to compare: its answers to test cases, the figures of each fold and seed, and the measure to compare by.

    The measure is one of OF_ANSWERS, or a figure of every slide: AUPRC+ of a map.
    """

    name: str
    measure: str
    run: Run
    answers: "pd.DataFrame"
    by_fold: Sequence[FoldFigures]

    @classmethod
    def of(cls, run: Run, measure: str = "auc", *, name: str | None = None) -> "ComparedRun":
        return cls(name or run.name, measure, run, run.predictions(), run.metrics.by_fold)


@dataclass(frozen=True)
class Comparison:
    """The difference between two runs (first minus second) of means over folds, its interval over patients, and tests of no
    difference; NaN where a test does not apply.

    p_t: paired t-test over folds, as in the paper; with one fold over its seeds, where it tests the initialisation only.
    p_patients: over patients, as the interval. p_delong: DeLong's test over patients, of the mean of the folds' AUCs.
    holm_...: p values corrected for the number of comparisons.
    """

    first: str
    second: str
    difference: float
    low: float
    high: float
    p_t: float
    p_patients: float
    p_delong: float
    measure: str = "auc"
    pairs: str = "folds"
    holm_t: float = float("nan")
    holm_patients: float = float("nan")
    holm_delong: float = float("nan")


def compare_runs(runs: Sequence[Run], *, measure: str = "auc") -> list[Comparison]:
    """Compare every run with every other."""
    if len(runs) < 2:
        raise CarmilError("one run cannot be compared: expected two or more")
    if len({run.name for run in runs}) < len(runs):
        raise CarmilError("two runs have the same folder name: rename one, so that the table can tell them apart")
    return compare_pairs(list(combinations([ComparedRun.of(run, measure) for run in runs], 2)))


def compare_pairs(pairs: Sequence[tuple[ComparedRun, ComparedRun]]) -> list[Comparison]:
    """Compare the runs of each pair; p values are corrected for the number of pairs."""
    found = [_compare(a, b) for a, b in pairs]
    corrected = {name: holm([getattr(pair, f"p_{name}") for pair in found]) for name in TESTS}
    return [
        Comparison(**{**vars(pair), **{f"holm_{name}": float(values[i]) for name, values in corrected.items()}})
        for i, pair in enumerate(found)
    ]


def comparison_table(found: Sequence[Comparison]) -> ResultTable:
    def p(value: float, corrected: float) -> str:
        return "–" if np.isnan(value) else f"{value:.3g} ({corrected:.3g})"

    def signed(value: float) -> str:
        return "–" if np.isnan(value) else f"{round(100 * value, 1) + 0.0:+.1f}"  # + 0.0: never -0.0

    lines = tuple(
        (
            pair.first,
            pair.second,
            signed(pair.difference),
            "–" if np.isnan(pair.low) else f"{signed(pair.low)} to {signed(pair.high)}",
            p(pair.p_t, pair.holm_t),
            p(pair.p_patients, pair.holm_patients),
            p(pair.p_delong, pair.holm_delong),
        )
        for pair in found
    )
    over = " over seeds" if any(pair.pairs == "seeds" for pair in found) else ""
    measure = " or ".join(dict.fromkeys(SHOWN[pair.measure] for pair in found))
    heads = (
        "first",
        "second",
        f"difference of mean {measure}",
        "95 % interval of that",
        f"p paired t{over}",
        "p over patients",
        "p DeLong",
    )
    title = "Pairs of runs: first minus second of the means over folds above, per cent (p values by Holm's method in brackets)"
    return ResultTable(title, heads, lines, names=2)


def each_fold(by_fold: Sequence[FoldFigures], measure: str) -> dict[int, float]:
    """A figure by fold, the mean over its seeds; with one fold, by seed. NaN where it is undefined."""
    several = len({line.fold for line in by_fold}) > 1
    values: dict[int, list[float]] = {}
    for line in by_fold:
        values.setdefault(line.fold if several else line.seed, []).append(line.figures.get(measure, np.nan))
    return {fold: float(np.mean(found)) for fold, found in values.items()}


def _compare(a: ComparedRun, b: ComparedRun) -> Comparison:
    given = _answers(a), _answers(b)
    cases = [set(zip(one.cases.tolist(), one.labels.tolist(), strict=True)) for one in given]
    if a.run.classes != b.run.classes or cases[0] != cases[1]:
        raise CarmilError(
            f"{a.name} and {b.name} were not tested on the same cases ({len(cases[0])} and {len(cases[1])}, "
            f"{len(cases[0] & cases[1])} in common): compare runs of one cohort and label table"
        )
    first, second = (
        estimate(judged.measure if judged.measure in OF_ANSWERS else "mean", one)
        for judged, one in zip((a, b), given, strict=True)
    )
    spread, exact = difference_interval(first, second), float("nan")
    whose = dict(zip(given[0].cases.tolist(), given[0].patients.tolist(), strict=True))
    of_own = len(set(whose.values())) == len(whose)
    if (
        a.measure == "auc"
        and len(a.run.classes) == 2
        and of_own
        and np.bincount(given[0].labels, minlength=2).min() > 1
    ):
        exact = delong(first, second).p
    over = _over_folds(a, b)
    return Comparison(
        a.name,
        b.name,
        spread.value,
        spread.low,
        spread.high,
        float("nan") if over is None else over.p,
        difference_p(first, second),
        exact,
        measure=a.measure,
        pairs=_pairs(a, b),
    )


def _answers(judged: ComparedRun) -> FoldAnswers:
    """One row per patient (or slide), fold and seed, as in the run's figures; of a map, one row per slide that has its measure."""
    run, measure, frame = judged.run, judged.measure, judged.answers
    if measure not in OF_ANSWERS:
        if measure not in frame:
            raise CarmilError(f"{judged.name} has no {SHOWN.get(measure, measure)} of single slides to compare by")
        frame = frame.dropna(subset=[measure])
        rows = {f"{name}s": frame[name].to_numpy() for name in ("fold", "seed", "patient")}
        return FoldAnswers.of(
            class_numbers(frame, run.classes), frame[measure].to_numpy(), cases=frame["slide"].to_numpy(), **rows
        )
    thresholds = {(line.fold, line.seed): line.threshold for line in judged.by_fold}
    if measure in AT_THRESHOLDS and len(run.classes) == 2 and None in thresholds.values():
        raise CarmilError(f"{judged.name} does not say where its answers begin: train it again to compare by macro F1")
    if run.merges_slides:
        frame = merge_patients(frame, run.classes, run.metrics.rule)
    groups = zip(frame["fold"], frame["seed"], strict=True)
    return fold_answers(frame, run.classes, [Decision(run.classes, thresholds.get(group)) for group in groups])


def _pairs(a: ComparedRun, b: ComparedRun) -> str:
    """The units of the paired t-test."""
    return "folds" if len({line.fold for line in (*a.by_fold, *b.by_fold)}) > 1 else "seeds"


def _over_folds(a: ComparedRun, b: ComparedRun) -> Test | None:
    """The paired t-test over folds, or over the seeds of one fold; None unless both runs have the same folds."""
    if a.run.data.splits != b.run.data.splits:
        return None
    first, second = each_fold(a.by_fold, a.measure), each_fold(b.by_fold, b.measure)
    folds = [fold for fold in first if not np.isnan(first[fold]) and not np.isnan(second.get(fold, np.nan))]
    if len(folds) < 2:
        return None
    return paired_t([first[fold] for fold in folds], [second[fold] for fold in folds])
