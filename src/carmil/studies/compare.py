"""`carmil compare`: is one run better than another, or luckier? Pairs of runs on the same cases, corrected for their number."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from carmil.errors import CarmilError
from carmil.evidence.performance import bag_auc
from carmil.evidence.statistics import bootstrap_difference, delong, holm, paired_t
from carmil.report.tables import ResultTable
from carmil.studies.answers import by_patient, columns, numbers, probabilities
from carmil.studies.figures import mean_over_seeds
from carmil.studies.run_folder import StudyRun

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Comparison:
    """Two runs: the difference of their AUCs (first minus second) and how sure it is; NaN where a test does not apply.

    t: paired t-test over folds, as the paper. bootstrap and DeLong: over the cases of all test folds together. p values are
    also given corrected for the number of comparisons (Holm).
    """

    first: str
    second: str
    difference: float
    low: float
    high: float
    p_t: float
    p_bootstrap: float
    p_delong: float
    holm_t: float = float("nan")
    holm_bootstrap: float = float("nan")
    holm_delong: float = float("nan")


def compare_runs(runs: Sequence[StudyRun], *, repeats: int = 2000) -> list[Comparison]:
    if len(runs) < 2:
        raise CarmilError("one run cannot be compared: expected two or more")
    if len({run.name for run in runs}) < len(runs):
        raise CarmilError("two runs have the same folder name: rename one, so that the table can tell them apart")
    found = [_compared(a, b, repeats) for a, b in combinations(runs, 2)]
    corrected = {name: holm([getattr(pair, f"p_{name}") for pair in found]) for name in ("t", "bootstrap", "delong")}
    return [
        Comparison(**{**vars(pair), **{f"holm_{name}": float(values[i]) for name, values in corrected.items()}})
        for i, pair in enumerate(found)
    ]


def comparison_table(found: Sequence[Comparison]) -> ResultTable:
    def p(value: float, corrected: float) -> str:
        return "–" if np.isnan(value) else f"{value:.3g} ({corrected:.3g})"

    lines = tuple(
        (
            pair.first,
            pair.second,
            f"{100 * pair.difference:+.1f}",
            f"{100 * pair.low:+.1f} to {100 * pair.high:+.1f}",
            p(pair.p_t, pair.holm_t),
            p(pair.p_bootstrap, pair.holm_bootstrap),
            p(pair.p_delong, pair.holm_delong),
        )
        for pair in found
    )
    heads = ("first", "second", "AUC difference", "95 % interval", "p paired t", "p bootstrap", "p DeLong")
    return ResultTable("Pairs of runs (p values corrected by Holm's method in brackets)", heads, lines, names=2)


def _compared(a: StudyRun, b: StudyRun, repeats: int) -> Comparison:
    first, second = _cases(a), _cases(b)
    if a.classes != b.classes or set(first.index) != set(second.index):
        raise CarmilError(
            f"{a.name} and {b.name} were not tested on the same cases ({len(first)} and {len(second)}, "
            f"{len(set(first.index) & set(second.index))} in common): compare runs of one cohort and label table"
        )
    second = second.loc[first.index]
    y, pa, pb = numbers(first, a.classes), probabilities(first, a.classes), probabilities(second, a.classes)
    groups = first["patient"].to_numpy()
    spread = bootstrap_difference(bag_auc, y, pa, pb, groups=groups, repeats=repeats)
    independent = len(set(groups)) == len(groups)
    exact = delong(y, pa[:, 1], pb[:, 1]).p if len(a.classes) == 2 and independent else float("nan")
    return Comparison(a.name, b.name, spread.value, spread.low, spread.high, _over_folds(a, b), spread.p, exact)


def _cases(run: StudyRun) -> "pd.DataFrame":
    """One line a patient (or slide), by the mean of all answers it got as a test case."""
    frame = mean_over_seeds(run.predictions(), run.classes)
    if run.metrics["level"] == "patient" and run.metrics["rule"] != "one-bag":
        frame = by_patient(frame, run.classes, run.metrics["rule"])
        key = "patient"
    else:
        key = "slide"
    values = columns(run.classes)
    keys = list(dict.fromkeys([key, "patient", "label"]))
    return frame.groupby(keys, sort=True)[values].mean().reset_index().set_index(key, drop=False)


def _over_folds(a: StudyRun, b: StudyRun) -> float:
    """p of the paired t-test over the folds' AUCs; only where both runs had the same folds."""
    if a.facts["splits"] != b.facts["splits"]:
        return float("nan")
    pairs = [_fold_means(run) for run in (a, b)]
    folds = [fold for fold in pairs[0] if not np.isnan(pairs[0][fold]) and not np.isnan(pairs[1].get(fold, np.nan))]
    if len(folds) < 2:
        return float("nan")
    return paired_t([pairs[0][fold] for fold in folds], [pairs[1][fold] for fold in folds]).p


def _fold_means(run: StudyRun) -> dict[int, float]:
    values: dict[int, list[float]] = {}
    for line in run.metrics["by_fold"]:
        values.setdefault(line["fold"], []).append(np.nan if line["auc"] is None else line["auc"])
    return {fold: float(np.mean(found)) for fold, found in values.items()}
