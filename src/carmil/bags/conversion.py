"""Features in the type of a store. What does not fit into it is refused; `cohort check` and `cohort build` both ask here."""

from dataclasses import dataclass

import numpy as np

from carmil.bags.sources import Bag, Source
from carmil.errors import CarmilError
from carmil.words import plural

MENTIONED = 0.001  # share of a slide's nonzero features that become 0: above it the build prints one line
REFUSED = 0.5  # above it nothing is left to learn from


@dataclass(frozen=True, eq=False)
class Converted:
    """values (n, d) as they are stored, bfloat16 as uint16; vanished: the share of the nonzero features that became 0."""

    values: np.ndarray
    vanished: float


def converted(bag: Bag, source: Source, dtype: str) -> Converted:
    """Round finite features to `dtype`. Refuse a bag with values that become infinite, or most of which become 0."""
    features = np.ascontiguousarray(bag.features)
    values = rounded(features, dtype)
    if dtype == "bfloat16":
        infinite, zero = (values & 0x7F80) == 0x7F80, (values & 0x7FFF) == 0
    else:
        infinite, zero = np.isinf(values), values == 0
    if infinite.any():
        raise CarmilError(
            f"{source.path}: values up to {np.abs(features).max():g} do not fit into {dtype}: "
            "pack them with `carmil cohort build --dtype float32`"
        )
    nonzero = int(np.count_nonzero(features))
    vanished = int(np.count_nonzero(zero & (features != 0))) / nonzero if nonzero else 0.0
    if vanished > REFUSED:
        raise CarmilError(
            f"{source.path}: {vanished:.0%} of the nonzero values become 0 in {dtype}, they are too small for it: "
            "pack them with `carmil cohort build --dtype float32`"
        )
    return Converted(values, vanished)


def vanished_line(vanished: dict[str, float], dtype: str) -> str | None:
    """One sentence about the slides (by name, with their share) that lose tiny values to the store's type, if any do."""
    worst = sorted((name for name, share in vanished.items() if share > MENTIONED), key=lambda name: -vanished[name])
    if not worst:
        return None
    others = ", ..." if len(worst) > 1 else ""
    return (
        f"WARNING: tiny features of {plural(len(worst), 'slide')} became 0 in {dtype}, up to {vanished[worst[0]]:.1%} of the "
        f"nonzero ones ({worst[0]!r}{others}), and others near them lost digits: "
        "pack them with `carmil cohort build --dtype float32`"
    )


def rounded(features: np.ndarray, dtype: str) -> np.ndarray:
    """Features in the type of a store, rounded to nearest, ties to even; bfloat16, the upper half of a float32, as uint16."""
    if dtype == "bfloat16":
        bits = features.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    with np.errstate(over="ignore", under="ignore"):
        return features.astype(dtype, copy=False)
