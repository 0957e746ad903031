"""Targets other than classes, beside baselines measured in the same folds.

Planted hazards: bags of crc's nuclei whose hazard rises with one type of nucleus and falls with another, so that the sign
of every nucleus is known. Ki67: recurrence, grade, node and HER2, and age of breast-cancer patients, from the Ki67 of
their cells. c cases, p predictions per case.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from carmil.datasets.ki67 import build_ki67
from carmil.datasets.planted_hazards import build_planted_hazards
from carmil.datasets.study_cohort import PRODUCT, ModelProtocol, StudyCohort
from carmil.errors import CarmilError
from carmil.report.paper import Finding
from carmil.reproduce.method_runs import Method, MethodRun, measured_on, train_methods
from carmil.reproduce.recipes import Request, write_finding
from carmil.runs.facts import Adjustment
from carmil.statistics.bootstrap import Interval
from carmil.statistics.hazards import fit_cox
from carmil.statistics.intervals import FoldAnswers, resampled_interval
from carmil.studies.adjustment import PENALIZER, Design
from carmil.studies.agreement import run_agreement
from carmil.studies.figures import SHOWN, figure_text, mean_interval
from carmil.studies.predictions import outcomes, predicted
from carmil.studies.subjects import open_run_store
from carmil.table_files import read_table
from carmil.tables import ResultTable
from carmil.targets import Labels, Ordinal, Survival, Target, Value

if TYPE_CHECKING:
    import pandas as pd

MODELS = ("abmil.gated", "car/abmil.gated")
MAPS = ("path", "attention")
ORACLE = "log_hazard"  # the column of planted hazards with the true log hazard
FAST_SEEDS = 1
CELLS = {"hidden": 64, "attention": 32}  # options of a model: a cell of ki67 has some 40 features, a tile 1,000
CLINICAL = ("age", "node", "t_stage", "grade")

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Prediction:
    """A target of ki67 and the baselines of it: the columns that each is fitted on.

    settings: those of `carmil train`. models: by default all.
    """

    title: str
    settings: Mapping[str, str]
    baselines: Mapping[str, tuple[str, ...]]


KI67 = (
    Prediction(
        "recurrence",
        {"target": "months", "event": "recurrence", "adjust": ",".join(CLINICAL)},
        {
            "Cox: mean log Ki67": ("mean_log_ki67",),
            "Cox: share of cells above 1000": ("share_above_1000",),
            "Cox: age": ("age",),
            "Cox: node, T stage and grade": ("node", "t_stage", "grade"),
        },
    ),
    Prediction("grade", {"target": "grade", "kind": "ordinal"}, {"linear: mean log Ki67": ("mean_log_ki67",)}),
    Prediction("node, HER2", {"target": "node,her2"}, {"logistic: mean log Ki67": ("mean_log_ki67",)}),
    Prediction("age", {"target": "age"}, {"linear: mean log Ki67": ("mean_log_ki67",)}),
)


def run_targets(crc: Path | None, ki67: Path | None, request: Request, *, seeds: int = 5) -> Finding:
    """Train whatever is missing, and write targets.md and targets.json."""
    if crc is None and ki67 is None:
        raise CarmilError("no data: give --crc, --ki67 or both")
    seeds = FAST_SEEDS if request.fast else seeds
    tables, runs, notes = [], list[MethodRun](), dict[str, None]()
    for measured, of_runs in (planted(crc, request, seeds), cells(ki67, request, seeds)):
        tables += measured
        runs += of_runs
    for one in runs:
        notes |= dict.fromkeys(one.cohort.notes)
    return write_finding(
        "targets",
        request,
        {},
        tables=tables,
        conditions=(
            f"{runs[0].run.settings.folds} folds by patient, {seeds} initialisations each, trained with the defaults of "
            "`carmil train`; all figures are the mean over folds of the mean over initialisations",
            "brackets: 95 % interval, percentiles over resampled patients; differences are paired, the first model of the table "
            "minus the row, on the same resamples: a difference is claimed only where its interval leaves out 0",
            f"baselines are fitted on all patients that the fold does not test; Cox's models with a penalizer of {PENALIZER:g}",
            *notes,
            measured_on([one.run for one in runs]),
        ),
        heading="Targets other than classes",
    )


def planted(crc: Path | None, request: Request, seeds: int) -> tuple[list[ResultTable], list[MethodRun]]:
    """Measure planted hazards: C-index beside the true hazard's, signed evidence per nucleus, and a run on shuffled times."""
    if crc is None:
        return [], []
    home = request.shared / "cohorts" / "planted-hazards"
    settings = {"target": "time", "event": "event"}
    cohorts = [
        _protocol(
            build_planted_hazards(crc, home, fast=request.fast, shuffled=shuffled, seed=request.seed),
            seeds,
            ModelProtocol(CELLS if request.fast else {}),
        )
        for shuffled in (False, True)
    ]
    runs = train_methods(cohorts[:1], [Method(model, model, settings) for model in MODELS], request)
    null = train_methods(cohorts[1:], [Method(MODELS[0], MODELS[0], settings)], request)
    truth = read_table(cohorts[0].labels).set_index("slide")[ORACLE]
    rows = [_figure_row(one, _answers(one)) for one in runs]
    frame, target = runs[0].predictions, runs[0].run.target
    oracle = _answers(runs[0], np.array(truth.loc[frame["slide"]], dtype=np.float64)[:, None])
    rows.append(("true log hazard", *_figures(target, oracle), _difference(target, _answers(runs[0]), oracle)))
    rows += [(f"{one.method.title}, times shuffled", *_figures(target, _answers(one)), "–") for one in null]
    heads = ("planted hazards", SHOWN[target.key_figure], "95 % interval", f"{runs[0].method.title} minus this")
    maps = [(one.method.title, name, *_agreement(one, name, request)) for one in runs for name in MAPS]
    return [
        ResultTable("Planted hazards: C-index, per cent", heads, tuple(rows)),
        ResultTable(
            "Planted hazards: agreement with the sign of every nucleus, per cent",
            ("model", "map", "AUPRC+", "AUPRC±, mirror rule"),
            tuple(maps),
            names=2,
        ),
    ], [*runs, *null]


