"""Write a run folder. `metrics.json` is written last: a run with this file is finished."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from carmil import __version__
from carmil.csv_files import frame_text
from carmil.errors import CarmilError
from carmil.files import atomic_file, write_text
from carmil.provenance import machine, to_json
from carmil.runs.facts import Data, FoldModel, Metrics, Spread
from carmil.runs.run import PATHS, TRAIN_AGAIN, key_of
from carmil.runs.settings import Settings, Value
from carmil.training.history import History
from carmil.training.population import Population
from carmil.untrusted import parse_as, read_json
from carmil.weights import write_tensors

_WRITTEN = {  # files written beside KIND.json; a user's file of such a name is not overwritten
    "run": (
        *("splits.tsv", "weights.safetensors", "scope.safetensors", "models.json", "history.json", "metrics.json"),
        *("calibration.json", "predictions.parquet", "predictions.csv", "card.md", "study.yaml", "report.html"),
    ),
    "sweep": ("report.html", "sweep.md", "sweep.png"),
    "explanation": ("summary.json", "summary.csv", "summary.parquet"),
}
_OF_SOME = ("target", "outcomes", "imported")  # written for other targets than classes, and for imported models
_OTHERWISE = {"run": "data or splits", "sweep": "data, splits or grid", "explanation": "slides"}


Splits = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class SweepPoint:
    """A point of a sweep, as in sweep.json: its values, and the figures of its run."""

    name: str
    values: Mapping[str, Value]
    validation_loss: Spread
    summary: Mapping[str, Spread]
    idle_branch: bool
    chosen_on_validation_bags: bool


def begin_run(
    folder: Path, settings: Settings, data: Data, *, warm_start: str | None = None, notes: Sequence[str] = ()
) -> str:
    """Write run.json, or check that it contains the same run; return its key. Another run in the folder is refused.

    warm_start: the key of the weights that the models start from.
    """
    of_some = {} if data.target is None else {"target": asdict(data.target), "outcomes": to_json(data.outcomes)}
    if data.imported is not None:
        of_some["imported"] = asdict(data.imported)
    facts = {
        "data": data.fingerprint,
        **{name: value for name, value in vars(data).items() if name not in ("fingerprint", "geometry", *_OF_SOME)},
        **of_some,
        "tile_pixels": data.geometry.tile_pixels,
        "tile_mpp": data.geometry.tile_mpp,
        "warm_start": warm_start,
        "said": list(notes),
    }
    return begin(folder, settings.lasting(), facts)


def begin_sweep(
    folder: Path,
    settings: Mapping[str, Value],
    over: Mapping[str, Sequence[Value]],
    *,
    data: Sequence[str],
    truth: Sequence[str | None],
    splits: Sequence[Splits],
) -> str:
    """Write sweep.json, or check that it contains the same sweep; return its key. settings: common to all points;
    over: the grid.

    data, truth and splits: fingerprints and folds of each population.
    """
    grid = json.loads(json.dumps(over, default=str))
    return begin(folder, settings, {"over": grid, "data": data, "truth": truth, "splits": splits}, kind="sweep")


def write_sweep_figures(folder: Path, points: Sequence[SweepPoint], chosen_by_fold: Mapping[str, Spread]) -> None:
    """Add the figures of all points to sweep.json."""
    path = folder / "sweep.json"
    request = parse_as(read_json(path, TRAIN_AGAIN), dict[str, Any], str(path), TRAIN_AGAIN)
    write_text(path, json.dumps(to_json({**request, "points": points, "chosen_by_fold": chosen_by_fold}), indent=2))


def begin(folder: Path, settings: Mapping[str, Value], facts: Mapping[str, Any], *, kind: str = "run") -> str:
    """Write KIND.json, or check that it contains the same facts; return its key. Different facts are refused.

    Paths of data with known fingerprints are not compared: a moved folder is the same run, and the new paths are
    recorded.
    """
    key, path = key_of(settings, facts), folder / f"{kind}.json"
    if path.exists():
        begun = parse_as(read_json(path, TRAIN_AGAIN), dict[str, Any], str(path), TRAIN_AGAIN)
        before = parse_as(begun.get("settings"), dict[str, Any], f"{path}: settings", TRAIN_AGAIN)
        if begun.get("key") != key:
            counted = [name for name in settings if "data" not in facts or name not in PATHS]
            differing = [name for name in counted if before.get(name) != settings[name]]
            why = f"its {', '.join(differing)} differ" if differing else f"its {_OTHERWISE[kind]} differ"
            raise CarmilError(f"{folder} holds another {kind} ({why}): choose another --out or remove it")
        current = {**before, **{name: value for name, value in settings.items() if name in PATHS}}
        if current != before:
            write_text(path, json.dumps({**begun, "settings": current}, indent=2))
        return key
    if taken := next((name for name in _WRITTEN[kind] if (folder / name).exists()), None):
        raise CarmilError(
            f"{folder} holds {taken} but no {kind}.json: {taken} would be overwritten; choose another --out or "
            "move the file"
        )
    content = {"carmil": __version__, "key": key, "machine": machine(), "settings": settings, **facts}
    write_text(path, json.dumps(content, indent=2))
    return key


def check_no_run(folder: Path) -> None:
    """Refuse a folder that holds a run, so that other files do not overwrite its predictions."""
    if (folder / "run.json").exists():
        raise CarmilError(f"--out {folder} holds a run, whose files would be overwritten: choose another --out")


def write_models(folder: Path, population: Population, history: History, models: Sequence[FoldModel]) -> None:
    """Write weights.safetensors, models.json and history.json."""
    write_tensors(folder / "weights.safetensors", population.state())
    write_text(folder / "history.json", json.dumps(to_json(history)))
    write_text(folder / "models.json", json.dumps(to_json(models), indent=2))


def write_metrics(folder: Path, metrics: Metrics) -> None:
    """Write metrics.json, the last file of a run. The figures of a fold are in the same object as its number."""
    by_fold = [
        {"fold": one.fold, "seed": one.seed}
        | ({} if one.threshold is None else {"threshold": one.threshold})
        | dict(one.figures)
        for one in metrics.by_fold
    ]
    facts = {k: v for k, v in asdict(metrics).items() if v is not None or k not in ("adjustment", "prediction_sets")}
    write_text(folder / "metrics.json", json.dumps(to_json({**facts, "by_fold": by_fold}), indent=2))


def write_table(path: Path, frame: pd.DataFrame) -> None:
    with atomic_file(path) as aside:
        frame.to_parquet(aside, index=False)


def write_predictions(folder: Path, frame: pd.DataFrame) -> None:
    """Write predictions.parquet and predictions.csv."""
    write_table(folder / "predictions.parquet", frame)
    write_text(folder / "predictions.csv", frame_text(frame))
