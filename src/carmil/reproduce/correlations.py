"""Section 6 and Figure 6: how alike are ABMIL's attention, CAR-MIL's factual (F) and its counterfactual attention (CF)?

On the test slides of a cohort with several classes, and on Four Bags; both distances. Raw scores u, before any softmax.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from carmil.datasets.study_cohort import StudyCohort
from carmil.errors import CarmilError
from carmil.evidence.counterfactual_change import correlations
from carmil.progress import console
from carmil.report.matrices import Matrix, draw_matrices
from carmil.reproduce.digits import Point, digit_cohorts, training_lines
from carmil.reproduce.method_runs import Method, train_methods
from carmil.reproduce.recipes import Finding, Picture, Request, write_finding
from carmil.reproduce.slide_cohorts import several_classes
from carmil.reproduce.slide_table import ABMIL, CAR_COSINE, CAR_L1, uninformed_lines
from carmil.reproduce.two_branches import Looked, look, models_of_run
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
class Alike:
    """values: kind -> pair -> for each model (test bags), NaN where a map is constant."""

    data: str
    distance: str
    values: Mapping[str, Mapping[tuple[str, str], Sequence[Floats]]]

    def by_model(self, kind: str, pair: tuple[str, str]) -> Floats:
        """(r) the mean over each model's bags."""
        return np.array([np.nanmean(one) if not np.isnan(one).all() else np.nan for one in self.values[kind][pair]])

    def figure(self, kind: str, pair: tuple[str, str]) -> str:
        found = self.by_model(kind, pair)
        found = found[~np.isnan(found)]
        if not len(found):
            return "–"
        return f"{found.mean():.2f}" + (f" ± {found.std(ddof=1):.2f}" if len(found) > 1 else "")

    def over_bags(self, kind: str, pair: tuple[str, str]) -> str:
        every = np.concatenate(self.values[kind][pair])
        return f"{np.nanstd(every, ddof=1):.2f}" if (~np.isnan(every)).sum() > 1 else "–"


def reproduce(request: Request) -> Finding:
    digits = digit_cohorts(request, [TASK])
    cars = [Point(distance=distance).method for distance in DISTANCES]
    plain, *trained = train_methods(digits, [Method("abmil", "abmil"), *cars], request)
    found = [
        _compared(digits[0], distance, (plain.run, car.run), request)
        for distance, car in zip(DISTANCES, trained, strict=True)
    ]
    cohort, said = several_classes(request)
    little: list[str] = []
    if cohort is not None:
        plain_run, *car_runs = rows = train_methods([cohort], (ABMIL, CAR_L1, CAR_COSINE), request)
        of_slides = [
            _compared(cohort, distance, (plain_run.run, car.run), request)
            for distance, car in zip(DISTANCES, car_runs, strict=True)
        ]
        found = [*of_slides, *found]
        little = uninformed_lines(rows)
        said = [f"{cohort.title}: {line}" for line in cohort.notes]
    picture = draw_matrices(
        [_matrix(one, "spearman") for one in found],
        request.out / "correlations.png",
        low=-1,
        high=1,
        bar="Spearman, mean over bags and models",
        signed=True,
    )
    lines = [
        *(_said(one) for one in found),
        f"{PAPERS}. "
        + ("Ours are of other data" if cohort is None or cohort.stand_in else "Ours are of the same slides")
        + ": they stand in no column with them",
        *little,
    ]
    conditions = [
        "attention scores u, before the softmax; ABMIL and CAR-MIL of the same seed and fold are compared, on their test bags",
        "± is over models (initialisations and folds) of the mean over their test bags; `over bags`: the deviation of single bags",
        *training_lines(digits, [one.run for one in (plain, *trained)]),
        *said,
    ]
    caption = (
        f"How alike the attention scores are: {', '.join(dict.fromkeys(one.data for one in found))}; both distances."
    )
    finding = Finding(
        tuple(_table(found, kind) for kind in KINDS), (Picture(picture, caption),), tuple(lines), tuple(conditions)
    )
    return write_finding("correlations", request, finding, {"found": [_facts(one) for one in found]})


