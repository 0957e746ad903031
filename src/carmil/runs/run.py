"""A finished run: its settings, data, models, figures, predictions, curves and weights.

run.json               the request: settings, versions, machine, fingerprints of the data, notes
splits.tsv             the role of every slide in every fold (splits_1.tsv ... where each seed has its own folds)
checkpoint.safetensors where an interrupted training resumes
checkpoint.parts       the parts of it that have ended and that have begun; both files are removed at the end
weights.safetensors    every parameter of the models that were kept, stacked
models.json            the fold and seed of each of them, its epoch, hyper-parameters and threshold
history.json           learning curves of all models
predictions.parquet    the answer for every slide by the fold in which it was tested, one row per seed, and the answer of several
                       seeds together (joint_answer); AUPRC+ of its maps, where the truth is known
predictions.csv        the same for a spreadsheet
metrics.json           figures; written last: a run that has it is finished
evidence, faithfulness the results of `carmil explain` and `carmil faithfulness`
card.md, report.html   for people; study.yaml holds the settings that have no option in the card's command

Keys of these files are the names of fields here and in `facts`; no other room spells them.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from carmil.bags.geometry import TileGeometry
from carmil.counterfactual import create_model
from carmil.errors import CarmilError
from carmil.models.contract import BagModel
from carmil.models.scaled_model import ScaledModel
from carmil.provenance import config_key
from carmil.runs.decision import Decision, joint_decision, rule_origin
from carmil.runs.facts import Data, FoldModel, Learning, Metrics
from carmil.runs.settings import WHERE, Settings, Value, current_names
from carmil.training.population import Member, Population
from carmil.untrusted import check_not_stream, one_line_errors, parse_as, read_json, read_json_as, read_parquet
from carmil.words import plural

if TYPE_CHECKING:
    import pandas as pd

TRAIN_AGAIN = "remove the run and train again"
SHORT = 16  # letters of a slide's checksum that a run keeps
# Settings that are paths: where data lie does not make a run another one.
PATHS = ("bags", "labels", "splits", "warm_start")
# What makes a run or a sweep another one.
KEYED = ("data", "truth", "classes", "splits", "warm_start", "over")


@dataclass(frozen=True)
class Run:
    """A finished run.

    key: equal for equal settings and data. notes: what was guessed or left out while it was trained.
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

    @property
    def classes(self) -> tuple[str, ...]:
        return self.data.classes

    @cached_property
    def tested_folds(self) -> list[int]:
        """The test fold of each model as numbered in predictions and figures: consecutive where each seed has its own folds."""
        folds = 1 + max(model.fold for model in self.models)
        seeds = sorted({model.seed for model in self.models})
        reshuffled = len(self.data.splits) > 1
        return [model.fold + reshuffled * folds * seeds.index(model.seed) for model in self.models]

    @property
    def thresholds(self) -> list[list[float | None]]:
        """The threshold of each model, and the confidence below which it gives no answer: with the weights, what answers
        depend on."""
        return [[model.threshold, model.abstain_below] for model in self.models]

    @property
    def merges_slides(self) -> bool:
        """Whether a patient's answer is computed from the answers for their slides."""
        return self.metrics.level == "patient" and self.metrics.rule != "one-bag"

    def decisions(self, rows: Sequence[int]) -> list[Decision]:
        """The decision rule of each of these models by itself."""
        return [Decision(self.classes, self.models[row].threshold, self.models[row].abstain_below) for row in rows]

    def decision(self, rows: Sequence[int] | None = None) -> Decision:
        """The joint decision rule of some models; by default of all, which answer for new slides."""
        rows = range(len(self.models)) if rows is None else rows
        folds = {self.tested_folds[row] for row in rows}
        one_rule = len({(model.threshold, model.abstain_below) for model in self.models}) == 1
        origin = rule_origin(
            self.settings.threshold,
            self.decisions(rows),
            folds=() if one_rule or folds == set(self.tested_folds) else sorted(folds),
            level=self.metrics.level,
            patients=self.metrics.rule,
        )
        return replace(joint_decision(self.decisions(rows)), origin=origin)

    def predictions(self) -> "pd.DataFrame":
        """Read one row per test slide, fold and seed; every column that is used is checked."""
        path = self.folder / "predictions.parquet"
        frame = read_table(path)
        _check_predictions(frame, self, path)
        return frame

    def history(self) -> Learning:
        """Read the learning curves of all models that were trained, one or more per model that was kept."""
        path = self.folder / "history.json"
        found = read_json_as(path, Learning, "is not as `carmil train` writes it", TRAIN_AGAIN)
        trained = len(found.best_epoch)
        curves = [*found.train.values(), found.validation]
        points = max(model.point for model in self.models)
        if (
            "cls" not in found.train
            or trained % len(self.models)
            or points >= trained // len(self.models)
            or any(len(epoch) != trained for curve in curves for epoch in curve)
            or len({len(curve) for curve in curves}) > 1
            or max(model.best_epoch for model in self.models) >= len(found.validation)
        ):
            raise CarmilError(f"{path} is of other models than models.json: {TRAIN_AGAIN}")
        return found

    def population(self, device: str = "cpu") -> Population:
        """Read the models that were kept, in the order of `models`."""
        members = [Member(seed=model.seed, lr=model.lr) for model in self.models]
        return read_population(self.folder / "weights.safetensors", self.model, members, device=device)

    def model(self) -> BagModel:
        """Build a fresh model like the run's."""
        return build(self.settings, self.data.width, len(self.classes))


