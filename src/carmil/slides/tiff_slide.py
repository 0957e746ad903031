"""Slides read with tifffile: plain and pyramidal TIFF, OME-TIFF. A level is a page, stored in segments (tiles or strips).

Pages are counted before they are read, since they may form a cycle. `check_tiff` inspects a file before OpenSlide opens
it, which can abort the process if the file is damaged.
"""

import logging
import re
import xml.etree.ElementTree as ElementTree
from collections import OrderedDict
from math import prod
from pathlib import Path

import numpy as np
import tifffile

from carmil.errors import CarmilError
from carmil.slides.pyramid import Pyramid, over_white
from carmil.slides.slide import FileMpp, GivenMpp, Level, Picture, choose_mpp, micrometres
from carmil.untrusted import one_line_errors
from carmil.words import number_in

MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
MOST_PAGES = 1000  # a slide has about ten: levels, a label, an overview

logging.getLogger("tifffile").addHandler(logging.NullHandler())  # our own messages describe the problems of a file
_LARGEST_SEGMENT = 1 << 28  # samples; a segment is always decoded whole
_MOST_CHECKED = 1 << 24  # pixels that are looked at when a 16-bit slide is opened
_UNNAMED_CHANNEL = re.compile(r"(?i)channel[ :_-]*\d+([ :_-]\d+)*|c\d+|\d+")
_CACHE = 1 << 26  # bytes of decoded segments, which neighbouring tiles share


def open_tiff(path: Path, advice: str = "is this TIFF complete?") -> tifffile.TiffFile:
    """Open a TIFF for reading. Refuse one with endless pages, which tifffile would follow for hours."""
    with one_line_errors(path, advice):
        file = tifffile.TiffFile(path)
        try:
            places: set[int] = set()
            for page in file.pages:
                if page.offset in places or len(places) == MOST_PAGES:
                    how = (
                        "whose pages form a cycle" if page.offset in places else f"with more than {MOST_PAGES:,} pages"
                    )
                    raise CarmilError(f"{path} is a TIFF {how}: {advice}")
                places.add(page.offset)
        except BaseException:
            file.close()
            raise
    return file


def line_of(error: Exception) -> str:
    """Return the message of a library on one line."""
    return " ".join(str(error).split())[:200]


def is_tiff(path: Path) -> bool:
    """Return whether a file begins with the signature of a TIFF."""
    with path.open("rb") as stream:
        return stream.read(4) in MAGIC


def check_tiff(path: Path) -> None:
    """Refuse a TIFF with impossible sizes, missing tiles, or pieces larger than the file."""
    with open_tiff(path) as file, one_line_errors(path, "is this TIFF complete?"):
        for number, page in enumerate(file.pages):
            if problem := _problem(page.aspage(), file.filehandle.size):
                raise CarmilError(f"{path}: page {number} {problem}; check that the file is complete")


