"""Evaluate every explainer on crc: how well its map finds the cancerous nuclei, compared with ABMIL's attention.

Five folds by patient and several seeds. Intervals and p values are those of `carmil compare`: for means over folds,
computed over patients. f folds.
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
from carmil.report.paper import Finding, Picture
from carmil.reproduce.crc import PROTOCOL, crc_cohort, crc_conditions
from carmil.reproduce.method_runs import Method, measured_on, train_methods
from carmil.reproduce.paper import Figure, figure, figure_text, interval_text
from carmil.reproduce.recipes import Request, write_finding
from carmil.runs.run import Run
from carmil.statistics.bootstrap import Interval
from carmil.statistics.intervals import Estimate, difference_interval, difference_p, estimate
from carmil.studies.agreement import MapAgreement, run_agreement
from carmil.studies.predictions import arrange, predicted
from carmil.studies.subjects import open_run_store
from carmil.studies.train import check_model
from carmil.tables import ResultTable
from carmil.targets import Target

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
    """The figures of a map.

    `tests`: AUPRC+ and the prediction of every test slide, fold and seed. test, validation: each of MEASURES by seed
    and fold (s, f), over the bags of the part.
    """

    name: Map
    target: Target
    tests: "pd.DataFrame"
    test: Mapping[str, np.ndarray]
    validation: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Contrast:
    """A choice of map per fold with its models: figures in per cent with intervals over patients, and differences
    from the baseline.
    """

    maps: tuple[Map, ...]
    auprc: Interval
    auprc_difference: Interval
    auc: Interval
    auc_difference: Interval


def run_crc_evidence(
    folder: Path, models: Sequence[str], request: Request, *, seeds: int = SEEDS, epochs: int = PROTOCOL.epochs
) -> Finding:
    """Train and measure whatever is missing, and write crc_evidence.md, .json and .png."""
    for model in models:
        check_model(model)
    for needed, why in ((BASELINE[0], "whose attention maps are compared with"), (DEFAULT[0], "the default model")):
        if needed not in models:
            raise CarmilError(f"--models {','.join(models)}: expected {needed!r} among them, {why}")
    cohort = crc_cohort(folder, request, epochs=epochs, seeds=seeds)
    trained = train_methods([cohort], [Method(model, model) for model in dict.fromkeys(models)], request)
    runs = [one.run for one in trained]
    maps = [one for run in runs for one in map_figures(run, request.device)]
    contrasts, fixed = compare_maps(maps)
    aucs = {run.settings.model: _seed_auc(run) for run in runs}
    every, rows = _every_map(maps, contrasts, aucs)
    facts = {"rows": rows, "contrasts": [{"fixed": how, **asdict(one)} for how, one in fixed.items()], "aucs": aucs}
    path = request.out / "crc_evidence.png"
    groups: dict[str, dict[str, Interval]] = {}
    for (model, evidence), one in contrasts.items():
        groups.setdefault(model, {})[evidence] = one.auprc
    axis = "AUPRC+ on test bags, per cent, with 95 % intervals over patients"
    write_dots(groups, path, axis=axis, guide=contrasts[BASELINE].auprc.value, note="ABMIL's attention")
    return write_finding(
        "crc_evidence",
        request,
        facts,
        tables=(_fixed_table(fixed), every),
        pictures=(Picture(path, f"{axis}."),),
        conditions=(*crc_conditions(cohort, request.seed), *LINES, measured_on(runs)),
        heading="CRC nuclei: which maps find them",
    )


def _seed_auc(run: Run) -> Figure:
    """Return the bag AUC over the seeds, each the mean over its folds."""
    folds = sorted(run.metrics.by_fold, key=lambda one: (one.seed, one.fold))
    return figure(np.reshape([one.figures["auc"] for one in folds], (run.settings.seeds, -1)).mean(1))


def map_figures(run: Run, device: str) -> list[MapFigures]:
    """Return the figures of every explainer of the run's model on the test and the validation bags of its folds."""
    place = {name: i for i, name in enumerate(open_run_store(run).ids)}
    row = {(fold, model.seed): i for i, (fold, model) in enumerate(zip(run.tested_folds, run.models, strict=True))}
    frame = run.predictions()
    at = [row[key] for key in zip(frame["fold"], frame["seed"], strict=True)], [place[name] for name in frame["slide"]]
    parts = (run_agreement(run, bags=bags, device=device) for bags in ("test", "validation"))
    return [
        MapFigures(
            (run.settings.model, test.explainer),
            run.target,
            frame.assign(auprc=test.measures["auprc_plus"][..., 0].numpy()[at]),
            _by_fold(run, test),
            _by_fold(run, validation),
        )
        for test, validation in zip(*parts, strict=True)
    ]


