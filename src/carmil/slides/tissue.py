"""Find the tissue of a slide, as CLAM does: saturation, median, Otsu, closing, holes, smallest areas. Lengths in micrometres."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from skimage.filters import threshold_otsu
from skimage.measure import approximate_polygon, find_contours

from carmil.errors import CarmilError, unknown
from carmil.slides.overview import OVERVIEW, Overview, is_ink, saturation
from carmil.slides.slide import Slide

Outline = NDArray[np.float64]  # (k, 2): x, y in level-0 pixels, closed: the last point equals the first

# The saturation of glass is rarely above 8 (of 255), and never above 30: without glass, a higher Otsu threshold would
# divide tissue.
_OTSU_WITHIN = (8, 30)


@dataclass(frozen=True)
class TissueRule:
    """How tissue is separated from glass. threshold: a saturation of 0 to 255, or None for Otsu's."""

    threshold: int | None = None
    median_um: float = 56
    closing_um: float = 64
    least_mm2: float = 0.26
    least_hole_mm2: float = 0.065
    most_holes: int = 8


PRESETS = {
    "default": TissueRule(),
    "biopsy": TissueRule(
        threshold=15, median_um=40, closing_um=32, least_mm2=0.016, least_hole_mm2=0.016, most_holes=2
    ),
    "resection": TissueRule(least_mm2=1.6, least_hole_mm2=0.26),
}


@dataclass(frozen=True, eq=False)
class TissueRegion:
    """A piece of tissue: its outline and the outlines of its holes."""

    outer: Outline
    holes: tuple[Outline, ...]


@dataclass(frozen=True, eq=False)
class Tissue:
    """Regions of a slide, largest first, and their `mask` (h, w) with OVERVIEW micrometres per pixel."""

    regions: tuple[TissueRegion, ...]
    mask: NDArray[np.bool_]
    threshold: int

    @property
    def mm2(self) -> float:
        return float(self.mask.sum()) * (OVERVIEW / 1000) ** 2

    def holds(self, points: NDArray) -> NDArray[np.bool_]:
        """Return whether points (..., 2), x and y in micrometres, are in tissue."""
        x, y = np.moveaxis(np.floor(points / OVERVIEW).astype(np.int64), -1, 0)
        height, width = self.mask.shape
        inside = (x >= 0) & (y >= 0) & (x < width) & (y < height)
        return inside & self.mask[np.clip(y, 0, height - 1), np.clip(x, 0, width - 1)]


def preset(name: str) -> TissueRule:
    if name not in PRESETS:
        raise CarmilError(unknown("preset", name, PRESETS))
    return PRESETS[name]


def find_tissue(slide: Slide, overview: Overview, rule: TissueRule = PRESETS["default"]) -> Tissue:
    """Return the tissue of a slide; refuse a slide without any."""
    colour = saturation(overview.picture)
    threshold = _otsu(overview, colour) if rule.threshold is None else rule.threshold
    # The mean over a square is above a half exactly where its median is.
    coloured = ndimage.uniform_filter((colour > threshold).astype(np.float32), _odd(rule.median_um), mode="nearest")
    found = _close(coloured > 0.5, rule.closing_um)
    labels, count = ndimage.label(found)
    pixel = (OVERVIEW / 1000) ** 2
    sizes = np.bincount(labels.ravel(), minlength=count + 1) * pixel
    kept = [i for i in np.argsort(-sizes[1:], kind="stable") + 1 if sizes[i] >= rule.least_mm2]
    if not kept:
        raise CarmilError(f"{slide.path}: no tissue ({_why_none(sizes[1:], threshold, rule)})")
    boxes = ndimage.find_objects(labels)
    mask, regions = np.zeros_like(found), []
    for i in kept:
        rows, columns = boxes[i - 1]
        part, holes = _split_holes(labels[rows, columns] == i, rule)
        mask[rows, columns] |= part
        regions.append(_region(slide, part, holes, (columns.start, rows.start)))
    return Tissue(tuple(regions), mask, threshold)


def _why_none(sizes: NDArray[np.floating], threshold: int, rule: TissueRule) -> str:
    """Return the reason why no piece of these sizes (mm2) is tissue, and a remedy."""
    if not len(sizes):
        return f"no colour: no saturation above {threshold} of 255"
    reason = f"the largest piece has {sizes.max():.3f} mm2, the smallest area that counts is {rule.least_mm2:g} mm2"
    small = PRESETS["biopsy"].least_mm2
    return f"{reason}: for small pieces use --preset biopsy, {small:g} mm2" if rule.least_mm2 > small else reason


def _otsu(overview: Overview, colour: NDArray[np.uint8]) -> int:
    """Return Otsu's threshold between glass and tissue, from every third pixel without ink."""
    some = ndimage.median_filter(colour[::3, ::3], 3)[~is_ink(overview.picture[::3, ::3])]
    lowest, highest = _OTSU_WITHIN
    if some.size == 0 or some.min() == some.max():
        return lowest
    return int(np.clip(threshold_otsu(some), lowest, highest))


def _close(mask: NDArray[np.bool_], width_um: float) -> NDArray[np.bool_]:
    size = _odd(width_um)
    beyond = np.pad(mask, size, mode="edge")  # otherwise tissue near the edge would grow towards it
    wide = ndimage.maximum_filter(beyond, size)
    return ndimage.minimum_filter(wide, size)[size:-size, size:-size]


def _split_holes(part: NDArray[np.bool_], rule: TissueRule) -> tuple[NDArray[np.bool_], list[NDArray[np.bool_]]]:
    """Return a region with its smaller holes filled, and the masks of its larger holes."""
    filled = ndimage.binary_fill_holes(part)
    labels, count = ndimage.label(filled & ~part)
    sizes = np.bincount(labels.ravel(), minlength=count + 1)[1:] * (OVERVIEW / 1000) ** 2
    largest = [i for i in np.argsort(-sizes, kind="stable")[: rule.most_holes] if sizes[i] >= rule.least_hole_mm2]
    holes = [labels == i + 1 for i in largest]
    for hole in holes:
        filled = filled & ~hole
    return filled, holes


def _region(
    slide: Slide, part: NDArray[np.bool_], holes: list[NDArray[np.bool_]], corner: tuple[int, int]
) -> TissueRegion:
    mask = part.copy()
    for hole in holes:
        mask |= hole
    return TissueRegion(_outline(slide, mask, corner), tuple(_outline(slide, hole, corner) for hole in holes))


def _outline(slide: Slide, mask: NDArray[np.bool_], corner: tuple[int, int]) -> Outline:
    """Return the longest contour, in level-0 pixels, of a mask whose upper left pixel is overview pixel `corner`."""
    contours = find_contours(np.pad(mask, 1).astype(np.uint8), 0.5, fully_connected="low")
    line = approximate_polygon(max(contours, key=len), tolerance=0.5)
    overview = (
        line[:, ::-1] - 0.5 + corner
    )  # minus one pixel of padding, plus a half: contours run through pixel centres
    points = overview * OVERVIEW / slide.mpp
    return np.clip(points, 0, (slide.width, slide.height))


def _odd(width_um: float) -> int:
    """Return a width in overview pixels, odd so that it has a centre."""
    return max(1, round(width_um / OVERVIEW) // 2 * 2 + 1)
