"""A study's run is a folder; everything a report shows is computed from it.

run.json               what was asked and of which data: settings, versions, machine, fingerprints, what was said
splits.tsv             who was trained, validated and tested on what (splits_1.tsv ... where each seed has its own)
checkpoint.safetensors where a killed training goes on, and where it is trained in parts
checkpoint.parts       the parts that have ended and those begun; both gone when it has ended
weights.safetensors    every parameter of the models that were kept, stacked
models.json            which fold and seed each of them is of, its epoch, hyper-parameters, threshold
history.json           learning curves of all models
predictions.parquet    what is answered for every slide by the fold in which it was tested; its maps' AUPRC+, where that is known
predictions.csv        the same for a spreadsheet
metrics.json           figures; written last: a run that has it is finished
evidence, faithfulness what `carmil explain` and `carmil faithfulness` found, if they were asked
card.md, report.html   for people; study.yaml holds the settings that the card's command cannot name
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
from carmil.models.standardised import Standardised
from carmil.training.population import Member, Population
from carmil.training.protocol import GridPoint, Trained
from carmil.training.runs import config_key, machine, plain
from carmil.weights import write_tensors

if TYPE_CHECKING:
    import pandas as pd


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
        return read_table(self.folder / "predictions.parquet")

    def history(self) -> dict[str, Any]:
        return _json(self.folder / "history.json")

    def population(self, device: str = "cpu") -> Population:
        """The models that were kept, in the order of `models`."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        facts = self.facts
        members = [Member(seed=model["seed"], lr=model["lr"]) for model in self.models]
        population = Population(
            lambda: build(facts["settings"], facts["width"], len(self.classes)), members, device=device
        )
        try:
            population.load_state(load_file(self.folder / "weights.safetensors"))
        except (OSError, SafetensorError) as error:
            raise CarmilError(f"{self.folder / 'weights.safetensors'} cannot be read ({error}): train again") from error
        return population


def build(settings: Mapping[str, Any], width: int, classes: int) -> BagModel:
    """A fresh model as the settings ask for it."""
    model = create_model(settings["model"], width, classes, **(settings["options"] or {}))
    return Standardised(model, width) if settings["standardise"] else model


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
        begun = _json(there)
        if begun.get("key") != key:
            differing = [name for name, value in settings.items() if begun.get("settings", {}).get(name) != value]
            why = f"its {', '.join(differing)} differ" if differing else f"its {_OTHERWISE[kind]} differ"
            raise CarmilError(f"{folder} holds another {kind} ({why}): choose another --out or remove it")
        now = {**begun["settings"], **{name: value for name, value in facts["settings"].items() if name in READ}}
        if now != begun["settings"]:
            write_text(there, json.dumps({**begun, "settings": now}, indent=2))
        return key
    write_text(there, json.dumps({"carmil": __version__, "key": key, "machine": machine(), **facts}, indent=2))
    return key


def finished(folder: Path) -> bool:
    return (folder / "metrics.json").is_file()


def read_run(folder: Path) -> StudyRun:
    if not (folder / "run.json").is_file():
        raise CarmilError(f"{folder} is no run: expected a folder that `carmil train` wrote")
    if not finished(folder):
        raise CarmilError(f"{folder} is a run that has not ended: start `carmil train` again with the same words")
    facts, models, metrics = (_json(folder / f"{name}.json") for name in ("run", "models", "metrics"))
    if isinstance(facts, dict) and "splits" not in facts:
        raise CarmilError(f"{folder} is a run of another kind: expected one that `carmil train` wrote")
    for name, sound in (
        ("run", _has(facts, settings=dict, classes=list, splits=list, width=int) and _sound_geometry(facts)),
        ("models", isinstance(models, list) and bool(models) and all(_has(one, seed=int, fold=int) for one in models)),
        ("metrics", _has(metrics, level=str, rule=str, summary=dict, intervals=dict, by_fold=list)),
    ):
        if not sound:
            raise CarmilError(
                f"{folder / name}.json is not as `carmil train` writes it: remove the run and train again"
            )
    return StudyRun(folder, facts, models, metrics)


def _has(found: Any, **kinds: type) -> bool:
    return isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in kinds.items())


def _sound_geometry(facts: dict[str, Any]) -> bool:
    try:
        TileGeometry(facts.get("tile_pixels"), facts.get("tile_mpp"))
    except ValueError:
        return False
    return True


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
    import pandas as pd

    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise CarmilError(f"{path} cannot be read ({error}): train again") from error


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CarmilError(f"{path} cannot be read ({error}): remove the run and train again") from error


def pick_device(device: str) -> str:
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"
