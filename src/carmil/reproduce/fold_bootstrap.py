"""Measures that are means over folds, and how sure they are: computed again on resampled patients, all resamples at once.

b patients, a bag each, f folds that test every patient once, s seeds, r resamples. A resample is a row of counts (r, b): how
often each patient is in it. Two maps or two models are compared on the same resamples.
"""

import numpy as np
from numpy.typing import NDArray

from carmil.statistics.bootstrap import draws

Floats = NDArray[np.float64]


def resamples(labels: NDArray, *, repeats: int = 2000, seed: int = 0) -> Floats:
    """Counts (r, b) of patients drawn with replacement, each class among itself; labels (b)."""
    drawn = draws(len(labels), strata=labels, repeats=repeats, seed=seed)
    return np.concatenate(list(drawn)).astype(np.float64)


def fold_mean(values: Floats, tested: NDArray[np.bool_], counts: Floats) -> Floats:
    """The mean over folds of the mean over their patients, (r); values (b), NaN where a patient has none; tested (f, b)."""
    there = ~np.isnan(values)
    mine = (tested & there).T.astype(np.float64)  # (b, f)
    with np.errstate(invalid="ignore"):
        return ((counts * np.where(there, values, 0.0)) @ mine / (counts @ mine)).mean(1)


def fold_auc(scores: Floats, labels: NDArray, tested: NDArray[np.bool_], counts: Floats) -> Floats:
    """The mean over folds and seeds of the AUC of the fold's patients, (r); scores (s, b), labels (b) 0 or 1.

    How often i is drawn does not depend on the seed, so that the seeds' mean is taken pair by pair, once for all resamples.
    """
    areas = []
    for fold in tested:
        positive, negative = (np.flatnonzero(fold & (labels == c)) for c in (1, 0))
        first, second = scores[:, positive, None], scores[:, None, negative]
        won = ((first > second) + 0.5 * (first == second)).mean(0)  # (positives, negatives)
        drawn, others = counts[:, positive], counts[:, negative]
        with np.errstate(invalid="ignore"):
            areas.append(((drawn @ won) * others).sum(1) / (drawn.sum(1) * others.sum(1)))
    return np.mean(areas, axis=0)
