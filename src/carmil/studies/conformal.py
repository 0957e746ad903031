"""Prediction sets: for a level of 90 %, sets of classes that contain the true one for 90 % of the patients of each class.

They are calibrated on patients that no model of the run was trained or selected on, with one score per patient. For a slide
whose patient is unknown, one slide of each calibration patient is drawn, so that the set holds for a slide drawn at random
from a new patient.

c cases (patients or slides), k classes or grades, s calibration slides.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from carmil.errors import CarmilError
from carmil.runs.calibration_slides import CalibrationSlides, read_calibration
from carmil.runs.facts import ClassCoverage, PredictionSets, Range
from carmil.runs.run import PATIENT_SET, SET_LEVEL, SLIDE_SET, Run
from carmil.statistics.conformal import (
    class_quantiles,
    expected_coverage,
    fewest_cases,
    prediction_sets,
    set_figures,
)
from carmil.studies.predictions import merge_patients, outcomes, predicted
from carmil.targets import Target
from carmil.words import percent_text, plural

NOTHING = "none"  # an empty set, in words
TOO_FEW = "lower the level, add patients, or calibrate on another cohort with `carmil evaluate RUN --conformal`"


@dataclass(frozen=True, eq=False)
class SetRule:
    """The rule by which the joint predictions of some models become sets. quantiles (k), calibrated (k): patients of
    each class.
    """

    target: Target
    level: float
    quantiles: NDArray[np.float64]
    calibrated: NDArray[np.int64]

    def sets(self, predictions: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return a mask (c, k) of the classes in the set of each case (c, p)."""
        scores = self.target.nonconformity(predictions)
        return prediction_sets(scores, self.quantiles, contiguous=self.target.contiguous_sets)


@dataclass(frozen=True, eq=False)
class SetCalibration:
    """The prediction sets of a run. merge: how slides are combined into patients, as in the run's metrics."""

    target: Target
    slides: CalibrationSlides
    merge: str
    _rules: dict[tuple[tuple[int, ...], bool], SetRule] = field(default_factory=dict, init=False, repr=False)

    @property
    def level(self) -> float:
        return self.slides.level

    @property
    def merges(self) -> bool:
        """Return whether calibration patients have several slides."""
        return len(set(self.slides.patients)) < len(self.slides.slides)

    def calibrating(self, slides: Iterable[str]) -> list[str]:
        """Return those of `slides` that have the name of a calibration slide, sorted."""
        return sorted(set(self.slides.slides) & set(slides))

    def rule(self, models: tuple[int, ...], *, of_patients: bool) -> SetRule:
        """Return the joint rule of these models, for the answers for patients or for single slides."""
        key = models, of_patients and self.merges
        if key not in self._rules:
            names = self.target.prediction_columns()
            frame = pd.DataFrame(self.slides.joint(models), columns=names)
            frame.insert(0, "slide", self.slides.slides)
            frame.insert(1, "patient", self.slides.patients)
            for name, values in self.target.label_values(np.array(self.slides.labels)).items():
                frame[name] = values
            if key[1]:
                frame = merge_patients(frame, self.target, self.merge)
            else:
                frame = frame.sort_values("slide").sample(frac=1, random_state=0).drop_duplicates("patient")
            labels = outcomes(frame, self.target)
            quantiles = class_quantiles(self.target.nonconformity(predicted(frame, self.target)), labels, self.level)
            counts = np.bincount(labels, minlength=len(quantiles))
            self._rules[key] = SetRule(self.target, self.level, quantiles, counts)
        return self._rules[key]

    def sets(self, frame: pd.DataFrame, models: Sequence[tuple[int, ...]], *, of_patients: bool) -> NDArray[np.bool_]:
        """Return (c, k) the sets of the cases of a table. models: those that answer for each case."""
        p = predicted(frame, self.target)
        sets = np.zeros((len(p), len(self.target.answer_names)), dtype=bool)
        for key in set(models):
            rows = np.array([one == key for one in models])
            sets[rows] = self.rule(key, of_patients=of_patients).sets(p[rows])
        return sets

    def slide_words(self, frame: pd.DataFrame, models: Sequence[tuple[int, ...]]) -> list[str]:
        """Return the sets of single slides in words, one per row of a table."""
        return self.words(self.sets(frame, models, of_patients=False))

    @property
    def meaning(self) -> str:
        """Describe the guarantee of the sets of single slides."""
        counts = self.rule((0,), of_patients=False).calibrated.tolist()
        each = ", ".join(f"{n} {name}" for name, n in zip(self.target.answer_names, counts, strict=True))
        slide = "; of several slides of a patient it holds for one drawn at random" if self.merges else ""
        return (
            f"{SLIDE_SET}: contains the truth for at least {percent_text(self.level)} of the new patients of each "
            f"{self.target.strata_word}, if they are like the {sum(counts)} that it was calibrated on ({each}){slide}"
        )

    def words(self, sets: NDArray[np.bool_]) -> list[str]:
        """Return sets in words: "benign, carcinoma", or NOTHING."""
        return [", ".join(np.array(self.target.answer_names)[row]) or NOTHING for row in sets]

    def measure(self, cases: pd.DataFrame, models: Sequence[tuple[int, ...]], *, of_patients: bool) -> PredictionSets:
        """Return the figures of the sets of cases that were not used for training, selection or calibration. cases: one
        row per patient (or slide).
        """
        sets, labels = self.sets(cases, models, of_patients=of_patients), outcomes(cases, self.target)
        whole = set_figures(sets, labels)
        calibrated = self.rule(models[0], of_patients=of_patients).calibrated.tolist()
        by_class = {}
        for c, name in enumerate(self.target.answer_names):
            own = set_figures(sets[labels == c], labels[labels == c])
            expected = expected_coverage(calibrated[c], self.level)
            by_class[name] = ClassCoverage(calibrated[c], expected, own.cases, Range.of(own.coverage))
        return PredictionSets(
            self.level, whole.cases, Range.of(whole.coverage), whole.size, whole.singletons, whole.empty, by_class
        )


