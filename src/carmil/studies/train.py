"""`carmil train`: folds x seeds x grid on a user's own cohort, chosen on validation bags, tested once.

b bags of the store, f folds, g points of the grid.
"""

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from carmil.bags.split_files import write_splits
from carmil.bags.splits import CALIBRATION, TEST, TRAIN, VALIDATION
from carmil.counterfactual import list_models
from carmil.counterfactual.branches import study_coefficients
from carmil.errors import CarmilError, unknown
from carmil.files import write_text
from carmil.locks import folder_lock
from carmil.progress import Log, count_progress, training_progress
from carmil.provenance import config_key
from carmil.runs.facts import Data
from carmil.runs.run import SHORT, Run, build, finished, pick_device, read_run, weights_key
from carmil.runs.settings import Settings
from carmil.runs.writing import Splits, begin_run
from carmil.statistics.operating import Rule
from carmil.studies.card import CONFIG, card, yaml_part
from carmil.studies.cohort import Cohort, Material, open_material, worker_bags
from carmil.studies.evaluate_folds import evaluate_folds
from carmil.targets import Classes, Target
from carmil.training.checkpoint import Checkpoint
from carmil.training.cluster import Cluster, connected
from carmil.training.population import Population
from carmil.training.process_settings import configure_process
from carmil.training.protocol import Candidates, GridPoint, train_protocol
from carmil.training.recipe import UNUSED, Recipe, first_eligible_epoch
from carmil.training.scaling import fit_scales
from carmil.words import plural

PER_MODEL_SETTINGS = ("lr", "alpha", "lambda_", "distance")  # settings in which the models of one population may differ


def run_study(settings: Settings, *, log: Log = lambda line: None) -> Run:
    """Train, choose, test and write a run. An interrupted run is resumed; a finished run is read."""
    check(settings)
    material = open_material(settings, log=log)
    check_fit(settings, material)
    ended = finished(settings.out)
    (run,) = run_together([settings], material, checkpoint=settings.out / "checkpoint.safetensors", log=log)
    if ended:
        log(f"{settings.out} has ended already; its figures are read")
    return run


def check(settings: Settings) -> None:
    """Refuse settings that can be recognised as wrong before any bag is opened."""
    check_model(settings.model)
    Rule.parse(settings.threshold)
    grid_of(settings)
    recipe_of(settings)


def check_model(name: str) -> None:
    """Refuse an unknown model name."""
    known = list_models()
    if name not in known:
        raise CarmilError(unknown("model", name, known))


def check_fit(settings: Settings, material: Material) -> None:
    """Refuse settings that do not fit the cohort: unknown options of the model, or settings for classes only."""
    target, rule = material.cohort.target, Rule.parse(settings.threshold)
    build(settings, material.cohort.store.width, target)
    if isinstance(target, Classes):
        if len(target.names) > 2 and rule.name != "balanced":
            raise CarmilError(
                f"--threshold {settings.threshold} is for two classes; this table has {len(target.names)}"
            )
        if rule.name in ("sensitivity", "specificity"):
            _check_validation(settings, material)
        return
    of_classes = {"threshold": "balanced", "abstain": 0.0, "class_weights": "none", "positive": None}
    for name, default in of_classes.items():
        if getattr(settings, name) != default:
            option = name.replace("_", "-")
            raise CarmilError(
                f"--{option} is for classes; the target {target.title!r} is of the kind {target.kind!r}: leave it out"
            )
    if target.timed:
        _check_events(settings, material)


def _check_events(settings: Settings, material: Material) -> None:
    """Check, before training, that the training and the validation slides of each fold have an event."""
    labels = material.cohort.bags.labels
    assert labels is not None
    for division in material.roles:
        for row, roles in enumerate(division):
            for role, name in ((TRAIN, "training"), (VALIDATION, "validation")):
                if not labels[roles == role, 1].any():
                    raise CarmilError(
                        f"none of the {int((roles == role).sum())} {name} slides of fold {row // settings.inner} has an event: "
                        "expected at least one; use fewer folds, a larger share for validation, or other splits"
                    )


