"""Overview of a slide, read in one pass: a small picture, and the amount of detail behind each of its pixels.

Both lie on a grid of OVERVIEW micrometres from the slide's upper left corner, independent of its levels, so that a 40x and a
20x copy of a slide have the same overview. Its saturation separates tissue from glass, and shows pen marks.
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
_BLOCK = 256  # overview pixels per side that are read at once
_SHOWN = 1200  # pixels of the longer side of the picture for display
_GLASS = 235
_FOLD = round(OVERVIEW / FINE)
_DARK = 40  # a pixel whose brightest channel is below this is black, and its saturation is noise


@dataclass(frozen=True, eq=False)
class Detail:
    """The variance of the grey value and the mean of its squared Laplacian, within each overview pixel."""

    contrast: NDArray[np.float32]
    edges: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Overview:
    """`picture` (h, w, 3), OVERVIEW micrometres per pixel; white beyond the slide. detail: None if not requested, or
    if the slide is too coarse.

    shown: a larger picture for display; on a small slide each overview pixel has 2 x 2 or 4 x 4 pixels.
    """

    picture: Picture
    shown: Picture
    detail: Detail | None


def read_overview(slide: Slide, *, detail: bool = True) -> Overview:
    """Return the overview of a slide. Without `detail` the smallest level is enough, which is faster."""
    across, down = (ceil(side * slide.mpp / OVERVIEW) for side in (slide.width, slide.height))
    side = OVERVIEW / slide.mpp  # level-0 pixels per overview pixel
    zoom = next((zoom for zoom in (4, 2) if zoom * max(across, down) <= _SHOWN), 1)
    rectangle = (0, 0, across * side, down * side, (across * zoom, down * zoom))
    if not detail or slide.mpp > FINE:
        display = slide.read(*rectangle)
        return Overview(_shrink(display, zoom), display, None)
    has_small = any(level.downsample * slide.mpp > FINE for level in slide.levels)
    if not has_small and slide.levels[-1].width * slide.levels[-1].height > MOST:
        raise no_overview(slide, slide.levels[-1])
    display = slide.read(*rectangle) if has_small else np.empty((down * zoom, across * zoom, 3), np.uint8)
    maps = np.zeros((2, down, across), np.float32)
    for top in range(0, down, _BLOCK):
        for left in range(0, across, _BLOCK):
            here = np.s_[top : top + _BLOCK, left : left + _BLOCK]
            block = np.s_[top * zoom : (top + _BLOCK) * zoom, left * zoom : (left + _BLOCK) * zoom]
            if has_small and display[block].min() > _GLASS:
                continue  # glass has no detail
            height, width = maps[0][here].shape
            corner = (left * side, top * side, width * side, height * side)
            fine = slide.read(*corner, (width * _FOLD, height * _FOLD))
            if not has_small:
                display[block] = _shrink(fine, _FOLD // zoom)
            maps[:, *here] = _detail(fine)
    return Overview(_shrink(display, zoom), display, Detail(*maps))


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


def saturation(picture: Picture) -> NDArray[np.uint8]:
    """Return HSV's saturation (h, w), 0 to 255; 0 for black."""
    bright, least = picture.max(axis=-1), picture.min(axis=-1)
    share = (bright - least).astype(np.float32) * 255 / np.maximum(bright, 1)
    return np.where(bright < _DARK, 0, np.rint(share)).astype(np.uint8)


def is_ink(picture: Picture) -> NDArray[np.bool_]:
    """Return a mask (h, w) of green, blue and black ink. In stained tissue green is never above red; red ink is
    not detected.
    """
    red, green = picture[..., 0].astype(np.int16), picture[..., 1].astype(np.int16)
    coloured = (green - red > 20) & (saturation(picture) > 60)
    black = (picture.max(axis=-1) < 70) & (saturation(picture) < 60)
    return coloured | black
