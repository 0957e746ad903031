"""Read a rectangle of a slide at any size, from the nearest level, in pieces."""

import os
from abc import abstractmethod
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from math import ceil, floor

import numpy as np
from PIL import Image

from carmil.errors import CarmilError
from carmil.slides.slide import Level, Picture, Slide

_PIECE = 1024  # level pixels per side that are in memory at once
MOST = 10_000_000_000  # level pixels read for one picture, which takes minutes; a slide that needs more has no overview
_WHITE = 255


class Pyramid(Slide):
    """A slide whose file is read in rectangles of whole level pixels; scaling and edges are handled by this class."""

    @abstractmethod
    def _region(self, level: int, x: int, y: int, width: int, height: int) -> Picture:
        """Return a rectangle inside the level, in pixels of the level."""

    def read(self, x: float, y: float, width: float, height: float, pixels: tuple[int, int]) -> Picture:
        across, down = pixels
        if min(across, down) < 1 or not (width > 0 and height > 0):
            raise ValueError(f"a rectangle of {width} x {height} as {across} x {down} pixels: expected positive sizes")
        number = self._level_for(min(width / across, height / down))
        level = self.levels[number]
        left, top = x / level.downsample, y / level.downsample
        step = (width / level.downsample / across, height / level.downsample / down)
        if max(step) > _PIECE / 4:  # too many pixels per output pixel for one row of pieces: scale in two steps
            finer = (ceil(across * max(1, step[0] / 64)), ceil(down * max(1, step[1] / 64)))
            larger = Image.fromarray(self.read(x, y, width, height, finer))
            return np.array(larger.resize(pixels, Image.Resampling.BOX))
        self._refuse_too_much(level, left, top, across * step[0], down * step[1])
        pieces = [(*rows, *columns) for rows in _pieces(down, step[1]) for columns in _pieces(across, step[0])]
        if len(pieces) == 1:
            return self._piece(number, left, top, step, pixels)
        out = np.empty((down, across, 3), np.uint8)

        def fill(piece: tuple[int, int, int, int]) -> None:
            above, below, start, end = piece
            corner = (left + start * step[0], top + above * step[1])
            out[above:below, start:end] = self._piece(number, *corner, step, (end - start, below - above))

        with ThreadPoolExecutor(min(4, len(pieces), os.cpu_count() or 1)) as threads:
            deque(threads.map(fill, pieces), maxlen=0)
        return out

    def _level_for(self, scale: float) -> int:
        """Return the smallest level that is large enough, within one per cent."""
        fitting = [i for i, level in enumerate(self.levels) if level.downsample <= scale * 1.01]
        return max(fitting, key=lambda i: self.levels[i].downsample, default=0)

    def _refuse_too_much(self, level: Level, left: float, top: float, width: float, height: float) -> None:
        visible = [
            max(0.0, min(start + size, whole) - max(start, 0.0))
            for start, size, whole in ((left, width, level.width), (top, height, level.height))
        ]
        if visible[0] * visible[1] > MOST:
            raise no_overview(self, level)

    def _piece(
        self, number: int, left: float, top: float, step: tuple[float, float], pixels: tuple[int, int]
    ) -> Picture:
        """Return `pixels` of `step` level pixels each, from (left, top); white outside the level."""
        level = self.levels[number]
        # Rounding errors are removed, as neighbours of a tile would otherwise be decoded too.
        left, top = (round(start) if abs(start - round(start)) < 1e-6 else start for start in (left, top))
        x0, y0 = floor(left), floor(top)
        x1, y1 = ceil(left + pixels[0] * step[0] - 1e-6), ceil(top + pixels[1] * step[1] - 1e-6)
        inside = (max(x0, 0), max(y0, 0), min(x1, level.width), min(y1, level.height))
        canvas = np.full((y1 - y0, x1 - x0, 3), _WHITE, np.uint8)
        if inside[0] < inside[2] and inside[1] < inside[3]:
            part = self._region(number, inside[0], inside[1], inside[2] - inside[0], inside[3] - inside[1])
            canvas[inside[1] - y0 : inside[3] - y0, inside[0] - x0 : inside[2] - x0] = part
        if canvas.shape[:2] == (pixels[1], pixels[0]) and step == (1.0, 1.0):
            return canvas
        box = (left - x0, top - y0)
        ends = (min(box[0] + pixels[0] * step[0], x1 - x0), min(box[1] + pixels[1] * step[1], y1 - y0))
        how = Image.Resampling.HAMMING if max(step) > 1 else Image.Resampling.BICUBIC
        return np.array(Image.fromarray(canvas).resize(pixels, how, box=(*box, *ends)))


def no_overview(slide: Slide, level: Level) -> CarmilError:
    return CarmilError(
        f"{slide.path} has no overview: its smallest sufficient level is {level.width:,} x {level.height:,} "
        "pixels, too many to read for one picture; convert it to a pyramidal TIFF"
    )


def _pieces(pixels: int, step: float) -> list[tuple[int, int]]:
    count = max(1, ceil(pixels * step / _PIECE))
    edges = [round(i * pixels / count) for i in range(count + 1)]
    return [(a, b) for a, b in pairwise(edges) if b > a]


def over_white(colour: Picture, alpha: Picture, *, premultiplied: bool = False) -> Picture:
    """Blend colour (h, w, 3) with alpha (h, w) over white."""
    if alpha.min(initial=_WHITE) == _WHITE:
        return colour
    share = alpha[..., None].astype(np.uint16)
    under = (_WHITE - share) * _WHITE
    above = colour.astype(np.uint16) * (_WHITE if premultiplied else share)
    return np.minimum((above + under + _WHITE // 2) // _WHITE, _WHITE).astype(np.uint8)
