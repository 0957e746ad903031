"""Colours of words and contours, and a slide beneath the colours of a map: grey, so that hue means one thing."""

import numpy as np
from numpy.typing import NDArray

from carmil.slides.slide import Picture

INK, SOFT = (28, 35, 48), (91, 100, 116)
OUTLINES = (INK, (11, 127, 105), (194, 49, 126), (111, 108, 12))  # none of them a colour of a map


def covered(slide: Picture, cover: NDArray[np.uint8]) -> Picture:
    """The slide beneath colours (h, w, 4)."""
    alpha = cover[..., 3:].astype(np.uint16)
    mixed = slide * (255 - alpha)
    mixed += cover[..., :3] * alpha
    mixed += 128
    mixed += mixed >> 8  # with the shift that follows, a division by 255, rounded
    mixed >>= 8
    return mixed.astype(np.uint8)


def greyed(picture: Picture) -> Picture:
    """Without hue and a little lighter."""
    red, green, blue = (picture[..., c].astype(np.uint16) for c in range(3))
    grey = (red * 54 + green * 183 + blue * 19) >> 8
    light = (255 - (255 - grey) * 3 // 4).astype(np.uint8)
    return np.repeat(light[..., None], 3, axis=2)
