"""The colours of maps: blue supports, orange refutes, violet is attention. The viewer's page uses the same colours.

The slide beneath is grey, so that hue has one meaning. Blue and orange differ for all common kinds of colour
blindness; violet darkens monotonically, so that it can be read in grey too.
"""

import numpy as np
from numpy.typing import NDArray

from carmil.slides.slide import Picture

SUPPORTS, REFUTES, ATTENDED = (20, 100, 200), (200, 90, 0), (128, 80, 170)
# (position on the scale, colour)
ATTENTION = ((0.0, (238, 234, 244)), (0.6, ATTENDED), (1.0, (52, 16, 88)))
SIGNED = ((-1.0, (140, 55, 0)), (-0.75, REFUTES), (0.0, (236, 236, 238)), (0.75, SUPPORTS), (1.0, (8, 58, 140)))
WEAKEST, STRONGEST = 0.30, 0.85  # opacity of a colour over the slide, at 0 and at the ends of the scale
NOTHING = 255  # index in the colour table where there is no tile

# Text and contours.
INK, SOFT = (28, 35, 48), (91, 100, 116)
OUTLINES = (INK, (11, 127, 105), (194, 49, 126), (111, 108, 12))  # none of them is a colour of a map

Colours = NDArray[np.uint8]  # (256, 4): red, green, blue, opacity


def colour_table(*, signed: bool) -> Colours:
    """Return the colours of index 0 to 254, from the lowest to the highest; NOTHING is transparent."""
    at = np.linspace(-1, 1, NOTHING) if signed else np.linspace(0, 1, NOTHING)
    stops = SIGNED if signed else ATTENTION
    places, shades = np.array([stop for stop, _ in stops]), np.array([shade for _, shade in stops])
    table = np.zeros((256, 4), np.uint8)
    table[:NOTHING, :3] = np.stack([np.interp(at, places, shades[:, c]) for c in range(3)], axis=1).round()
    table[:NOTHING, 3] = (255 * (WEAKEST + (STRONGEST - WEAKEST) * np.abs(at))).round()
    return table


def colour_indices(values: NDArray[np.float64], *, signed: bool) -> NDArray[np.uint8]:
    """Return the indices of scaled values in their colour table."""
    at = (values + 1) / 2 if signed else values
    return np.where(np.isnan(at), NOTHING, (np.clip(np.nan_to_num(at), 0, 1) * (NOTHING - 1)).round()).astype(np.uint8)


def to_colours(values: NDArray[np.float64], *, signed: bool) -> NDArray[np.uint8]:
    """Return red, green and blue (n, 3) of scaled values without a slide beneath."""
    return colour_table(signed=signed)[colour_indices(values, signed=signed), :3]


def blend(slide: Picture, cover: NDArray[np.uint8]) -> Picture:
    """Lay colours (h, w, 4) over the slide."""
    alpha = cover[..., 3:].astype(np.uint16)
    mixed = slide * (255 - alpha)
    mixed += cover[..., :3] * alpha
    mixed += 128
    mixed += mixed >> 8  # together with the next shift, a division by 255, rounded
    mixed >>= 8
    return mixed.astype(np.uint8)


def to_grey(picture: Picture) -> Picture:
    """Return the picture in grey, a little lighter."""
    red, green, blue = (picture[..., c].astype(np.uint16) for c in range(3))
    grey = (red * 54 + green * 183 + blue * 19) >> 8
    light = (255 - (255 - grey) * 3 // 4).astype(np.uint8)
    return np.repeat(light[..., None], 3, axis=2)
