"""A cohort of slides as a table of the paper needs it: where it lies, how it is divided and by what it is measured."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SlideCohort:
    """One column of Table 2. measures: the two figures it has there, by their names in a run's metrics.

    official: the table's own split, then `seeds` initialisations; else `folds` by patient.
    said: what a reader must know of it: counts that differ from the paper's, what it stands in for.
    """

    name: str
    title: str
    bags: Path
    labels: Path
    measures: tuple[str, str]
    encoder: str
    official: bool = False
    folds: int = 5
    seeds: int = 1
    lr: float = 2e-4
    stand_in: bool = False
    said: tuple[str, ...] = ()
