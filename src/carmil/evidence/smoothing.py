"""Smoothing of a map in the plane: every instance distributes its value equally among all instances within a radius,
itself included.

    e'_j = sum over i within r of j:  e_i / (number of instances within r of i)          sum_j e'_j = sum_j e_j

The total is preserved, and with it the meaning of an evidence map's sum; single instances no longer stand out,
and evidence for and against cancels where it is mixed. Inside tissue this is the mean over a disc; at an edge an
instance has fewer neighbours and keeps more of its value. Smoothing is for display: faithfulness and counts of
single tiles use the map without it.

n instances, c columns.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from carmil.errors import CarmilError


def smooth_map(values: ArrayLike, places: ArrayLike, radius: float) -> NDArray[np.float64]:
    """Smooth values (n) or (n, c) at places (n, 2), in the unit of the radius; a radius of 0 leaves them unchanged."""
    from scipy.sparse import coo_matrix
    from scipy.spatial import cKDTree

    values, places = np.asarray(values, dtype=np.float64), np.asarray(places, dtype=np.float64)
    if places.shape != (len(values), 2):
        raise CarmilError(
            f"{len(values):,} values at places of shape {places.shape}: expected places ({len(values)}, 2)"
        )
    if not 0 <= radius < np.inf:
        raise CarmilError(f"a radius of {radius}: expected a number >= 0")
    if radius == 0 or len(values) == 0:
        return values.copy()
    reach = radius * (1 + 1e-9)  # a neighbour at exactly this distance is included
    pairs = cKDTree(places).query_pairs(reach, output_type="ndarray")
    giver, taker = np.concatenate([pairs, pairs[:, ::-1]]).T
    within = coo_matrix((np.ones(len(giver)), (taker, giver)), shape=(len(values), len(values))).tocsr()
    share = (values.T / (1 + np.bincount(giver, minlength=len(values)))).T
    return share + within @ share
