"""Quality rules: leave out tiles that are blank, marked by a pen or blurred. Each rule can be switched off by its name."""

from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from carmil.errors import CarmilError, unknown
from carmil.slides.overview import OVERVIEW, Overview, is_ink, saturation
from carmil.slides.slide import Tiles
from carmil.slides.tissue import Tissue

Mean = Callable[[NDArray], NDArray[np.float64]]  # a function that averages a map of the overview over each tile

_WHITE_SATURATION = 15  # as in CLAM: a tile with a lower mean saturation (of 255) is glass
_BLACK = 50  # a tile with a lower mean of the brightest channel is black
_PEN_SHARE = 0.1
# Laplacian squared over variance, within 8 um: 2.2 to 10 in sharp H&E, below 0.8 when it is blurred by 3 um.
_SHARP = 1.0


def apply_rules(
    tiles: Tiles, overview: Overview, tissue: Tissue, *, keep: Collection[str] = ()
) -> tuple[Tiles, dict[str, Tiles]]:
    """Return the tiles to use, and the tiles left out, by the name of the first rule that they violate."""
    check_rules(keep)
    mean = _means(tiles, overview.picture.shape[:2])
    good, left_out = np.ones(len(tiles), bool), {}
    for name, rule in RULES.items():
        if name in keep:
            continue
        broken = good & rule(overview, tissue, mean)
        left_out[name] = replace(tiles, corners=tiles.corners[broken])
        good &= ~broken
    return replace(tiles, corners=tiles.corners[good]), left_out


def check_rules(names: Collection[str]) -> None:
    for name in names:
        if name not in RULES:
            raise CarmilError(unknown("rule", name, RULES))


def _blank(overview: Overview, tissue: Tissue, mean: Mean) -> NDArray[np.bool_]:
    bright = overview.picture.max(axis=-1)
    return (mean(saturation(overview.picture)) < _WHITE_SATURATION) | (mean(bright) < _BLACK)


def _pen(overview: Overview, tissue: Tissue, mean: Mean) -> NDArray[np.bool_]:
    return mean(is_ink(overview.picture)) > _PEN_SHARE


def _blurred(overview: Overview, tissue: Tissue, mean: Mean) -> NDArray[np.bool_]:
    """Return whether the tissue of each tile is blurred. On a slide too coarse for detail no tile is."""
    if overview.detail is None:
        return np.zeros(1, bool)
    contrast, edges = (mean(values * tissue.mask) for values in (overview.detail.contrast, overview.detail.edges))
    return edges < _SHARP * (
        contrast + mean(tissue.mask)
    )  # plus one grey level squared, since flat tissue is not sharp


RULES: dict[str, Callable[[Overview, Tissue, Mean], NDArray[np.bool_]]] = {
    "blank": _blank,
    "pen": _pen,
    "blurred": _blurred,
}


def _means(tiles: Tiles, shape: tuple[int, ...]) -> Mean:
    """Return a function that averages a map (h, w) over each tile, using sums over rectangles."""
    to_pixels = tiles.slide_mpp / OVERVIEW
    first = np.rint(tiles.corners * to_pixels).astype(np.int64)
    last = np.maximum(np.rint((tiles.corners + tiles.size) * to_pixels).astype(np.int64), first + 1)
    (x0, y0), (x1, y1) = (np.clip(edge, 0, (shape[1], shape[0])).T for edge in (first, last))
    area = np.maximum((x1 - x0) * (y1 - y0), 1)

    def mean(values: NDArray) -> NDArray[np.float64]:
        sums = np.pad(values, ((1, 0), (1, 0))).cumsum(0, dtype=np.float64).cumsum(1)
        return (sums[y1, x1] - sums[y0, x1] - sums[y1, x0] + sums[y0, x0]) / area

    return mean
