"""A study's run is a folder; everything a report shows is computed from it.

run.json               what was asked and of which data: settings, versions, machine, fingerprints, what was said
splits.tsv             who was trained, validated and tested on what (splits_1.tsv ... where each seed has its own)
checkpoint.safetensors where a killed training goes on, and where it is trained in parts
checkpoint.parts       the parts that have ended and those begun; both gone when it has ended
weights.safetensors    every parameter of the models that were kept, stacked
models.json            which fold and seed each of them is of, its epoch, hyper-parameters, threshold
history.json           learning curves of all models
predictions.parquet    the answer to every slide by the fold in which it was tested, one row per seed, and that of several seeds
                       together (joint_answer); its maps' AUPRC+, where that is known
predictions.csv        the same for a spreadsheet
metrics.json           figures; written last: a run that has it is finished
evidence, faithfulness what `carmil explain` and `carmil faithfulness` found, if they were asked
card.md, report.html   for people; study.yaml holds the settings that the card's command cannot name
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from carmil import __version__
from carmil.bags.geometry import TileGeometry
from carmil.counterfactual import create_model
from carmil.csv_files import frame_text
from carmil.errors import CarmilError
from carmil.files import whole_file, write_text
from carmil.models.contract import BagModel
from carmil.models.scaled import Scaled
from carmil.runs.decision import Decision
from carmil.runs.settings import WHERE, Settings, current_names
from carmil.studies.run_schema import Learning, Metrics, ModelFacts, RunFacts
from carmil.training.population import Member, Population
from carmil.training.protocol import GridPoint, Trained
from carmil.training.runs import config_key, machine, plain
from carmil.untrusted import check_type, one_line_errors, read_json, read_parquet
from carmil.weights import write_tensors
from carmil.words import plural

if TYPE_CHECKING:
    import pandas as pd


_TRAIN_AGAIN = "remove the run and train again"


@dataclass(frozen=True)
class StudyRun:
    """A finished run, read back."""

    folder: Path
    facts: dict[str, Any]
    models: list[dict[str, Any]]
    metrics: dict[str, Any]

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.facts["classes"])

    @property
    def settings(self) -> dict[str, Any]:
        return self.facts["settings"]

    @property
    def geometry(self) -> TileGeometry:
        """Of the tiles that the models were trained on; unknown in runs of 0.1.0."""
        return TileGeometry(self.facts.get("tile_pixels"), self.facts.get("tile_mpp"))

    @property
    def thresholds(self) -> list[list[float | None]]:
        """What each model's answers rest on beside its weights: its threshold, and the confidence below which it has none."""
        return [[model["threshold"], model["abstain_below"]] for model in self.models]

    def predictions(self) -> "pd.DataFrame":
        """One row per test slide, fold and seed; every column that is read is checked."""
        path = self.folder / "predictions.parquet"
        frame = read_table(path)
        _check_predictions(frame, self, path)
        return frame

    def history(self) -> Learning:
        """Learning curves of all models that were trained; of those of a grid, one in `grid` was kept."""
        path = self.folder / "history.json"
        found = read_json(path, _TRAIN_AGAIN)
        check_type(found, Learning, f"{path} is not as `carmil train` writes it", _TRAIN_AGAIN)
        trained = len(found["best_epoch"])
        curves = [*found["train"].values(), found["validation"]]
        points = max(model["point"] for model in self.models)
        if (
            "cls" not in found["train"]
            or trained % len(self.models)
            or points >= trained // len(self.models)
            or any(len(epoch) != trained for curve in curves for epoch in curve)
            or len({len(curve) for curve in curves}) > 1
            or max(model["best_epoch"] for model in self.models) >= len(found["validation"])
        ):
            raise CarmilError(f"{path} is of other models than models.json: {_TRAIN_AGAIN}")
        return found

    def population(self, device: str = "cpu") -> Population:
        """The models that were kept, in the order of `models`."""
        facts = self.facts
        members = [Member(seed=model["seed"], lr=model["lr"]) for model in self.models]
        return read_population(
            self.folder / "weights.safetensors",
            lambda: build(facts["settings"], facts["width"], len(self.classes)),
            members,
            device=device,
        )


