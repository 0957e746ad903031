"""Training settings: the roles of bags, the optimizer, the schedule and early stopping."""

import math
from dataclasses import dataclass

from carmil.errors import CarmilError
from carmil.training.optimizers import OPTIMIZERS

# The role of a bag for a model. There is no role for test bags, so that they cannot be used in training.
UNUSED, TRAIN, VALIDATION = 0, 1, 2
MOST_EPOCHS = 1_000_000  # the curves of all epochs are stored


def first_eligible_epoch(warmup: int | None, epochs: int) -> int:
    """Return the first epoch whose weights a study may keep: the one after `warmup`, by default half of all epochs.

    Early in training the learning rate is high and the validation loss noisy, so that its minimum is a matter of
    chance. On slides with few informative tiles it occurred before anything had been learned (docs/choosing.md).
    """
    return min(epochs // 2 if warmup is None else warmup, epochs - 1)


@dataclass(frozen=True)
class Recipe:
    """The training settings of a population. The defaults are those of the digit-bag benchmark (xMIL's template)."""

    epochs: int = 1000
    batch: int = 16
    optimizer: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    shuffle: bool = False
    warmup: int = 10
    patience: int = 100
    study_seed: int = 0
    schedule: str = "constant"
    class_weights: str = "none"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        for name, low in (
            ("epochs", 1),
            ("batch", 1),
            ("warmup", 0),
            ("patience", 1),
            ("weight_decay", 0),
            ("momentum", 0),
        ):
            if not getattr(self, name) >= low:
                raise CarmilError(f"{name} is {getattr(self, name)}: expected at least {low}")
        if self.epochs > MOST_EPOCHS:
            raise CarmilError(f"epochs is {self.epochs}: expected at most {MOST_EPOCHS:,}")
        if self.optimizer not in OPTIMIZERS:
            raise CarmilError(f"unknown optimizer {self.optimizer!r}: expected one of {', '.join(OPTIMIZERS)}")
        if not 0 <= self.label_smoothing < 1:
            raise CarmilError(f"label_smoothing is {self.label_smoothing}: expected at least 0 and less than 1")
        if self.class_weights not in ("none", "balanced"):
            raise CarmilError(f"unknown class_weights {self.class_weights!r}: expected none or balanced")
        if self.schedule not in ("constant", "cosine"):
            raise CarmilError(f"unknown schedule {self.schedule!r}: expected constant or cosine")

    def pace(self, epoch: int) -> float:
        """Return the factor of the learning rates in this epoch; a cosine falls from 1 towards 0 over all epochs."""
        return 0.5 * (1 + math.cos(math.pi * epoch / self.epochs)) if self.schedule == "cosine" else 1.0
