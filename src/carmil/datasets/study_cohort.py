"""A cohort as a recipe needs it: where it lies, how it is divided, how it is trained on and by what it is measured."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class ModelProtocol:
    """Settings of `carmil train` that a protocol fixes for one model: its options, and its optimizer where it has its own."""

    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Literal["adam", "sgd"] | None = None


def as_published(model: str) -> ModelProtocol:
    """Every model with its own defaults."""
    return ModelProtocol()


@dataclass(frozen=True)
class Protocol:
    """Settings of `carmil train` that a cohort's protocol fixes, under their names there. The defaults are those of slides.

    official: the table's own split, then `seeds` initialisations of it; else `folds` by patient.
    fast_epochs: of a look at the machinery.
    of_model: what the protocol fixes for a model, by its name.
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
    fast_epochs: int = 3
    of_model: Callable[[str], ModelProtocol] = as_published

    @property
    def fast(self) -> "Protocol":
        """The same with few folds and epochs: a look at the machinery."""
        return replace(self, folds=min(self.folds, 3), epochs=min(self.epochs, self.fast_epochs))


SLIDES = Protocol()


@dataclass(frozen=True)
class StudyCohort:
    """One column of a table.

    measures: the figures it has there, by their names in a run's metrics
    notes: what a reader must know of it: counts that differ from the paper's, what it stands in for
    folder: the name of its folder among the runs, where name and encoder do not say it all
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
