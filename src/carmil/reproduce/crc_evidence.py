"""Which maps find the cancerous nuclei? Every explainer on crc, five folds by patient and several seeds, against ABMIL's attention.

Intervals and p values are those of `carmil compare`: of means over folds, over patients. f folds.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from carmil.errors import CarmilError
from carmil.evidence import EXPLAINERS
from carmil.report.dots import write_dots
from carmil.reproduce.crc import PROTOCOL, conditions, crc_cohort, measured_on
from carmil.reproduce.method_runs import Method, train_methods
from carmil.reproduce.paper import Figure, figure, figure_text
from carmil.reproduce.recipes import Finding, Picture, Request, write_finding
from carmil.runs.run import Run
from carmil.statistics.bootstrap import Interval
from carmil.statistics.intervals import Estimate, FoldAnswers, difference_interval, difference_p, estimate
from carmil.studies.agreement import MapAgreement, run_agreement
from carmil.studies.predictions import class_numbers, probabilities
from carmil.studies.subjects import open_run_store
from carmil.studies.train import check_model
from carmil.tables import ResultTable

if TYPE_CHECKING:
    import pandas as pd

SEEDS = 5
BASELINE = ("abmil.gated", "attention")
DEFAULT = ("car/abmil.gated", "path")
MEASURES = ("auprc_plus", "auroc", "ndcg")
LINES = (
    "AUPRC+, AUROC, NDCG (gain 1 for a cancerous nucleus): of the map for the positive class in each patient with cancerous nuclei "
    "and others; the mean over a fold's test patients, then over the folds; the same of its validation patients",
    "intervals and p values: 95 %, over patients, of the mean over folds and seeds, as `carmil compare` has them; differences on "
    "the same patients",
    "baseline: ABMIL's attention. Validation: the best AUPRC+ on validation bags among CAR's maps that are signed and of a class; "
    "a validation bag of one fold is a test bag of another, so only the choice fold by fold is blind to all it is tested on",
)

Map = tuple[str, str]  # a model and an explainer


@dataclass(frozen=True, eq=False)
class MapFigures:
    """A map: AUPRC+ of every test slide, fold and seed beside the prediction (`tests`), and MEASURES by seed and fold (s, f).

    test and validation: of the bags of each part.
    """

    name: Map
    classes: tuple[str, ...]
    tests: "pd.DataFrame"
    test: Mapping[str, np.ndarray]
    validation: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Row:
    """A map: its figures in per cent over the seeds, its AUPRC+ and the difference from the baseline's over patients."""

    model: str
    evidence: str
    test: dict[str, Figure]
    validation: dict[str, Figure]
    auprc: Interval
    difference: Interval


@dataclass(frozen=True)
class Contrast:
    """The map of each fold, how it was fixed, and these maps and their models against the baseline, in per cent."""

    fixed: str
    maps: tuple[Map, ...]
    auprc: Interval
    auprc_difference: Interval
    auc: Interval
    auc_difference: Interval


@dataclass(frozen=True)
class Result:
    rows: list[Row]
    contrasts: list[Contrast]
    aucs: dict[str, Figure]


def run_crc_evidence(
    folder: Path, models: Sequence[str], request: Request, *, seeds: int = SEEDS, epochs: int = PROTOCOL.epochs
) -> Finding:
    """Train and measure what is not there yet, and write crc_evidence.md, .json and .png."""
    for model in models:
        check_model(model)
    for needed, why in ((BASELINE[0], "whose attention maps are compared with"), (DEFAULT[0], "the default model")):
        if needed not in models:
            raise CarmilError(f"--models {','.join(models)}: expected {needed!r}, {why}, among them")
    cohort = crc_cohort(folder, request, epochs=epochs, seeds=seeds)
    runs = train_methods([cohort], [Method(model, model) for model in dict.fromkeys(models)], request)
    rows, contrasts = compare_maps([one for row in runs for one in map_figures(row.run, request.device)])
    result = Result(rows, contrasts, {row.method.model: figure(_seed_aucs(row.run)) for row in runs})
    machines = dict.fromkeys(measured_on(row.run) for row in runs)
    lines = (*conditions(cohort, request.seed), *LINES, f"measured on {'; and on '.join(machines)}")
    path = request.out / "crc_evidence.png"
    groups: dict[str, dict[str, Interval]] = {}
    for row in result.rows:
        groups.setdefault(row.model, {})[row.evidence] = row.auprc
    axis = "AUPRC+ on test bags, per cent, with 95 % intervals over patients"
    write_dots(groups, path, axis=axis, guide=groups[BASELINE[0]][BASELINE[1]].value, note="ABMIL's attention")
    finding = Finding(tables(result), (Picture(path, f"{axis}."),), conditions=lines)
    heading = "CRC nuclei: which maps find them"
    return write_finding("crc_evidence", request, finding, asdict(result), heading=heading)


