"""Measure how often the 95 % intervals of a study's figures hold the true value, on simulated scores.

    python benchmarks/coverage.py                       # the tables of docs/study.md, some minutes on one CPU core
    python benchmarks/coverage.py --simulations 200     # a quick look
    python benchmarks/coverage.py --candidates          # the intervals they were chosen from

Scores are binormal: negatives N(0, 1), positives N(d, 1), where d gives the true AUC; cases above d / 2 are predicted positive.
There are five folds, or as many as the smaller class has cases, each with its share of both classes, as in `carmil train`. The
true value of macro F1 over folds is its mean over 20,000 other simulations.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from statistics import NormalDist
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from speed.script import run_script

from carmil.statistics.intervals import Estimate, FoldAnswers, Interval, difference_interval, estimate, wilson

SIZES = (16, 30, 100)
RATIOS = {"1:1": 2, "1:5": 6}
AREAS = (0.8, 0.95, 0.99)
NORMAL = NormalDist()
CELLS = (
    "n",
    "classes",
    "true AUC",
    "AUC, one test set",
    "AUC, mean over folds",
    "balanced accuracy, one test set",
    "balanced accuracy, mean over folds",
    "macro F1, mean over folds",
    "sensitivity",
    "difference of two AUCs",
)
THREE = ("n, classes 3:2:1", "distance", "AUC, mean over folds", "balanced accuracy", "accuracy")
INTERVALS = ("DeLong", "Hanley-McNeil", "Newcombe", "own")
CANDIDATES = (
    *CELLS[:3],
    *(f"{what}: {name}" for what in ("AUC", "AUC, some missed") for name in INTERVALS),
    "balanced accuracy: MOVER",
    "own",
)
SLIDES = ("patients, three slides each", "true AUC", "correlation", "AUC", "balanced accuracy", "accuracy")


@dataclass(frozen=True)
class Cell:
    """n cases, `positives` of them positive, with scores of this AUC."""

    n: int
    positives: int
    area: float

    @property
    def apart(self) -> float:
        return 2**0.5 * NORMAL.inv_cdf(self.area)

    @property
    def rate(self) -> float:
        """True sensitivity and specificity."""
        return NORMAL.cdf(self.apart / 2)

    @property
    def labels(self) -> NDArray[np.int64]:
        return (np.arange(self.n) < self.positives).astype(np.int64)

    @property
    def folds(self) -> NDArray[np.int64]:
        """Each class is dealt in turn, the negatives from the last fold on."""
        folds = min(5, self.positives)
        place = np.arange(self.n)
        return np.where(place < self.positives, place, self.n - 1 - place) % folds

    def answers(self, rng: np.random.Generator, folds: NDArray[np.int64] | None = None) -> FoldAnswers:
        scores = rng.normal(self.labels * self.apart, 1)
        return answers_of(self.labels, scores, self.apart / 2, folds)


def answers_of(
    labels: NDArray, scores: NDArray, cut: float, folds: NDArray | None = None, patients: NDArray | None = None
) -> FoldAnswers:
    two = np.column_stack([-scores, scores])
    return FoldAnswers.of(labels, two, (scores >= cut).astype(int), folds=folds, patients=patients)


def coverage(simulations: int, truth: float, simulate: Callable[[], Interval]) -> str:
    """Per cent of the intervals that hold the truth, and their mean width."""
    intervals = [simulate() for _ in range(simulations)]
    share = np.mean([interval.low <= truth <= interval.high for interval in intervals])
    width = np.mean([interval.high - interval.low for interval in intervals])
    return f"{100 * share:.1f} ({100 * width:.0f})"


def two_classes(cell: Cell, simulations: int, rng: np.random.Generator) -> list[str]:
    def simulate(measure: str, folds: NDArray[np.int64] | None = None) -> Callable[[], Interval]:
        return lambda: estimate(measure, cell.answers(rng, folds)).interval()

    def difference() -> Interval:
        """Two models of the same AUC whose scores correlate by 0.5."""
        shared = rng.normal(size=cell.n)
        models = [
            answers_of(
                cell.labels, cell.labels * cell.apart + 0.5**0.5 * (shared + rng.normal(size=cell.n)), 0, cell.folds
            )
            for _ in range(2)
        ]
        return difference_interval(*(estimate("auc", answers) for answers in models))

    return [
        coverage(simulations, cell.area, simulate("auc")),
        coverage(simulations, cell.area, simulate("auc", cell.folds)),
        coverage(simulations, cell.rate, simulate("balanced_accuracy")),
        coverage(simulations, cell.rate, simulate("balanced_accuracy", cell.folds)),
        coverage(simulations, true_f1(cell, rng), simulate("f1_macro", cell.folds)),
        coverage(simulations, cell.rate, simulate("sensitivity")),
        coverage(simulations, 0.0, difference),
    ]


def true_f1(cell: Cell, rng: np.random.Generator, simulations: int = 20_000) -> float:
    """The mean of the macro F1 that `carmil train` would print."""
    values = np.zeros(simulations)
    folds = np.unique(cell.folds)
    for fold in folds:
        labels = cell.labels[cell.folds == fold]
        m, n = int(labels.sum()), int((1 - labels).sum())
        tp, tn = rng.binomial(m, cell.rate, simulations), rng.binomial(n, cell.rate, simulations)
        wrong = (m - tp) + (n - tn)
        f1 = [np.divide(2 * t, 2 * t + wrong, out=np.zeros(simulations), where=2 * t + wrong > 0) for t in (tp, tn)]
        values += np.mean(f1, axis=0) / len(folds)
    return float(values.mean())


def three_classes(n: int, apart: float, simulations: int, rng: np.random.Generator) -> list[str]:
    """Scores N(apart, 1) for the class itself, N(0, 1) for the two others; classes 3 : 2 : 1, three folds."""
    labels = np.repeat([0, 1, 2], [n // 2, n // 3, n - n // 2 - n // 3])
    folds = np.concatenate([np.arange((labels == c).sum()) for c in range(3)]) % 3

    def probabilities(labels: NDArray) -> NDArray:
        scores = np.exp(rng.normal(size=(len(labels), 3)) + apart * np.eye(3)[labels])
        return scores / scores.sum(1, keepdims=True)

    many = np.repeat([0, 1, 2], [3000, 2000, 1000])
    large = [FoldAnswers.of(many, probabilities(many)) for _ in range(20)]
    return [
        coverage(
            simulations,
            float(np.mean([estimate(measure, answers).value for answers in large])),
            lambda m=measure: estimate(m, FoldAnswers.of(labels, probabilities(labels), folds=folds)).interval(),
        )
        for measure in ("auc", "balanced_accuracy", "accuracy")
    ]


def slides_of_patients(
    patients: int, area: float, agreement: float, simulations: int, rng: np.random.Generator
) -> list[str]:
    """Three slides per patient, each of a random class; the scores of a patient share a part of their variance."""
    apart = 2**0.5 * NORMAL.inv_cdf(area)
    patient_of = np.repeat(np.arange(patients), 3)

    def simulate(measure: str) -> Interval:
        labels = rng.integers(2, size=3 * patients)
        own = rng.normal(size=patients)[patient_of] * (1 - 2 * labels) * -1
        scores = labels * apart + agreement**0.5 * own + (1 - agreement) ** 0.5 * rng.normal(size=3 * patients)
        return estimate(measure, answers_of(labels, scores, apart / 2, patients=patient_of)).interval()

    rate = NORMAL.cdf(apart / 2)
    return [
        coverage(simulations, area, lambda: simulate("auc")),
        coverage(simulations, rate, lambda: simulate("balanced_accuracy")),
        coverage(simulations, rate, lambda: simulate("accuracy")),
    ]


def candidates(cell: Cell, simulations: int, rng: np.random.Generator) -> list[str]:
    """Coverage of other intervals on one test set, and of the package's own.

    AUC of binormal scores; AUC where some positives score like negatives and the others far above; balanced accuracy.
    """
    shares = []
    for missed in (0.0, 2 * (1 - cell.area)):
        hits = [_auc_hits(cell, missed, rng) for _ in range(simulations)]
        shares += list(100 * np.mean(hits, axis=0))
    hits = [_balanced_accuracy_hits(cell, rng) for _ in range(simulations)]
    return [f"{share:.1f}" for share in (*shares, *(100 * np.mean(hits, axis=0)))]


def _auc_hits(cell: Cell, missed: float, rng: np.random.Generator) -> list[bool]:
    """Whether each interval of INTERVALS holds the true AUC in one simulation. missed: share of positives like negatives."""
    scores = rng.normal(cell.labels * cell.apart, 1)
    if missed:
        detected = (rng.random(cell.n) >= missed) & (cell.labels == 1)
        scores = np.where(detected, 50.0, 0.0) + rng.normal(size=cell.n)
    auc = estimate("auc", answers_of(cell.labels, scores, cell.apart / 2))
    deviation = sum(part**2 for part in auc.influence.values()) ** 0.5  # DeLong's
    m, n = cell.positives, cell.n - cell.positives
    variances = (
        partial(hanley_mcneil, m=m, n=n, sizes=(m, n)),
        partial(hanley_mcneil, m=m, n=n, sizes=(cell.n / 2, cell.n / 2)),
    )
    intervals = [*(Estimate(auc.value, variance, {}).interval() for variance in variances), auc.interval()]
    delong = auc.value - 1.96 * deviation <= cell.area <= auc.value + 1.96 * deviation
    return [delong, *(interval.low <= cell.area <= interval.high for interval in intervals)]


def _balanced_accuracy_hits(cell: Cell, rng: np.random.Generator) -> tuple[bool, bool]:
    """Whether MOVER's interval and the package's own hold the true balanced accuracy in one simulation."""
    answers = cell.answers(rng)
    sizes = (cell.positives, cell.n - cell.positives)
    rates = [estimate(name, answers).value for name in ("sensitivity", "specificity")]
    limits = [wilson(rate, count) for rate, count in zip(rates, sizes, strict=True)]
    low, high = (
        sum(rates) / 2
        + sign * sum((rate - ends[side]) ** 2 for rate, ends in zip(rates, limits, strict=True)) ** 0.5 / 2
        for side, sign in enumerate((-1, 1))
    )
    own = estimate("balanced_accuracy", answers).interval()
    return low <= cell.rate <= high, own.low <= cell.rate <= own.high


def hanley_mcneil(t: float, *, m: int, n: int, sizes: tuple[float, float]) -> float:
    """Variance of an AUC t. sizes: positives and negatives; Newcombe uses their mean for both."""
    first, second = sizes
    return t * (1 - t) * (1 + (first - 1) * (1 - t) / (2 - t) + (second - 1) * t / (1 + t)) / (m * n)


def simulate_row(job: tuple[Callable[..., list[str]], tuple, int, int]) -> list[str]:
    function, arguments, simulations, seed = job
    return function(*arguments, simulations, np.random.default_rng(seed))


def main(
    simulations: Annotated[int, typer.Option(help="Per cell.")] = 2000,
    seed: int = 0,
    candidates_: Annotated[
        bool, typer.Option("--candidates", help="Other intervals that were tried, and the package's own.")
    ] = False,
    workers: int = os.cpu_count() or 1,
) -> None:
    begin = time.perf_counter()
    print(
        f"Per cent of 95 % intervals that hold the true value, in brackets their mean width; {simulations} simulations."
    )
    cells = [
        ((str(n), ratio, str(area)), (Cell(n, round(n / part), area),))
        for n in SIZES
        for ratio, part in RATIOS.items()
        for area in AREAS
    ]
    three = [((str(n), str(apart)), (n, apart)) for n in (18, 30, 90) for apart in (1, 2, 4)]
    slides = [
        ((str(u), str(area), str(r)), (u, area, r)) for u in (16, 50) for area in (0.8, 0.95) for r in (0.0, 0.5, 0.9)
    ]
    tables = [(CELLS, two_classes, cells), (THREE, three_classes, three), (SLIDES, slides_of_patients, slides)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for heads, function, rows in [(CANDIDATES, candidates, cells)] if candidates_ else tables:
            print("\n| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
            jobs = [(function, arguments, simulations, seed + i) for i, (_, arguments) in enumerate(rows)]
            for (names, _), figures in zip(rows, pool.map(simulate_row, jobs), strict=True):
                print("| " + " | ".join([*names, *figures]) + " |", flush=True)
    print(f"\n{time.perf_counter() - begin:.0f} s, {workers} workers")


if __name__ == "__main__":
    run_script(main)
