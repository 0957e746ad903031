"""The slides of a run, each with the models that were tested on it. k classes, n instances of one slide.

Features stay in the store's memory map until a case is opened.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from carmil.bags.bags import Bags
from carmil.bags.geometry import UNKNOWN, TileGeometry
from carmil.bags.slide_file import NOT_RECORDED, SlideFile
from carmil.evidence.explainers import default_explainer
from carmil.models.contract import BagModel
from carmil.runs.decision import Decision
from carmil.runs.evidence import RunEvidence
from carmil.training.population import Population

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Case:
    """A slide (or a digit bag): its place among the bags, the models that answer for it, their rule, and what they answered.

    probabilities (k), and of the counterfactual attention (k), each the mean over the models. tile_size is a tile's edge
    in the unit of the coordinates, geometry what the encoder got of a tile: pixels, and micrometres per pixel; slide_file the
    slide that was tiled.
    """

    slide: str
    place: int
    models: tuple[int, ...]
    decision: Decision
    probabilities: Floats
    counterfactual: Floats | None = None
    label: str | None = None
    patient: str | None = None
    fold: int | None = None
    tile_size: float | None = None
    geometry: TileGeometry = UNKNOWN
    slide_file: SlideFile = NOT_RECORDED

    @property
    def answer(self) -> str:
        """A class, or NO_ANSWER."""
        return self.decision.answer(self.probabilities)

    @property
    def leading(self) -> int:
        """The number of the class whose evidence is shown: the answer, or without one the leading class."""
        return int(self.decision.leading(self.probabilities[None])[0])


@dataclass(frozen=True, eq=False)
class RunCases:
    """All cases of a run. pictures: what a row of the bags looks like, where its store has pictures.

    evidence: what `carmil explain` wrote, where it did.
    """

    name: str
    classes: tuple[str, ...]
    bags: Bags
    cases: tuple[Case, ...]
    population: Population
    pictures: Callable[[int], NDArray[np.uint8]] | None = None
    evidence: RunEvidence | None = None
    _members: dict[int, BagModel] = field(default_factory=dict, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.cases)

    @property
    def model(self) -> BagModel:
        """One of the models, to see what they support."""
        return self.member(0)

    @property
    def method(self) -> str:
        """The explainer whose evidence is shown."""
        return default_explainer(self.model)

    def member(self, row: int) -> BagModel:
        with self._lock:
            if row not in self._members:
                self._members[row] = self.population.member(row)
            return self._members[row]

    def members(self, number: int) -> list[BagModel]:
        """The models that answer for a case."""
        return [self.member(row) for row in self.cases[number].models]

    def bag(self, number: int) -> Bags:
        return self.bags[self.cases[number].place]

    def size(self, number: int) -> int:
        """n"""
        return int(self.bags.sizes[self.cases[number].place])

    def first_row(self, number: int) -> int:
        """The position of the case's first instance among all instances."""
        return int(self.bags.offsets[self.cases[number].place])

    def coordinates(self, number: int) -> Floats | None:
        """(n, 2) x and y of the instances' upper left corners, in the unit of the bag; None where they are not known."""
        if self.bags.coordinates is None or self.bags.units[self.cases[number].place] is None:
            return None
        first = self.first_row(number)
        return self.bags.coordinates[first : first + self.size(number)].double().numpy()
