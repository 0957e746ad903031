"""How often the 95 % intervals of a study's figures hold the true value: simulated scores, the intervals of the package itself.

    python benchmarks/coverage.py                       # the tables of docs/study.md, some minutes on one CPU core
    python benchmarks/coverage.py --simulations 200     # a look
    python benchmarks/coverage.py --candidates          # the intervals these were chosen from

Scores are binormal: negatives N(0, 1), positives N(d, 1), where d gives the AUC asked for; the answer is yes above d / 2. Folds
are five, or as many as the smaller class has cases, each with its share of both classes, as `carmil train` cuts them. Of macro
F1 over folds the true value is its mean over 20,000 other simulations.
"""

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from carmil.statistics.intervals import Estimate, FoldAnswers, difference_interval, estimate, wilson

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
CANDIDATES = (
    *CELLS[:3],
    *(
        f"{what}: {name}"
        for what in ("AUC", "AUC, some missed")
        for name in ("DeLong", "Hanley-McNeil", "Newcombe", "own")
    ),
    "balanced accuracy: MOVER",
    "own",
)
SLIDES = ("patients, three slides each", "true AUC", "correlation", "AUC", "balanced accuracy", "accuracy")


@dataclass(frozen=True)
class Cell:
    """n cases, of which `positives` are, with scores of that AUC."""

    n: int
    positives: int
    area: float

    @property
    def apart(self) -> float:
        return 2**0.5 * NORMAL.inv_cdf(self.area)

    @property
    def rate(self) -> float:
        """Sensitivity and specificity of the answers."""
        return NORMAL.cdf(self.apart / 2)

    @property
    def labels(self) -> NDArray[np.int64]:
        return (np.arange(self.n) < self.positives).astype(np.int64)

    @property
    def folds(self) -> NDArray[np.int64]:
        """Each class dealt out in turn, the negatives from the last fold on."""
        folds = min(5, self.positives)
        place = np.arange(self.n)
        return np.where(place < self.positives, place, self.n - 1 - place) % folds

    def answers(self, rng: np.random.Generator, folds: NDArray[np.int64] | None = None) -> FoldAnswers:
        scores = rng.normal(self.labels * self.apart, 1)
        return answered(self.labels, scores, self.apart / 2, folds)


def answered(
    labels: NDArray, scores: NDArray, cut: float, folds: NDArray | None = None, patients: NDArray | None = None
) -> FoldAnswers:
    given = np.column_stack([-scores, scores])
    return FoldAnswers.of(labels, given, (scores >= cut).astype(int), folds=folds, patients=patients)


def covered(simulations: int, truth: float, drawn: Callable[[], object]) -> str:
    """Per cent of the intervals that hold the truth, and their mean width."""
    found = [drawn() for _ in range(simulations)]
    held = np.mean([one.low <= truth <= one.high for one in found])  # type: ignore[attr-defined]
    width = np.mean([one.high - one.low for one in found])  # type: ignore[attr-defined]
    return f"{100 * held:.1f} ({100 * width:.0f})"


def of_cell(cell: Cell, simulations: int, rng: np.random.Generator) -> list[str]:
    def one(measure: str, folds: NDArray[np.int64] | None = None) -> Callable[[], object]:
        return lambda: estimate(measure, cell.answers(rng, folds)).interval()

    def pair() -> object:
        """Two models whose scores agree by 0.5: the same AUC."""
        shared = rng.normal(size=cell.n)
        two = [
            answered(
                cell.labels, cell.labels * cell.apart + 0.5**0.5 * (shared + rng.normal(size=cell.n)), 0, cell.folds
            )
            for _ in range(2)
        ]
        return difference_interval(*(estimate("auc", answers) for answers in two))

    return [
        covered(simulations, cell.area, one("auc")),
        covered(simulations, cell.area, one("auc", cell.folds)),
        covered(simulations, cell.rate, one("balanced_accuracy")),
        covered(simulations, cell.rate, one("balanced_accuracy", cell.folds)),
        covered(simulations, true_f1(cell, rng), one("f1_macro", cell.folds)),
        covered(simulations, cell.rate, one("sensitivity")),
        covered(simulations, 0.0, pair),
    ]


def true_f1(cell: Cell, rng: np.random.Generator, simulations: int = 20_000) -> float:
    """The mean of what `carmil train` would print."""
    values = np.zeros(simulations)
    folds = np.unique(cell.folds)
    for fold in folds:
        of = cell.folds == fold
        m, n = int(cell.labels[of].sum()), int((1 - cell.labels[of]).sum())
        tp, tn = rng.binomial(m, cell.rate, simulations), rng.binomial(n, cell.rate, simulations)
        wrong = (m - tp) + (n - tn)
        f1 = [np.divide(2 * t, 2 * t + wrong, out=np.zeros(simulations), where=2 * t + wrong > 0) for t in (tp, tn)]
        values += np.mean(f1, axis=0) / len(folds)
    return float(values.mean())


