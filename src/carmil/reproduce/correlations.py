"""Section 6 and Figure 6: how alike are ABMIL's attention, CAR-MIL's factual (F) and its counterfactual attention (CF)?

On the test slides of a cohort with several classes, and on Four Bags; both distances. Raw scores u, before any softmax.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from carmil.errors import CarmilError
from carmil.evidence.counterfactual_change import correlations
from carmil.progress import console
from carmil.report.matrices import Matrix, draw_matrices
from carmil.reproduce.branch_outputs import BranchOutputs, models_of_run, predict_branches
from carmil.reproduce.digits import Point, digit_cohorts, training_lines
from carmil.reproduce.method_runs import Method, MethodRun, train_methods
from carmil.reproduce.recipes import Finding, Picture, Request, write_finding
from carmil.reproduce.slide_cohorts import several_classes
from carmil.reproduce.slide_table import ABMIL, CAR_COSINE, CAR_L1, uninformed_lines
from carmil.runs.run import Run
from carmil.tables import ResultTable

Floats = NDArray[np.float64]

TASK = "four_bags"
DISTANCES = {"l1": "L1", "cosine": "cosine"}
MAPS = ("ABMIL", "F", "CF")
PAIRS = (("ABMIL", "F"), ("ABMIL", "CF"), ("F", "CF"))
KINDS = ("spearman", "pearson")
PAPERS = (
    "the paper, on BRACS with UNI features, has Spearman 0.69 ± 0.05 (L1) and 0.69 ± 0.03 (cosine) between F and ABMIL, and "
    "-0.67 ± 0.02 (L1) and 0.20 ± 0.63 (cosine) between F and CF; what its ± is over it does not say"
)


@dataclass(frozen=True, eq=False)
class MapCorrelations:
    """Correlations of attention maps: kind -> pair -> one array (test bags) per model, NaN where a map is constant."""

    data: str
    distance: str
    values: Mapping[str, Mapping[tuple[str, str], Sequence[Floats]]]

    def by_model(self, kind: str, pair: tuple[str, str]) -> Floats:
        """(r) the mean over each model's bags."""
        bags = self.values[kind][pair]
        return np.array([np.nan if np.isnan(of_model).all() else np.nanmean(of_model) for of_model in bags])

    def mean(self, kind: str, pair: tuple[str, str]) -> float:
        means = self.by_model(kind, pair)
        return float("nan") if np.isnan(means).all() else float(np.nanmean(means))

    def figure(self, kind: str, pair: tuple[str, str]) -> str:
        means = self.by_model(kind, pair)
        means = means[~np.isnan(means)]
        if not len(means):
            return "–"
        return f"{means.mean():.2f}" + (f" ± {means.std(ddof=1):.2f}" if len(means) > 1 else "")

    def over_bags(self, kind: str, pair: tuple[str, str]) -> str:
        bags = np.concatenate(self.values[kind][pair])
        return f"{np.nanstd(bags, ddof=1):.2f}" if (~np.isnan(bags)).sum() > 1 else "–"


def reproduce(request: Request) -> Finding:
    digits = digit_cohorts(request, [TASK])
    points = [Point(distance=distance).method for distance in DISTANCES]
    digit_rows = train_methods(digits, [Method("abmil", "abmil"), *points], request)
    results = _correlate(digit_rows, request)
    cohort, notes = several_classes(request)
    warnings: list[str] = []
    if cohort is not None:
        rows = train_methods([cohort], (ABMIL, CAR_L1, CAR_COSINE), request)
        results = [*_correlate(rows, request), *results]
        warnings = uninformed_lines(rows)
        notes = [f"{cohort.title}: {line}" for line in cohort.notes]
    picture = draw_matrices(
        [_matrix(result, "spearman") for result in results],
        request.out / "correlations.png",
        low=-1,
        high=1,
        bar="Spearman, mean over bags and models",
        signed=True,
    )
    data = "other data" if cohort is None or cohort.stand_in else "the same slides"
    caption = (
        f"Correlations of attention scores: {', '.join(dict.fromkeys(one.data for one in results))}; both distances."
    )
    finding = Finding(
        tuple(_table(results, kind) for kind in KINDS),
        (Picture(picture, caption),),
        (*map(_summary, results), f"{PAPERS}. Ours are of {data}: they stand in no column with them", *warnings),
        (
            "attention scores u, before the softmax; ABMIL and CAR-MIL of the same seed and fold are compared, on their test bags",
            "±: deviation over models (initialisations and folds) of the mean over test bags; `over bags`: that of single bags",
            *training_lines(digits, [row.run for row in digit_rows]),
            *notes,
        ),
    )
    return write_finding("correlations", request, finding, {"found": [_as_json(result) for result in results]})


