"""A finished run: its settings, data, models, figures, predictions, curves and weights.

run.json               the request: settings, versions, machine, fingerprints of the data, notes
splits.tsv             the role of every slide in every fold (splits_1.tsv ... if each seed has its own folds)
checkpoint.safetensors the state from which interrupted training resumes
checkpoint.parts       the finished and unfinished parts of the training; both files are removed at the end
weights.safetensors    every parameter of the selected models, stacked
scope.safetensors      the training bags of each of them, for the distance of other slides from the training cohort
models.json            the fold and seed of each of them, its epoch, hyper-parameters and threshold
history.json           learning curves of all models
predictions.parquet    the answer for every slide by the fold in which it was tested, one row per seed, and the answer of several
                       seeds together (joint_answer); AUPRC+ of its maps, if the truth is known; the prediction set of the
                       slide (and of the patient, if patients have several slides), of all models tested on it
predictions.csv        the same as text
calibration.json       the predictions of every model for the calibration slides, if the run has prediction sets
metrics.json           figures; written last, so that a run with this file is finished
evidence, faithfulness the results of `carmil explain` and `carmil faithfulness`
card.md, report.html   for people; study.yaml contains the settings that have no option in the card's command

The keys of these files are the names of fields in this module and in `facts`; no other room spells them.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
import torch

from carmil.bags.geometry import TileGeometry
from carmil.counterfactual import create_model
from carmil.errors import CarmilError
from carmil.models.contract import BagModel
from carmil.models.scaled_model import ScaledModel
from carmil.provenance import config_key
from carmil.runs.facts import Calibration, Data, FoldModel, Learning, Metrics
from carmil.runs.settings import WHERE, Settings, Value, current_names
from carmil.statistics.hazards import mean_of_steps
from carmil.targets import Classes, Target
from carmil.targets.decision import Decision, joint_decision
from carmil.targets.target import Training
from carmil.training.population import Member, Population
from carmil.training.recipe import TRAIN
from carmil.untrusted import check_not_stream, one_line_errors, parse_as, read_json, read_json_as, read_parquet
from carmil.words import plural

TRAIN_AGAIN = "remove the run and train again"
SHORT = 16  # characters of a slide's checksum that a run stores
# Settings that are paths. A run remains the same run if its data are moved.
PATHS = ("bags", "labels", "splits", "warm_start")
# Settings that version 0.1.0 did not have, and that count only where they are given.
OPTIONAL = ("target", "event", "kind", "loss", "grades", "adjust", "conformal")
# Columns of the predictions of a run with prediction sets.
SLIDE_SET, PATIENT_SET, SET_LEVEL = "prediction_set", "patient_set", "set_level"
DISTANCE = (
    "cohort_distance"  # column: how far a slide is from the training bags; above 1 it is outside the training cohort
)
# The facts that identify a run or a sweep.
KEYED = ("data", "truth", "classes", "target", "splits", "imported", "warm_start", "over")


@dataclass(frozen=True)
class Run:
    """A finished run.

    key: equal for equal settings and data. notes: on guesses made, and slides left out, in training.
    """

    folder: Path
    version: str
    key: str
    machine: Mapping[str, str]
    settings: Settings
    data: Data
    notes: tuple[str, ...]
    models: tuple[FoldModel, ...]
    metrics: Metrics

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @cached_property
    def target(self) -> Target:
        return self.data.target or Classes(names=self.data.classes)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the names of the models' outputs: the classes, or the outputs of another target. Evidence has one
        column for each.
        """
        return self.target.outputs

    @cached_property
    def tested_folds(self) -> list[int]:
        """Return the test fold of each model as numbered in predictions and figures: consecutive if each seed has its own folds."""
        folds = 1 + max(model.fold for model in self.models)
        seeds = sorted({model.seed for model in self.models})
        reshuffled = len(self.data.splits) > 1
        return [model.fold + reshuffled * folds * seeds.index(model.seed) for model in self.models]

    @property
    def thresholds(self) -> list[list[float | None]]:
        """Return the threshold of each model and the confidence below which it abstains, which, together with the
        weights, determine the answers.
        """
        return [[model.threshold, model.abstain_below] for model in self.models]

    @property
    def merges_slides(self) -> bool:
        """Return whether a patient's answer is computed from the answers for the patient's slides."""
        return self.metrics.level == "patient" and self.metrics.rule != "one-bag"

    def decisions(self, rows: Sequence[int]) -> list[Decision]:
        """Return the decision rule of each of these models by itself."""
        return [self.target.decision(self.models[row].threshold, self.models[row].abstain_below) for row in rows]

    def decision(self, rows: Sequence[int] | None = None) -> Decision:
        """Return the joint decision rule of some models; by default of all, which answer for new slides."""
        rows = range(len(self.models)) if rows is None else rows
        folds = {self.tested_folds[row] for row in rows}
        one_rule = len({(model.threshold, model.abstain_below) for model in self.models}) == 1
        origin = self.target.rule_origin(
            self.settings.threshold,
            self.decisions(rows),
            folds=() if one_rule or folds == set(self.tested_folds) else sorted(folds),
            level=self.metrics.level,
            patients=self.metrics.rule,
        )
        return replace(joint_decision(self.decisions(rows)), origin=origin)

    def training(self, rows: Sequence[int]) -> Training | None:
        """Return the facts about the training bags of these models that figures of their predictions need; None for
        classes.

        With several models, the outcomes are those of all their training bags, and the baseline is the mean of theirs.
        """
        if self.data.outcomes is None:
            return None
        outcomes = np.array(self.data.outcomes, dtype=np.float64)
        trained = np.zeros(len(outcomes), dtype=bool)
        seeds, inner = sorted({model.seed for model in self.models}), 1 + max(model.inner for model in self.models)
        for model in (self.models[row] for row in rows):
            division = self.data.splits[seeds.index(model.seed) if len(self.data.splits) > 1 else 0]
            trained |= np.array(division[model.fold * inner + model.inner]) == TRAIN
        baselines = [model.baseline.function for row in rows if (model := self.models[row]).baseline is not None]
        return Training(outcomes[trained], mean_of_steps(baselines) if baselines else None)

    def predictions(self) -> pd.DataFrame:
        """Read predictions: one row per test slide, fold and seed. All columns in use are validated."""
        if not self.data.splits:
            columns = [*self.target.label_columns, *self.target.prediction_columns()]
            return pd.DataFrame(columns=["fold", "seed", "slide", "patient", *columns])
        path = self.folder / "predictions.parquet"
        frame = read_table(path)
        _check_predictions(frame, self, path)
        return frame

    def history(self) -> Learning:
        """Read the learning curves of all trained models, one or more per selected model."""
        path = self.folder / "history.json"
        learning = read_json_as(path, Learning, "is not as `carmil train` writes it", TRAIN_AGAIN)
        trained = len(learning.best_epoch)
        curves = [*learning.train.values(), learning.validation]
        points = max(model.point for model in self.models)
        if (
            "cls" not in learning.train
            or trained % len(self.models)
            or points >= trained // len(self.models)
            or any(len(epoch) != trained for curve in curves for epoch in curve)
            or len({len(curve) for curve in curves}) > 1
            or max(model.best_epoch for model in self.models) >= len(learning.validation)
        ):
            raise CarmilError(f"{path} is of other models than models.json: {TRAIN_AGAIN}")
        return learning

    def population(self, device: str = "cpu") -> Population:
        """Read the selected models, in the order of `models`."""
        members = [Member(seed=model.seed, lr=model.lr) for model in self.models]
        return read_population(self.folder / "weights.safetensors", self.model, members, device=device)

    def model(self) -> BagModel:
        """Build a new model with the run's settings."""
        return build(self.settings, self.data.width, self.target)


