"""calibration.json: the predictions of every model of a run for the slides of the patients that calibrate its
prediction sets.

`carmil train --conformal` writes it into the run, `carmil evaluate --conformal` into its output. Sets are computed from it for
any of the run's models together, so that one calibration part serves the test folds and new slides.

m models, s slides, p predictions.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from carmil.errors import CarmilError
from carmil.files import write_text
from carmil.provenance import to_json
from carmil.runs.facts import Count, Share
from carmil.runs.run import TRAIN_AGAIN, Run, weights_key
from carmil.statistics.conformal import fewest_cases
from carmil.untrusted import read_json_as

FILE = "calibration.json"


@dataclass(frozen=True)
class CalibrationSlides:
    """weights: the fingerprint of the models; level: the coverage of the sets; labels (s): the index of each slide's
    class or grade.

    predicted (m, s, p), in the order of the run's models.
    """

    weights: str
    level: float
    slides: tuple[str, ...]
    patients: tuple[str, ...]
    labels: tuple[Count, ...]
    predicted: tuple[tuple[tuple[Share, ...], ...], ...]

    def joint(self, models: tuple[int, ...]) -> NDArray[np.float64]:
        """Return (s, p) the predictions of these models together."""
        return np.array([self.predicted[row] for row in models], dtype=np.float64).mean(0)


def write_calibration(folder: Path, calibration: CalibrationSlides) -> None:
    write_text(folder / FILE, json.dumps(to_json(calibration)))


def read_calibration(run: Run, folder: Path | None = None) -> CalibrationSlides | None:
    """Read the calibration slides of a run, or those in another folder for this run; None if the run has none."""
    path = (run.folder if folder is None else folder) / FILE
    if not path.is_file():
        if folder is not None:
            raise CarmilError(
                f"{path} does not exist: expected the output of `carmil evaluate {run.folder} --conformal 0.9 --bags ... "
                "--labels ... --out ...`"
            )
        if run.metrics.prediction_sets is not None:
            raise CarmilError(f"{path} is missing: {TRAIN_AGAIN}")
        return None
    advice = TRAIN_AGAIN if folder is None else "run `carmil evaluate --conformal` again"
    found = read_json_as(path, CalibrationSlides, "is not as carmil writes it", advice)
    if found.weights != weights_key(run):
        raise CarmilError(f"{path} was calibrated for other models than those of {run.folder}: {advice}")
    if not _is_sound(found, run):
        raise CarmilError(f"{path} is not as carmil writes it (slides, labels or predictions): {advice}")
    return found


def _is_sound(found: CalibrationSlides, run: Run) -> bool:
    """Return whether all lists of a file have the right length, each patient has one label, and each class has enough
    patients for the level of the sets.
    """
    count, width, classes = len(found.slides), len(run.target.prediction_columns()), len(run.target.answer_names)
    label_of = dict(zip(found.patients, found.labels, strict=False))
    return (
        0 < found.level < 1
        and len(found.patients) == len(found.labels) == count
        and len(found.predicted) == len(run.models)
        and all(len(slides) == count and all(len(row) == width for row in slides) for slides in found.predicted)
        and all(label_of[patient] == label for patient, label in zip(found.patients, found.labels, strict=True))
        and set(label_of.values()) == set(range(classes))
        and min(Counter(label_of.values()).values()) >= fewest_cases(found.level)
    )
