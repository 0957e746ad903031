"""`carmil compare`: differences between runs on the same cases, with intervals and p values corrected for the number of pairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd

from carmil.errors import CarmilError
from carmil.runs.facts import FoldFigures
from carmil.runs.run import Run
from carmil.statistics.bootstrap import holm, paired_t
from carmil.statistics.intervals import (
    FoldAnswers,
    delong,
    difference_interval,
    difference_p,
    estimate,
    resampled_interval,
)
from carmil.studies.figures import SHOWN, fold_answers
from carmil.studies.predictions import arrange, merge_patients
from carmil.tables import ResultTable

OF_ANSWERS = ("auc", "f1_macro", "balanced_accuracy")
# With two classes these depend on the threshold; with more they are computed from the most probable class.
AT_THRESHOLDS = ("f1_macro", "balanced_accuracy")
TESTS = ("t", "patients", "delong")


@dataclass(frozen=True, eq=False)
class ComparedRun:
    """A run to compare: its answers to test cases, the figures of each fold and seed, and the measure to compare by.

    The measure is one of OF_ANSWERS, for targets other than classes one of `Target.measures`, or a figure per slide
    such as AUPRC+ of a map.
    """

    name: str
    measure: str
    run: Run
    answers: pd.DataFrame
    by_fold: Sequence[FoldFigures]

    @classmethod
    def of(cls, run: Run, measure: str | None = None, *, name: str | None = None) -> "ComparedRun":
        """Return a run to compare, by default by the key figure of its target."""
        return cls(name or run.name, measure or run.target.key_figure, run, run.predictions(), run.metrics.by_fold)


@dataclass(frozen=True)
class Comparison:
    """The difference between two runs (first minus second), with its interval and tests of the hypothesis of no
    difference.

    The difference is between means over folds, the interval over patients. A p value is NaN if its test does not
    apply.

    p_t: paired t-test over folds, as in the paper; with one fold over its seeds, where it tests the initialisation only.
    p_patients: over patients, like the interval. p_delong: DeLong's test over patients, of the mean of the folds' AUCs.
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


def compare_runs(runs: Sequence[Run]) -> list[Comparison]:
    """Compare every run with every other, by the key figure of their target."""
    if len(runs) < 2:
        raise CarmilError("one run cannot be compared: expected two or more")
    if (without := next((run for run in runs if not run.data.splits), None)) is not None:
        raise CarmilError(f"{without.folder} was imported without slides: import it again with --bags and --labels")
    if len({run.name for run in runs}) < len(runs):
        raise CarmilError("two runs have the same folder name, which identifies them in the table: rename one of them")
    return compare_pairs(list(combinations([ComparedRun.of(run) for run in runs], 2)))


def compare_pairs(pairs: Sequence[tuple[ComparedRun, ComparedRun]]) -> list[Comparison]:
    """Compare the runs of each pair; p values are corrected for the number of pairs."""
    comparisons = [_compare(a, b) for a, b in pairs]
    corrected = {name: holm([getattr(pair, f"p_{name}") for pair in comparisons]) for name in TESTS}
    return [
        Comparison(**{**vars(pair), **{f"holm_{name}": float(values[i]) for name, values in corrected.items()}})
        for i, pair in enumerate(comparisons)
    ]


def comparison_table(found: Sequence[Comparison]) -> ResultTable:
    def p(value: float, corrected: float) -> str:
        return "–" if np.isnan(value) else f"{value:.3g} ({corrected:.3g})"

    def signed(value: float) -> str:
        return "–" if np.isnan(value) else f"{round(100 * value, 1) + 0.0:+.1f}"  # + 0.0 avoids -0.0

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
    """Return a figure by fold, the mean over its seeds; with one fold, by seed. NaN if undefined."""
    several = len({line.fold for line in by_fold}) > 1
    values: dict[int, list[float]] = {}
    for line in by_fold:
        values.setdefault(line.fold if several else line.seed, []).append(line.figures.get(measure, np.nan))
    return {fold: float(np.mean(figures)) for fold, figures in values.items()}


def _compare(a: ComparedRun, b: ComparedRun) -> Comparison:
    given = _answers(a), _answers(b)
    cases = [set(zip(one.cases.tolist(), map(str, one.labels.tolist()), strict=True)) for one in given]
    if a.run.target.kind != b.run.target.kind or a.run.outputs != b.run.outputs or cases[0] != cases[1]:
        raise CarmilError(
            f"{a.name} and {b.name} were not tested on the same cases ({len(cases[0])} and {len(cases[1])}, "
            f"{len(cases[0] & cases[1])} in common): compare runs of one cohort and label table"
        )
    if (measure := a.run.target.measures.get(a.measure)) is not None:
        spread = resampled_interval(measure, *given)
        p_patients, exact = spread.p, float("nan")
    else:
        first, second = (
            estimate(judged.measure if judged.measure in OF_ANSWERS else "mean", one)
            for judged, one in zip((a, b), given, strict=True)
        )
        spread, p_patients = difference_interval(first, second), difference_p(first, second)
        exact = delong(first, second).p if a.measure == "auc" and _has_delong(a.run, given[0]) else float("nan")
    return Comparison(
        a.name,
        b.name,
        spread.value,
        spread.low,
        spread.high,
        _paired_t_p(a, b),
        p_patients,
        exact,
        measure=a.measure,
        pairs="folds" if len({line.fold for line in (*a.by_fold, *b.by_fold)}) > 1 else "seeds",
    )


def _has_delong(run: Run, given: FoldAnswers) -> bool:
    """Return whether DeLong's test applies: two classes with more than one case each, and every case is a patient of its own."""
    whose = dict(zip(given.cases.tolist(), given.patients.tolist(), strict=True))
    own = len(set(whose.values())) == len(whose)
    return len(run.outputs) == 2 and own and int(np.bincount(given.labels, minlength=2).min()) > 1


def _answers(judged: ComparedRun) -> FoldAnswers:
    """Return one row per patient (or slide), fold and seed, as in the run's figures; for a map, one row per slide with a value."""
    run, measure, frame = judged.run, judged.measure, judged.answers
    if measure not in OF_ANSWERS and measure not in run.target.measures:
        if measure not in frame:
            raise CarmilError(
                f"{judged.name} has no {SHOWN.get(measure, measure)} per slide, so that it "
                "cannot be compared by this measure"
            )
        frame = frame.dropna(subset=[measure])
        return arrange(frame, run.target, frame[measure].to_numpy())
    thresholds = {(line.fold, line.seed): line.threshold for line in judged.by_fold}
    if measure in AT_THRESHOLDS and len(run.outputs) == 2 and None in thresholds.values():
        raise CarmilError(
            f"{judged.name} does not record its decision thresholds: train it again to compare by macro F1"
        )
    if run.merges_slides:
        frame = merge_patients(frame, run.target, run.metrics.rule)
    groups = zip(frame["fold"], frame["seed"], strict=True)
    return fold_answers(frame, run.target, [run.target.decision(thresholds.get(group)) for group in groups])


def _paired_t_p(a: ComparedRun, b: ComparedRun) -> float:
    """Return p of the paired t-test over folds, or over the seeds of one fold; NaN unless both runs have the same folds."""
    if a.run.data.splits != b.run.data.splits:
        return float("nan")
    first, second = each_fold(a.by_fold, a.measure), each_fold(b.by_fold, b.measure)
    folds = [fold for fold in first if not np.isnan(first[fold]) and not np.isnan(second.get(fold, np.nan))]
    if len(folds) < 2:
        return float("nan")
    return paired_t([first[fold] for fold in folds], [second[fold] for fold in folds]).p