def run_sets(run: Run, folder: Path | None = None) -> SetCalibration | None:
    """Return the prediction sets of a run, by its own calibration slides or those in a folder; None if it has none."""
    if folder is not None:
        check_target(run.target)
    slides = read_calibration(run, folder)
    return None if slides is None else SetCalibration(run.target, slides, run.metrics.rule)


def add_sets(
    frame: pd.DataFrame, calibration: SetCalibration, models: Mapping[tuple[int, int], tuple[int, ...]]
) -> PredictionSets:
    """Add the sets of the test slides to a run's predictions, and return their figures, over patients.

    frame: one row per slide, fold and seed; models: those of each fold and seed. All models that were tested on a slide
    answer together.
    """
    target = calibration.target
    keys = ["slide", "patient", *target.label_columns]
    slides = frame.groupby(keys, sort=False)[target.prediction_columns()].mean().reset_index()
    answering = {
        slide: tuple(sorted({row for pair in zip(lines["fold"], lines["seed"], strict=True) for row in models[pair]}))
        for slide, lines in frame.groupby("slide", sort=False)
    }
    of_slide = [answering[slide] for slide in slides["slide"]]
    words = calibration.slide_words(slides, of_slide)
    frame[SLIDE_SET] = frame["slide"].map(dict(zip(slides["slide"], words, strict=True)))
    frame[SET_LEVEL] = calibration.level
    of_patient = dict(zip(slides["patient"], of_slide, strict=True))
    merges = calibration.merge != "one-bag"
    cases = merge_patients(slides, target, calibration.merge) if merges else slides
    rows = [of_patient[patient] for patient in cases["patient"]]
    if len(cases) < len(slides):
        words = calibration.words(calibration.sets(cases, rows, of_patients=True))
        frame[PATIENT_SET] = frame["patient"].map(dict(zip(cases["patient"], words, strict=True)))
    return calibration.measure(cases, rows, of_patients=True)


def check_target(target: Target) -> None:
    """Refuse prediction sets of a target that is neither classes nor grades."""
    if not target.answer_names:
        raise CarmilError(
            f"prediction sets are for classes and grades; the target {target.title!r} is of the kind {target.kind!r}: leave "
            "--conformal out"
        )


def check_patients(patients: Sequence[str], labels: Sequence[int]) -> None:
    """Refuse patients whose slides have different labels: calibration needs one label per patient."""
    label_of: dict[str, int] = {}
    for patient, label in zip(patients, labels, strict=True):
        if label_of.setdefault(patient, label) != label:
            raise CarmilError(
                f"patient {patient!r} has slides with different labels: prediction sets are calibrated by patient and need one "
                "label per patient; leave --conformal out"
            )


def count_patients(patients: NDArray, labels: NDArray[np.int64], names: Sequence[str]) -> dict[str, int]:
    """Return the number of patients of each class."""
    return {name: len(set(patients[labels == c].tolist())) for c, name in enumerate(names)}


def check_counts(counts: Mapping[str, int], level: float, word: str, where: str) -> None:
    """Refuse a level for which a class has too few calibration patients."""
    fewest = fewest_cases(level)
    for name, count in counts.items():
        if count < fewest:
            raise CarmilError(
                f"--conformal {level:g}: {word} {name!r} has {plural(count, 'patient')} in {where}, {fewest} of every {word} are "
                f"needed; {TOO_FEW}"
            )
