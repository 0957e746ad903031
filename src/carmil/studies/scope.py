"""Find slides outside the training cohort, by the distance of their features from the training bags of the models that
answer.

m models, b bags.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.runs.run import DISTANCE
from carmil.statistics.scope import BEYOND, BagMoments, Scope, fit_scope
from carmil.training.bag_moments import bag_moments
from carmil.words import percent_text, plural

MEANING = f"1 is the distance that {percent_text(BEYOND)} of the training cohort's own slides exceed"


def fit_scopes(moments: BagMoments, patients: Sequence[str], trained: NDArray[np.bool_]) -> list[Scope] | None:
    """Fit the scope of every model on its own training bags; None if one has too few patients.

    moments, patients: those of the b bags. trained (m, b).
    """
    names, fitted = np.array(patients), {}
    for row in np.unique(trained, axis=0):
        scope = fit_scope(moments[row], names[row])
        if scope is None:
            return None
        fitted[row.tobytes()] = scope
    return [fitted[row.tobytes()] for row in trained]


def joint_distance(scopes: Sequence[Scope], models: Sequence[int], moments: BagMoments) -> NDArray[np.float64]:
    """Return (b) the distance of bags from the training bags of some models together: the mean over the models."""
    return np.mean([scopes[row].distance(moments) for row in models], axis=0)


def distances(
    scopes: Sequence[Scope], bags: Bags, places: Tensor, models: Sequence[tuple[int, ...]], device: str
) -> list[float]:
    """Return the distance between each bag at `places` and the training bags of the models that answer for it."""
    moments, found = bag_moments(bags, places, device=device), np.zeros(len(places))
    for key in set(models):
        rows = np.array([one == key for one in models])
        found[rows] = joint_distance(scopes, key, moments[rows])
    return found.tolist()


def outside_text(distance: float) -> str | None:
    """Return the words for a slide outside the training cohort; None for one inside."""
    return f"outside the training cohort: distance {distance:.2f} ({MEANING})" if distance > 1 else None


def outside_line(frame: pd.DataFrame) -> list[str]:
    """Return a line about the slides of a table that are outside the training cohort; none if there are none."""
    if DISTANCE not in frame:
        return []
    far = frame[frame[DISTANCE] > 1].sort_values(DISTANCE, ascending=False)
    if far.empty:
        return []
    named = ", ".join(
        f"{slide!r} {distance:.2f}" for slide, distance in zip(far["slide"][:3], far[DISTANCE][:3], strict=True)
    )
    more = f" and {len(far) - 3} more" if len(far) > 3 else ""
    return [
        f"outside the training cohort: {len(far)} of {plural(len(frame), 'slide')}, whose answers may not hold ({named}{more}; "
        f"{MEANING})"
    ]
