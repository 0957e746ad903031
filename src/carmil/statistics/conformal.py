"""Class-conditional split conformal prediction: sets of answers that contain the truth with a chosen probability.

A score says how badly a class fits a case. The set of a case is every class whose score is at most the quantile of that
class: of the scores of its n_c calibration cases, the ceil((n_c + 1) level)-th smallest. If a new case of class c and the
calibration cases of class c could have been drawn in any order, its set contains c with a probability of at least `level`,
on average over calibration sets and new cases; without ties it is ceil((n_c + 1) level) / (n_c + 1). No assumption is made
about the model (Vovk 2012, class by class; Sadinle, Lei and Wasserman 2019, for scores 1 - p).

n calibration cases, b cases, k classes.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from carmil.errors import CarmilError
from carmil.statistics.bootstrap import Interval
from carmil.statistics.intervals import clopper_pearson

Floats = NDArray[np.float64]
ROUNDING = 1e-9  # (9 + 1) x 0.9 must be 9, whatever its last bit


@dataclass(frozen=True)
class SetFigures:
    """Figures of the sets of some cases: the share that contains the truth, mean size, shares with one class and with none."""

    cases: int
    coverage: Interval
    size: float
    singletons: float
    empty: float


def quantile_rank(cases: int, level: float) -> int:
    """Return the rank, from 1, of the quantile among the sorted scores; a rank above `cases` means too few cases."""
    return math.ceil((cases + 1) * level - ROUNDING)


def fewest_cases(level: float) -> int:
    """Return the smallest number of calibration cases of a class for which there is a quantile: 9 at 0.9, 19 at 0.95."""
    if not 0 < level < 1:
        raise CarmilError(f"a coverage of {level:g}: expected a number between 0 and 1, such as 0.9")
    return math.ceil(level / (1 - level) - ROUNDING)


def expected_coverage(cases: int, level: float) -> float:
    """Return the mean coverage of a class over calibration sets of this many cases of it, without ties."""
    return quantile_rank(cases, level) / (cases + 1)


def class_quantiles(scores: Floats, labels: NDArray[np.int64], level: float) -> Floats:
    """Return (k) the quantile of each class. scores (n, k) of every class, of which that of the label (n) counts."""
    quantiles = np.empty(scores.shape[1])
    for c in range(scores.shape[1]):
        own = np.sort(scores[labels == c, c])
        if len(own) < fewest_cases(level):
            raise CarmilError(
                f"class {c} has {len(own)} calibration cases: a coverage of {level:g} needs at least {fewest_cases(level)}"
            )
        quantiles[c] = own[quantile_rank(len(own), level) - 1]
    return quantiles


def prediction_sets(scores: Floats, quantiles: Floats, *, contiguous: bool = False) -> NDArray[np.bool_]:
    """Return a mask (b, k) of the classes in each case's set. contiguous: add the classes between two of the set."""
    sets = scores <= quantiles
    if contiguous:
        below, above = np.maximum.accumulate(sets, 1), np.maximum.accumulate(sets[:, ::-1], 1)[:, ::-1]
        return below & above
    return sets


def set_figures(sets: NDArray[np.bool_], labels: NDArray[np.int64]) -> SetFigures:
    """Return the figures of sets (b, k) of independent cases; the interval of the coverage is Clopper and Pearson's."""
    cases, sizes = len(sets), sets.sum(1)
    if not cases:
        nothing = Interval(low=math.nan, high=math.nan, value=math.nan)
        return SetFigures(0, nothing, math.nan, math.nan, math.nan)
    share = float(sets[np.arange(cases), labels].mean())
    low, high = clopper_pearson(share, cases)
    return SetFigures(
        cases,
        Interval(low=low, high=high, value=share),
        size=float(sizes.mean()),
        singletons=float((sizes == 1).mean()),
        empty=float((sizes == 0).mean()),
    )
