"""The slides of a run, each with the models that were tested on it. k classes, n instances of one slide.

Features stay in the store's memory map until a case is opened.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from carmil.bags.bags import Bags
from carmil.bags.geometry import UNKNOWN, TileGeometry
from carmil.bags.pictures import Pictures
from carmil.bags.sources import NOT_RECORDED, SlideFile
from carmil.bags.store import Store, open_store
from carmil.errors import CarmilError
from carmil.evidence.explainers import default_explainer
from carmil.models.contract import Ability, BagModel
from carmil.progress import Log
from carmil.runs.answers import RUN_AGAIN, SlideAnswers
from carmil.runs.evidence import RunEvidence, check_same_models, read_run_evidence
from carmil.runs.run import Run, finished, read_run
from carmil.studies.scope import outside_text
from carmil.studies.subjects import Subject, answered_subjects, open_run_store, own_subjects
from carmil.targets import Target
from carmil.targets.decision import Decision
from carmil.training.population import Population

Floats = NDArray[np.float64]
ENLARGED = 112  # minimum pixels of the longer side of an instance's picture


@dataclass(frozen=True, eq=False)
class Case:
    """A slide (or a digit bag): its position among the bags, the models that answer for it, their rule, and their
    answer.

    prediction_set: the classes of the slide's set, in words, and its level; outside: words for a slide outside the training
    cohort.
    predicted (p), and the predictions of the counterfactual attention (p), are means over the models. tile_size is a
    tile's edge in the unit of the coordinates, geometry the pixels and micrometres per pixel of the encoder's
    input; slide_file is the slide that was tiled.
    """

    slide: str
    place: int
    models: tuple[int, ...]
    decision: Decision
    predicted: Floats
    counterfactual: Floats | None = None
    label: str | None = None
    patient: str | None = None
    prediction_set: str | None = None
    outside: str | None = None
    fold: int | None = None
    tile_size: float | None = None
    geometry: TileGeometry = UNKNOWN
    slide_file: SlideFile = NOT_RECORDED

    @property
    def answer(self) -> str:
        """Return the name of a class, or NO_ANSWER."""
        return self.decision.answer(self.predicted)

    @property
    def explained(self) -> str:
        """Return the output whose evidence is shown: the answer or, if there is none, the leading class."""
        return self.decision.explained(self.predicted)


@dataclass(frozen=True, eq=False)
class RunCases:
    """All cases of a run. pictures: images of the instances, by row of the bags, if the store has them.

    evidence: the output of `carmil explain`, if there is any.
    """

    name: str
    target: Target
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
    def outputs(self) -> tuple[str, ...]:
        """Return the classes, or other outputs, that have evidence."""
        return self.target.outputs

    @property
    def model(self) -> BagModel:
        """Return the first model, whose abilities are those of all."""
        return self.member(0)

    @property
    def method(self) -> str:
        """Return the explainer whose evidence is shown."""
        return default_explainer(self.model)

    def member(self, row: int) -> BagModel:
        with self._lock:
            if row not in self._members:
                self._members[row] = self.population.member(row)
            return self._members[row]

    def members(self, number: int) -> list[BagModel]:
        """Return the models that answer for a case."""
        return [self.member(row) for row in self.cases[number].models]

    def bag(self, number: int) -> Bags:
        return self.bags[self.cases[number].place]

    def size(self, number: int) -> int:
        """Return the number of instances, n."""
        return int(self.bags.sizes[self.cases[number].place])

    def leading(self, number: int) -> int:
        """Return the number of the output whose evidence is shown for a case."""
        return self.outputs.index(self.cases[number].explained)

    def first_row(self, number: int) -> int:
        """Return the position of the case's first instance among all instances."""
        return int(self.bags.offsets[self.cases[number].place])

    def coordinates(self, number: int) -> Floats | None:
        """Return (n, 2) x and y of the instances' upper left corners, in the unit of the bag; None if unknown."""
        if self.bags.coordinates is None or self.bags.units[self.cases[number].place] is None:
            return None
        first = self.first_row(number)
        return self.bags.coordinates[first : first + self.size(number)].double().numpy()