def read_population(
    path: Path,
    make: Callable[[], BagModel],
    members: Sequence[Member],
    *,
    device: str,
    precision: str = "float32",
    advice: str = TRAIN_AGAIN,
) -> Population:
    """Read weights into models made by `make`. Sizes are compared before memory is allocated."""
    from safetensors.torch import load_file

    with one_line_errors(path, advice):
        state = load_file(path)
        with torch.device("meta"):
            model = make()
    needed = len(members) * sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    found = sum(tensor.numel() for tensor in state.values())
    if needed != found:
        raise CarmilError(f"{path} holds {found:,} weights, and the models they belong to have {needed:,}: {advice}")
    own = {name: tensor.is_floating_point() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for name, tensor in state.items():
        if tensor.is_floating_point() != own.get(name, tensor.is_floating_point()) or not tensor.isfinite().all():
            raise CarmilError(f"{path}: {name} holds values that are not finite numbers of its type: {advice}")
    with one_line_errors(path, advice):
        population = Population(make, members, device=device, precision=precision)
        population.load_state(state)
    return population


def build(settings: "ModelSettings", width: int, classes: int) -> BagModel:
    """Build a fresh model from settings."""
    model = create_model(settings.model, width, classes, init=settings.init, **(settings.options or {}))
    return model if settings.scale == "none" else ScaledModel(model, width)


class ModelSettings(Protocol):
    """The settings that define a model; `Settings` and `MILClassifier` have them."""

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
        raise CarmilError(f"{path} lists no model: {TRAIN_AGAIN}")
    inner, seeds = 1 + max(model.inner for model in models), {model.seed for model in models}
    if len({(model.fold, model.inner, model.seed) for model in models}) != len(models):
        raise CarmilError(f"{path} lists two models of the same fold and seed: {TRAIN_AGAIN}")
    for model in models:
        if (model.fold + 1) * inner > len(data.splits[0]) or len(data.splits) not in (1, len(seeds)):
            raise CarmilError(f"{path} has folds or seeds that the splits of run.json do not have: {TRAIN_AGAIN}")
        try:
            Decision(data.classes, model.threshold, model.abstain_below)
        except CarmilError as error:
            raise CarmilError(f"{path}: {error}; {TRAIN_AGAIN}") from None


def _check_metrics(metrics: Metrics, path: Path) -> None:
    bins = metrics.calibration
    shares = [
        share
        for count, *pair in zip(bins.count, bins.confidence, bins.accuracy, strict=False)
        for share in (pair if count else [])
    ]
    if (
        not len(bins.count) == len(bins.confidence) == len(bins.accuracy) == len(bins.edges) - 1
        or not bins.count
        or any(not 0 <= share <= 1 for share in shares)
    ):
        raise CarmilError(f"{path}: calibration is not as `carmil train` writes it: {TRAIN_AGAIN}")
    for name, interval in metrics.intervals.items():
        if math.isnan(interval.low) != math.isnan(interval.high):
            raise CarmilError(f"{path}: intervals.{name} has one end only: {TRAIN_AGAIN}")
    if "auc" not in metrics.intervals:
        raise CarmilError(f"{path}: intervals.auc is missing: {TRAIN_AGAIN}")


def _check_predictions(frame: "pd.DataFrame", run: Run, path: Path) -> None:
    import numpy as np

    words, numbers = ("slide", "patient", "label"), ("fold", "seed")
    names = [str(name) for name in frame.columns]
    kinds = ("p", "cf") if any(f"cf_{name}" in names for name in run.classes) else ("p",)
    shares = [f"{kind}_{name}" for kind in kinds for name in run.classes]
    if missing := [name for name in (*words, *numbers, *shares) if name not in names]:
        raise CarmilError(f"{path} has no column {missing[0]!r}: {TRAIN_AGAIN}")
    sound = (
        len(set(names)) == len(names)
        and len(frame)
        and all(frame[name].map(lambda value: isinstance(value, str)).all() for name in words)
        and all(frame[name].dtype.kind in "iu" for name in numbers)
        and all(frame[name].dtype.kind == "f" for name in shares)
        and all(frame[name].between(-1e-6, 1 + 1e-6).all() for name in shares)
        and frame["label"].isin(run.classes).all()
    )
    if not sound:
        raise CarmilError(f"{path} is not as `carmil train` writes it (types, probabilities or labels): {TRAIN_AGAIN}")
    folds = np.unique(frame["fold"]).tolist()
    if folds != sorted({line.fold for line in run.metrics.by_fold}):
        raise CarmilError(f"{path} has other folds than metrics.json: {TRAIN_AGAIN}")
    tested = (1 + max(model.fold for model in run.models)) * len(run.data.splits)
    if not 0 <= folds[0] <= folds[-1] < tested:
        raise CarmilError(f"{path} has folds that no model was tested on: expected 0 to {tested - 1}; {TRAIN_AGAIN}")


def finished(folder: Path) -> bool:
    return (folder / "metrics.json").is_file()


@dataclass(frozen=True, kw_only=True)
class _RunFile(Data):
    """run.json."""

    carmil: str
    key: str
    machine: Mapping[str, str]
    settings: dict[str, Value]
    said: tuple[str, ...]
    tile_pixels: int | None = None
    tile_mpp: float | None = None


def read_run(folder: Path) -> Run:
    """Read a run and check every number that others rely on."""
    if not folder.exists():
        raise CarmilError(f"{folder} does not exist: expected the folder of a run that `carmil train` wrote")
    if not (folder / "run.json").is_file():
        raise CarmilError(f"{folder} is no run: expected a folder that `carmil train` wrote")
    if not finished(folder):
        raise CarmilError(
            f"{folder} is a run that has not ended: run `carmil train` again with the same options to resume"
        )
    path = folder / "run.json"
    raw = read_json(path, TRAIN_AGAIN)
    if isinstance(raw, dict) and "splits" not in raw:
        raise CarmilError(f"{folder} is a run of another kind: expected one that `carmil train` wrote")
    words = "is not as `carmil train` writes it"
    facts = parse_as(raw, _RunFile, f"{path} {words}", TRAIN_AGAIN)
    data = _data(facts, path)
    models = read_json_as(folder / "models.json", tuple[FoldModel, ...], words, TRAIN_AGAIN)
    _check_models(models, data, folder / "models.json")
    metrics = _metrics(read_json(folder / "metrics.json", TRAIN_AGAIN), folder / "metrics.json", words)
    settings = _settings(facts.settings, path)
    if len(models) != (expected := len(data.splits[0]) * settings.seeds):
        raise CarmilError(
            f"{folder / 'models.json'} lists {plural(len(models), 'model')}: expected {expected}, one per fold and seed of "
            f"run.json; {TRAIN_AGAIN}"
        )
    if not facts.carmil.startswith("0.1.") and facts.key != key_of(raw["settings"], raw):
        raise CarmilError(f"{path} was changed after it was written (its key does not fit): {TRAIN_AGAIN}")
    return Run(folder, facts.carmil, facts.key, facts.machine, settings, data, facts.said, models, metrics)


def key_of(settings: Mapping[str, Value], facts: Mapping[str, Any]) -> str:
    """A fingerprint that tells runs or sweeps apart. Paths do not count where the fingerprint of the data is known."""
    counted = {name: value for name, value in settings.items() if "data" not in facts or name not in PATHS}
    return config_key({name: facts[name] for name in KEYED if name in facts} | {"settings": counted})


def _settings(given: Mapping[str, Value], path: Path) -> Settings:
    """Settings as `carmil train` takes them; those that the run does not record are as in 0.1.0."""
    known = {field.name for field in fields(Settings)} - {*WHERE}
    named = {name: value for name, value in current_names(given).items() if name in known}
    return Settings.of({"out": str(path.parent), "preset": "0.1", **named}, where=str(path))


def _data(facts: _RunFile, path: Path) -> Data:
    classes, splits = facts.classes, facts.splits
    if len(set(classes)) != len(classes) or len(classes) < 2 or len(facts.class_counts) != len(classes):
        raise CarmilError(f"{path}: classes and class_counts do not fit: expected two or more different classes")
    if not splits or any(not division or len(division) != len(splits[0]) or not all(division) for division in splits):
        raise CarmilError(f"{path}: splits are empty or of different lengths: {TRAIN_AGAIN}")
    try:
        geometry = TileGeometry(facts.tile_pixels, facts.tile_mpp)
    except ValueError as error:
        raise CarmilError(f"{path}: {error}") from None
    return Data(**{field.name: getattr(facts, field.name) for field in fields(Data)} | {"geometry": geometry})


def _metrics(raw: Any, path: Path, words: str) -> Metrics:
    """Parse metrics.json, which has the figures of a fold beside its number, not in a mapping of their own."""
    if isinstance(raw, dict) and isinstance(raw.get("by_fold"), list):
        raw = {**raw, "by_fold": [_fold_figures(line) for line in raw["by_fold"]]}
    found = parse_as(raw, Metrics, f"{path} {words}", TRAIN_AGAIN)
    _check_metrics(found, path)
    return found


def _fold_figures(line: Any) -> Any:
    if not isinstance(line, dict):
        return line
    own = {name: line[name] for name in ("fold", "seed", "threshold") if name in line}
    return {**own, "figures": {name: value for name, value in line.items() if name not in own}}


def weights_key(run: Run) -> str:
    """A fingerprint that changes with any weight."""
    check_not_stream(run.folder / "weights.safetensors")
    return hashlib.sha256((run.folder / "weights.safetensors").read_bytes()).hexdigest()[:16]


def read_table(path: Path) -> "pd.DataFrame":
    table = read_parquet(path, TRAIN_AGAIN)
    with one_line_errors(path, TRAIN_AGAIN):
        return table.to_pandas(ignore_metadata=True)  # pandas believes whatever it finds there


def pick_device(device: str) -> str:
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"
