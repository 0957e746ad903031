"""A cohort for a recipe: its location, split, training protocol and measures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class ModelProtocol:
    """Settings of `carmil train` that a protocol fixes for one model: its options, and its optimizer if it differs."""

    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Literal["adam", "sgd"] | None = None


def as_published(model: str) -> ModelProtocol:
    """Return a protocol with every model's own defaults."""
    return ModelProtocol()


@dataclass(frozen=True)
class Protocol:
    """Settings of `carmil train` that a cohort's protocol fixes, under the same names. The defaults are those for
    slides.

    official: the split of the table with `seeds` initialisations; otherwise `folds` by patient.
    preset: the defaults of all other settings; None for those of `carmil train`.
    fast_epochs: the number of epochs of a quick trial.
    of_model: settings for a model, by its name.
    """

    official: bool = False
    folds: int = 5
    seeds: int = 1
    epochs: int = 100
    patience: int = 20
    warmup: int = 5
    batch: int = 1
    optimizer: Literal["adam", "sgd"] = "adam"
    lr: float = 2e-4
    weight_decay: float = 1e-5
    schedule: Literal["cosine", "constant"] = "cosine"
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    preset: str | None = "0.1"
    fast_epochs: int = 3
    of_model: Callable[[str], ModelProtocol] = as_published

    @property
    def fast(self) -> "Protocol":
        """Return the protocol with few folds and epochs, for a quick trial."""
        return replace(self, folds=min(self.folds, 3), epochs=min(self.epochs, self.fast_epochs))


SLIDES = Protocol()
PRODUCT = Protocol(preset=None, warmup=50, lr=5e-4, weight_decay=1e-2)  # the defaults of `carmil train`
SURVIVAL = replace(PRODUCT, batch=32)  # Cox's likelihood compares the bags of a step


@dataclass(frozen=True)
class StudyCohort:
    """One column of a table.

    measures: the figures in this column, by their names in a run's metrics
    notes: remarks for readers: counts that differ from the paper's, which cohort this one stands in for
    folder: the name of its folder among the runs, if name and encoder are ambiguous
    """

    name: str
    title: str
    bags: Path
    labels: Path
    measures: tuple[str, ...]
    encoder: str
    protocol: Protocol = SLIDES
    stand_in: bool = False
    notes: tuple[str, ...] = ()
    folder: str = ""
