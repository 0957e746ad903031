"""Overview of a slide, read in one pass: a small picture, and the amount of detail behind each of its pixels.

Both lie on a grid of OVERVIEW micrometres from the slide's upper left corner, independent of its levels, so that a 40x and a
20x copy of a slide have the same overview.
"""

from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from carmil.slides.pyramid import MOST, no_overview
from carmil.slides.slide import Picture, Slide

OVERVIEW = 8.0  # micrometres per pixel of the overview
FINE = 2.0  # micrometres per pixel where detail is measured; nuclei are about 4 pixels wide
_BLOCK = 256  # overview pixels of a side that are read at once
_SHOWN = 1200  # pixels of the longer side of the picture for people
_GLASS = 235
_FOLD = round(OVERVIEW / FINE)


@dataclass(frozen=True, eq=False)
class Detail:
    """Behind each overview pixel: the variance of the grey value, and the mean of its Laplacian squared."""

    contrast: NDArray[np.float32]
    edges: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Overview:
    """`picture` (h, w, 3), OVERVIEW micrometres per pixel; white beyond the slide. detail: None if not
    requested, or if the slide is too coarse.

    shown: a larger picture for people; each overview pixel of a small slide has 2 x 2 or 4 x 4 pixels there.
    """

    picture: Picture
    shown: Picture
    detail: Detail | None


def read_overview(slide: Slide, *, detail: bool = True) -> Overview:
    """Return the overview of a slide. Without `detail` the smallest level is enough, which is faster."""
    across, down = (ceil(side * slide.mpp / OVERVIEW) for side in (slide.width, slide.height))
    side = OVERVIEW / slide.mpp  # level-0 pixels behind one of the overview's
    zoom = next((zoom for zoom in (4, 2) if zoom * max(across, down) <= _SHOWN), 1)
    whole = (0, 0, across * side, down * side, (across * zoom, down * zoom))
    if not detail or slide.mpp > FINE:
        shown = slide.read(*whole)
        return Overview(_shrink(shown, zoom), shown, None)
    has_small = any(level.downsample * slide.mpp > FINE for level in slide.levels)
    if not has_small and slide.levels[-1].width * slide.levels[-1].height > MOST:
        raise no_overview(slide, slide.levels[-1])
    shown = slide.read(*whole) if has_small else np.empty((down * zoom, across * zoom, 3), np.uint8)
    maps = np.zeros((2, down, across), np.float32)
    for top in range(0, down, _BLOCK):
        for left in range(0, across, _BLOCK):
            here = np.s_[top : top + _BLOCK, left : left + _BLOCK]
            there = np.s_[top * zoom : (top + _BLOCK) * zoom, left * zoom : (left + _BLOCK) * zoom]
            if has_small and shown[there].min() > _GLASS:
                continue  # glass has no detail
            height, width = maps[0][here].shape
            corner = (left * side, top * side, width * side, height * side)
            fine = slide.read(*corner, (width * _FOLD, height * _FOLD))
            if not has_small:
                shown[there] = _shrink(fine, _FOLD // zoom)
            maps[:, *here] = _detail(fine)
    return Overview(_shrink(shown, zoom), shown, Detail(*maps))


def _shrink(picture: Picture, fold: int) -> Picture:
    return picture if fold == 1 else np.rint(_block_means(picture, fold)).astype(np.uint8)


def _detail(fine: Picture) -> NDArray[np.float32]:
    grey = fine @ np.array([0.299, 0.587, 0.114], np.float32)
    edges = ndimage.laplace(grey, mode="nearest")
    contrast = _block_means(grey**2, _FOLD) - _block_means(grey, _FOLD) ** 2
    return np.stack([contrast, _block_means(edges**2, _FOLD)])


def _block_means(values: NDArray, fold: int) -> NDArray:
    """Return means over squares of `fold` pixels."""
    height, width = values.shape[0] // fold, values.shape[1] // fold
    return values.reshape(height, fold, width, fold, *values.shape[2:]).mean(axis=(1, 3), dtype=np.float32)