def _check_validation(settings: Settings, material: Material) -> None:
    """Check, before training, that each fold has validation slides of both classes if the threshold rule needs them."""
    labels = material.cohort.bags.labels
    assert labels is not None
    for division in material.roles:
        for fold, roles in enumerate(division.unflatten(0, (-1, settings.inner))):  # (inner, b)
            present = labels[(roles == VALIDATION).any(0)].unique().tolist()
            if len(present) < 2:
                raise CarmilError(
                    f"--threshold {settings.threshold}: all validation slides of fold {fold} are "
                    f"{material.cohort.target.outputs[present[0]]!r}, expected both classes; use balanced or a number, "
                    "or other folds"
                )


def run_together(
    studies: Sequence[Settings], material: Material, *, checkpoint: Path, log: Log = lambda line: None
) -> list[Run]:
    """Train studies that differ in PER_MODEL_SETTINGS (and `out`) only as one population.

    Thresholds and figures are computed for each study by itself; the files are the same as if it were trained alone.
    """
    configure_process()
    data = data_of(material.cohort, material.divisions, _trained_on(material))
    studies = [study.completed(material.cohort.target) for study in studies]
    keys = [begin_run(study.out, study, data, warm_start=_start_of(study), notes=material.notes) for study in studies]
    where = Checkpoint(checkpoint, config_key({"studies": keys}))
    if not all(finished(study.out) for study in studies):
        with folder_lock(checkpoint.with_suffix(".lock"), checkpoint.parent):
            _train_missing(studies, material, where, log)
    where.remove()
    runs = [read_run(study.out) for study in studies]
    for run in runs:
        if not (run.folder / "card.md").exists():
            if settings := yaml_part(run):
                write_text(run.folder / CONFIG, settings)
            write_text(run.folder / "card.md", card(run))
    return runs


def _train_missing(studies: Sequence[Settings], material: Material, checkpoint: Checkpoint, log: Log) -> None:
    if all(finished(study.out) for study in studies):
        return
    for study in studies:
        _write_folds(study.out, material)
    grids = [grid_of(study) for study in studies]
    candidates = _trained(studies[0], material, [point for grid in grids for point in grid], checkpoint, log)
    first = 0
    for study, grid in zip(studies, grids, strict=True):
        points = range(first, first + len(grid))
        first = points.stop
        if not finished(study.out):
            evaluate_folds(study, material, candidates.select(points), grid)


def grid_of(settings: Settings) -> list[GridPoint]:
    """Return every combination of the settings that are lists."""

    def values(given: Any) -> list[Any]:
        return given if isinstance(given, list) else [given]

    points = []
    for lr, alpha, lambda_ in product(values(settings.lr), values(settings.alpha), values(settings.lambda_)):
        coefficients, given = study_coefficients(
            settings.model, {"alpha": alpha, "lambda_": lambda_, "distance": settings.distance}
        )
        points.append(GridPoint(lr, coefficients, {"lr": lr, **given}))
    return points


def recipe_of(settings: Settings, target: Target | None = None) -> Recipe:
    """Return the recipe of a training. target: that of the cohort, None while it is not known."""
    defaults = Classes if target is None else target
    smoothing = settings.label_smoothing
    return Recipe(
        epochs=settings.epochs,
        batch=defaults.batch if settings.batch is None else settings.batch,
        optimizer=settings.optimizer,
        weight_decay=settings.weight_decay,
        shuffle=True,
        warmup=first_eligible_epoch(settings.warmup, settings.epochs),
        patience=settings.patience,
        study_seed=settings.seed,
        schedule=settings.schedule,
        class_weights=settings.class_weights,
        label_smoothing=defaults.label_smoothing if smoothing is None else smoothing,
    )


def _write_folds(folder: Path, material: Material) -> None:
    for i, split in enumerate(material.splits):
        write_splits(folder / ("splits.tsv" if i == 0 else f"splits_{i}.tsv"), split)


def data_of(cohort: Cohort, divisions: Splits, used: Tensor) -> Data:
    """Return the facts about the data of a run. used: the mask of the bags whose slides the run recognises later."""
    store = cohort.store
    numbers, strata = cohort.strata
    return Data(
        fingerprint=cohort.fingerprint,
        store=store.fingerprint,
        store_type=store.dtype,
        trained_on=_short_checksums(cohort, used),
        truth=cohort.truth,
        encoder=store.encoder,
        pooling=store.pooling,
        geometry=store.geometry,
        tilings=store.tilings,
        width=store.width,
        classes=strata,
        slides=len(cohort.slides),
        patients=len(set(cohort.patients)),
        class_counts=tuple(np.bincount(numbers, minlength=len(strata)).tolist()),
        splits=divisions,
        **_target(cohort),
    )


