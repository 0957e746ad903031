"""The cases of a run, read from its folder."""

from pathlib import Path

import numpy as np

from carmil.bags.bags import Bags
from carmil.errors import CarmilError
from carmil.models.contract import Ability
from carmil.progress import Log
from carmil.runs.evidence import RunEvidence, read_run_evidence
from carmil.runs.run import Run, read_run
from carmil.studies.decisions import decision_of
from carmil.studies.subjects import open_run_store, own_subjects
from carmil.viewer.cases import Case, RunCases
from carmil.viewer.digit_cases import digit_cases, digit_runs, is_digit_run


def read_cases(folder: Path, *, log: Log = lambda line: None) -> RunCases:
    """The cases of a run that `carmil train` or `carmil demo` wrote. A folder of several digit runs: its first."""
    if not folder.is_dir():
        raise CarmilError(f"{folder} is no run: expected a folder that `carmil train` or `carmil demo` wrote")
    if is_digit_run(folder):
        return digit_cases(folder)
    if not (folder / "run.json").exists() and (found := digit_runs(folder)):
        for other in found[1:]:
            log(f"there is also {other}")
        return digit_cases(found[0])
    return _study_cases(read_run(folder), log)


def _study_cases(run: Run, log: Log) -> RunCases:
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
                decision=decision_of(run, subject.models),
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
    return RunCases(run.name, run.classes, bags, tuple(cases), population, evidence=_evidence(run, log))


def _evidence(run: Run, log: Log) -> RunEvidence | None:
    """The evidence in the run's folder; without it the models compute a map when it is first shown."""
    try:
        return read_run_evidence(run)
    except CarmilError as error:
        if (run.folder / "evidence").exists():
            log(f"maps are computed when they are shown: {error}")
        return None