def _by_fold(run: Run, agreement: MapAgreement) -> dict[str, np.ndarray]:
    """Return (s, f) of each measure: the mean over the model's bags."""
    order = sorted(range(len(run.models)), key=lambda i: (run.models[i].seed, run.models[i].fold))
    figures = {}
    for measure in MEASURES:
        values = agreement.measures[measure].nanmean((1, 2)).numpy()[order].reshape(run.settings.seeds, -1)
        if np.isnan(values).any():
            fold = int(np.isnan(values).any(0).argmax())
            raise CarmilError(
                f"{run.folder}: no validation or test patient of fold {fold} has both cancerous and other "
                "nuclei; expected at least one, to evaluate maps on: try another --seed"
            )
        figures[measure] = values
    return figures


def compare_maps(maps: Sequence[MapFigures]) -> tuple[dict[Map, Contrast], dict[str, Contrast]]:
    """Compare every map with ABMIL's attention, and likewise the maps selected without test bags, by the rule of selection."""
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
    baseline = _estimates(ways["baseline"], by_name)

    def contrast(chosen: tuple[Map, ...]) -> Contrast:
        figures = zip(_estimates(chosen, by_name), baseline, strict=True)
        return Contrast(chosen, *(span for own, other in figures for span in _spans(own, other)))

    return {name: contrast((name,) * folds) for name in by_name}, {how: contrast(way) for how, way in ways.items()}


def _eligible(model: str, method: str) -> bool:
    """Return whether a map may become the default: a signed map of one class by CAR, and not the random map."""
    explainer = EXPLAINERS[method]
    return model.startswith("car/") and explainer.signed and explainer.class_conditional and method != "random"


def _estimates(maps: Sequence[Map], by_name: Mapping[Map, MapFigures]) -> tuple[Estimate, Estimate]:
    """Return AUPRC+ and bag AUC, computed in each fold with the fold's own map and the model of that map."""
    import pandas as pd

    target = by_name[maps[0]].target
    frame = pd.concat([by_name[name].tests.query("fold == @fold") for fold, name in enumerate(maps)])
    mixed = frame.dropna(subset=["auprc"])
    return (
        estimate("mean", arrange(mixed, target, mixed["auprc"].to_numpy())),
        estimate("auc", arrange(frame, target, predicted(frame, target))),
    )


def _spans(own: Estimate, other: Estimate) -> tuple[Interval, Interval]:
    """Return the interval of a figure, and of its difference from another, in per cent."""
    found = own.interval(), replace(difference_interval(own, other), p=difference_p(own, other))
    own_span, difference = (
        replace(one, value=100 * one.value, low=100 * one.low, high=100 * one.high) for one in found
    )
    return own_span, difference


def _fixed_table(fixed: Mapping[str, Contrast]) -> ResultTable:
    less = "less the baseline's"
    lines = tuple(
        (
            how,
            _maps_text(one.maps),
            _span(one.auprc),
            *_difference(one, one.auprc_difference),
            _span(one.auc),
            *_difference(one, one.auc_difference),
        )
        for how, one in fixed.items()
    )
    heads = ("fixed by", "map", "AUPRC+", less, "p", "bag AUC", f"{less} AUC", "p of AUC")
    return ResultTable(f"The default map against the attention of {BASELINE[0]}", heads, lines)


def _every_map(
    maps: Sequence[MapFigures], contrasts: Mapping[Map, Contrast], aucs: Mapping[str, Figure]
) -> tuple[ResultTable, list[dict[str, object]]]:
    """Return the table of all maps, figures in per cent over the seeds, and its rows for the JSON file."""
    lines, rows = [], []
    for one in maps:
        model, evidence = one.name
        contrast = contrasts[one.name]
        test, validation = (
            {name: figure(values.mean(1)) for name, values in part.items()} for part in (one.test, one.validation)
        )
        auprc, auroc, ndcg = (figure_text(test[name]) for name in MEASURES)
        less, _ = _difference(contrast, contrast.auprc_difference)
        chosen_by, auc = figure_text(validation["auprc_plus"]), figure_text(aucs[model])
        lines.append((model, evidence, EXPLAINERS[evidence].kind, auprc, less, auroc, ndcg, chosen_by, auc))
        names: dict[str, object] = {"model": model, "evidence": evidence, "test": test, "validation": validation}
        rows.append(names | {"auprc": contrast.auprc, "difference": contrast.auprc_difference})
    heads = ("AUPRC+", "less the baseline's", "AUROC", "NDCG", "AUPRC+ validation", "bag AUC")
    return ResultTable("Every explainer", ("model", "map", "kind", *heads), tuple(lines), names=3), rows


def _difference(one: Contrast, difference: Interval) -> tuple[str, str]:
    """Format the difference from the baseline, and p; dashes for the baseline itself."""
    return ("–", "–") if set(one.maps) == {BASELINE} else (_span(difference, "+z.1f"), f"{difference.p:.2g}")


def _maps_text(maps: Sequence[Map]) -> str:
    """List the maps, with the number of folds if folds have different maps."""
    folds = Counter(maps)
    counts = {one: f"{n} × " if len(folds) > 1 else "" for one, n in folds.items()}
    return ", ".join(f"{counts[model, method]}{method} of {model}" for model, method in folds)


def _span(one: Interval, form: str = ".1f") -> str:
    return interval_text(one.value, one.low, one.high, form)
