"""How far a bag is from the training bags, in units of a limit that few bags of the training cohort exceed.

The mean instance c of a bag of n instances, centred and scaled, is compared with those of the training bags: along the r
directions in which these differ most, by its distance in standard deviations, and in all other directions together. Both
variances have a part between bags and a part w / n that a bag of few instances has by chance, so that small bags are not far
away because they are small; w comes from the two halves of each training bag.

    z = mean over k of (v_k c)^2 / (b_k + w_k / n),    q = (|c|^2 - sum over k of (v_k c)^2) / (b_rest + w_rest / n)

The distance is the root of z / mean(z) + q / mean(q) over its limit, which 5 % of the training cohort exceed. Means and limit
are computed from training bags that were left out of the fit, in five parts by patient.

b bags, d features, r directions.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]

DIRECTIONS = 10
PARTS = 5
FEWEST = 20  # patients: of fewer, no limit is exceeded by 5 %
BEYOND = 0.05  # share of the training cohort that is beyond the limit
LEAST = 1e-3  # of the variance within bags: the least that bags are taken to differ
ROUNDING = 1e-4  # of the variance between bags: what is less is rounding, as across all directions in which bags differ
LEAST_TERM = 0.1  # of the mean terms, which are about 1 unless there is rounding only


@dataclass(frozen=True, eq=False)
class BagMoments:
    """Sizes (b), mean instances (b, d), mean squares (b, d), and the difference of the means of every other instance (b, d)."""

    sizes: Floats
    means: Floats
    squares: Floats
    halves: Floats

    def __getitem__(self, rows: NDArray) -> "BagMoments":
        return BagMoments(self.sizes[rows], self.means[rows], self.squares[rows], self.halves[rows])

    def __len__(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True, eq=False)
class Scope:
    """Statistics of the training bags of one model, from which the distance is computed.

    centre and deviation (d), directions (r, d); variances between and within bags along them (r), and in the rest (2); the
    means of both terms (2), and the limit ().
    """

    centre: Floats
    deviation: Floats
    directions: Floats
    between: Floats
    within: Floats
    rest: Floats
    terms: Floats
    limit: Floats

    def distance(self, bags: BagMoments) -> Floats:
        """Return (b) the distance of each bag; above 1 it is outside the training cohort."""
        return np.sqrt((_terms(self, bags) / self.terms).sum(1)) / self.limit


def fit_scope(bags: BagMoments, patients: NDArray) -> Scope | None:
    """Fit the scope of training bags; None if there are too few patients. patients (b): names or numbers."""
    different, of = np.unique(patients, return_inverse=True)
    if len(different) < FEWEST:
        return None
    part = np.random.default_rng(0).permutation(len(different))[of] % PARTS
    terms = np.zeros((len(bags), 2))
    for k in range(PARTS):
        left_out = part == k
        fitted = _fit(bags[~left_out])
        terms[left_out] = _terms(fitted, bags[left_out])
    whole = _fit(bags)
    means = terms.mean(0).clip(LEAST_TERM)
    distances = np.sort(np.sqrt((terms / means).sum(1)))
    rank = min(math.ceil((len(distances) + 1) * (1 - BEYOND)), len(distances))
    return replace(whole, terms=means, limit=distances[rank - 1])


def _fit(bags: BagMoments) -> Scope:
    from sklearn.utils.extmath import randomized_svd

    share = bags.sizes / bags.sizes.sum()
    mean = share @ bags.means
    variance = (share @ bags.squares - mean**2).clip(0)
    common = variance.mean() or 1.0
    deviation = np.sqrt(np.sqrt(np.where(variance > 0, variance, common) * common))
    scaled = (bags.means - mean) / deviation
    offsets = scaled - scaled.mean(0)
    many = max(1, min(DIRECTIONS, offsets.shape[1] - 1))
    directions = randomized_svd(offsets, many, random_state=0)[2]
    # The means of two halves differ by w (1/n1 + 1/n2), which is 4 w / n of an even bag.
    pairs = bags.sizes > 1
    odd, even = np.floor(bags.sizes[pairs] / 2), np.ceil(bags.sizes[pairs] / 2)
    halves = bags.halves[pairs] / deviation / np.sqrt(1 / odd + 1 / even)[:, None]
    within = ((halves @ directions.T) ** 2).mean(0) if pairs.any() else np.zeros(many)
    within_rest = max(0.0, float((halves**2).sum(1).mean() - within.sum())) if pairs.any() else 0.0
    along = offsets @ directions.T
    inverse, freedom = float((1 / bags.sizes).mean()), len(bags) / (len(bags) - 1)
    rounding = max(ROUNDING * float((offsets**2).sum(1).mean()), 1e-12)
    between = _between(freedom * (along**2).mean(0), within, inverse).clip(rounding)
    left = freedom * ((offsets**2).sum(1) - (along**2).sum(1)).mean()
    rest = np.array([_between(left, within_rest, inverse).clip(rounding), within_rest])
    centre = mean + scaled.mean(0) * deviation
    return Scope(centre, deviation, directions, between, within, rest, np.ones(2), np.ones(()))


def _between(variance: Floats | float, within: Floats | float, inverse: float) -> Floats:
    return np.maximum(variance - np.multiply(within, inverse), np.multiply(LEAST, within))


def _terms(scope: Scope, bags: BagMoments) -> Floats:
    """Return (b, 2) the terms z and q."""
    offsets = (bags.means - scope.centre) / scope.deviation
    along = offsets @ scope.directions.T
    z = (along**2 / (scope.between + scope.within / bags.sizes[:, None])).mean(1)
    left = ((offsets**2).sum(1) - (along**2).sum(1)).clip(0)
    return np.column_stack([z, left / (scope.rest[0] + scope.rest[1] / bags.sizes)])
