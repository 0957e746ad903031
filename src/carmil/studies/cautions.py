"""What a reader should know before using a run, one line each, from what was measured on its test folds. c cases, k classes."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from carmil.maps.tile_maps import LEAST_MOVED
from carmil.runs.facts import Range
from carmil.runs.run import Run
from carmil.statistics.calibration import cross_entropies
from carmil.studies.figures import MEAN_OVER_FOLDS
from carmil.words import plural

LITTLE = 0.01  # of the class frequencies' cross-entropy: the least by which an informed model is below it
CHANCE = 0.5  # the AUC of scores that are independent of the labels
UNIFORM = 0.9  # of a slide's instances: attention spread over this share is nearly uniform
FEW = 5  # patients of a class


def informed(cross_entropy: float, class_frequencies: float) -> bool:
    """Whether probabilities are better than always predicting the class frequencies."""
    return cross_entropy < (1 - LITTLE) * class_frequencies


def readings(
    p: NDArray[np.float64], labels: NDArray[np.int64], moved: Sequence[float] = (), spread: Sequence[float] = ()
) -> dict[str, float]:
    """The measurements that `cautions` judges by. p (c, k) and labels (c) of the test cases; moved and spread of each test
    slide."""
    given, shares = cross_entropies(p, labels)
    found = {"cross_entropy": given, "cross_entropy_of_class_frequencies": shares}
    for name, values in (("attention_moved", moved), ("attention_spread", spread)):
        known = np.asarray(values, dtype=np.float64)
        known = known[~np.isnan(known)]
        if len(known):
            found[name] = float(np.median(known))
    return found


def answer_cautions(readings: Mapping[str, float], auc: Range | None, cases: str) -> list[str]:
    """Cautions about answers alone. readings: see `readings`; auc: its interval, if known; cases: such as "test slides"."""
    lines = []
    given, shares = (readings.get(name, math.nan) for name in ("cross_entropy", "cross_entropy_of_class_frequencies"))
    if not math.isnan(given) and not math.isnan(shares) and not informed(given, shares):
        lines.append(
            f"the model is no better than class frequencies: its cross-entropy on the {cases} is {given:.3f}, that of always "
            f"predicting the class frequencies is {shares:.3f}; the AUC shows whether it still ranks cases"
        )
    if auc is not None and auc.low <= CHANCE:
        lines.append(
            f"the AUC may be chance: its 95 % interval, {100 * auc.low:.1f} to {100 * auc.high:.1f}, is not wholly above "
            "50, the AUC of a model that knows nothing of the labels"
        )
    return lines


def cautions(run: Run) -> list[str]:
    """One line per caution that applies; none for a run of version 0.1.0, which did not measure them."""
    found = run.metrics.readings
    auc = run.metrics.intervals.get("auc") if run.metrics.intervals_of == MEAN_OVER_FOLDS else None
    lines = answer_cautions(found, auc, f"test {run.metrics.level}s")
    lines += never_answered(run)
    moved = found.get("attention_moved", math.nan)
    if moved < LEAST_MOVED:
        lines.append(unmoved(moved))
    spread = found.get("attention_spread", math.nan)
    if spread >= UNIFORM:
        lines.append(
            f"attention is nearly uniform: on the median test slide it is spread over {spread:.0%} of the instances "
            "(exp of its entropy), so attention maps of this run point nowhere"
        )
    return lines


def never_answered(run: Run) -> list[str]:
    """One line per class that is never the answer, whatever the truth."""
    frame = run.predictions()
    answers = set(frame["answer"]) if "answer" in frame else set(run.classes)  # runs of 0.1.0 do not have them
    return [
        f"class {name!r} is never answered, though {plural(count, 'slide has', 'slides have')} that label"
        for name, count in zip(run.classes, run.data.class_counts, strict=True)
        if name not in answers and count > 0
    ]


def unmoved(median: float) -> str:
    """The caution about a counterfactual attention that hardly differs from the factual one."""
    return (
        f"the counterfactual attention did not move: on the median slide only {median:.3f} of the attention differs (2 is the "
        f"most; below {LEAST_MOVED:g} is negligible), so do not read the counterfactual maps of this run"
    )


def few_patients(classes: Sequence[str], labels: Sequence[int], patients: Sequence[str]) -> list[str]:
    """One line per class with fewer than five patients."""
    lines = []
    for c, name in enumerate(classes):
        count = len({patient for patient, label in zip(patients, labels, strict=True) if label == c})
        if count < FEW:
            lines.append(
                f"class {name!r} has {count} patient{'s' * (count != 1)}, fewer than five: figures of this class are "
                "mostly chance"
            )
    return lines
