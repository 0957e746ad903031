"""Learning curves of a population. r models."""

from dataclasses import dataclass

import torch
from torch import Tensor

from carmil.training.early_stopping import TrainingState


@dataclass(frozen=True)
class History:
    """Loss terms by epoch and model, (epochs, r), NaN after a model stopped; each model's best epoch and number of epochs."""

    train: dict[str, Tensor]
    validation: Tensor
    best_epoch: Tensor
    epochs_run: Tensor

    @classmethod
    def from_tables(cls, tables: dict[str, Tensor], best_epoch: Tensor, epochs_run: Tensor) -> "History":
        train = {name: table for name, table in tables.items() if name != "validation"}
        return cls(train, tables["validation"], best_epoch, epochs_run)

    @property
    def tables(self) -> dict[str, Tensor]:
        """Return all curves by name, including `validation`."""
        return {**self.train, "validation": self.validation}

    def of(self, rows: Tensor) -> "History":
        """Return the history of some models, cut at the last epoch of the longest-running one."""
        run = self.epochs_run[rows]
        last = int(run.max())
        train = {name: table[:last, rows] for name, table in self.train.items()}
        return History(train, self.validation[:last, rows], self.best_epoch[rows], run)


class HistoryBuilder:
    """Builder of a history: tables of all epochs, NaN for epochs still to come."""

    def __init__(self, epochs: int, models: int) -> None:
        self._shape = (epochs, models)
        self.tables: dict[str, Tensor] = {}

    def add(self, epoch: int, losses: dict[str, Tensor], validation: Tensor, rows: Tensor) -> None:
        """Record an epoch of the models `rows`."""
        for name, values in {**losses, "validation": validation}.items():
            table = self.tables.setdefault(name, torch.full(self._shape, float("nan")))
            table[epoch, rows.cpu()] = values.detach().float().cpu()

    def history(self, state: TrainingState) -> History:
        run = state.epochs_run.cpu()
        last = int(run.max())
        stopped = torch.arange(last).unsqueeze(-1) >= run
        tables = {name: table[:last].masked_fill(stopped, float("nan")) for name, table in self.tables.items()}
        return History.from_tables(tables, state.best_epoch.cpu(), run)
