"""Learning curves. r models."""

from dataclasses import dataclass

import torch
from torch import Tensor

from carmil.training.early_stopping import TrainingState


@dataclass(frozen=True)
class History:
    """What happened: loss terms by epoch and model, (epochs, r), NaN after a model stopped; and each model's best epoch."""

    train: dict[str, Tensor]
    validation: Tensor
    best_epoch: Tensor
    epochs_run: Tensor

    def of(self, rows: Tensor) -> "History":
        """These models' only, as long as the longest of them ran."""
        run = self.epochs_run[rows]
        last = int(run.max())
        train = {name: table[:last, rows] for name, table in self.train.items()}
        return History(train, self.validation[:last, rows], self.best_epoch[rows], run)


class HistoryBuilder:
    """A history in the making: tables of all epochs, NaN where nothing is known yet."""

    def __init__(self, epochs: int, models: int) -> None:
        self._shape = (epochs, models)
        self.tables: dict[str, Tensor] = {}

    def add(self, epoch: int, losses: dict[str, Tensor], judged: Tensor, rows: Tensor) -> None:
        """Books an epoch of the models `rows`."""
        for name, values in {**losses, "validation": judged}.items():
            table = self.tables.setdefault(name, torch.full(self._shape, float("nan")))
            table[epoch, rows.cpu()] = values.detach().float().cpu()

    def history(self, state: TrainingState) -> History:
        run = state.epochs_run.cpu()
        last = int(run.max())
        gone = torch.arange(last).unsqueeze(-1) >= run
        tables = {name: table[:last].masked_fill(gone, float("nan")) for name, table in self.tables.items()}
        return History(
            validation=tables.pop("validation"), train=tables, best_epoch=state.best_epoch.cpu(), epochs_run=run
        )