def read_population(
    path: Path,
    make: Callable[[], BagModel],
    members: Sequence[Member],
    *,
    device: str,
    precision: str = "float32",
    advice: str = _TRAIN_AGAIN,
) -> Population:
    """The models `make` with the weights of a file. Their sizes are compared before memory is taken."""
    from safetensors.torch import load_file

    with one_line_errors(path, advice):
        state = load_file(path)
        with torch.device("meta"):
            model = make()
    needed = len(members) * sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    found = sum(tensor.numel() for tensor in state.values())
    if needed != found:
        raise CarmilError(f"{path} holds {found:,} weights, and the models they belong to have {needed:,}: {advice}")
    population = Population(make, members, device=device, precision=precision)
    population.load_state(state)
    return population


def build(settings: Mapping[str, Any], width: int, classes: int) -> BagModel:
    """A fresh model as the settings ask for it."""
    model = create_model(settings["model"], width, classes, init=settings["init"], **(settings["options"] or {}))
    return model if settings["scale"] == "none" else Scaled(model, width)


SHORT = 16  # letters of a slide's checksum that a run keeps
KEYED = (
    "settings",
    "data",
    "truth",
    "classes",
    "splits",
    "warm_start",
    "over",
)  # what makes a run or a sweep another one
READ = ("bags", "labels", "splits", "warm_start")  # settings that are paths
_WRITTEN = {  # beside KIND.json; what a user has under such a name is not overwritten
    "run": (
        *("splits.tsv", "weights.safetensors", "models.json", "history.json", "metrics.json"),
        *("predictions.parquet", "predictions.csv", "card.md", "study.yaml", "report.html"),
    ),
    "sweep": ("report.html", "sweep.md", "sweep.png"),
    "explanation": ("summary.json", "summary.csv", "summary.parquet"),
}
_OTHERWISE = {"run": "data or splits", "sweep": "data, splits or grid", "explanation": "slides"}


def begin(folder: Path, facts: dict[str, Any], *, kind: str = "run") -> str:
    """Writes run.json (or KIND.json), or finds the same begun before; gives its key. Another one there is refused.

    Where the facts know what the data are, it does not matter where they lie: a moved folder is the same run, and remembers the
    new place.
    """
    settings = {name: value for name, value in facts["settings"].items() if "data" not in facts or name not in READ}
    key = config_key({name: facts[name] for name in KEYED if name in facts} | {"settings": settings})
    there = folder / f"{kind}.json"
    if there.exists():
        begun = read_json(there, _TRAIN_AGAIN)
        check_type(begun, dict[str, Any], str(there), _TRAIN_AGAIN)
        if begun.get("key") != key:
            differing = [name for name, value in settings.items() if begun.get("settings", {}).get(name) != value]
            why = f"its {', '.join(differing)} differ" if differing else f"its {_OTHERWISE[kind]} differ"
            raise CarmilError(f"{folder} holds another {kind} ({why}): choose another --out or remove it")
        check_type(begun.get("settings"), dict[str, Any], f"{there}: settings", _TRAIN_AGAIN)
        now = {**begun["settings"], **{name: value for name, value in facts["settings"].items() if name in READ}}
        if now != begun["settings"]:
            write_text(there, json.dumps({**begun, "settings": now}, indent=2))
        return key
    if taken := next((name for name in _WRITTEN[kind] if (folder / name).exists()), None):
        raise CarmilError(
            f"{folder} holds {taken} but no {kind}.json: that file is not overwritten; choose another --out or move the file"
        )
    write_text(there, json.dumps({"carmil": __version__, "key": key, "machine": machine(), **facts}, indent=2))
    return key


def finished(folder: Path) -> bool:
    return (folder / "metrics.json").is_file()


