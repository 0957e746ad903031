"""scope.safetensors, beside the weights: a summary of the training bags of every model, for the distance from its
cohort.
"""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

from carmil.errors import CarmilError
from carmil.runs.run import TRAIN_AGAIN, Run
from carmil.statistics.scope import Scope
from carmil.untrusted import one_line_errors
from carmil.weights import write_tensors

FILE = "scope.safetensors"
NAMES = tuple(field.name for field in fields(Scope))
DIMENSIONS = {
    "centre": 1,
    "deviation": 1,
    "directions": 2,
    "between": 1,
    "within": 1,
    "rest": 1,
    "terms": 1,
    "limit": 0,
}


def write_scopes(folder: Path, scopes: Sequence[Scope]) -> None:
    """Write the scopes of a run, one per model."""
    tensors = {name: np.stack([getattr(scope, name) for scope in scopes]) for name in NAMES}
    write_tensors(folder / FILE, {name: torch.from_numpy(values).float() for name, values in tensors.items()})


def read_scopes(run: Run) -> tuple[Scope, ...] | None:
    """Read the scopes of a run; None if it has none, like runs of earlier versions and of few patients."""
    from safetensors.torch import load_file

    path = run.folder / FILE
    if not path.is_file():
        return None
    with one_line_errors(path, TRAIN_AGAIN):
        tensors = {name: tensor.double().numpy() for name, tensor in load_file(path).items()}
    if set(tensors) != set(NAMES) or not _fit(tensors, len(run.models), run.data.width):
        raise CarmilError(f"{path} does not fit the models of the run: {TRAIN_AGAIN}")
    return tuple(Scope(**{name: tensors[name][row] for name in NAMES}) for row in range(len(run.models)))


def _fit(tensors: dict[str, np.ndarray], models: int, width: int) -> bool:
    """Return whether all tensors have the right shapes and finite numbers, positive where these are divisors."""
    if any(tensors[name].ndim != 1 + dimensions for name, dimensions in DIMENSIONS.items()):
        return False
    directions = tensors["directions"].shape[1]
    shapes = {
        "centre": (width,),
        "deviation": (width,),
        "directions": (directions, width),
        "between": (directions,),
        "within": (directions,),
        "rest": (2,),
        "terms": (2,),
        "limit": (),
    }
    positive = (tensors["deviation"], tensors["between"], tensors["rest"][:, 0], tensors["terms"], tensors["limit"])
    return (
        all(tensors[name].shape == (models, *shape) for name, shape in shapes.items())
        and all(np.isfinite(values).all() for values in tensors.values())
        and all((values > 0).all() for values in positive)
        and all((tensors[name] >= 0).all() for name in ("within", "rest"))
    )
