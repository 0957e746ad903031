"""A measure of many resamples at once: rows are sorted or counted once, and a resample only weighs them.

r resamples, b cases, k classes. counts (r, b): how often each case is in each resample.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from carmil.evidence.performance import bag_auc, balanced_accuracy, f1_macro

Floats = NDArray[np.float64]
Measure = Callable[..., float]


def resampled(measure: Measure, counts: NDArray[np.int64], *arrays: NDArray) -> Floats:
    """(r) the measure of each resample. Measures of WEIGHED have a fast way; any other is asked resample by resample."""
    if measure in WEIGHED:
        return WEIGHED[measure](counts, *arrays)
    places = np.arange(counts.shape[1])
    drawn = (np.repeat(places, count) for count in counts)
    return np.array([measure(*(array[rows] for array in arrays)) for rows in drawn], dtype=np.float64)


def _auc(counts: NDArray[np.int64], probabilities: NDArray, labels: NDArray) -> Floats:
    classes = probabilities.shape[1]
    if classes > 2:
        probabilities = probabilities / probabilities.sum(1, keepdims=True)
    areas = []
    for c in range(classes) if classes > 2 else (1,):
        order = probabilities[:, c].argsort(kind="stable")
        ranked, positive = probabilities[order, c], labels[order] == c
        ties = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]]))
        weights = counts[:, order].astype(np.float64)
        wins = np.add.reduceat(weights * positive, ties, axis=1)
        losses = np.add.reduceat(weights * ~positive, ties, axis=1)
        won = (wins * (losses.cumsum(1) - losses / 2)).sum(1)  # a tie is half won
        with np.errstate(invalid="ignore"):
            areas.append(won / (wins.sum(1) * losses.sum(1)))
    return np.mean(areas, axis=0)


def _balanced_accuracy(counts: NDArray[np.int64], probabilities: NDArray, labels: NDArray) -> Floats:
    right, labelled, _ = _confused(counts, probabilities, labels)
    return _mean_over_classes(right, labelled)


def _f1_macro(counts: NDArray[np.int64], probabilities: NDArray, labels: NDArray) -> Floats:
    right, labelled, answered = _confused(counts, probabilities, labels)
    return _mean_over_classes(2 * right, labelled + answered)


def _confused(counts: NDArray[np.int64], probabilities: NDArray, labels: NDArray) -> tuple[Floats, Floats, Floats]:
    """(r, k) each: cases of a class that are answered so, that are labelled so, and all that are answered so."""
    classes = np.eye(probabilities.shape[1])
    label, answer = classes[labels], classes[probabilities.argmax(1)]
    return counts @ (label * answer), counts @ label, counts @ answer


def _mean_over_classes(part: Floats, whole: Floats) -> Floats:
    """(r) the mean of part / whole over the classes that are there."""
    there = whole > 0
    return (part / np.where(there, whole, 1)).sum(1) / there.sum(1)


WEIGHED: dict[Measure, Callable[..., Floats]] = {
    bag_auc: _auc,
    balanced_accuracy: _balanced_accuracy,
    f1_macro: _f1_macro,
}
