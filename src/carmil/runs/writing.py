"""Writing a run's folder. `metrics.json` comes last: a run that has it is finished."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    import pandas as pd

_WRITTEN = {  # beside KIND.json; what a user has under such a name is not overwritten
    "run": (
        *("splits.tsv", "weights.safetensors", "models.json", "history.json", "metrics.json"),
        *("predictions.parquet", "predictions.csv", "card.md", "study.yaml", "report.html"),
    ),
    "sweep": ("report.html", "sweep.md", "sweep.png"),
    "explanation": ("summary.json", "summary.csv", "summary.parquet"),
}
_OTHERWISE = {"run": "data or splits", "sweep": "data, splits or grid", "explanation": "slides"}


Splits = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class SweepPoint:
    """A point of a sweep in sweep.json: its values, and the figures of its run."""

    name: str
    values: Mapping[str, Value]
    validation_loss: Spread
    summary: Mapping[str, Spread]
    idle_branch: bool
    chosen_on_validation_bags: bool


def begin_run(
    folder: Path, settings: Settings, data: Data, *, warm_start: str | None = None, notes: Sequence[str] = ()
) -> str:
    """Write run.json, or find the same begun before; return its key. Another run there is refused.

    warm_start: the key of the weights that the models start from.
    """
    facts = {
        "data": data.fingerprint,
        **{name: value for name, value in vars(data).items() if name not in ("fingerprint", "geometry")},
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
    """Write sweep.json, or find the same begun before; return its key. settings: those that all points share; over: the grid.

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
    """Write KIND.json, or find the same begun before; return its key. Another one there is refused.

    Where the data are known by their fingerprint, their paths do not count: a moved folder is the same run, and the new paths
    are recorded.
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
            f"{folder} holds {taken} but no {kind}.json: that file is not overwritten; choose another --out or move the file"
        )
    content = {"carmil": __version__, "key": key, "machine": machine(), "settings": settings, **facts}
    write_text(path, json.dumps(content, indent=2))
    return key


def check_no_run(folder: Path) -> None:
    """Refuse a folder for other files that holds a run: they would overwrite its predictions."""
    if (folder / "run.json").exists():
        raise CarmilError(f"--out {folder} holds a run, whose files would be overwritten: choose another --out")


def write_models(folder: Path, population: Population, history: History, models: Sequence[FoldModel]) -> None:
    """Write weights.safetensors, models.json and history.json."""
    write_tensors(folder / "weights.safetensors", population.state())
    write_text(folder / "history.json", json.dumps(to_json(history)))
    write_text(folder / "models.json", json.dumps(to_json(models), indent=2))


def write_metrics(folder: Path, metrics: Metrics) -> None:
    """Write metrics.json, the last file of a run. The figures of a fold stand beside its number."""
    by_fold = [
        {"fold": one.fold, "seed": one.seed}
        | ({} if one.threshold is None else {"threshold": one.threshold})
        | dict(one.figures)
        for one in metrics.by_fold
    ]
    write_text(folder / "metrics.json", json.dumps(to_json({**asdict(metrics), "by_fold": by_fold}), indent=2))


def write_table(path: Path, frame: "pd.DataFrame") -> None:
    with atomic_file(path) as aside:
        frame.to_parquet(aside, index=False)


def write_predictions(folder: Path, frame: "pd.DataFrame") -> None:
    """Write predictions.parquet, and the same as predictions.csv for a spreadsheet."""
    write_table(folder / "predictions.parquet", frame)
    write_text(folder / "predictions.csv", frame_text(frame))