def read_population(
    path: Path,
    make: Callable[[], BagModel],
    members: Sequence[Member],
    *,
    device: str,
    precision: str = "float32",
    advice: str = TRAIN_AGAIN,
) -> Population:
    """Read weights into models built by `make`. Sizes are compared before memory is allocated."""
    from safetensors.torch import load_file

    with one_line_errors(path, advice):
        state = load_file(path)
        with torch.device("meta"):
            model = make()
    needed = len(members) * sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    size = sum(tensor.numel() for tensor in state.values())
    if needed != size:
        raise CarmilError(f"{path} has {size:,} weights: expected {needed:,} for its models; {advice}")
    own = {name: tensor.is_floating_point() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for name, tensor in state.items():
        if tensor.is_floating_point() != own.get(name, tensor.is_floating_point()) or not tensor.isfinite().all():
            raise CarmilError(f"{path}: {name} has values that are not finite, or out of range for its type: {advice}")
    with one_line_errors(path, advice):
        population = Population(make, members, device=device, precision=precision)
        population.load_state(state)
    return population


def build(settings: "ModelSettings", width: int, target: Target) -> BagModel:
    """Build a new model from settings, with one output per output of the target."""
    options = settings.options or {}
    model = create_model(settings.model, width, len(target.outputs), init=settings.init, link=target.link(), **options)
    return model if settings.scale == "none" else ScaledModel(model, width)


class ModelSettings(Protocol):
    """The settings that define a model; `Settings` and `MILClassifier` have these attributes."""

    @property
    def model(self) -> str: ...
    @property
    def options(self) -> dict[str, Value] | None: ...
    @property
    def scale(self) -> str: ...
    @property
    def init(self) -> str: ...


def _check_models(models: Sequence[FoldModel], data: Data, path: Path) -> None:
    if not models:
        raise CarmilError(f"{path} lists no model: expected at least one; {TRAIN_AGAIN}")
    inner, seeds = 1 + max(model.inner for model in models), {model.seed for model in models}
    folds = _folds(data)
    if len({(model.fold, model.inner, model.seed) for model in models}) != len(models):
        raise CarmilError(f"{path} lists two models of the same fold and seed: {TRAIN_AGAIN}")
    for model in models:
        if (model.fold + 1) * inner > folds or len(data.splits or [()]) not in (1, len(seeds)):
            raise CarmilError(f"{path} has folds or seeds that the splits of run.json do not have: {TRAIN_AGAIN}")
        try:
            (data.target or Classes(names=data.classes)).decision(model.threshold, model.abstain_below)
        except CarmilError as error:
            raise CarmilError(f"{path}: {error}; {TRAIN_AGAIN}") from None


def _folds(data: Data) -> int:
    """Return the number of folds for which models were selected; an imported model without slides counts as one."""
    return len(data.splits[0]) if data.splits else 1


def _check_metrics(metrics: Metrics, target: Target, path: Path) -> None:
    if (metrics.calibration is None) == isinstance(target, Classes) or not _is_sound(metrics.calibration):
        raise CarmilError(f"{path}: calibration differs from what `carmil train` writes: {TRAIN_AGAIN}")
    for name, interval in metrics.intervals.items():
        if math.isnan(interval.low) != math.isnan(interval.high):
            raise CarmilError(f"{path}: intervals.{name} has one end only: {TRAIN_AGAIN}")
    if target.key_figure not in metrics.intervals:
        raise CarmilError(f"{path}: intervals.{target.key_figure} is missing: {TRAIN_AGAIN}")


def _is_sound(bins: Calibration | None) -> bool:
    """Return whether all bins of a calibration are complete, and their numbers from 0 to 1."""
    if bins is None:
        return True
    shares = [
        share
        for count, *pair in zip(bins.count, bins.confidence, bins.accuracy, strict=False)
        for share in (pair if count else [])
    ]
    complete = len(bins.count) == len(bins.confidence) == len(bins.accuracy) == len(bins.edges) - 1 > 0
    return complete and all(0 <= share <= 1 for share in shares)


def _check_predictions(frame: pd.DataFrame, run: Run, path: Path) -> None:
    words: tuple[str, ...] = ("slide", "patient")
    numbers, target = ("fold", "seed"), run.target
    names = [str(name) for name in frame.columns]
    branch = any(name in names for name in target.prediction_columns("cf"))
    if run.metrics.prediction_sets is not None:
        words += (SLIDE_SET, *((PATIENT_SET,) if PATIENT_SET in names else ()))
    further = [] if run.metrics.prediction_sets is None else [SET_LEVEL]
    further += [DISTANCE] if DISTANCE in names else []
    predicted = [name for kind in (("p", "cf") if branch else ("p",)) for name in target.prediction_columns(kind)]
    if missing := [
        name for name in (*words, *target.label_columns, *numbers, *further, *predicted) if name not in names
    ]:
        raise CarmilError(f"{path} has no column {missing[0]!r}: {TRAIN_AGAIN}")
    sound = (
        len(set(names)) == len(names)
        and len(frame)
        and all(frame[name].map(lambda value: isinstance(value, str)).all() for name in words)
        and all(frame[name].dtype.kind in "iu" for name in numbers)
        and all(frame[name].dtype.kind == "f" and np.isfinite(frame[name]).all() for name in (*further, *predicted))
        and target.are_sound({name: frame[name] for name in names}, predicted)
    )
    if not sound:
        raise CarmilError(
            f"{path} differs from what `carmil train` writes (types, probabilities or labels): {TRAIN_AGAIN}"
        )
    folds = np.unique(frame["fold"]).tolist()
    if folds != sorted({line.fold for line in run.metrics.by_fold}):
        raise CarmilError(f"{path} has different folds than metrics.json: {TRAIN_AGAIN}")
    tested = (1 + max(model.fold for model in run.models)) * len(run.data.splits)
    if not 0 <= folds[0] <= folds[-1] < tested:
        raise CarmilError(f"{path} has folds that no model was tested on: expected 0 to {tested - 1}; {TRAIN_AGAIN}")


def finished(folder: Path) -> bool:
    return (folder / "metrics.json").is_file()


@dataclass(frozen=True, kw_only=True)
class _RunFile(Data):
    """The contents of run.json."""

    carmil: str
    key: str
    machine: Mapping[str, str]
    settings: dict[str, Value]
    said: tuple[str, ...]
    tile_pixels: int | None = None
    tile_mpp: float | None = None


def read_run(folder: Path) -> Run:
    """Read a run, and validate all numbers that are used later."""
    if not folder.exists():
        raise CarmilError(f"{folder} does not exist: expected the folder of a run that `carmil train` wrote")
    if not (folder / "run.json").is_file():
        raise CarmilError(f"{folder} is not a run: expected a folder that `carmil train` wrote")
    if not finished(folder):
        raise CarmilError(f"{folder} is an unfinished run: run `carmil train` again with the same options to resume")
    path = folder / "run.json"
    raw = read_json(path, TRAIN_AGAIN)
    if isinstance(raw, dict) and "splits" not in raw:
        raise CarmilError(f"{folder} is a run of another kind: expected one that `carmil train` wrote")
    words = "is not as `carmil train` writes it"
    facts = parse_as(raw, _RunFile, f"{path} {words}", TRAIN_AGAIN)
    data = _data(facts, path)
    models = read_json_as(folder / "models.json", tuple[FoldModel, ...], words, TRAIN_AGAIN)
    _check_models(models, data, folder / "models.json")
    target = data.target or Classes(names=data.classes)
    metrics = _metrics(read_json(folder / "metrics.json", TRAIN_AGAIN), folder / "metrics.json", words)
    if data.splits:
        _check_metrics(metrics, target, folder / "metrics.json")
    settings = _settings(facts.settings, path)
    if len(models) != (expected := _folds(data) * settings.seeds):
        raise CarmilError(
            f"{folder / 'models.json'} lists {plural(len(models), 'model')}: expected {expected}, one per fold and seed of "
            f"run.json; {TRAIN_AGAIN}"
        )
    if not facts.carmil.startswith("0.1.") and facts.key != key_of(raw["settings"], raw):
        raise CarmilError(
            f"{path} was changed after it was written (its key does not match its contents): {TRAIN_AGAIN}"
        )
    return Run(folder, facts.carmil, facts.key, facts.machine, settings, data, facts.said, models, metrics)


def key_of(settings: Mapping[str, Value], facts: Mapping[str, Any]) -> str:
    """Return a fingerprint that identifies a run or a sweep. Paths do not count if the fingerprint of the data is known.

    Settings of OPTIONAL count only if given, so that runs that were begun without them keep their key.
    """
    counted = {
        name: value
        for name, value in settings.items()
        if ("data" not in facts or name not in PATHS) and (value is not None or name not in OPTIONAL)
    }
    return config_key({name: facts[name] for name in KEYED if name in facts} | {"settings": counted})


def _settings(given: Mapping[str, Value], path: Path) -> Settings:
    """Return the settings of a run; settings that it does not record have the defaults of 0.1.0."""
    known = {field.name for field in fields(Settings)} - {*WHERE}
    named = {name: value for name, value in current_names(given).items() if name in known}
    return Settings.of({"out": str(path.parent), "preset": "0.1", **named}, where=str(path))


def _data(facts: _RunFile, path: Path) -> Data:
    classes, splits = facts.classes, facts.splits
    least = 2 if facts.target is None else 1
    if len(set(classes)) != len(classes) or len(classes) < least or len(facts.class_counts) != len(classes):
        raise CarmilError(
            f"{path}: classes and class_counts do not match: expected one count for each of two "
            "or more different classes"
        )
    unsplit = not splits and facts.imported is None
    if unsplit or any(not division or len(division) != len(splits[0]) or not all(division) for division in splits):
        raise CarmilError(f"{path}: splits are empty or of different lengths: {TRAIN_AGAIN}")
    slides = len(splits[0][0]) if splits else 0
    if (facts.target is None) != (facts.outcomes is None) or len(facts.outcomes or range(slides)) != slides:
        raise CarmilError(f"{path}: expected a target and the outcomes of all slides, or neither: {TRAIN_AGAIN}")
    try:
        geometry = TileGeometry(facts.tile_pixels, facts.tile_mpp)
    except ValueError as error:
        raise CarmilError(f"{path}: {error}") from None
    return Data(**{field.name: getattr(facts, field.name) for field in fields(Data)} | {"geometry": geometry})


def _metrics(raw: Any, path: Path, words: str) -> Metrics:
    """Parse metrics.json, where the figures of a fold are in the same object as its number."""
    if isinstance(raw, dict) and isinstance(raw.get("by_fold"), list):
        raw = {**raw, "by_fold": [_fold_figures(line) for line in raw["by_fold"]]}
    return parse_as(raw, Metrics, f"{path} {words}", TRAIN_AGAIN)


def _fold_figures(line: Any) -> Any:
    if not isinstance(line, dict):
        return line
    own = {name: line[name] for name in ("fold", "seed", "threshold") if name in line}
    return {**own, "figures": {name: value for name, value in line.items() if name not in own}}


def weights_key(run: Run) -> str:
    """Return a fingerprint that changes with any weight."""
    return fingerprint_weights(run.folder)


def fingerprint_weights(folder: Path) -> str:
    """Return the fingerprint of the weights in a run's folder, which may be unfinished."""
    check_not_stream(folder / "weights.safetensors")
    return hashlib.sha256((folder / "weights.safetensors").read_bytes()).hexdigest()[:16]


def read_table(path: Path) -> pd.DataFrame:
    table = read_parquet(path, TRAIN_AGAIN)
    with one_line_errors(path, TRAIN_AGAIN):
        return table.to_pandas(ignore_metadata=True)  # pandas would trust the metadata of the file


def pick_device(device: str) -> str:
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"
