"""Calibration: whether answers with a probability of 80 % are correct four times in five. b bags, k classes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from carmil.errors import CarmilError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Reliability:
    """The share of correct answers by the probability of the most probable class: edges (bins+1), all others (bins),
    NaN if empty.
    """

    edges: Floats
    count: NDArray[np.int64]
    confidence: Floats
    accuracy: Floats

    @property
    def ece(self) -> float:
        """Return the expected calibration error: |accuracy - confidence| of the bins, weighted by their bags."""
        filled = self.count > 0
        return float((self.count * self._gaps)[filled].sum() / self.count.sum())

    @property
    def mce(self) -> float:
        """Return the maximum calibration error: that of the worst bin, whatever its number of bags."""
        return float(np.nanmax(self._gaps))

    @property
    def _gaps(self) -> Floats:
        return np.abs(self.accuracy - self.confidence)


def reliability(probabilities: ArrayLike, labels: ArrayLike, *, bins: int = 10) -> Reliability:
    """Return the accuracy by the probability of the most probable class, in bins of equal width with their upper edges."""
    if bins < 1:
        raise CarmilError(f"{bins} bins: expected at least one")
    given, truth = _cases(probabilities, labels)
    confidence, right = given.max(1), given.argmax(1) == truth
    edges = np.linspace(0, 1, bins + 1)
    bin_of = np.searchsorted(edges[1:-1], confidence)
    count = np.bincount(bin_of, minlength=bins)
    sums = (np.bincount(bin_of, weights=values, minlength=bins) for values in (confidence, right))
    with np.errstate(invalid="ignore"):
        mean_confidence, accuracy = (total / count for total in sums)
    return Reliability(edges=edges, count=count, confidence=mean_confidence, accuracy=accuracy)


def brier(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Return the mean squared distance from the truth.

    With two classes it is that of class 1 only, from 0 to 1; with more it is summed over all classes, from 0 to 2.
    """
    given, truth = _cases(probabilities, labels)
    squared = (given - np.eye(given.shape[1])[truth]) ** 2
    return float((squared[:, 1] if given.shape[1] == 2 else squared.sum(1)).mean())


def class_probabilities(probabilities: ArrayLike) -> Floats:
    """Return probabilities (b, k) as float64; refuse values that are not probabilities."""
    try:
        given = np.asarray(probabilities, dtype=np.float64)
    except (TypeError, ValueError):
        raise CarmilError(
            "probabilities have a value that is not a number: expected an array (bags, classes)"
        ) from None
    if given.ndim != 2 or given.shape[1] < 2 or not len(given):
        raise CarmilError(
            f"probabilities have shape {given.shape}: expected (bags, classes), at least one bag, two classes"
        )
    if not ((given >= 0) & (given <= 1)).all():
        row = (~((given >= 0) & (given <= 1))).any(1).argmax()
        raise CarmilError(f"probabilities of bag {row} are {given[row].tolist()}: expected numbers from 0 to 1")
    total = given.sum(1)
    if (off := np.abs(total - 1) > 1e-2).any():
        raise CarmilError(
            f"probabilities of bag {off.argmax()} sum to {total[off][0]:.3g}: expected 1; apply a softmax if "
            "these are logits"
        )
    return given


def _cases(probabilities: ArrayLike, labels: ArrayLike) -> tuple[Floats, NDArray[np.int64]]:
    given, truth = class_probabilities(probabilities), np.asarray(labels)
    if truth.shape != (len(given),):
        raise CarmilError(f"labels have shape {truth.shape}, probabilities {given.shape}: expected one label per bag")
    wrong = ~np.isin(truth, np.arange(given.shape[1]))
    if wrong.any():
        known = f"expected 0 to {given.shape[1] - 1}"
        raise CarmilError(f"label {truth[wrong][0].item()!r} of bag {wrong.argmax()}: {known}")
    return given, truth.astype(np.int64)


def cross_entropies(probabilities: ArrayLike, labels: ArrayLike) -> tuple[float, float]:
    """Return the cross-entropy of the probabilities (b, k), and that of always predicting the class frequencies of these cases."""
    p, y = np.asarray(probabilities, dtype=np.float64), np.asarray(labels)
    shares = np.bincount(y) / len(y)
    given = p[np.arange(len(y)), y].clip(1e-12)
    return float(-np.log(given).mean()), float(-np.log(shares[y]).mean())
