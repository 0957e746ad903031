"""Colours of small pictures: how saturated a pixel is, and whether a pen has been there."""

import numpy as np
from numpy.typing import NDArray

from carmil.slides.slide import Picture

_DARK = 40  # brightest channel below this: black, whose saturation is noise


def saturation(picture: Picture) -> NDArray[np.uint8]:
    """(h, w): 0 to 255, as HSV has it; 0 where it is black."""
    bright, least = picture.max(axis=-1), picture.min(axis=-1)
    share = (bright - least).astype(np.float32) * 255 / np.maximum(bright, 1)
    return np.where(bright < _DARK, 0, np.rint(share)).astype(np.uint8)


def inked(picture: Picture) -> NDArray[np.bool_]:
    """(h, w): green, blue or black ink. In stained tissue green is never above red; red ink looks like blood and is not told."""
    red, green = picture[..., 0].astype(np.int16), picture[..., 1].astype(np.int16)
    coloured = (green - red > 20) & (saturation(picture) > 60)
    black = (picture.max(axis=-1) < 70) & (saturation(picture) < 60)
    return coloured | black