def cells(ki67: Path | None, request: Request, seeds: int) -> tuple[list[ResultTable], list[MethodRun]]:
    """Measure every target of ki67 beside its baselines."""
    if ki67 is None:
        return [], []
    cohort = _protocol(build_ki67(ki67, request.shared / "cohorts" / "ki67"), seeds, ModelProtocol(CELLS))
    table = read_table(cohort.labels).set_index("slide")
    tables, runs = [], list[MethodRun]()
    for prediction in KI67:
        batch = cohort.protocol.batch if "event" in prediction.settings else PRODUCT.batch
        batched = replace(cohort, protocol=replace(cohort.protocol, batch=batch))
        methods = [Method(model, model, prediction.settings) for model in MODELS]
        trained = train_methods([batched], methods, request)
        target, first = trained[0].run.target, _answers(trained[0])
        rows = [_figure_row(one, _answers(one)) for one in trained]
        for title, columns in prediction.baselines.items():
            given = _answers(trained[0], fold_predictions(trained[0], table, columns))
            rows.append((title, *_figures(target, given), _difference(target, first, given)))
        heads = (prediction.title, SHOWN[target.key_figure], "95 % interval", f"{trained[0].method.title} minus this")
        tables.append(
            ResultTable(f"Ki67, {prediction.title}: {SHOWN[target.key_figure]}, per cent", heads, tuple(rows))
        )
        adjusted = [(one.method.title, one.run.metrics.adjustment) for one in trained]
        if lines := [_adjusted_row(title, one) for title, one in adjusted if one is not None]:
            columns = (
                "risk of",
                *(f"{', '.join(CLINICAL)}" if name == "covariates" else name for name in ADJUSTED),
                "gain",
            )
            tables.append(
                ResultTable("Ki67, recurrence: what the risk adds, C-index in per cent", columns, tuple(lines))
            )
        runs += trained
    return tables, runs


ADJUSTED = ("covariates", "risk", "both")


def _adjusted_row(title: str, one: Adjustment) -> tuple[str, ...]:
    values = [one.c_index[name] for name in ADJUSTED] + [one.gain]
    return title, *(_span(each.value, each.low, each.high) for each in values)


def _protocol(cohort: StudyCohort, seeds: int, of_models: ModelProtocol) -> StudyCohort:
    return replace(cohort, protocol=replace(cohort.protocol, seeds=seeds, of_model=lambda model: of_models))


