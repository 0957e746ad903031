"""The cases of a run, read from its folder."""

from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from carmil.bags.bags import Bags
from carmil.bags.pictures import Pictures
from carmil.errors import CarmilError
from carmil.models.contract import Ability
from carmil.progress import Log
from carmil.runs.evidence import RunEvidence, read_run_evidence
from carmil.runs.run import Run, finished, read_run
from carmil.studies.subjects import open_run_store, own_subjects
from carmil.viewer.cases import Case, RunCases

ENLARGED = 112  # pixels of the longer side of an instance's picture, at least


def read_cases(folder: Path, *, log: Log = lambda line: None) -> RunCases:
    """The cases of a run. Of a folder with several runs in it, as `carmil demo` writes it, those of the first."""
    if not folder.is_dir():
        raise CarmilError(f"{folder} is no run: expected a folder that `carmil train` or `carmil demo` wrote")
    if not (folder / "run.json").exists() and (runs := runs_in(folder)):
        for other in runs[1:]:
            log(f"there is also {other}")
        folder = runs[0]
    return _cases(read_run(folder), log)


def runs_in(folder: Path) -> list[Path]:
    """The runs of a recipe or of the demo, those with a counterfactual branch and more classes first."""
    found = [path.parent for path in folder.glob("runs/*/*/run.json") if finished(path.parent)]
    return sorted(found, key=lambda run: (not run.name.startswith("car-"), -len(read_run(run).classes), str(run)))


def _cases(run: Run, log: Log) -> RunCases:
    store = open_run_store(run)
    population = run.population()
    with_counterfactual = Ability.COUNTERFACTUAL_MAP in population.model.abilities
    tested = run.predictions().groupby("slide")["fold"].unique()
    cases = []
    for subject in sorted(own_subjects(run, store), key=lambda subject: subject.place):
        folds = tested[subject.slide]
        cases.append(
            Case(
                slide=subject.slide,
                place=subject.place,
                models=subject.models,
                decision=run.decision(subject.models),
                probabilities=np.array(subject.probabilities),
                counterfactual=np.array(subject.counterfactual) if with_counterfactual else None,
                label=subject.label,
                patient=subject.patient,
                fold=int(folds[0]) if len(folds) == 1 else None,
                tile_size=store.entries[subject.place].tile_size,
                geometry=store.entries[subject.place].geometry,
                slide_file=store.entries[subject.place].slide_file,
            )
        )
    bags = store.bags()
    if run.metrics.rule == "one-bag":  # slides of a patient would lie on top of each other
        bags = Bags.trusted(**{**vars(bags), "coordinates": None, "coordinate_unit": None})
    pictures = store.pictures()
    picture = None if pictures is None else partial(_enlarged, pictures)
    return RunCases(run.name, run.classes, bags, tuple(cases), population, picture, evidence=_evidence(run, log))


def _enlarged(pictures: Pictures, row: int) -> NDArray[np.uint8]:
    """A picture with every pixel as a square of pixels, so that a browser does not blur it."""
    image = pictures.rgb(row)
    times = max(1, ENLARGED // max(image.shape[:2]))
    return image.repeat(times, 0).repeat(times, 1)


def _evidence(run: Run, log: Log) -> RunEvidence | None:
    """The evidence in the run's folder; without it the models compute a map when it is first shown."""
    try:
        return read_run_evidence(run)
    except CarmilError as error:
        if (run.folder / "evidence").exists():
            log(f"maps are computed when they are shown: {error}")
        return None