def _problem(page: tifffile.TiffPage, size: int) -> str | None:
    sides = [page.imagewidth, page.imagelength, *((page.tilewidth, page.tilelength) if page.is_tiled else ())]
    if not all(isinstance(side, int) and side > 0 for side in sides):
        return "has a size that is not a positive whole number"
    if not all(isinstance(number, int) and 0 <= number <= size for number in page.databytecounts):
        return f"stores pieces that are larger than the file, which has {size:,} bytes"
    if page.is_tiled:
        wide, tall, across, down = sides
        planes = page.samplesperpixel if page.planarconfig == tifffile.PLANARCONFIG.SEPARATE else 1
        needed, found = planes * -(-wide // across) * -(-tall // down), len(page.databytecounts)
        if min(found, len(page.dataoffsets)) < needed:
            return f"has {found:,} tiles where its size needs {needed:,}"
    return None


class TiffSlide(Pyramid):
    def __init__(self, path: Path, *, mpp: GivenMpp) -> None:
        self.path = path
        self._file = open_tiff(path)
        self._file.filehandle.set_lock(True)
        self._lock = self._file.filehandle.lock  # tifffile's own lock: it reads metadata lazily
        self._segments, self._bytes = OrderedDict[tuple[int, int, int], np.ndarray](), 0
        try:
            with one_line_errors(path, "is this TIFF whole?"):
                series, number = self._largest_series()
                attributes, channels = self._ome_pixels(number) if self._file.is_ome else ({}, [])
                if len(series.pages) > 1:
                    _check_channels(path, channels)
                self._pages = [
                    [self._check_page(page.aspage()) for page in level.pages if page] for level in series.levels
                ]
                first = self._pages[0][0]
                self._white = _largest_value(first, attributes)
                self.height, self.width = first.imagelength, first.imagewidth
                self.levels = tuple(
                    Level(
                        page.imagewidth,
                        page.imagelength,
                        (self.width / page.imagewidth + self.height / page.imagelength) / 2,
                    )
                    for page, *_ in self._pages
                )
                recorded = _ome_mpp(attributes) or _tag_mpp(first)
                self.mpp, self.mpp_from = choose_mpp(path, recorded, mpp)
                self._refuse_dark()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def _region(self, level: int, x: int, y: int, width: int, height: int) -> Picture:
        parts = [self._samples(level, number, x, y, width, height) for number in range(len(self._pages[level]))]
        samples = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)
        if samples.dtype != np.uint8:
            samples = (samples.clip(max=self._white) * np.float32(255 / self._white) + 0.5).astype(np.uint8)
        return samples if len(parts) > 1 else _rgb(samples, self._pages[level][0])

    def _samples(self, level: int, number: int, x: int, y: int, width: int, height: int) -> np.ndarray:
        """Return a rectangle of a page, (height, width, samples), as it is stored."""
        page = self._pages[level][number]
        planes, tall, wide, down, across = _grid(page)
        out = np.full((height, width, page.samplesperpixel), self._white, page.dtype)
        for row in range(y // tall, -(-(y + height) // tall)):
            for column in range(x // wide, -(-(x + width) // wide)):
                for plane in range(planes):
                    segment = self._segment(level, number, (plane * down + row) * across + column)
                    if segment is None:
                        continue  # a sparse file that stores no data for this segment
                    top, left = row * tall - y, column * wide - x
                    part = segment[max(0, -top) : height - top, max(0, -left) : width - left]
                    top, left = max(0, top), max(0, left)
                    samples = slice(None) if planes == 1 else slice(plane, plane + 1)
                    out[top : top + part.shape[0], left : left + part.shape[1], samples] = part
        return out

    def _segment(self, level: int, number: int, index: int) -> np.ndarray | None:
        """Return a decoded segment (height, width, samples), or None where the file stores nothing."""
        page, key = self._pages[level][number], (level, number, index)
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
        except Exception as error:  # every codec raises its own errors
            raise CarmilError(
                f"{self.path} cannot be decoded (level {level}, segment {index}): {line_of(error)}"
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
            raise CarmilError(f"{self.path} cannot be read at byte {at:,}: {line_of(error)}") from None

    def _largest_series(self) -> tuple[tifffile.TiffPageSeries, int]:
        """Return the largest picture of the file (others are labels and overviews), and its number."""
        if not len(self._file.series):
            raise CarmilError(f"{self.path} holds no picture; check that the file is complete")
        sized = [
            (series.keyframe.imagewidth * series.keyframe.imagelength, -i) for i, series in enumerate(self._file.series)
        ]
        number = -max(sized)[1]
        series = self._file.series[number]
        if len(series.pages) > 1 and (series.axes != "CYX" or len(series.pages) != 3):
            shape = " x ".join(f"{size} {axis}" for size, axis in zip(series.shape, series.axes, strict=True))
            raise CarmilError(
                f"{self.path} is a stack of {len(series.pages)} pictures ({shape}): expected one RGB picture"
            )
        return series, number

    def _check_page(self, page: tifffile.TiffPage) -> tifffile.TiffPage:
        """Return the page; refuse one that is not RGB or grayscale of 8 or 16 bits, or is truncated."""
        sizes = (page.imagewidth, page.imagelength, page.samplesperpixel, *page.chunks)
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise CarmilError(
                f"{self.path} has a picture whose size is not a positive whole number; check that the file is complete"
            )
        if problem := _unreadable(page):
            raise CarmilError(f"{self.path} {problem}: expected RGB (or grayscale) of 8 or 16 bits")
        if prod(page.chunks) > _LARGEST_SEGMENT:
            raise CarmilError(
                f"{self.path} stores {' x '.join(f'{size:,}' for size in page.chunks)} samples in one piece, "
                "too large to be decoded as a whole; convert it to a tiled TIFF"
            )
        planes, _, _, down, across = _grid(page)
        segments = planes * down * across
        if not all(isinstance(number, int) and number >= 0 for number in (*page.dataoffsets, *page.databytecounts)):
            raise CarmilError(
                f"{self.path} has pieces at positions that are not whole numbers; check that the file is complete"
            )
        if len(page.dataoffsets) < segments or len(page.databytecounts) < segments:
            raise CarmilError(
                f"{self.path} has {min(len(page.dataoffsets), len(page.databytecounts)):,} pieces where its "
                f"size needs {segments:,}; check that the file is complete"
            )
        end = max(
            (at + size for at, size in zip(page.dataoffsets, page.databytecounts, strict=False) if size), default=0
        )
        if end > self._file.filehandle.size:
            raise CarmilError(
                f"{self.path} is truncated: its pixels end at byte {end:,}, but the file at "
                f"{self._file.filehandle.size:,}"
            )
        return page

    def _ome_pixels(self, number: int) -> tuple[dict[str, str], list[str]]:
        """Return the attributes of a picture in the OME metadata, and the names of its channels."""
        try:
            pictures = ElementTree.fromstring(self._file.ome_metadata or "").findall(".//{*}Image/{*}Pixels")
        except ElementTree.ParseError:
            pictures = []
        if number >= len(pictures):
            return {}, []
        return pictures[number].attrib, [channel.get("Name", "") for channel in pictures[number].findall("{*}Channel")]

    def _refuse_dark(self) -> None:
        """Refuse 16-bit pixels that use little of their range: the file does not state the true range."""
        smallest = self.levels[-1]
        if self._pages[0][0].dtype == np.uint8 or smallest.width * smallest.height > _MOST_CHECKED:
            return
        brightest = self._region(len(self.levels) - 1, 0, 0, smallest.width, smallest.height).max()
        if brightest < 64:
            raise CarmilError(
                f"{self.path} has 16 bits per sample, of which its brightest pixel uses {brightest / 255:.1%} (of 0 to "
                f"{self._white:,}): state the range in OME SignificantBits or TIFF MaxSampleValue, or convert it to 8 bits"
            )


def _check_channels(path: Path, names: list[str]) -> None:
    """Refuse three channels that are named, but not red, green and blue in this order."""
    named = [name.casefold() for name in names if name and not _UNNAMED_CHANNEL.fullmatch(name)]
    if named and [name[:1] for name in named] != ["r", "g", "b"]:
        raise CarmilError(f"{path} has the channels {', '.join(names)}: expected red, green, blue")


def _largest_value(page: tifffile.TiffPage, attributes: dict[str, str]) -> int:
    """Return the sample value that is shown as 255: that of the stated bits, the stated maximum, or all bits."""
    whole = 2**page.bitspersample - 1
    if page.bitspersample == 8:
        return whole
    bits = number_in(attributes.get("SignificantBits", ""))
    if bits is not None and 8 <= bits <= 16:
        return 2 ** int(bits) - 1
    tag = page.tags.get("MaxSampleValue")
    stated = None if tag is None else np.max(tag.value)
    return int(stated) if stated is not None and 255 <= stated <= whole else whole


def _ome_mpp(attributes: dict[str, str]) -> FileMpp | None:
    x, y = (
        micrometres(attributes.get(f"PhysicalSize{axis}"), attributes.get(f"PhysicalSize{axis}Unit")) for axis in "XY"
    )
    return None if x is None or y is None else FileMpp(x, y, "OME PhysicalSize")


def _grid(page: tifffile.TiffPage) -> tuple[int, int, int, int, int]:
    """Return the planes of a page, height and width of a segment, and the rows and columns of segments."""
    planes = page.samplesperpixel if page.planarconfig == tifffile.PLANARCONFIG.SEPARATE else 1
    tall, wide = page.chunks[-3:-1] if planes == 1 and page.samplesperpixel > 1 else page.chunks[-2:]
    return planes, tall, wide, -(-page.imagelength // tall), -(-page.imagewidth // wide)


def _unreadable(page: tifffile.TiffPage) -> str | None:
    """Return the reason why the pixels of a page cannot be read, or None."""
    kinds = tifffile.PHOTOMETRIC
    if (page.dtype, page.bitspersample) not in ((np.uint8, 8), (np.uint16, 16)):
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