def _compared(cohort: StudyCohort, distance: str, runs: tuple[Run, Run], request: Request) -> Alike:
    """ABMIL and CAR of the same fold and seed, on the slides that both were tested on."""
    bags, plain = models_of_run(runs[0], request.device)
    others = {(one.fold, one.seed): one for one in models_of_run(runs[1], request.device)[1]}

    def pairs() -> Iterator[tuple[Looked, Looked]]:
        for one in plain:
            car = others.get((one.fold, one.seed))
            if car is None or car.places.tolist() != one.places.tolist():
                raise CarmilError(
                    f"{runs[0].folder} and {runs[1].folder} were tested on different slides: remove one and run again"
                )
            yield look(one.model, bags, one.places), look(car.model, bags, one.places)

    with console.status(f"comparing maps on {cohort.title}, {DISTANCES[distance]}"):
        return _alike(cohort.title, distance, pairs())


def _alike(data: str, distance: str, pairs: Iterator[tuple[Looked, Looked]]) -> Alike:
    values: dict[str, dict[tuple[str, str], list[Floats]]] = {kind: {pair: [] for pair in PAIRS} for kind in KINDS}
    for plain, car in pairs:
        maps = dict(zip(MAPS, (plain.scores, car.scores, car.branch[0]), strict=True))
        found = correlations({name: u.unsqueeze(-1) for name, u in maps.items()}, car.offsets)
        for pair in PAIRS:
            for kind in KINDS:
                values[kind][pair].append(getattr(found[pair], kind)[:, 0].numpy())
    return Alike(data, distance, values)


def _matrix(one: Alike, kind: str) -> Matrix:
    values, cells = np.eye(len(MAPS)), [["1"] * len(MAPS) for _ in MAPS]
    for pair in PAIRS:
        y, x = (MAPS.index(name) for name in pair)
        every = one.by_model(kind, pair)
        values[y, x] = values[x, y] = np.nan if np.isnan(every).all() else np.nanmean(every)
        cells[y][x] = cells[x][y] = one.figure(kind, pair)
    title = f"{one.data}\n{DISTANCES[one.distance]}"
    return Matrix(title, MAPS, MAPS, values, tuple(map(tuple, cells)))


def _table(found: Sequence[Alike], kind: str) -> ResultTable:
    heads = ("data", "distance", *(word for pair in PAIRS for word in ("–".join(pair), "over bags")))
    lines = tuple(
        (
            one.data,
            DISTANCES[one.distance],
            *(cell for pair in PAIRS for cell in (one.figure(kind, pair), one.over_bags(kind, pair))),
        )
        for one in found
    )
    return ResultTable(f"{kind.capitalize()} between attention maps", heads, lines, names=2)


def _said(one: Alike) -> str:
    """In words, from the figures."""

    def word(pair: tuple[str, str]) -> str:
        every = one.by_model("spearman", pair)
        mean = float("nan") if np.isnan(every).all() else float(np.nanmean(every))
        sizes = ((0.8, "nearly the same order"), (0.4, "alike"), (0.2, "a little alike"), (-0.2, "unrelated"))
        of = next((words for least, words in sizes if mean >= least), "opposed")
        return f"{'no order to compare' if mean != mean else of} ({one.figure('spearman', pair)})"

    return (
        f"{one.data}, {DISTANCES[one.distance]}: F and ABMIL are {word(('ABMIL', 'F'))}, F and CF {word(('F', 'CF'))}, "
        f"CF and ABMIL {word(('ABMIL', 'CF'))} (Spearman)"
    )


def _facts(one: Alike) -> dict[str, object]:
    return {
        "data": one.data,
        "distance": one.distance,
        **{kind: {"–".join(pair): one.by_model(kind, pair).tolist() for pair in PAIRS} for kind in KINDS},
    }
