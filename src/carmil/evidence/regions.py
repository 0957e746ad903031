"""Regions: groups of neighbouring instances, nearly equal in size, formed by coordinates.

n instances of all bags together, b bags.
"""

import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.errors import CarmilError
from carmil.words import plural

TILES = 16  # per region: 4 x 4 where tissue is dense


def neighbouring_regions(bags: Bags, tiles: int = TILES) -> Tensor:
    """Return the region of each instance (n), numbered from 0 in its bag. A region has at most `tiles` instances.

    A bag is divided in two across its longer side, and each part again, in proportion to the number of regions in each
    half. The sizes of regions differ by one at most.
    """
    if tiles < 1:
        raise CarmilError(f"regions of {tiles} tiles: expected at least one")
    check_coordinates(bags)
    assert bags.coordinates is not None
    region = torch.empty(len(bags.features), dtype=torch.int64)
    for start, at in zip(bags.offsets.tolist(), bags.coordinates.cpu().split(bags.sizes.tolist()), strict=False):
        region[start : start + len(at)] = _divide(at, tiles)
    return region


def check_coordinates(bags: Bags) -> None:
    """Refuse bags without coordinates."""
    if bags.coordinates is None or bags.coordinates.isnan().any():
        unplaced = list(bags.ids)
        if bags.coordinates is not None:
            parts = bags.coordinates.split(bags.sizes.tolist())
            unplaced = [name for name, at in zip(bags.ids, parts, strict=True) if at.isnan().any()]
        raise CarmilError(
            f"{plural(len(unplaced), 'bag')} of {len(bags)} without coordinates, such as {unplaced[0]!r}: regions of "
            "neighbouring tiles need the place of every tile"
        )


def _divide(coordinates: Tensor, tiles: int) -> Tensor:
    """Return the region of each instance of one bag (n). coordinates (n, 2)."""
    region, count = torch.empty(len(coordinates), dtype=torch.int64), 0
    parts = [(torch.arange(len(coordinates)), -(-len(coordinates) // tiles))]
    while parts:
        rows, regions = parts.pop()
        if regions == 1:
            region[rows] = count
            count += 1
            continue
        at = coordinates[rows]
        rows = rows[at[:, int((at.amax(0) - at.amin(0)).argmax())].argsort(stable=True)]
        cut = len(rows) * (regions // 2) // regions
        parts += [(rows[cut:], regions - regions // 2), (rows[:cut], regions // 2)]
    return region