def read_run(folder: Path) -> StudyRun:
    if not (folder / "run.json").is_file():
        raise CarmilError(f"{folder} is no run: expected a folder that `carmil train` wrote")
    if not finished(folder):
        raise CarmilError(f"{folder} is a run that has not ended: start `carmil train` again with the same words")
    facts, models, metrics = (read_json(folder / f"{name}.json", _TRAIN_AGAIN) for name in ("run", "models", "metrics"))
    if isinstance(facts, dict) and "splits" not in facts:
        raise CarmilError(f"{folder} is a run of another kind: expected one that `carmil train` wrote")
    for name, found, kind in (
        ("run", facts, RunFacts),
        ("models", models, list[ModelFacts]),
        ("metrics", metrics, Metrics),
    ):
        check_type(found, kind, f"{folder / name}.json is not as `carmil train` writes it", _TRAIN_AGAIN)
    _check_facts(facts, folder / "run.json")
    _check_models(models, facts, folder / "models.json")
    _check_metrics(metrics, folder / "metrics.json")
    return StudyRun(folder, facts, models, metrics)


def _check_facts(facts: RunFacts, path: Path) -> None:
    """Settings that `carmil train` would take, and numbers that fit each other.

    Settings that the run does not know are as 0.1.0 had them."""
    given = {name: value for name, value in current_names(facts["settings"]).items() if name not in WHERE}
    known = {field.name for field in fields(Settings)}
    checked = Settings.of(
        {"out": str(path.parent), "preset": "0.1", **{n: v for n, v in given.items() if n in known}}, where=str(path)
    ).asked()
    facts["settings"] = given | {name: value for name, value in checked.items() if name not in WHERE}
    classes, splits = facts["classes"], facts["splits"]
    try:
        TileGeometry(facts.get("tile_pixels"), facts.get("tile_mpp"))
    except ValueError as error:
        raise CarmilError(f"{path}: {error}") from None
    if len(set(classes)) != len(classes) or len(classes) < 2 or len(facts["class_counts"]) != len(classes):
        raise CarmilError(f"{path}: classes and class_counts do not fit: expected two or more different classes")
    if facts["width"] < 1:
        raise CarmilError(f"{path}: width is {facts['width']}: expected at least 1")
    if not splits or any(not division or len(division) != len(splits[0]) or not all(division) for division in splits):
        raise CarmilError(f"{path}: splits are empty or of different lengths: {_TRAIN_AGAIN}")


def _check_models(models: list[ModelFacts], facts: RunFacts, path: Path) -> None:
    if not models:
        raise CarmilError(f"{path} lists no model: {_TRAIN_AGAIN}")
    inner, seeds = 1 + max(model["inner"] for model in models), {model["seed"] for model in models}
    expected = len(facts["splits"][0]) * facts["settings"]["seeds"]
    if len(models) != expected:
        raise CarmilError(
            f"{path} lists {plural(len(models), 'model')}: expected {expected}, one per fold and seed of run.json; {_TRAIN_AGAIN}"
        )
    if len({(model["fold"], model["inner"], model["seed"]) for model in models}) != len(models):
        raise CarmilError(f"{path} lists two models of the same fold and seed: {_TRAIN_AGAIN}")
    for model in models:
        if min(model[name] for name in ("fold", "inner", "seed", "point", "best_epoch")) < 0 or model["seed"] >= 2**32:
            raise CarmilError(f"{path}: a fold, seed, point or epoch is outside its range: {_TRAIN_AGAIN}")
        if (model["fold"] + 1) * inner > len(facts["splits"][0]) or len(facts["splits"]) not in (1, len(seeds)):
            raise CarmilError(f"{path} has folds or seeds that the splits of run.json do not have: {_TRAIN_AGAIN}")
        two = ("validation_sensitivity", "validation_specificity", "threshold_said")
        if len(facts["classes"]) == 2 and not all(name in model for name in two):
            raise CarmilError(f"{path} lacks {' or '.join(two)} of a model: {_TRAIN_AGAIN}")
        try:
            Decision(tuple(facts["classes"]), model["threshold"], model["abstain_below"])
        except CarmilError as error:
            raise CarmilError(f"{path}: {error}; {_TRAIN_AGAIN}") from None


