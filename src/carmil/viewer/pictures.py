"""Pictures of a case: deep-zoom tiles of its slide, and its instances, in bounded memory.

Deep zoom as in OpenSeadragon: the last level is the slide itself, every level before it half as large, down to one
pixel.
"""

import io
import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from carmil.errors import CarmilError
from carmil.maps.mosaic import picture_size, spacing
from carmil.progress import Log
from carmil.slides.slide import Picture, Slide, check_same_size
from carmil.viewer.cases import Floats, RunCases
from carmil.viewer.limits import BoundedCache
from carmil.viewer.slide_files import SlideFiles

TILE, OVERLAP = 254, 1  # pixels
KEPT = 2**26  # bytes of JPEG
MOST_READ = 2**25  # stored pixels decoded for one picture; levels that need more are not displayed
INSTANCE = 224  # maximum side of an instance's picture, in pixels
THUMBNAIL = 112  # longer side of a slide's thumbnail, in pixels
QUALITY = 82


@dataclass(frozen=True)
class Zoom:
    """The deep zoom of a slide. Levels before `coarsest` are too expensive to read."""

    width: int
    height: int
    mpp: float
    levels: int
    coarsest: int

    def size(self, level: int) -> tuple[int, int]:
        scale = self.scale(level)
        return math.ceil(self.width / scale), math.ceil(self.height / scale)

    def scale(self, level: int) -> int:
        """Return the level-0 pixels per pixel of a level."""
        return 1 << (self.levels - 1 - level)


@dataclass(frozen=True, eq=False)
class Places:
    """Corners (n, 2) of the instances and the edge of a tile, in `unit`: level-0 pixels, or their own without a slide file."""

    corners: Floats
    tile_size: float
    extent: tuple[float, float]
    unit: str

    @property
    def centres(self) -> Floats:
        return self.corners + self.tile_size / 2


