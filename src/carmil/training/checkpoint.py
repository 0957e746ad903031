"""Where a training that was killed goes on."""

import json
import time
from pathlib import Path

from carmil.errors import CarmilError
from carmil.files import whole_file
from carmil.training.curves import Curves
from carmil.training.stopping import State


class Checkpoint:
    """A file with everything between two epochs, written whole. `key` says what is trained: another key does not go on."""

    def __init__(self, path: Path, key: str, *, every: float = 60.0) -> None:
        self.path, self.key, self.every = path, key, every
        self._written = time.monotonic()

    def load(self, state: State, curves: Curves) -> int:
        """Puts state and curves where they were, and gives the epoch to go on with; 0 if there is no such file."""
        from safetensors import SafetensorError, safe_open

        if not self.path.exists():
            return 0
        try:
            with safe_open(self.path, framework="pt") as file:
                facts = json.loads(file.metadata()["carmil"])
                if facts["key"] != self.key:
                    raise CarmilError(f"{self.path} is of another training: choose another --out or remove it")
                kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise CarmilError(f"{self.path} cannot be read ({error}): remove it to begin anew") from error
        curves.tables = {
            name.removeprefix("curve."): kept.pop(name) for name in list(kept) if name.startswith("curve.")
        }
        state.restore(kept)
        return int(facts["epoch"]) + 1

    def save_if_due(self, epoch: int, state: State, curves: Curves) -> None:
        if time.monotonic() - self._written >= self.every:
            self.save(epoch, state, curves)

    def save(self, epoch: int, state: State, curves: Curves) -> None:
        from safetensors.torch import save_file

        tensors = state.tensors() | {f"curve.{name}": table for name, table in curves.tables.items()}
        facts = json.dumps({"key": self.key, "epoch": epoch})
        with whole_file(self.path) as aside:
            copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_file(copies, aside, metadata={"carmil": facts})
        self._written = time.monotonic()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