def three_classes(n: int, apart: float, simulations: int, rng: np.random.Generator) -> list[str]:
    """Scores N(apart, 1) for the class itself, N(0, 1) for the two others; classes 3 : 2 : 1, three folds."""
    labels = np.repeat([0, 1, 2], [n // 2, n // 3, n - n // 2 - n // 3])
    folds = np.concatenate([np.arange((labels == c).sum()) for c in range(3)]) % 3

    def drawn(count: NDArray) -> NDArray:
        return np.exp(rng.normal(size=(len(count), 3)) + apart * np.eye(3)[count])

    def alike(given: NDArray) -> NDArray:
        return given / given.sum(1, keepdims=True)

    many = np.repeat([0, 1, 2], [3000, 2000, 1000])
    large = [FoldAnswers.of(many, alike(drawn(many))) for _ in range(20)]
    return [
        covered(
            simulations,
            float(np.mean([estimate(measure, one).value for one in large])),
            lambda m=measure: estimate(m, FoldAnswers.of(labels, alike(drawn(labels)), folds=folds)).interval(),
        )
        for measure in ("auc", "balanced_accuracy", "accuracy")
    ]


def of_slides(patients: int, area: float, agreement: float, simulations: int, rng: np.random.Generator) -> list[str]:
    """Three slides of each patient, of either class by chance; the scores of a patient share a part of their variance."""
    apart = 2**0.5 * NORMAL.inv_cdf(area)
    whose = np.repeat(np.arange(patients), 3)

    def drawn(measure: str) -> object:
        labels = rng.integers(2, size=3 * patients)
        own = rng.normal(size=patients)[whose] * (1 - 2 * labels) * -1
        scores = labels * apart + agreement**0.5 * own + (1 - agreement) ** 0.5 * rng.normal(size=3 * patients)
        return estimate(measure, answered(labels, scores, apart / 2, patients=whose)).interval()

    rate = NORMAL.cdf(apart / 2)
    return [
        covered(simulations, area, lambda: drawn("auc")),
        covered(simulations, rate, lambda: drawn("balanced_accuracy")),
        covered(simulations, rate, lambda: drawn("accuracy")),
    ]


def candidates(cell: Cell, simulations: int, rng: np.random.Generator) -> list[str]:
    """Other intervals that were tried, one test set, and the package's own: AUC of binormal scores, AUC where some positives
    score like negatives and the others far above, balanced accuracy."""
    found = []
    for missed in (0.0, 2 * (1 - cell.area)):
        held: dict[str, list[bool]] = {}
        for _ in range(simulations):
            scores = rng.normal(cell.labels * cell.apart, 1)
            if missed:
                seen = (rng.random(cell.n) >= missed) & (cell.labels == 1)
                scores = np.where(seen, 50.0, 0.0) + rng.normal(size=cell.n)
            answers = answered(cell.labels, scores, cell.apart / 2)
            one = estimate("auc", answers)
            own, value = one.interval(), one.value
            sd = sum(part**2 for part in one.influence.values()) ** 0.5  # DeLong's
            limits = {"DeLong": (value - 1.96 * sd, value + 1.96 * sd), "own": (own.low, own.high)}
            m, n = cell.positives, cell.n - cell.positives
            for name, sizes in (("Hanley-McNeil", (m, n)), ("Newcombe", (cell.n / 2, cell.n / 2))):
                kept = Estimate(value, partial(hanley_mcneil, m=m, n=n, sizes=sizes), {}).interval()
                limits[name] = (kept.low, kept.high)
            for name, (low, high) in limits.items():
                held.setdefault(name, []).append(low <= cell.area <= high)
        found += [f"{100 * np.mean(held[name]):.1f}" for name in ("DeLong", "Hanley-McNeil", "Newcombe", "own")]
    inside = []
    for _ in range(simulations):
        answers = cell.answers(rng)
        sizes = (cell.positives, cell.n - cell.positives)
        rates = [estimate(name, answers).value for name in ("sensitivity", "specificity")]
        limits = [wilson(rate, count) for rate, count in zip(rates, sizes, strict=True)]
        value = sum(rates) / 2
        low, high = (
            value + sign * sum((rate - ends[side]) ** 2 for rate, ends in zip(rates, limits, strict=True)) ** 0.5 / 2
            for side, sign in enumerate((-1, 1))
        )
        own = estimate("balanced_accuracy", answers).interval()
        inside.append((low <= cell.rate <= high, own.low <= cell.rate <= own.high))
    return [*found, *(f"{share:.1f}" for share in 100 * np.mean(inside, axis=0))]


def hanley_mcneil(t: float, *, m: int, n: int, sizes: tuple[float, float]) -> float:
    """Their variance of an AUC t; sizes: of positives and negatives; Newcombe takes their mean for both."""
    first, second = sizes
    return t * (1 - t) * (1 + (first - 1) * (1 - t) / (2 - t) + (second - 1) * t / (1 + t)) / (m * n)


def row(asked: tuple[Callable[..., list[str]], tuple, int, int]) -> list[str]:
    of, given, simulations, seed = asked
    return of(*given, simulations, np.random.default_rng(seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=2000, help="per cell")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--candidates", action="store_true", help="other intervals that were tried, beside the package's own"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    begun = time.perf_counter()
    print(
        f"Per cent of 95 % intervals that hold the true value, in brackets their mean width; {asked.simulations} simulations."
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
    with ProcessPoolExecutor(asked.workers, mp_context=get_context("spawn")) as pool:
        tables = [(CELLS, of_cell, cells), (THREE, three_classes, three), (SLIDES, of_slides, slides)]
        for heads, of, rows in [(CANDIDATES, candidates, cells)] if asked.candidates else tables:
            print("\n| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
            jobs = [(of, given, asked.simulations, asked.seed + i) for i, (_, given) in enumerate(rows)]
            for (names, _), found in zip(rows, pool.map(row, jobs), strict=True):
                print("| " + " | ".join([*names, *found]) + " |", flush=True)
    print(f"\n{time.perf_counter() - begun:.0f} s, {asked.workers} workers")


if __name__ == "__main__":
    main()
