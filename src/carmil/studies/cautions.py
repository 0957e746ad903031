"""Cautions for readers of a run, one line each, from measurements on its test folds. c cases."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carmil.evidence.concentration import uniform_caution
from carmil.maps.tile_maps import LEAST_MOVED
from carmil.runs.facts import Range
from carmil.runs.run import Run
from carmil.studies.figures import MEAN_OVER_FOLDS, SHOWN
from carmil.targets import Target
from carmil.words import plural

LITTLE = 0.01  # relative to the cross-entropy of the class frequencies: a model is informed if it is lower by more than this share
FEW = 5  # a class with fewer patients than this has a caution


def informed(cross_entropy: float, class_frequencies: float) -> bool:
    """Return whether probabilities are better than always predicting the class frequencies."""
    return cross_entropy < (1 - LITTLE) * class_frequencies


def readings(
    target: Target,
    predicted: NDArray[np.float64],
    outcomes: NDArray[Any],
    moved: Sequence[float] = (),
    spread: Sequence[float] = (),
) -> dict[str, float]:
    """Return the measurements that `cautions` uses. predicted (c, p) and outcomes (c) or (c, t) are of the test cases.

    moved, spread: the distance by which the counterfactual branch moves attention, and the share of instances that
    attention spreads over, per test slide.
    """
    measurements = target.readings(predicted, outcomes)
    for name, values in (("attention_moved", moved), ("attention_spread", spread)):
        known = np.asarray(values, dtype=np.float64)
        known = known[~np.isnan(known)]
        if len(known):
            measurements[name] = float(np.median(known))
    return measurements


def answer_cautions(target: Target, readings: Mapping[str, float], key: Range | None, cases: str) -> list[str]:
    """Return cautions about answers alone.

    readings: see `readings`; key: the interval of the target's key figure, if known; cases: the word for them, such as
    "test slides".
    """
    lines = []
    given, shares = (readings.get(name, math.nan) for name in ("cross_entropy", "cross_entropy_of_class_frequencies"))
    if not math.isnan(given) and not math.isnan(shares) and not informed(given, shares):
        lines.append(
            f"the model is no better than class frequencies: its cross-entropy on the {cases} is {given:.3f}, that of always "
            f"predicting the class frequencies is {shares:.3f}; the AUC shows whether it still ranks cases"
        )
    if key is not None and key.low <= target.chance:
        name = SHOWN[target.key_figure]
        lines.append(
            f"the {name} may be chance: its 95 % interval, {100 * key.low:.1f} to {100 * key.high:.1f}, is not wholly above "
            f"{100 * target.chance:g}, the {name} of a model that is independent of the labels"
        )
    return lines


def cautions(run: Run) -> list[str]:
    """Return one line per applicable caution; none for a run of version 0.1.0, which did not record the measurements."""
    measurements, target = run.metrics.readings, run.target
    key = run.metrics.intervals.get(target.key_figure) if run.metrics.intervals_of == MEAN_OVER_FOLDS else None
    lines = answer_cautions(target, measurements, key, f"test {run.metrics.level}s")
    lines += never_answered(run)
    if run.data.imported is not None and run.data.splits:
        lines.append(
            f"{run.data.imported.checkpoint} does not say which slides its model was trained on: figures of such slides "
            "are no test of it"
        )
    moved = measurements.get("attention_moved", math.nan)
    if moved < LEAST_MOVED:
        lines.append(unmoved(moved))
    spread = measurements.get("attention_spread", math.nan)
    uniform = uniform_caution(spread, "attention", where="on the median test slide", maps="attention maps of this run")
    return [*lines, uniform] if uniform else lines


def never_answered(run: Run) -> list[str]:
    """Return one line per class, or grade, that is never given as an answer."""
    frame, names = run.predictions(), run.target.answer_names
    answers = set(frame["answer"]) if "answer" in frame else set(names)  # runs of 0.1.0 do not have them
    counts = zip(names, run.data.class_counts, strict=True) if names else ()
    return [
        f"{run.target.strata_word} {name!r} is never answered, though {plural(count, 'slide has', 'slides have')} that label"
        for name, count in counts
        if name not in answers and count > 0
    ]


def unmoved(median: float) -> str:
    """Return the caution about a counterfactual attention that hardly differs from the factual attention."""
    return (
        f"the counterfactual attention did not move: on the median slide only {median:.3f} of the attention differs (2 is the "
        f"most; below {LEAST_MOVED:g} is negligible), so do not read the counterfactual maps of this run"
    )


def few_patients(
    classes: Sequence[str], labels: Sequence[int], patients: Sequence[str], word: str = "class"
) -> list[str]:
    """Return one line per class, or other stratum called `word`, with fewer than five patients."""
    lines = []
    for c, name in enumerate(classes):
        count = len({patient for patient, label in zip(patients, labels, strict=True) if label == c})
        if count < FEW:
            lines.append(
                f"{word} {name!r} has {count} patient{'s' * (count != 1)}, fewer than five: figures of this {word} are "
                "mostly chance"
            )
    return lines
