"""`carmil train`: folds x seeds x grid on a user's own cohort, chosen on validation bags, tested once.

b bags of the store, f folds, m models that are kept.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from carmil.bags.splits import TEST, Splits, audit, write_splits
from carmil.counterfactual import list_models
from carmil.counterfactual.branches import branch_coefficients
from carmil.errors import CarmilError, unknown
from carmil.evidence.operating import OperatingPoint, Rule, abstention, threshold
from carmil.files import write_text
from carmil.progress import training_progress
from carmil.studies.answers import answered, by_patient, numbers, probabilities
from carmil.studies.card import card
from carmil.studies.cohort import Cohort, Say, divided, of_settings, roles_of
from carmil.studies.figures import calibration, intervals, mean_over_seeds, measured, summarised
from carmil.studies.run_folder import StudyRun, begin, build, finished, pick_device, read_run, write_models, write_table
from carmil.studies.settings import Settings
from carmil.studies.truth import agreement
from carmil.training.checkpoint import Checkpoint
from carmil.training.population import Population
from carmil.training.processor import settle
from carmil.training.protocol import GridPoint, Trained, set_scales, train_protocol, validation_bags
from carmil.training.recipe import UNUSED, Recipe
from carmil.training.runs import plain

if TYPE_CHECKING:
    import pandas as pd


def run_study(settings: Settings, *, say: Say = lambda line: None) -> StudyRun:
    """Trains, chooses, tests and writes the run; goes on with a run that was begun, and reads one that has ended."""
    settle()
    known = list_models()
    if settings.model not in known:
        raise CarmilError(unknown("model", settings.model, known))
    rule, grid, recipe = Rule.parse(settings.threshold), grid_of(settings), _recipe(settings)
    remarks: list[str] = []

    def tell(line: str) -> None:
        remarks.append(line)
        say(line)

    cohort = of_settings(settings, say=tell)
    if rule.name != "balanced" and len(cohort.classes) > 2:
        raise CarmilError(f"--threshold {settings.threshold} is for two classes; this table has {len(cohort.classes)}")
    splits = divided(cohort, settings, say=tell)
    for line in _audited(splits, cohort):
        tell(line)
    key = begin(settings.out, _facts(settings, cohort, splits, remarks))
    if finished(settings.out):
        say(f"{settings.out} has ended already; its figures are read")
        return read_run(settings.out)
    for i, split in enumerate(splits):
        write_splits(settings.out / ("splits.tsv" if i == 0 else f"splits_{i}.tsv"), split)
    roles = roles_of(splits, cohort)
    checkpoint = Checkpoint(settings.out / "checkpoint.safetensors", key)
    trained = _trained(settings, cohort, roles, grid, recipe, checkpoint)
    points = {
        group: _operating_point(group, trained, cohort, rule, settings) for group in _groups(trained, roles, settings)
    }
    _conclude(settings, cohort, trained, grid, points)
    checkpoint.remove()
    run = read_run(settings.out)
    write_text(settings.out / "card.md", card(run))
    return run


def grid_of(settings: Settings) -> list[GridPoint]:
    """Every combination of the settings that are lists."""

    def values(given: Any) -> list[Any]:
        return given if isinstance(given, list) else [given]

    points = []
    for lr, alpha, lambda_ in product(values(settings.lr), values(settings.alpha), values(settings.lambda_)):
        named = {"alpha": alpha, "lambda_": lambda_, "distance": settings.distance}
        given = {name: value for name, value in named.items() if value is not None}
        if given and "/" not in settings.model:
            raise CarmilError(
                f"{settings.model!r} has no counterfactual branch that {', '.join(given)} could be of: try 'car/{settings.model}'"
            )
        coefficients = branch_coefficients(settings.model, **given) if given else {}
        points.append(GridPoint(lr, coefficients, {"lr": lr, **given}))
    return points


@dataclass(frozen=True, eq=False)
class _Group:
    """The models that answer together for a test fold: one, or the inner models of a nested fold."""

    fold: int
    seed: int
    models: tuple[int, ...]
    roles: Tensor  # (inner, b)

    @property
    def tested(self) -> Tensor:
        return (self.roles[0] == TEST).nonzero().squeeze(-1)


def _groups(trained: Trained, roles: Tensor, settings: Settings) -> list[_Group]:
    inner = settings.inner
    folds = roles.shape[1] // inner
    seeds = sorted({kept.seed for kept in trained.kept})
    groups: dict[tuple[int, int], list[int]] = {}
    for row, kept in enumerate(trained.kept):
        groups.setdefault((seeds.index(kept.seed), kept.fold), []).append(row)
    return [
        _Group(
            fold=fold + (division * folds if len(roles) > 1 else 0),
            seed=seeds[division],
            models=tuple(rows),
            roles=roles[division if len(roles) > 1 else 0, fold * inner : (fold + 1) * inner],
        )
        for (division, fold), rows in groups.items()
    ]


def _recipe(settings: Settings) -> Recipe:
    return Recipe(
        epochs=settings.epochs,
        batch=settings.batch,
        optimizer=settings.optimizer,
        weight_decay=settings.weight_decay,
        shuffle=True,
        warmup=min(settings.warmup, settings.epochs - 1),
        patience=settings.patience,
        study_seed=settings.seed,
        schedule=settings.schedule,
        class_weights=settings.class_weights,
        label_smoothing=settings.label_smoothing,
    )


def _audited(splits: Sequence[Splits], cohort: Cohort) -> list[str]:
    remarks: list[str] = []
    for split in splits:
        errors, said = audit(split, cohort.labels.tolist(), cohort.classes)
        if errors:
            raise CarmilError(f"the split is not sound: {errors[0]}")
        remarks += [line for line in said if line not in remarks]
    return remarks


def _facts(settings: Settings, cohort: Cohort, splits: Sequence[Splits], remarks: list[str]) -> dict[str, Any]:
    asked = {name: value for name, value in settings.asked().items() if name not in ("out", "device")}
    return {
        "settings": asked,
        "data": cohort.fingerprint,
        "store": cohort.store.fingerprint,
        "encoder": cohort.store.encoder,
        "width": cohort.store.width,
        "classes": cohort.classes,
        "slides": len(cohort.slides),
        "patients": len(set(cohort.patients)),
        "class_counts": torch.bincount(cohort.labels, minlength=len(cohort.classes)).tolist(),
        "splits": [split.roles.tolist() for split in splits],
        "said": remarks,
    }


def _trained(
    settings: Settings, cohort: Cohort, roles: Tensor, grid: list[GridPoint], recipe: Recipe, checkpoint: Checkpoint
) -> Trained:
    seeds = list(range(settings.seed, settings.seed + settings.seeds))
    given = roles.masked_fill(roles == TEST, UNUSED)
    models = given.shape[1] * len(seeds) * len(grid)

    def prepare(population: Population, everyone: Tensor) -> None:
        if settings.standardise:
            set_scales(population, cohort.bags, everyone)
        if settings.warm_start is not None:
            population.warm_start(_baseline(settings, population, len(grid)))

    with training_progress(settings.model, recipe.epochs, models) as on_epoch:
        return train_protocol(
            lambda: build(settings.asked(), cohort.store.width, len(cohort.classes)),
            cohort.bags,
            given if len(given) > 1 else given[0],
            recipe=recipe,
            seeds=seeds,
            grid=grid,
            inner=settings.inner,
            prepare=prepare,
            device=pick_device(settings.device),
            checkpoint=checkpoint,
            on_epoch=on_epoch,
        )


def _baseline(settings: Settings, population: Population, points: int) -> dict[str, Tensor]:
    """The weights of a run of the model without its branch, model by model: the same folds and seeds, or nothing."""
    assert settings.warm_start is not None
    run = read_run(settings.warm_start)
    mine = json.loads((settings.out / "run.json").read_text(encoding="utf-8"))
    if run.facts["data"] != mine["data"] or run.facts["splits"] != mine["splits"]:
        raise CarmilError(
            f"{settings.warm_start} was trained on other data or folds: its test bags would leak into this run"
        )
    if len(run.models) * points != len(population):
        raise CarmilError(
            f"{settings.warm_start} has {len(run.models)} models, this run {len(population) // points} folds x seeds: "
            "give both the same --folds, --seeds and --inner"
        )
    return {name: tensor.repeat_interleave(points, 0) for name, tensor in run.population().state().items()}


@dataclass(frozen=True)
class _Point:
    """What validation bags decided: where "yes" begins (two classes), and below which confidence there is no answer."""

    at: OperatingPoint | None
    cut: float | None


def _operating_point(group: _Group, trained: Trained, cohort: Cohort, rule: Rule, settings: Settings) -> _Point:
    import pandas as pd

    parts = []
    for row, roles in zip(group.models, group.roles, strict=True):
        chosen = validation_bags(roles)
        part = answered(trained.population, [row], cohort.bags, chosen, cohort.classes)
        parts.append(_with_labels(part, cohort, chosen))
    frame = _judged_by(pd.concat(parts), cohort, settings)
    p = probabilities(frame, cohort.classes)
    at = threshold(numbers(frame, cohort.classes), p[:, 1], rule) if len(cohort.classes) == 2 else None
    cut = None
    if settings.abstain > 0:
        cut = abstention(p if at is None else p[:, 1], settings.abstain, None if at is None else at.threshold)
    return _Point(at, cut)


def _with_labels(frame: "pd.DataFrame", cohort: Cohort, chosen: Tensor) -> "pd.DataFrame":
    assert cohort.bags.labels is not None
    patient = dict(zip(cohort.slides, cohort.patients, strict=True))
    frame.insert(1, "patient", [patient[slide] for slide in frame["slide"]])
    frame.insert(2, "label", [cohort.classes[i] for i in cohort.bags.labels[chosen].tolist()])
    return frame


def _judged_by(frame: "pd.DataFrame", cohort: Cohort, settings: Settings) -> "pd.DataFrame":
    """A line for everyone who is judged: a patient, or a slide where slides of a patient have different labels."""
    if settings.patients == "one-bag" or not judged_by_patient(cohort):
        return frame
    return by_patient(frame, cohort.classes, settings.patients)


def judged_by_patient(cohort: Cohort) -> bool:
    labels: dict[str, int] = {}
    pairs = zip(cohort.patients, cohort.labels.tolist(), strict=True)
    return all(labels.setdefault(patient, label) == label for patient, label in pairs)


def _conclude(
    settings: Settings, cohort: Cohort, trained: Trained, grid: list[GridPoint], points: dict[_Group, _Point]
) -> None:
    """The test folds are looked at here, once; nothing is chosen any more."""
    import pandas as pd

    frames, lines = [], []
    for group, point in points.items():
        frame = answered(trained.population, group.models, cohort.bags, group.tested, cohort.classes)
        frame = _with_labels(frame, cohort, group.tested)
        frame.insert(0, "fold", group.fold)
        frame.insert(1, "seed", group.seed)
        at = None if point.at is None else point.at.threshold
        figures = measured(_judged_by(frame, cohort, settings), cohort.classes, threshold=at, cut=point.cut)
        figures |= agreement(trained.population, group.models, cohort.bags, group.tested)
        lines.append({"fold": group.fold, "seed": group.seed, **figures})
        frames.append(frame)
    frame, by_fold = pd.concat(frames, ignore_index=True), pd.DataFrame(lines)
    together = _judged_by(mean_over_seeds(frame, cohort.classes), cohort, settings)
    out = settings.out
    write_table(out / "predictions.parquet", frame)
    known = {row: point for group, point in points.items() for row in group.models}
    write_models(out, trained, grid, [_told(known[row]) for row in range(len(trained.kept))])
    metrics = {
        "level": "patient" if judged_by_patient(cohort) else "slide",
        "rule": settings.patients,
        "summary": summarised(by_fold),
        "intervals": intervals(together, cohort.classes),
        "calibration": calibration(together, cohort.classes),
        "by_fold": by_fold.to_dict("records"),
    }
    write_text(out / "metrics.json", json.dumps(plain(metrics), indent=2))


def _told(point: _Point) -> dict[str, Any]:
    if point.at is None:
        return {"threshold": None, "abstain_below": point.cut}
    at = point.at
    return {
        "threshold": at.threshold,
        "rule": str(at.rule),
        "validation_sensitivity": at.sensitivity,
        "validation_specificity": at.specificity,
        "threshold_said": at.said,
        "abstain_below": point.cut,
    }
