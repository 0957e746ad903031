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
from carmil.runs.facts import Range
from carmil.statistics.bootstrap import Interval
from carmil.statistics.hazards import fit_cox
from carmil.statistics.intervals import FoldAnswers, resampled_interval
from carmil.studies.adjustment import PENALIZER, Design
from carmil.studies.agreement import slide_agreement
from carmil.studies.figures import SHOWN, figure_text, interval_words
from carmil.studies.predictions import arrange, outcomes, predicted
from carmil.table_files import read_table
from carmil.tables import ResultTable
from carmil.targets import Labels, Ordinal, Survival, Target, Value

if TYPE_CHECKING:
    import pandas as pd

MODELS = ("abmil.gated", "car/abmil.gated")
MAPS = ("path", "attention")
ORACLE = "log_hazard"  # the column of planted hazards with the true log hazard
PLANTED = {"target": "time", "event": "event"}  # settings of a study of planted hazards
FAST_SEEDS = 1
CELLS = {"hidden": 64, "attention": 32}  # options of a model: a cell of ki67 has some 40 features, a tile 1,000
CLINICAL = ("age", "node", "t_stage", "grade")

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Prediction:
    """A target of ki67 and its baselines, with the columns that each baseline is fitted on.

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
    cohort, shuffled = (planted_cohort(crc, request, seeds=seeds, shuffled=shuffled) for shuffled in (False, True))
    runs = train_methods([cohort], [Method(model, model, PLANTED) for model in MODELS], request)
    null = train_methods([shuffled], [Method(f"{MODELS[0]}, times shuffled", MODELS[0], PLANTED)], request)
    truth = read_table(cohort.labels).set_index("slide")[ORACLE]
    oracle = np.array(truth.loc[runs[0].predictions["slide"]], dtype=np.float64)[:, None]
    tables = [_figures_table("planted hazards", "Planted hazards: ", runs, {"true log hazard": oracle}, null)]
    lines = []
    for one in runs:
        agreement = slide_agreement(one.run, MAPS, device=request.device)
        for name in MAPS:
            cells = (_span(agreement[name][measure]) for measure in ("auprc_plus", "auprc_both"))
            lines.append((one.method.title, name, *cells))
    title = "Planted hazards: agreement with the sign of every nucleus, per cent"
    tables.append(ResultTable(title, ("model", "map", "AUPRC+", "AUPRC±, mirror rule"), tuple(lines), names=2))
    return tables, [*runs, *null]


def planted_cohort(crc: Path, request: Request, *, seeds: int = 1, shuffled: bool = False) -> StudyCohort:
    """Return the cohort of planted hazards, made of crc's nuclei; in a quick trial its models are small."""
    home = request.shared / "cohorts" / "planted-hazards"
    cohort = build_planted_hazards(crc, home, fast=request.fast, shuffled=shuffled, seed=request.seed)
    return _with_protocol(cohort, seeds, CELLS if request.fast else {})


def cells(ki67: Path | None, request: Request, seeds: int) -> tuple[list[ResultTable], list[MethodRun]]:
    """Measure every target of ki67 beside its baselines."""
    if ki67 is None:
        return [], []
    cohort = _with_protocol(build_ki67(ki67, request.shared / "cohorts" / "ki67"), seeds, CELLS)
    table = read_table(cohort.labels).set_index("slide")
    tables, runs = [], list[MethodRun]()
    for prediction in KI67:
        batch = cohort.protocol.batch if "event" in prediction.settings else PRODUCT.batch
        batched = replace(cohort, protocol=replace(cohort.protocol, batch=batch))
        trained = train_methods([batched], [Method(model, model, prediction.settings) for model in MODELS], request)
        baselines = {
            title: fold_predictions(trained[0], table, columns) for title, columns in prediction.baselines.items()
        }
        tables.append(_figures_table(prediction.title, f"Ki67, {prediction.title}: ", trained, baselines))
        lines = []
        for one in trained:
            if (found := one.run.metrics.adjustment) is not None:
                spans = [*(found.c_index[name] for name in ("covariates", "risk", "both")), found.gain]
                lines.append((one.method.title, *map(_span, spans)))
        if lines:
            heads = ("risk of", ", ".join(CLINICAL), "risk", "both", "gain")
            title = "Ki67, recurrence: what the risk adds, C-index in per cent"
            tables.append(ResultTable(title, heads, tuple(lines)))
        runs += trained
    return tables, runs


def _with_protocol(cohort: StudyCohort, seeds: int, options: Mapping[str, int]) -> StudyCohort:
    protocol = replace(cohort.protocol, seeds=seeds, of_model=lambda model: ModelProtocol(options))
    return replace(cohort, protocol=protocol)


def _figures_table(
    what: str, title: str, runs: Sequence[MethodRun], baselines: Mapping[str, Floats], null: Sequence[MethodRun] = ()
) -> ResultTable:
    """Tabulate the key figure of some runs, of baselines that predict (c, p) for the first run's cases, and of null
    runs, whose outcomes are shuffled.

    Only the baselines are compared with the first run.
    """
    first, target = runs[0], runs[0].run.target
    name, measure = target.key_figure, target.measures[target.key_figure]
    own = arrange(first.predictions, target, predicted(first.predictions, target))
    others = {title: arrange(first.predictions, target, scores) for title, scores in baselines.items()}

    def line(row: str, given: FoldAnswers, less: str = "–") -> tuple[str, ...]:
        interval = Range.of(resampled_interval(measure, given))
        return row, figure_text(name, interval.value), interval_words(interval, name), less

    def run_line(one: MethodRun) -> tuple[str, ...]:
        return line(one.method.title, arrange(one.predictions, target, predicted(one.predictions, target)))

    lines = [run_line(one) for one in runs]
    for row, given in others.items():
        lines.append(line(row, given, _span(resampled_interval(measure, own, given), sign="+")))
    lines += [run_line(one) for one in null]
    heads = (what, SHOWN[name], "95 % interval", f"{first.method.title} minus this")
    return ResultTable(f"{title}{SHOWN[name]}, per cent", heads, tuple(lines))


def _span(one: Interval | Range, sign: str = "") -> str:
    return f"{100 * one.value:{sign}.1f} ({100 * one.low:{sign}.1f} to {100 * one.high:{sign}.1f})"


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
    """Fit a regression of the number of the grade, and return the nearest grade with probability 1."""
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
