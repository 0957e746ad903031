"""Features in the type of a store. `cohort check` and `cohort build` refuse the same bags: those that do not fit into it."""

import numpy as np

from carmil.bags.sources import Bag, Source
from carmil.errors import CarmilError

REFUSED = 0.5  # share of the nonzero features that become 0, above which nothing is left to learn from


def convert_features(bag: Bag, source: Source, dtype: str) -> tuple[np.ndarray, float]:
    """Round finite features to `dtype`, and return them with the share of the nonzero features that became 0.

    Refuses a bag with values that become infinite, or most of which become 0. bfloat16 is returned as uint16.
    """
    features, float32 = np.ascontiguousarray(bag.features), "pack them with `carmil cohort build --dtype float32`"
    values = round_features(features, dtype)
    if dtype == "bfloat16":
        infinite, zero = (values & 0x7F80) == 0x7F80, (values & 0x7FFF) == 0
    else:
        infinite, zero = np.isinf(values), values == 0
    if infinite.any():
        largest = np.abs(features).max()
        raise CarmilError(f"{source.path}: values up to {largest:g} do not fit into {dtype}: {float32}")
    nonzero = int(np.count_nonzero(features))
    vanished = int(np.count_nonzero(zero & (features != 0))) / nonzero if nonzero else 0.0
    if vanished > REFUSED:
        raise CarmilError(
            f"{source.path}: {vanished:.0%} of the nonzero values become 0 in {dtype}, they are too small for it: {float32}"
        )
    return values, vanished


def round_features(features: np.ndarray, dtype: str) -> np.ndarray:
    """Features rounded to nearest, ties to even; bfloat16, the upper half of a float32, as uint16."""
    if dtype == "bfloat16":
        bits = features.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    with np.errstate(over="ignore", under="ignore"):
        return features.astype(dtype, copy=False)