def read_cases(folder: Path, *, log: Log = lambda line: None) -> RunCases:
    """Read the cases of a run; if the folder contains several runs, as `carmil demo` writes them, those of the first."""
    if not folder.is_dir():
        raise CarmilError(
            f"{folder} is not a run: expected a folder that `carmil train`, `carmil demo` or `carmil slides run` wrote"
        )
    if not (folder / "run.json").exists() and (runs := runs_in(folder)):
        for other in runs[1:]:
            log(f"there is also {other}")
        folder = runs[0]
    return _cases(read_run(folder), log)


def runs_in(folder: Path) -> list[Path]:
    """List the runs of a recipe or of the demo, those with a counterfactual branch and more classes first."""
    folders = [path.parent for path in folder.glob("runs/*/*/run.json") if finished(path.parent)]
    return sorted(folders, key=lambda run: (not run.name.startswith("car-"), -len(read_run(run).outputs), str(run)))


def read_answer_cases(answers: SlideAnswers, *, model: Path | None = None, log: Log = lambda line: None) -> RunCases:
    """Read the cases of a folder that `carmil slides run` wrote. model: the run that answered, if it has been moved."""
    run = answers.read_run(model)
    advice = f"give the run that answered with --model, or {RUN_AGAIN} with another --out"
    check_same_models(answers.evidence, run, answers.folder, advice)
    store = open_store(answers.store)
    subjects = answered_subjects(run, answers, store)
    evidence = _evidence(run, answers.evidence, store.fingerprint, log)
    cases = _cases_of(run, store, subjects, {}, evidence)
    return replace(cases, name=f"{answers.folder.resolve().name} (answers of {run.name})")


def _cases(run: Run, log: Log) -> RunCases:
    store = open_run_store(run)
    tested = run.predictions().groupby("slide")["fold"].unique()
    folds = {str(slide): tuple(numbers) for slide, numbers in tested.items()}
    evidence = _evidence(run, run.folder / "evidence", run.data.store, log)
    cases = _cases_of(run, store, own_subjects(run, store), folds, evidence)
    if run.metrics.rule != "one-bag":
        return cases
    bags = Bags.trusted(**{**vars(cases.bags), "coordinates": None, "coordinate_unit": None})
    return replace(cases, bags=bags)  # slides of a patient would overlap


def _cases_of(
    run: Run,
    store: Store,
    subjects: Sequence[Subject],
    tested: Mapping[str, tuple[int, ...]],
    evidence: RunEvidence | None,
) -> RunCases:
    """Return the cases of slides whose answers are known. tested: the folds in which a slide was tested."""
    population = run.population()
    with_counterfactual = Ability.COUNTERFACTUAL_MAP in population.model.abilities
    cases = []
    for subject in sorted(subjects, key=lambda subject: subject.place):
        folds = tested.get(subject.slide, ())
        cases.append(
            Case(
                slide=subject.slide,
                place=subject.place,
                models=subject.models,
                decision=run.decision(subject.models),
                predicted=np.array(subject.predicted),
                counterfactual=np.array(subject.counterfactual) if with_counterfactual else None,
                label=subject.label,
                patient=subject.patient,
                prediction_set=subject.prediction_set,
                outside=None if subject.distance is None else outside_text(subject.distance),
                fold=int(folds[0]) if len(folds) == 1 else None,
                tile_size=store.entries[subject.place].tile_size,
                geometry=store.entries[subject.place].geometry,
                slide_file=store.entries[subject.place].slide_file,
            )
        )
    pictures = store.pictures()
    picture = None if pictures is None else partial(_enlarged, pictures)
    return RunCases(run.name, run.target, store.bags(), tuple(cases), population, picture, evidence=evidence)


def _enlarged(pictures: Pictures, row: int) -> NDArray[np.uint8]:
    """Enlarge a picture, with a square per pixel, so that a browser does not blur it."""
    image = pictures.rgb(row)
    times = max(1, ENLARGED // max(image.shape[:2]))
    return image.repeat(times, 0).repeat(times, 1)


def _evidence(run: Run, folder: Path, data: str, log: Log) -> RunEvidence | None:
    """Read the evidence in a folder; without it the models compute each map when it is first shown."""
    try:
        return read_run_evidence(run, folder, data=data)
    except CarmilError as error:
        if folder.exists():
            log(f"maps are computed when they are shown: {error}")
        return None