def _target(cohort: Cohort) -> dict[str, Any]:
    """Return the facts about a target other than classes, which `Data.classes` describes."""
    if isinstance(cohort.target, Classes):
        return {}
    return {"target": cohort.target, "outcomes": _rows(cohort.outcomes)}


def _rows(outcomes: NDArray[Any]) -> tuple[tuple[float, ...], ...]:
    """Return outcomes (l) or (l, t) as one tuple per bag."""
    return tuple(tuple(row) for row in outcomes.reshape(len(outcomes), -1).tolist())


def _start_of(settings: Settings) -> str | None:
    return None if settings.warm_start is None else weights_key(read_run(settings.warm_start))


def _trained_on(material: Material) -> Tensor:
    """Return the mask of the bags that train or validate in any fold."""
    return ((material.roles == TRAIN) | (material.roles == VALIDATION)).any(0).any(0)


def _short_checksums(cohort: Cohort, used: Tensor) -> dict[str, str]:
    """Return the slides of some bags with short checksums of their features, by which `evaluate` recognises them."""
    checksums = cohort.checksums
    bags = [cohort.bags.ids[i] for i in used.nonzero().squeeze(-1).tolist()]
    return {slide: checksum[:SHORT] for bag in bags for slide, checksum in checksums[bag].items()}


def _trained(
    settings: Settings, material: Material, grid: list[GridPoint], checkpoint: Checkpoint, log: Log
) -> Candidates:
    cohort, recipe = material.cohort, recipe_of(settings, material.cohort.target)
    seeds = list(range(settings.seed, settings.seed + settings.seeds))
    kept_out = (material.roles == TEST) | (material.roles == CALIBRATION)
    given = material.roles.masked_fill(kept_out, UNUSED)
    models = given.shape[1] * len(seeds) * len(grid)
    device = pick_device(settings.device)

    def prepare(population: Population, everyone: Tensor) -> None:
        if settings.scale != "none":
            fit_scales(population, cohort.bags, everyone, settings.scale, device=device)
        if settings.warm_start is not None:
            population.warm_start(_baseline(settings.warm_start, material, population, len(grid)))

    train = partial(
        train_protocol,
        partial(build, settings, cohort.store.width, cohort.target),
        cohort.bags,
        given if len(given) > 1 else given[0],
        recipe=recipe,
        seeds=seeds,
        grid=grid,
        inner=settings.inner,
        prepare=prepare,
        device=device,
        precision=settings.precision,
        checkpoint=checkpoint,
    )
    if settings.cluster is None:
        with training_progress(settings.model, recipe.epochs, models) as on_epoch:
            return train(at_most=settings.models_at_once, on_epoch=on_epoch)
    assert cohort.bags.labels is not None
    store = partial(worker_bags, cohort.store.path.absolute(), cohort.store.fingerprint, cohort.bags.labels)
    with connected(settings.cluster) as ray, count_progress(settings.model, "parts") as on_part:
        cluster = Cluster(ray, store, device=settings.device, log=log, on_part=on_part)
        return train(at_most=settings.models_at_once or cluster.at_most(models), engine=cluster)


def _baseline(folder: Path, material: Material, population: Population, points: int) -> dict[str, Tensor]:
    """Read the weights of a run of the model without its branch, model by model. A run with other folds or seeds is refused."""
    run = read_run(folder)
    if run.data.fingerprint != material.cohort.fingerprint or run.data.splits != material.divisions:
        raise CarmilError(f"{folder} was trained on other data or folds: its test bags would leak into this run")
    if len(run.models) * points != len(population):
        raise CarmilError(
            f"{folder} has {plural(len(run.models), 'model')}, this run {len(population) // points} folds x "
            "seeds: give both runs the same --folds, --seeds and --inner"
        )
    return {name: tensor.repeat_interleave(points, 0) for name, tensor in run.population().state().items()}