def map_figures(run: Run, device: str) -> list[MapFigures]:
    """Every explainer of the run's model on the test and the validation bags of its folds."""
    place = {name: i for i, name in enumerate(open_run_store(run).ids)}
    row = {(fold, model.seed): i for i, (fold, model) in enumerate(zip(run.tested_folds, run.models, strict=True))}
    frame = run.predictions()
    at = [row[key] for key in zip(frame["fold"], frame["seed"], strict=True)], [place[name] for name in frame["slide"]]
    parts = (run_agreement(run, bags=bags, device=device) for bags in ("test", "validation"))
    return [
        MapFigures(
            (run.settings.model, test.explainer),
            run.classes,
            frame.assign(auprc=test.measures["auprc_plus"][..., 0].numpy()[at]),
            _by_fold(run, test),
            _by_fold(run, validation),
        )
        for test, validation in zip(*parts, strict=True)
    ]


def _by_fold(run: Run, agreement: MapAgreement) -> dict[str, np.ndarray]:
    """(s, f) of each measure: the mean over the model's bags."""
    order = sorted(range(len(run.models)), key=lambda i: (run.models[i].seed, run.models[i].fold))
    found = {}
    for measure in MEASURES:
        values = agreement.measures[measure].nanmean((1, 2)).numpy()[order].reshape(run.settings.seeds, -1)
        if np.isnan(values).any():
            fold = int(np.isnan(values).any(0).argmax())
            raise CarmilError(
                f"{run.folder}: no validation or test patient of fold {fold} has nuclei of both kinds, cancerous and not; expected "
                "at least one, to measure maps on: try another --seed"
            )
        found[measure] = values
    return found


def _seed_aucs(run: Run) -> list[float]:
    """Bag AUC of each seed, the mean over its folds."""
    by_seed: dict[int, list[float]] = {}
    for fold in run.metrics.by_fold:
        by_seed.setdefault(fold.seed, []).append(fold.figures["auc"])
    return [float(np.mean(aucs)) for aucs in by_seed.values()]


def compare_maps(maps: Sequence[MapFigures]) -> tuple[list[Row], list[Contrast]]:
    """One row per map; and the maps that are fixed without test bags against ABMIL's attention."""
    by_name = {one.name: one for one in maps}
    folds = by_name[BASELINE].test["auprc_plus"].shape[1]
    eligible = [name for name in by_name if _eligible(*name)]
    validation = np.stack([by_name[name].validation["auprc_plus"].mean(0) for name in eligible])  # (maps, f)
    ways = {
        "baseline": (BASELINE,) * folds,
        "product default": (DEFAULT,) * folds,
        "validation, all folds": (eligible[int(validation.mean(1).argmax())],) * folds,
        "validation, fold by fold": tuple(eligible[i] for i in validation.argmax(0)),
    }
    baseline = _estimates([BASELINE] * folds, by_name)
    rows, contrasts = [], []
    for name, one in by_name.items():
        auprc, _ = _estimates([name] * folds, by_name)
        test, validated = (
            {measure: figure(values.mean(1).tolist()) for measure, values in part.items()}
            for part in (one.test, one.validation)
        )
        rows.append(Row(*name, test, validated, _percent(auprc.interval()), _difference(auprc, baseline[0])))
    for fixed, chosen in ways.items():
        figures = zip(_estimates(chosen, by_name), baseline, strict=True)
        spans = [span for own, other in figures for span in (_percent(own.interval()), _difference(own, other))]
        contrasts.append(Contrast(fixed, chosen, *spans))
    return rows, contrasts


