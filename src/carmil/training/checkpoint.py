"""The checkpoint from which an interrupted training resumes."""

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from carmil.errors import CarmilError
from carmil.training.early_stopping import TrainingState
from carmil.training.history import HistoryBuilder
from carmil.untrusted import check_not_stream, short_message
from carmil.weights import write_tensors


class Checkpoint:
    """A file with the state between two epochs. `key` identifies the training: a checkpoint with another key is refused.

    `parts` is the folder for the files of a training in parts (carmil.training.partition).
    """

    def __init__(self, path: Path, key: str, *, every: float = 60.0) -> None:
        self.path, self.key, self.every = path, key, every
        self.parts = path.absolute().with_suffix(".parts")
        self._written = time.monotonic()

    def begun(self) -> bool:
        """Return whether there is a checkpoint to resume from."""
        return self.path.exists() or self.parts.is_dir()

    def load(self, state: TrainingState, curves: HistoryBuilder) -> int:
        """Restore state and curves, and return the next epoch; 0 if there is no checkpoint."""
        if not self.path.exists():
            return 0
        tensors, facts = read_keyed(self.path, self.key)
        curves.tables = {
            name.removeprefix("curve."): tensors.pop(name) for name in list(tensors) if name.startswith("curve.")
        }
        state.restore(tensors)
        return int(facts["epoch"]) + 1

    def save_if_due(self, epoch: int, state: TrainingState, curves: HistoryBuilder) -> None:
        if time.monotonic() - self._written >= self.every:
            self.save(epoch, state, curves)

    def save(self, epoch: int, state: TrainingState, curves: HistoryBuilder) -> None:
        tensors = state.tensors() | {f"curve.{name}": table for name, table in curves.tables.items()}
        write_keyed(self.path, tensors, {"key": self.key, "epoch": epoch})
        self._written = time.monotonic()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        shutil.rmtree(self.parts, ignore_errors=True)


def write_keyed(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str | int]) -> None:
    """Write tensors and facts, among them the `key` of their training, as one file."""
    write_tensors(path, tensors, {"carmil": json.dumps(facts)})


def read_keyed(path: Path, key: str) -> tuple[dict[str, Tensor], dict[str, str | int]]:
    """Read a file of `write_keyed`; refuse a file with another key."""
    from safetensors import SafetensorError, safe_open

    check_not_stream(path)
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()["carmil"])
            if facts["key"] != key:
                raise CarmilError(f"{path} belongs to another training: choose another --out or remove it")
            return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CarmilError(f"{path} cannot be read ({short_message(error)}): remove it to start again") from error
