"""`carmil compare`: is one run better than another, or luckier? Pairs of runs on the same cases, corrected for their number."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from carmil.errors import CarmilError
from carmil.evidence.performance import bag_auc, balanced_accuracy, f1_macro
from carmil.evidence.statistics import Test, bootstrap_difference, delong, delong_applies, holm, paired_t
from carmil.report.tables import ResultTable
from carmil.studies.answers import by_patient, columns, numbers, probabilities
from carmil.studies.figures import SHOWN, mean_over_seeds
from carmil.studies.run_folder import StudyRun

if TYPE_CHECKING:
    import pandas as pd

OF_ANSWERS: dict[str, Callable[..., float]] = {
    "auc": bag_auc,
    "f1_macro": f1_macro,
    "balanced_accuracy": balanced_accuracy,
}
ROUNDING = 1e-12  # whoever lies at the threshold is answered yes
AT_THRESHOLDS = ("f1_macro", "balanced_accuracy")  # of two classes; of more they are of the likeliest class
TESTS = ("t", "bootstrap", "delong")


@dataclass(frozen=True, eq=False)
class Judged:
    """What is compared: answers to test cases, the figures of each fold and seed, and the one of these to judge by.

    A measure is one of OF_ANSWERS, or one that every slide has: AUPRC+ of a map.
    """

    name: str
    measure: str
    run: StudyRun
    answers: "pd.DataFrame"
    by_fold: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, run: StudyRun, measure: str = "auc", *, name: str | None = None) -> "Judged":
        return cls(name or run.name, measure, run, run.predictions(), run.metrics["by_fold"])


@dataclass(frozen=True)
class Comparison:
    """Two runs: the difference of their figures (first minus second) and how sure it is; NaN where a test does not apply.

    t: paired t-test over folds, as the paper; of one fold over its seeds, where it tells what initialisation does and nothing
    of other cases. bootstrap and DeLong: over the cases of all test folds together, whose difference need not be the mean
    over folds, difference_t. p values are also given corrected for the number of comparisons (Holm).
    """

    first: str
    second: str
    difference: float
    low: float
    high: float
    p_t: float
    p_bootstrap: float
    p_delong: float
    measure: str = "auc"
    pairs: str = "folds"
    difference_t: float = float("nan")
    holm_t: float = float("nan")
    holm_bootstrap: float = float("nan")
    holm_delong: float = float("nan")


def compare_runs(runs: Sequence[StudyRun], *, measure: str = "auc", repeats: int = 2000) -> list[Comparison]:
    """Every run with every other."""
    if len(runs) < 2:
        raise CarmilError("one run cannot be compared: expected two or more")
    if len({run.name for run in runs}) < len(runs):
        raise CarmilError("two runs have the same folder name: rename one, so that the table can tell them apart")
    return compare_pairs(list(combinations([Judged.of(run, measure) for run in runs], 2)), repeats=repeats)


def compare_pairs(pairs: Sequence[tuple[Judged, Judged]], *, repeats: int = 2000) -> list[Comparison]:
    """Each pair; p values are corrected for as many as there are."""
    found = [_compared(a, b, repeats) for a, b in pairs]
    corrected = {name: holm([getattr(pair, f"p_{name}") for pair in found]) for name in TESTS}
    return [
        Comparison(**{**vars(pair), **{f"holm_{name}": float(values[i]) for name, values in corrected.items()}})
        for i, pair in enumerate(found)
    ]


def comparison_table(found: Sequence[Comparison]) -> ResultTable:
    def p(value: float, corrected: float) -> str:
        return "–" if np.isnan(value) else f"{value:.3g} ({corrected:.3g})"

    def signed(value: float) -> str:
        return "–" if np.isnan(value) else f"{100 * value:+.1f}"

    lines = tuple(
        (
            pair.first,
            pair.second,
            signed(pair.difference),
            "–" if np.isnan(pair.low) else f"{signed(pair.low)} to {signed(pair.high)}",
            p(pair.p_t, pair.holm_t),
            p(pair.p_bootstrap, pair.holm_bootstrap),
            p(pair.p_delong, pair.holm_delong),
        )
        for pair in found
    )
    over = " over seeds" if any(pair.pairs == "seeds" for pair in found) else ""
    measure = " or ".join(dict.fromkeys(SHOWN[pair.measure] for pair in found))
    heads = (
        "first",
        "second",
        f"{measure} difference",
        "95 % interval",
        f"p paired t{over}",
        "p bootstrap",
        "p DeLong",
    )
    return ResultTable("Pairs of runs (p values corrected by Holm's method in brackets)", heads, lines, names=2)


def each_fold(by_fold: Sequence[Mapping[str, Any]], measure: str) -> dict[int, float]:
    """A figure by fold, the mean over its seeds; of one fold by seed. NaN where there is none."""
    key = "fold" if len({line["fold"] for line in by_fold}) > 1 else "seed"
    values: dict[int, list[float]] = {}
    for line in by_fold:
        value = line.get(measure)
        values.setdefault(line[key], []).append(np.nan if value is None else value)
    return {fold: float(np.mean(found)) for fold, found in values.items()}


def _compared(a: Judged, b: Judged, repeats: int) -> Comparison:
    first, second = _cases(a), _cases(b)
    if a.run.classes != b.run.classes or set(first.index) != set(second.index):
        raise CarmilError(
            f"{a.name} and {b.name} were not tested on the same cases ({len(first)} and {len(second)}, "
            f"{len(set(first.index) & set(second.index))} in common): compare runs of one cohort and label table"
        )
    second = second.loc[first.index]
    y, groups = numbers(first, a.run.classes), first["patient"].to_numpy()
    pa, pb = _values(a, first), _values(b, second)
    measure = OF_ANSWERS.get(a.measure, _mean)
    spread = bootstrap_difference(measure, y, pa, pb, groups=groups, repeats=repeats)
    exact = float("nan")
    if measure is bag_auc and len(a.run.classes) == 2 and len(set(groups)) == len(groups) and delong_applies(y):
        exact = delong(y, pa[:, 1], pb[:, 1]).p
    over = _over_folds(a, b)
    p, mean = (float("nan"),) * 2 if over is None else (over.p, over.difference)
    return Comparison(
        a.name,
        b.name,
        spread.value,
        spread.low,
        spread.high,
        p,
        spread.p,
        exact,
        measure=a.measure,
        pairs=_pairs(a, b),
        difference_t=mean,
    )


def _cases(judged: Judged) -> "pd.DataFrame":
    """One line a patient (or slide), by the mean of all answers it got as a test case; where a map is judged, one a slide
    that it can be judged on."""
    run, measure = judged.run, judged.measure
    if measure not in OF_ANSWERS:
        if measure not in judged.answers:
            raise CarmilError(f"{judged.name} has no {SHOWN.get(measure, measure)} of single slides to compare by")
        frame, key, values = judged.answers.dropna(subset=[measure]), "slide", [measure]
    else:
        answers = _from_thresholds(judged) if measure in AT_THRESHOLDS and len(run.classes) == 2 else judged.answers
        frame, key, values = mean_over_seeds(answers, run.classes), "slide", columns(run.classes)
        if run.metrics["level"] == "patient" and run.metrics["rule"] != "one-bag":
            frame, key = by_patient(frame, run.classes, run.metrics["rule"]), "patient"
    keys = list(dict.fromkeys([key, "patient", "label"]))
    return frame.groupby(keys, sort=True)[values].mean().reset_index().set_index(key, drop=False)


def _from_thresholds(judged: Judged) -> "pd.DataFrame":
    """The answers with every probability moved so that the threshold of the run's decision lies at one half.

    A slide's is the median of the thresholds of the models that were tested on it (see carmil.studies.decisions): on the mean of
    the moved probabilities the most probable class is then the answer that a user gets.
    """
    thresholds = {(line["fold"], line["seed"]): line.get("threshold") for line in judged.by_fold}
    if None in thresholds.values():
        raise CarmilError(f"{judged.name} does not say where its answers begin: train it again to compare by F1")
    moved = judged.answers.copy()
    cuts = np.array([thresholds[key] for key in zip(moved["fold"], moved["seed"], strict=True)], dtype=np.float64)
    no, yes = columns(judged.run.classes)
    medians = moved.assign(cut=cuts).groupby("slide")["cut"].transform("median")
    moved[yes] = moved[yes] - medians.to_numpy(dtype=np.float64) + (0.5 + ROUNDING)
    moved[no] = 1 - moved[yes]
    return moved


def _values(judged: Judged, cases: "pd.DataFrame") -> NDArray[np.float64]:
    if judged.measure in OF_ANSWERS:
        return probabilities(cases, judged.run.classes)
    return cases[judged.measure].to_numpy(dtype=np.float64)


def _mean(values: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    return float(values.mean())


def _pairs(a: Judged, b: Judged) -> str:
    """What a paired t-test is over."""
    return "folds" if len({line["fold"] for line in (*a.by_fold, *b.by_fold)}) > 1 else "seeds"


def _over_folds(a: Judged, b: Judged) -> Test | None:
    """The paired t-test over the folds' figures, or over the seeds of one fold; only where both runs had the same folds."""
    if a.run.facts["splits"] != b.run.facts["splits"]:
        return None
    first, second = each_fold(a.by_fold, a.measure), each_fold(b.by_fold, b.measure)
    folds = [fold for fold in first if not np.isnan(first[fold]) and not np.isnan(second.get(fold, np.nan))]
    if len(folds) < 2:
        return None
    return paired_t([first[fold] for fold in folds], [second[fold] for fold in folds])
