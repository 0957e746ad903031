"""Section 6 and Figure 6: correlations of ABMIL's attention with CAR-MIL's factual (F) and counterfactual attention
(CF).

They are computed on the test slides of a cohort with several classes, and on Four Bags, for both distances, from
raw scores u before any softmax. r models, b test bags of each.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from carmil.errors import CarmilError
from carmil.evidence.branch_outputs import predict_branches
from carmil.evidence.counterfactual_change import correlations
from carmil.progress import console
from carmil.report.matrices import Matrix, draw_matrices
from carmil.report.paper import Finding, Picture
from carmil.reproduce.digits import Point, digit_cohorts, training_lines
from carmil.reproduce.method_runs import Method, MethodRun, models_of_run, train_methods
from carmil.reproduce.paper import figure, figure_text
from carmil.reproduce.recipes import Request, write_finding
from carmil.reproduce.slide_cohorts import several_classes
from carmil.reproduce.slide_table import ABMIL, CAR_COSINE, CAR_L1, caution_lines
from carmil.runs.run import Run
from carmil.tables import ResultTable

if TYPE_CHECKING:
    import pandas as pd

TASK = "four_bags"
DISTANCES = {"L1": "l1", "cosine": "cosine"}
MAPS = ("ABMIL", "F", "CF")
PAIRS = ("ABMIL–F", "ABMIL–CF", "F–CF")
KINDS = ("spearman", "pearson")
PAPERS = (
    "the paper, on BRACS with UNI features, has Spearman 0.69 ± 0.05 (L1) and 0.69 ± 0.03 (cosine) between F and ABMIL, and "
    "-0.67 ± 0.02 (L1) and 0.20 ± 0.63 (cosine) between F and CF; the paper does not state what ± is computed over"
)


def reproduce(request: Request) -> Finding:
    digits = digit_cohorts(request, [TASK])
    points = [Point(distance=distance).method for distance in DISTANCES.values()]
    digit_rows = train_methods(digits, [Method("abmil", "abmil"), *points], request)
    tables = _correlate(digit_rows, request)
    cohort, notes = several_classes(request)
    warnings: list[str] = []
    if cohort is not None:
        rows = train_methods([cohort], (ABMIL, CAR_L1, CAR_COSINE), request)
        tables = _correlate(rows, request) | tables
        warnings, notes = caution_lines(rows), [f"{cohort.title}: {line}" for line in cohort.notes]
    bar, matrices = "Spearman, mean over bags and models", [_matrix(*names, one) for names, one in tables.items()]
    picture = draw_matrices(matrices, request.out / "correlations.png", low=-1, high=1, bar=bar, signed=True)
    caption = (
        f"Correlations of attention scores: {', '.join(dict.fromkeys(data for data, _ in tables))}; both distances."
    )
    data = "other data" if cohort is None or cohort.stand_in else "the same slides"
    by_model = [
        {"data": title, "distance": DISTANCES[distance]}
        | {kind: {pair: of_models(one, kind, pair).tolist() for pair in PAIRS} for kind in KINDS}
        for (title, distance), one in tables.items()
    ]
    return write_finding(
        "correlations",
        request,
        {"found": by_model},
        tables=[_table(tables, kind) for kind in KINDS],
        pictures=(Picture(picture, caption),),
        lines=(f"{PAPERS}. Ours are of {data}: they stand in no column with them", *warnings),
        conditions=(
            "attention scores u, before the softmax; ABMIL and CAR-MIL of the same seed and fold are compared, on their test bags",
            "±: deviation over models (initialisations and folds) of the mean over test bags; `over bags`: that of single bags",
            *training_lines(digits, [row.run for row in digit_rows]),
            *notes,
        ),
    )


def of_models(found: "pd.DataFrame", kind: str, pair: str) -> "pd.Series":
    """Return (r) the mean over each model's bags."""
    return found[kind, pair].groupby(level=0).mean()


def cells(found: "pd.DataFrame", kind: str, pair: str) -> tuple[str, str]:
    """Format the mean with its deviation over models, and the deviation over all bags."""
    over_bags = float(found[kind, pair].std())
    return figure_text(figure(of_models(found, kind, pair), 1), ".2f"), "–" if isnan(over_bags) else f"{over_bags:.2f}"


def _correlate(rows: Sequence[MethodRun], request: Request) -> "dict[tuple[str, str], pd.DataFrame]":
    """Correlate the maps of ABMIL with those of CAR by each distance.

    The result has one table per data and distance, with one row per model and bag, and one column per kind and pair
    of maps.
    """
    import pandas as pd

    plain, *cars = rows
    tables = {}
    for distance, car in zip(DISTANCES, cars, strict=True):
        with console.status(f"comparing maps on {plain.cohort.title}, {distance}"):
            compared = enumerate(_compare(plain.run, car.run, request.device))
            frames = {i: pd.DataFrame(one) for i, one in compared}
        tables[plain.cohort.title, distance] = pd.concat(frames)
    return tables


def _compare(plain: Run, car: Run, device: str) -> Iterator[dict[tuple[str, str], NDArray[np.float64]]]:
    """Yield correlations (b) of the models of the same fold and seed, on the slides that both were tested on."""
    bags, models = models_of_run(plain, device)
    others = {(one.fold, one.seed): one for one in models_of_run(car, device)[1]}
    for one in models:
        other = others.get((one.fold, one.seed))
        if other is None or other.places.tolist() != one.places.tolist():
            raise CarmilError(
                f"{plain.folder} and {car.folder} were tested on different slides: remove one and run again"
            )
        first, second = (predict_branches(each.model, bags, one.places) for each in (one, other))
        maps = zip(MAPS, (first.scores, second.scores, second.counterfactual_scores), strict=True)
        pairs = correlations({name: u.unsqueeze(-1) for name, u in maps}, second.offsets).items()
        yield {(kind, "–".join(pair)): getattr(both, kind)[:, 0].numpy() for pair, both in pairs for kind in KINDS}


def _matrix(data: str, distance: str, found: "pd.DataFrame") -> Matrix:
    values, texts = np.eye(len(MAPS)), [["1"] * len(MAPS) for _ in MAPS]
    for pair in PAIRS:
        y, x = (MAPS.index(name) for name in pair.split("–"))
        values[y, x] = values[x, y] = of_models(found, "spearman", pair).mean()
        texts[y][x] = texts[x][y] = cells(found, "spearman", pair)[0]
    return Matrix(f"{data}\n{distance}", MAPS, MAPS, values, tuple(map(tuple, texts)))


def _table(found: "Mapping[tuple[str, str], pd.DataFrame]", kind: str) -> ResultTable:
    heads = ("data", "distance", *(word for pair in PAIRS for word in (pair, "over bags")))
    lines = tuple(
        (*names, *(cell for pair in PAIRS for cell in cells(one, kind, pair))) for names, one in found.items()
    )
    return ResultTable(f"{kind.capitalize()} between attention maps", heads, lines, names=2)