def _answers(one: MethodRun, scores: Floats | None = None) -> FoldAnswers:
    """Return the predictions for every test case, fold and seed; scores (c, p): other predictions of the same cases."""
    frame, target = one.predictions, one.run.target
    rows = {f"{name}s": frame[name].to_numpy() for name in ("fold", "seed", "patient")}
    given = predicted(frame, target) if scores is None else scores
    nothing = np.zeros(len(frame), dtype=np.int64)
    return FoldAnswers.of(outcomes(frame, target), given, nothing, cases=frame["slide"].to_numpy(), **rows)


def _figure_row(one: MethodRun, given: FoldAnswers) -> tuple[str, ...]:
    return one.method.title, *_figures(one.run.target, given), "–"


def _figures(target: Target, given: FoldAnswers) -> tuple[str, str]:
    """Return the key figure and its interval."""
    interval = resampled_interval(target.measures[target.key_figure], given)
    name = target.key_figure
    return figure_text(name, interval.value), f"{figure_text(name, interval.low)} to {figure_text(name, interval.high)}"


def _difference(target: Target, given: FoldAnswers, other: FoldAnswers) -> str:
    interval: Interval = resampled_interval(target.measures[target.key_figure], given, other)
    return _span(interval.value, interval.low, interval.high, sign="+")


def _span(value: float, low: float, high: float, sign: str = "") -> str:
    return f"{100 * value:{sign}.1f} ({100 * low:{sign}.1f} to {100 * high:{sign}.1f})"


def _agreement(one: MethodRun, explainer: str, request: Request) -> tuple[str, str]:
    """Return AUPRC+ and AUPRC± of a map, the mean over models and test bags, with intervals over patients."""
    (found,) = [found for found in run_agreement(one.run, [explainer], device=request.device) if found.rule == "mirror"]
    patients = read_table(one.cohort.labels).set_index("slide")["patient"]
    names = patients.reindex(open_run_store(one.run).ids).fillna("").to_numpy()
    cells = []
    for measure in ("auprc_plus", "auprc_both"):
        by_bag = found.measures[measure][..., 0].nanmean(0).numpy()
        interval = mean_interval(by_bag, names)
        cells.append(_span(interval.value, interval.low, interval.high))
    return cells[0], cells[1]


def fold_predictions(one: MethodRun, table: "pd.DataFrame", columns: Sequence[str]) -> Floats:
    """Return (c, p) the predictions of a baseline fitted, in each fold, on all slides that the fold does not test."""
    frame, target = one.predictions, one.run.target
    given = np.zeros((len(frame), len(target.prediction_columns())))
    covariates = table[[*columns]]
    for _, rows in frame.groupby(["fold", "seed"]):
        others = frame[(frame["seed"] == rows["seed"].iloc[0]) & (frame["fold"] != rows["fold"].iloc[0])]
        design = Design.of(covariates.loc[others["slide"]])
        x, new = (design.matrix(covariates.loc[part["slide"]]) for part in (others, rows))
        given[frame.index.get_indexer(rows.index)] = FITTED[target.kind](x, outcomes(others, target), new, target)
    return given


def _cox(x: Floats, y: Floats, new: Floats, target: Target) -> Floats:
    return (new @ fit_cox(x, y[:, 0], y[:, 1] > 0, penalizer=PENALIZER).coefficients)[:, None]


def _linear(x: Floats, y: Floats, new: Floats, target: Target) -> Floats:
    from sklearn.linear_model import LinearRegression

    return LinearRegression().fit(x, y).predict(new).reshape(len(new), -1)


def _nearest_grade(x: Floats, y: Floats, new: Floats, target: Target) -> Floats:
    """Return the grade nearest to a regression of its number, as certain probabilities."""
    grades = len(target.answer_names)
    nearest = _linear(x, y.astype(np.float64), new, target)[:, 0].round().clip(0, grades - 1).astype(int)
    return np.eye(grades)[nearest]


def _logistic(x: Floats, y: Floats, new: Floats, target: Target) -> Floats:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    columns = []
    for label in y.T:
        known = ~np.isnan(label)
        columns.append(
            make_pipeline(StandardScaler(), LogisticRegression()).fit(x[known], label[known]).predict_proba(new)[:, 1]
        )
    return np.column_stack(columns)


FITTED: dict[str, Callable[[Floats, Floats, Floats, Target], Floats]] = {
    Survival.kind: _cox,
    Value.kind: _linear,
    Ordinal.kind: _nearest_grade,
    Labels.kind: _logistic,
}
