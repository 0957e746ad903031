"""Slides read with tifffile: plain and pyramidal TIFF, OME-TIFF. A level is a page, stored in segments (tiles or strips)."""

import xml.etree.ElementTree as ElementTree
from collections import OrderedDict
from math import prod
from pathlib import Path

import numpy as np
import tifffile

from carmil.errors import CarmilError
from carmil.slides.pixel_size import FileMpp, choose_mpp, micrometres
from carmil.slides.pyramid import Pyramid, over_white
from carmil.slides.slide import Level, Picture
from carmil.slides.tiff_files import open_tiff
from carmil.untrusted import one_line_errors

_LARGEST_SEGMENT = 1 << 28  # samples; a segment is always decoded whole
_CACHE = 1 << 26  # bytes of decoded segments, which neighbouring tiles share


class TiffSlide(Pyramid):
    def __init__(self, path: Path, *, mpp: float | None = None) -> None:
        self.path = path
        self._file = open_tiff(path)
        self._file.filehandle.set_lock(True)
        self._lock = self._file.filehandle.lock  # tifffile's own lock: it reads metadata lazily
        self._segments, self._bytes = OrderedDict[tuple[int, int], np.ndarray](), 0
        try:
            with one_line_errors(path, "is this TIFF whole?"):
                series, number = self._largest_series()
                self._pages = [self._check_level(level) for level in series.levels]
                self.height, self.width = self._pages[0].imagelength, self._pages[0].imagewidth
                self.levels = tuple(
                    Level(
                        page.imagewidth,
                        page.imagelength,
                        (self.width / page.imagewidth + self.height / page.imagelength) / 2,
                    )
                    for page in self._pages
                )
                recorded = self._ome_mpp(number) if self._file.is_ome else _tag_mpp(self._pages[0])
                self.mpp, self.mpp_from = choose_mpp(path, recorded, mpp)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def _region(self, level: int, x: int, y: int, width: int, height: int) -> Picture:
        page = self._pages[level]
        planes, tall, wide, down, across = _grid(page)
        out = np.full((height, width, page.samplesperpixel), 255, np.uint8)
        for row in range(y // tall, -(-(y + height) // tall)):
            for column in range(x // wide, -(-(x + width) // wide)):
                for plane in range(planes):
                    segment = self._segment(level, (plane * down + row) * across + column)
                    if segment is None:
                        continue  # a sparse file: nothing was stored here
                    top, left = row * tall - y, column * wide - x
                    part = segment[max(0, -top) : height - top, max(0, -left) : width - left]
                    top, left = max(0, top), max(0, left)
                    samples = slice(None) if planes == 1 else slice(plane, plane + 1)
                    out[top : top + part.shape[0], left : left + part.shape[1], samples] = part
        return _rgb(out, page)

    def _segment(self, level: int, index: int) -> np.ndarray | None:
        """Return a decoded segment (height, width, samples), or None where the file stores nothing."""
        page, key = self._pages[level], (level, index)
        size = page.databytecounts[index]
        if size == 0:
            return None
        with self._lock:
            if (kept := self._segments.get(key)) is not None:
                self._segments.move_to_end(key)
                return kept
            stored = self._stored(page.dataoffsets[index], size)
        try:
            decoded, _, shape = page.decode(stored, index, jpegtables=page.jpegtables, _fullsize=False)
        except Exception as error:  # every codec has its own
            raise CarmilError(
                f"{self.path} cannot be decoded (level {level}, segment {index}): {_line(error)}"
            ) from None
        if decoded is None:
            return None
        segment: np.ndarray = decoded[0, : shape[1], : shape[2]]
        with self._lock:
            if key not in self._segments:
                self._segments[key] = segment
                self._bytes += segment.nbytes
            while self._bytes > _CACHE and len(self._segments) > 1:
                self._bytes -= self._segments.popitem(last=False)[1].nbytes
        return segment

    def _stored(self, at: int, size: int) -> bytes:
        try:
            self._file.filehandle.seek(at)
            return self._file.filehandle.read(size)
        except OSError as error:
            raise CarmilError(f"{self.path} cannot be read at byte {at:,}: {_line(error)}") from None

    def _largest_series(self) -> tuple[tifffile.TiffPageSeries, int]:
        """Return the largest picture of the file (others are labels and overviews), and its number."""
        if not len(self._file.series):
            raise CarmilError(f"{self.path} holds no picture; is the file complete?")
        sized = [
            (series.keyframe.imagewidth * series.keyframe.imagelength, -i) for i, series in enumerate(self._file.series)
        ]
        number = -max(sized)[1]
        series = self._file.series[number]
        if len(series.pages) > 1:
            shape = " x ".join(f"{size} {axis}" for size, axis in zip(series.shape, series.axes, strict=True))
            raise CarmilError(
                f"{self.path} is a stack of {len(series.pages)} pictures ({shape}): expected one RGB picture"
            )
        return series, number

    def _check_level(self, level: tifffile.TiffPageSeries) -> tifffile.TiffPage:
        """Return the page of a level; refuse one that is not 8-bit RGB or grayscale, or is truncated."""
        page = level.keyframe
        sizes = (page.imagewidth, page.imagelength, page.samplesperpixel, *page.chunks)
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise CarmilError(
                f"{self.path} has a picture whose size is not a positive whole number; is the file complete?"
            )
        if problem := _unreadable(page):
            raise CarmilError(f"{self.path} {problem}: expected 8-bit RGB (or grayscale)")
        if prod(page.chunks) > _LARGEST_SEGMENT:
            raise CarmilError(
                f"{self.path} stores {' x '.join(f'{size:,}' for size in page.chunks)} samples in one piece, which would have "
                "to be decoded whole; write it again as a tiled TIFF"
            )
        planes, _, _, down, across = _grid(page)
        segments = planes * down * across
        if not all(isinstance(number, int) and number >= 0 for number in (*page.dataoffsets, *page.databytecounts)):
            raise CarmilError(f"{self.path} has pieces at positions that are not whole numbers; is the file complete?")
        if len(page.dataoffsets) < segments or len(page.databytecounts) < segments:
            raise CarmilError(
                f"{self.path} has {min(len(page.dataoffsets), len(page.databytecounts)):,} pieces where its size needs "
                f"{segments:,}; is the file complete?"
            )
        end = max(
            (at + size for at, size in zip(page.dataoffsets, page.databytecounts, strict=False) if size), default=0
        )
        if end > self._file.filehandle.size:
            raise CarmilError(
                f"{self.path} is truncated: its pixels end at byte {end:,}, the file at {self._file.filehandle.size:,}"
            )
        return page

    def _ome_mpp(self, number: int) -> FileMpp | None:
        try:
            pixels = ElementTree.fromstring(self._file.ome_metadata or "").findall(".//{*}Image/{*}Pixels")
        except ElementTree.ParseError:
            pixels = []
        held = pixels[number].attrib if number < len(pixels) else {}
        x, y = (micrometres(held.get(f"PhysicalSize{axis}"), held.get(f"PhysicalSize{axis}Unit")) for axis in "XY")
        return _tag_mpp(self._pages[0]) if x is None or y is None else FileMpp(x, y, "OME PhysicalSize")


def _grid(page: tifffile.TiffPage) -> tuple[int, int, int, int, int]:
    """Return the planes of a page, height and width of a segment, and the rows and columns of segments."""
    planes = page.samplesperpixel if page.planarconfig == tifffile.PLANARCONFIG.SEPARATE else 1
    tall, wide = page.chunks[-3:-1] if planes == 1 and page.samplesperpixel > 1 else page.chunks[-2:]
    return planes, tall, wide, -(-page.imagelength // tall), -(-page.imagewidth // wide)


def _unreadable(page: tifffile.TiffPage) -> str | None:
    """Return what is wrong with the pixels of a page, or None."""
    kinds = tifffile.PHOTOMETRIC
    if page.dtype != np.uint8 or page.bitspersample != 8:
        return f"has {page.bitspersample} bits per sample ({page.dtype})"
    if page.imagedepth > 1:
        return f"is {page.imagedepth} deep"
    colours = page.samplesperpixel - len(page.extrasamples)
    if page.photometric in (kinds.MINISBLACK, kinds.MINISWHITE):
        return None if colours == 1 else f"has {colours} channels that are not declared as RGB"
    jpeg = page.compression in (tifffile.COMPRESSION.JPEG, tifffile.COMPRESSION.OJPEG)
    if page.photometric == kinds.RGB or (page.photometric == kinds.YCBCR and jpeg):
        return None if colours == 3 else f"has {colours} colours"
    return f"holds {getattr(page.photometric, 'name', page.photometric)} pixels"


def _rgb(samples: Picture, page: tifffile.TiffPage) -> Picture:
    """Convert (height, width, samples) to RGB, alpha over white."""
    colours = page.samplesperpixel - len(page.extrasamples)
    colour = samples[..., :colours]
    if page.photometric == tifffile.PHOTOMETRIC.MINISWHITE:
        colour = 255 - colour
    if colours == 1:
        colour = np.repeat(colour, 3, axis=2)
    kind = page.extrasamples[0] if page.extrasamples else tifffile.EXTRASAMPLE.UNSPECIFIED
    if kind == tifffile.EXTRASAMPLE.UNSPECIFIED:
        return np.ascontiguousarray(colour)
    return over_white(colour, samples[..., colours], premultiplied=kind == tifffile.EXTRASAMPLE.ASSOCALPHA)


def _tag_mpp(page: tifffile.TiffPage) -> FileMpp | None:
    """Return the resolution tags; None without a unit, or with the placeholder 1."""
    unit = {2: 25_400, 3: 10_000}.get(int(page.resolutionunit))
    x, y = page.resolution
    if unit is None or min(x, y) <= 1:
        return None
    return FileMpp(unit / x, unit / y, "its TIFF resolution")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
