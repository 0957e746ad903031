"""A run is a folder; everything a report shows is computed from it.

run.json               what was asked: config, versions, machine, data fingerprints, seeds
weights.safetensors    every parameter, stacked over the models
history.json           learning curves
predictions.parquet    what every model answers for every test bag
metrics.json           measures of every model
evidence/maps.safetensors   maps of every model over the test instances
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from carmil import __version__
from carmil.errors import CarmilError
from carmil.files import atomic_folder, write_text
from carmil.provenance import config_key, machine, machine_line, to_json
from carmil.training.history import History
from carmil.training.population import Population
from carmil.training.predict import Predictions
from carmil.untrusted import check_not_stream, short_message
from carmil.weights import write_tensors


@dataclass(frozen=True)
class Run:
    """A finished run, read back. `maps` are (r, n, ...) tensors over the test instances."""

    folder: Path
    config: dict[str, Any]
    metrics: dict[str, list[float]]
    history: dict[str, Any]
    maps: dict[str, Tensor]
    weights: dict[str, Tensor]
    measured_on: str


def write_run(
    folder: Path,
    *,
    config: Mapping[str, Any],
    population: Population,
    history: History,
    answers: Predictions,
    bag_ids: tuple[str, ...],
    labels: Tensor,
    metrics: Mapping[str, list[float]],
    maps: Mapping[str, Tensor],
    seconds: float,
) -> None:
    """Writes the whole folder aside, then gives it its name."""
    with atomic_folder(folder) as aside:
        facts = {
            "carmil": __version__,
            "key": config_key(config),
            "config": config,
            "machine": machine(),
            "measured_on": f"{population.device.type}: {machine_line()}",
            "training_seconds": round(seconds, 2),
        }
        write_text(aside / "run.json", json.dumps(facts, indent=2, default=str))
        write_text(aside / "metrics.json", json.dumps(to_json(dict(metrics)), indent=2))
        write_text(aside / "history.json", json.dumps(to_json(asdict(history))))
        write_tensors(aside / "weights.safetensors", population.state())
        _predictions(answers, bag_ids, labels, population).to_parquet(aside / "predictions.parquet", index=False)
        write_tensors(aside / "evidence" / "maps.safetensors", {name: tensor.float() for name, tensor in maps.items()})


def read_run(folder: Path) -> Run:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for name in ("run.json", "metrics.json", "history.json", "evidence/maps.safetensors", "weights.safetensors"):
        check_not_stream(folder / name)
    try:
        facts = json.loads((folder / "run.json").read_text())
        return Run(
            folder=folder,
            config=facts["config"],
            metrics=json.loads((folder / "metrics.json").read_text()),
            history=json.loads((folder / "history.json").read_text()),
            maps=load_file(folder / "evidence" / "maps.safetensors"),
            weights=load_file(folder / "weights.safetensors"),
            measured_on=facts["measured_on"],
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CarmilError(f"{folder} is not a whole run ({short_message(error)}): remove it and run again") from error


def has_run(folder: Path, config: Mapping[str, Any]) -> bool:
    """Is there a finished run of just this config?"""
    try:
        return json.loads((folder / "run.json").read_text())["key"] == config_key(config)
    except (OSError, ValueError, KeyError):
        return False


def _predictions(answers: Predictions, bag_ids: tuple[str, ...], labels: Tensor, population: Population) -> Any:
    import pandas as pd

    models, bags, classes = answers.probabilities.shape
    columns: dict[str, Any] = {
        "model": np.repeat(np.arange(models), bags),
        "seed": np.repeat([member.seed for member in population.members], bags),
        "bag": np.tile(np.array(bag_ids), models),
        "label": np.tile(labels.cpu().numpy(), models),
    }
    for c in range(classes):
        columns[f"p{c}"] = answers.probabilities[:, :, c].flatten().numpy()
    if answers.counterfactual_probabilities is not None:
        for i in range(answers.counterfactual_probabilities.shape[2]):
            for c in range(classes):
                values = answers.counterfactual_probabilities[:, :, i, c]
                columns[f"cf{i}_p{c}"] = values.flatten().numpy()
    return pd.DataFrame(columns)
