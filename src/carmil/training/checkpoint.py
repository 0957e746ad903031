"""Where a training that was killed goes on."""

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from carmil.errors import CarmilError
from carmil.training.early_stopping import TrainingState
from carmil.training.history import HistoryBuilder
from carmil.untrusted import check_not_stream, short_message
from carmil.weights import write_tensors


class Checkpoint:
    """A file with everything between two epochs, written whole. `key` says what is trained: another key does not go on.

    `parts` is the folder for the files of a training in parts (carmil.training.partition).
    """

    def __init__(self, path: Path, key: str, *, every: float = 60.0) -> None:
        self.path, self.key, self.every = path, key, every
        self.parts = path.absolute().with_suffix(".parts")
        self._written = time.monotonic()

    def begun(self) -> bool:
        """Whether there is anything to go on with."""
        return self.path.exists() or self.parts.is_dir()

    def load(self, state: TrainingState, curves: HistoryBuilder) -> int:
        """Puts state and curves where they were, and gives the epoch to go on with; 0 if there is no such file."""
        if not self.path.exists():
            return 0
        kept, facts = read_keyed(self.path, self.key)
        curves.tables = {
            name.removeprefix("curve."): kept.pop(name) for name in list(kept) if name.startswith("curve.")
        }
        state.restore(kept)
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


def write_keyed(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Tensors and a few facts, among them the `key` of the training they are of, as one file that appears whole."""
    write_tensors(path, tensors, {"carmil": json.dumps(facts)})


def read_keyed(path: Path, key: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_keyed` wrote; a file with another key is refused."""
    from safetensors import SafetensorError, safe_open

    check_not_stream(path)
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()["carmil"])
            if facts["key"] != key:
                raise CarmilError(f"{path} is of another training: choose another --out or remove it")
            return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CarmilError(f"{path} cannot be read ({short_message(error)}): remove it to begin anew") from error