def _correlate(rows: Sequence[MethodRun], request: Request) -> list[MapCorrelations]:
    """ABMIL with CAR by each distance: models of the same fold and seed, on the slides that both were tested on."""
    plain, *cars = rows
    results = []
    for distance, car in zip(DISTANCES, cars, strict=True):
        values: dict[str, dict[tuple[str, str], list[Floats]]] = {kind: {pair: [] for pair in PAIRS} for kind in KINDS}
        with console.status(f"comparing maps on {plain.cohort.title}, {DISTANCES[distance]}"):
            for first, second in _views(plain.run, car.run, request.device):
                maps = dict(zip(MAPS, (first.scores, second.scores, second.branch[0]), strict=True))
                found = correlations({name: u.unsqueeze(-1) for name, u in maps.items()}, second.offsets)
                for kind, pair in product(KINDS, PAIRS):
                    values[kind][pair].append(getattr(found[pair], kind)[:, 0].numpy())
        results.append(MapCorrelations(plain.cohort.title, distance, values))
    return results


def _views(plain: Run, car: Run, device: str) -> Iterator[tuple[BranchOutputs, BranchOutputs]]:
    bags, models = models_of_run(plain, device)
    others = {(one.fold, one.seed): one for one in models_of_run(car, device)[1]}
    for one in models:
        other = others.get((one.fold, one.seed))
        if other is None or other.places.tolist() != one.places.tolist():
            raise CarmilError(
                f"{plain.folder} and {car.folder} were tested on different slides: remove one and run again"
            )
        yield predict_branches(one.model, bags, one.places), predict_branches(other.model, bags, one.places)


def _matrix(result: MapCorrelations, kind: str) -> Matrix:
    values, cells = np.eye(len(MAPS)), [["1"] * len(MAPS) for _ in MAPS]
    for pair in PAIRS:
        y, x = (MAPS.index(name) for name in pair)
        values[y, x] = values[x, y] = result.mean(kind, pair)
        cells[y][x] = cells[x][y] = result.figure(kind, pair)
    return Matrix(f"{result.data}\n{DISTANCES[result.distance]}", MAPS, MAPS, values, tuple(map(tuple, cells)))


def _table(results: Sequence[MapCorrelations], kind: str) -> ResultTable:
    heads = ("data", "distance", *(word for pair in PAIRS for word in ("–".join(pair), "over bags")))
    lines = tuple(
        (
            result.data,
            DISTANCES[result.distance],
            *(cell for pair in PAIRS for cell in (result.figure(kind, pair), result.over_bags(kind, pair))),
        )
        for result in results
    )
    return ResultTable(f"{kind.capitalize()} between attention maps", heads, lines, names=2)


def _summary(result: MapCorrelations) -> str:
    """The Spearman correlations in words."""

    def word(pair: tuple[str, str]) -> str:
        mean = result.mean("spearman", pair)
        sizes = ((0.8, "nearly the same order"), (0.4, "alike"), (0.2, "a little alike"), (-0.2, "unrelated"))
        text = next((words for least, words in sizes if mean >= least), "opposed")
        return f"{'no order to compare' if np.isnan(mean) else text} ({result.figure('spearman', pair)})"

    return (
        f"{result.data}, {DISTANCES[result.distance]}: F and ABMIL are {word(('ABMIL', 'F'))}, F and CF {word(('F', 'CF'))}, "
        f"CF and ABMIL {word(('ABMIL', 'CF'))} (Spearman)"
    )


def _as_json(result: MapCorrelations) -> dict[str, object]:
    return {
        "data": result.data,
        "distance": result.distance,
        **{kind: {"–".join(pair): result.by_model(kind, pair).tolist() for pair in PAIRS} for kind in KINDS},
    }