class Pictures:
    """Pictures of all cases. Thread-safe."""

    def __init__(self, run: RunCases, slides: SlideFiles, *, share: float = 1.0, log: Log = lambda line: None) -> None:
        self.run, self.slides, self.log = run, slides, log
        self.problems: dict[int, str] = {}  # why a case's slide cannot be shown
        self._checked: set[int] = set()  # cases whose slide is the one that was tiled, as far as this can be checked
        self._kept: BoundedCache[bytes] = BoundedCache(int(KEPT * share), len)

    def zoom(self, number: int) -> Zoom | None:
        """Return the deep zoom; None without a slide file, or if the file is not the slide that was tiled."""
        name = self.run.cases[number].slide
        if name not in self.slides or number in self.problems:
            return None
        try:
            with self.slides.opened(name) as slide:
                if number not in self._checked:
                    self._check_slide(number, slide)
                    self._checked.add(number)
                return zoom_of(slide)
        except CarmilError as error:
            if number not in self.problems:
                self.log(f"{name} is shown without its slide: {error}")
            self.problems[number] = str(error)
            return None

    def _check_slide(self, number: int, slide: Slide) -> None:
        """Refuse a slide of another size than the tiled slide; if its size is not recorded, a slide that does not
        contain all tiles.
        """
        case, corners = self.run.cases[number], self.run.coordinates(number)
        recorded = case.slide_file
        if recorded.slide_width is not None and recorded.slide_height is not None:
            check_same_size(slide, recorded.slide_width, recorded.slide_height)
        elif corners is not None:
            pixel = slide.mpp if self.run.bags.units[case.place] == "um" else 1.0
            right, bottom = corners.max(0) / pixel  # corners, not edges: some tools let tiles reach over the edge
            if right >= slide.width or bottom >= slide.height:
                raise CarmilError(
                    f"{slide.path} is {slide.width:,} x {slide.height:,} pixels, but a tile begins at "
                    f"{right:,.0f}, {bottom:,.0f}: expected the slide that was tiled"
                )

    def kept(self, *key: object) -> bytes | None:
        """Return a picture from the cache, if it is cached."""
        return self._kept.get(key)

    def tile(self, number: int, level: int, x: int, y: int) -> bytes | None:
        """Return a deep-zoom tile; None if it does not exist."""
        name = self.run.cases[number].slide
        if self.zoom(number) is None:
            return None
        with self.slides.opened(name) as slide:
            picture = _tile(slide, level, x, y)
        return None if picture is None else self._made(("tile", number, level, x, y), picture)

    def thumbnail(self, number: int) -> bytes | None:
        """Return a small picture of the part of the slide that was tiled, or of the whole slide if the positions are unknown;
        None if there is none.
        """
        name, zoom, places = self.run.cases[number].slide, self.zoom(number), self.places(number)
        if zoom is None:
            return None
        first, last = np.zeros(2), np.array([zoom.width, zoom.height], dtype=np.float64)
        if places is not None:
            first = np.maximum(places.corners.min(0) - places.tile_size, first)
            last = np.minimum(places.corners.max(0) + 2 * places.tile_size, last)
        (x, y), (width, height) = first.tolist(), (last - first).tolist()
        pixels = picture_size(width, height, THUMBNAIL)
        with self.slides.opened(name) as slide:
            if stored_pixels(slide, width, height, max(width, height) / THUMBNAIL) > MOST_READ:
                return None
            picture = slide.read(x, y, width, height, pixels)
        return self._made(("thumbnail", number), picture)

    def instance(self, number: int, j: int) -> bytes | None:
        """Return the picture of instance j; None if there is none."""
        if self.run.pictures is not None:
            picture = self.run.pictures(self.run.first_row(number) + j)
            return self._made(("instance", number, j), picture)
        name, places = self.run.cases[number].slide, self.places(number)
        if self.zoom(number) is None or places is None:
            return None
        x, y = places.corners[j].tolist()
        side = min(INSTANCE, math.ceil(places.tile_size))
        with self.slides.opened(name) as slide:
            if stored_pixels(slide, places.tile_size, places.tile_size, places.tile_size / side) > MOST_READ:
                return None
            picture = slide.read(x, y, places.tile_size, places.tile_size, (side, side))
        return self._made(("instance", number, j), picture)

    def places(self, number: int) -> Places | None:
        """Return the positions; None if the run does not record them. With a slide file, micrometres are converted
        to level-0 pixels.
        """
        corners, case = self.run.coordinates(number), self.run.cases[number]
        if corners is None:
            return None
        size = case.tile_size or spacing(corners)
        zoom = self.zoom(number)
        unit = str(self.run.bags.units[case.place])
        if zoom is not None and unit == "um":
            corners, size, unit = corners / zoom.mpp, size / zoom.mpp, "level0_px"
        extent = corners.max(0) + size if zoom is None else np.array([zoom.width, zoom.height])
        return Places(corners, size, (float(extent[0]), float(extent[1])), unit)

    def _made(self, key: tuple[object, ...], picture: NDArray[np.uint8]) -> bytes:
        stream = io.BytesIO()
        Image.fromarray(picture).save(stream, format="JPEG", quality=QUALITY)
        self._kept.put(key, stream.getvalue())
        return stream.getvalue()


def zoom_of(slide: Slide) -> Zoom:
    levels = (max(slide.width, slide.height) - 1).bit_length() + 1
    zoom = Zoom(slide.width, slide.height, slide.mpp, levels, 0)
    cheap = [level for level in range(levels) if _stored(slide, zoom, level) <= MOST_READ]
    return replace(zoom, coarsest=cheap[0])


def _stored(slide: Slide, zoom: Zoom, level: int) -> float:
    """Return the number of stored pixels that are decoded for a tile of this level."""
    scale, size = zoom.scale(level), zoom.size(level)
    return stored_pixels(slide, min(size[0], TILE + 2) * scale, min(size[1], TILE + 2) * scale, scale)


def stored_pixels(slide: Slide, width: float, height: float, scale: float) -> float:
    """Return the number of stored pixels decoded for a rectangle in level-0 pixels, reduced by `scale`."""
    fitting = max((level.downsample for level in slide.levels if level.downsample <= scale * 1.01), default=1.0)
    return width * height / fitting**2


def _tile(slide: Slide, level: int, x: int, y: int) -> Picture | None:
    zoom = zoom_of(slide)
    if not zoom.coarsest <= level < zoom.levels:
        return None
    spans = [
        (max(0, at * TILE - OVERLAP), min(size, (at + 1) * TILE + OVERLAP))
        for at, size in zip((x, y), zoom.size(level), strict=True)
    ]
    (x0, x1), (y0, y1) = spans
    if x * TILE >= zoom.size(level)[0] or y * TILE >= zoom.size(level)[1]:
        return None
    scale, pixels = zoom.scale(level), (x1 - x0, y1 - y0)
    return slide.read(x0 * scale, y0 * scale, pixels[0] * scale, pixels[1] * scale, pixels)