def _eligible(model: str, method: str) -> bool:
    """May it be the default: a map of CAR's that is signed and of a class, and not chance?"""
    explainer = EXPLAINERS[method]
    return model.startswith("car/") and explainer.signed and explainer.class_conditional and method != "random"


def _estimates(maps: Sequence[Map], by_name: Mapping[Map, MapFigures]) -> tuple[Estimate, Estimate]:
    """AUPRC+ and bag AUC, each fold by its own map and that map's model."""
    import pandas as pd

    classes = by_name[maps[0]].classes
    frame = pd.concat([by_name[name].tests.query("fold == @fold") for fold, name in enumerate(maps)])

    def answers(rows: "pd.DataFrame", scores: np.ndarray) -> FoldAnswers:
        whose = {f"{name}s": rows[name].to_numpy() for name in ("fold", "seed", "patient")}
        return FoldAnswers.of(class_numbers(rows, classes), scores, cases=rows["slide"].to_numpy(), **whose)

    mixed = frame.dropna(subset=["auprc"])
    return (
        estimate("mean", answers(mixed, mixed["auprc"].to_numpy())),
        estimate("auc", answers(frame, probabilities(frame, classes))),
    )


def _percent(interval: Interval) -> Interval:
    return replace(interval, value=100 * interval.value, low=100 * interval.low, high=100 * interval.high)


def _difference(own: Estimate, other: Estimate) -> Interval:
    return replace(_percent(difference_interval(own, other)), p=difference_p(own, other))


def tables(result: Result) -> tuple[ResultTable, ResultTable]:
    fixed = tuple(
        (
            one.fixed,
            _maps_text(one.maps),
            _span(one.auprc),
            *_less(one, one.auprc_difference),
            _span(one.auc),
            *_less(one, one.auc_difference),
        )
        for one in result.contrasts
    )
    lines = tuple(
        (
            row.model,
            row.evidence,
            _kind(row.evidence),
            figure_text(row.test["auprc_plus"]),
            "–" if (row.model, row.evidence) == BASELINE else _span(row.difference, sign="+z"),
            *(figure_text(row.test[name]) for name in ("auroc", "ndcg")),
            figure_text(row.validation["auprc_plus"]),
            figure_text(result.aucs[row.model]),
        )
        for row in result.rows
    )
    less = "less the baseline's"
    return (
        ResultTable(
            f"The default map against the attention of {BASELINE[0]}",
            ("fixed by", "map", "AUPRC+", less, "p", "bag AUC", f"{less} AUC", "p of AUC"),
            fixed,
        ),
        ResultTable(
            "Every explainer",
            ("model", "map", "kind", "AUPRC+", less, "AUROC", "NDCG", "AUPRC+ validation", "bag AUC"),
            lines,
            names=3,
        ),
    )


def _less(one: Contrast, difference: Interval) -> tuple[str, str]:
    """The difference from the baseline, and p; dashes for the baseline itself."""
    return ("–", "–") if set(one.maps) == {BASELINE} else (_span(difference, sign="+z"), f"{difference.p:.2g}")


def _maps_text(maps: Sequence[Map]) -> str:
    """The maps by model, with the number of folds where they differ."""
    folds = Counter(maps)
    named = {name: f"{count} × {name[1]}" if len(folds) > 1 else name[1] for name, count in folds.items()}
    models = dict.fromkeys(model for model, _ in folds)
    return "; ".join(
        ", ".join(text for name, text in named.items() if name[0] == model) + f" of {model}" for model in models
    )


def _kind(method: str) -> str:
    explainer = EXPLAINERS[method]
    classes = "a class" if explainer.class_conditional else "all classes"
    return f"{'signed' if explainer.signed else 'unsigned'}, {classes}"


def _span(one: Interval, sign: str = "") -> str:
    return f"{one.value:{sign}.1f} [{one.low:{sign}.1f}, {one.high:{sign}.1f}]"
