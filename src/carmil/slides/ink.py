"""Saturation and pen marks of small pictures."""

import numpy as np
from numpy.typing import NDArray

from carmil.slides.slide import Picture

_DARK = 40  # brightest channel below this: black, whose saturation is noise


def saturation(picture: Picture) -> NDArray[np.uint8]:
    """Return HSV's saturation (h, w), 0 to 255; 0 for black."""
    bright, least = picture.max(axis=-1), picture.min(axis=-1)
    share = (bright - least).astype(np.float32) * 255 / np.maximum(bright, 1)
    return np.where(bright < _DARK, 0, np.rint(share)).astype(np.uint8)


def is_ink(picture: Picture) -> NDArray[np.bool_]:
    """Return where (h, w) green, blue or black ink is. In stained tissue green is never above red; red ink is not detected."""
    red, green = picture[..., 0].astype(np.int16), picture[..., 1].astype(np.int16)
    coloured = (green - red > 20) & (saturation(picture) > 60)
    black = (picture.max(axis=-1) < 70) & (saturation(picture) < 60)
    return coloured | black