def _check_metrics(metrics: Metrics, path: Path) -> None:
    bins = metrics["calibration"]
    shares = [
        share
        for count, *pair in zip(bins["count"], bins["confidence"], bins["accuracy"], strict=False)
        for share in (pair if count else [])
    ]
    if (
        not len(bins["count"]) == len(bins["confidence"]) == len(bins["accuracy"]) == len(bins["edges"]) - 1
        or not bins["count"]
        or min(bins["count"]) < 0
        or any(share is None or not 0 <= share <= 1 for share in (*shares, *bins["edges"]))
    ):
        raise CarmilError(f"{path}: calibration is not as `carmil train` writes it: {_TRAIN_AGAIN}")
    for line in metrics["by_fold"]:
        if not all(isinstance(line.get(name), int) for name in ("fold", "seed")):
            raise CarmilError(f"{path}: a line of by_fold has no fold or seed: {_TRAIN_AGAIN}")
    for name, interval in metrics["intervals"].items():
        if (interval["low"] is None) != (interval["high"] is None):
            raise CarmilError(f"{path}: intervals.{name} has one end only: {_TRAIN_AGAIN}")
    if "auc" not in metrics["intervals"]:
        raise CarmilError(f"{path}: intervals.auc is missing: {_TRAIN_AGAIN}")


def _check_predictions(frame: "pd.DataFrame", run: StudyRun, path: Path) -> None:
    import numpy as np

    words, numbers = ("slide", "patient", "label"), ("fold", "seed")
    names = [str(name) for name in frame.columns]
    kinds = ("p", "cf") if any(f"cf_{name}" in names for name in run.classes) else ("p",)
    shares = [f"{kind}_{name}" for kind in kinds for name in run.classes]
    if missing := [name for name in (*words, *numbers, *shares) if name not in names]:
        raise CarmilError(f"{path} has no column {missing[0]!r}: {_TRAIN_AGAIN}")
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
        raise CarmilError(f"{path} is not as `carmil train` writes it (types, probabilities or labels): {_TRAIN_AGAIN}")
    folds = np.unique(frame["fold"]).tolist()
    if folds != sorted({line["fold"] for line in run.metrics["by_fold"]}):
        raise CarmilError(f"{path} has other folds than metrics.json: {_TRAIN_AGAIN}")
    tested = (1 + max(model["fold"] for model in run.models)) * len(run.facts["splits"])
    if not 0 <= folds[0] <= folds[-1] < tested:
        raise CarmilError(f"{path} has folds that no model was tested on: expected 0 to {tested - 1}; {_TRAIN_AGAIN}")


def weights_key(run: StudyRun) -> str:
    """Changes with any weight."""
    return hashlib.sha256((run.folder / "weights.safetensors").read_bytes()).hexdigest()[:16]


def write_models(folder: Path, trained: Trained, grid: list[GridPoint], points: list[dict[str, Any]]) -> None:
    """Weights, models.json and history.json. points: what else is known of each model."""
    write_tensors(folder / "weights.safetensors", trained.population.state())
    models = [
        {**asdict(kept), "lr": grid[kept.point].lr, "settings": dict(grid[kept.point].settings), **point}
        for kept, point in zip(trained.kept, points, strict=True)
    ]
    write_text(folder / "history.json", json.dumps(plain(asdict(trained.history))))
    write_text(folder / "models.json", json.dumps(plain(models), indent=2))


def write_table(path: Path, frame: "pd.DataFrame") -> None:
    with whole_file(path) as aside:
        frame.to_parquet(aside, index=False)


def write_predictions(folder: Path, frame: "pd.DataFrame") -> None:
    """predictions.parquet, and the same as predictions.csv for a spreadsheet."""
    write_table(folder / "predictions.parquet", frame)
    write_text(folder / "predictions.csv", frame_text(frame))


def read_table(path: Path) -> "pd.DataFrame":
    table = read_parquet(path, _TRAIN_AGAIN)
    with one_line_errors(path, _TRAIN_AGAIN):
        return table.to_pandas(ignore_metadata=True)  # pandas believes whatever it finds there


def pick_device(device: str) -> str:
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"
