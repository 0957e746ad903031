"""Draw all maps of a slide: pictures of any size, a figure that compares them, the most important tiles, overlays.

OUT/MAP.png            the whole slide with one map and its legend, written strip by strip
OUT/comparison.png     all maps side by side, with zooms
OUT/tiles_MAP.png      the tiles with the highest and lowest values of a map, with their coordinates
OUT/SLIDE.geojson      for QuPath, optional
OUT/MAP.ome.tiff       pyramidal, optional
OUT/SLIDE.evidence.dcm DICOM segmentation, of a DICOM slide, optional
"""

import struct
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from carmil.errors import CarmilError
from carmil.files import atomic_file, safe_name
from carmil.maps.comparison import draw_comparison, draw_extreme_tiles
from carmil.maps.dicom_maps import check_dicom, write_segmentation
from carmil.maps.legend import NARROWEST, RESEARCH, legend
from carmil.maps.mosaic import Box, picture_size
from carmil.maps.overlays import write_geojson, write_ome_tiff
from carmil.maps.painting import Painter
from carmil.maps.regions import Region
from carmil.maps.tile_maps import Kind, Scale, TileMap, tile_maps
from carmil.slides.slide import Picture, Slide, Tiles

EFFORT = 2  # compression level of zlib, 0 to 9; higher levels are slow and save little
UP = 2  # PNG's filter that stores the difference to the row above
LONGEST = 4000


class PngWriter:
    """A PNG written from top to bottom, some rows at a time: a picture of any size in little memory.

    Call `write` with all rows of `width` RGB pixels, then `close`. `words` become the file's text chunks.
    """

    def __init__(self, file: BinaryIO, width: int, height: int, *, words: Mapping[str, str], mpp: float | None = None):
        self._file, self._shape, self._rows = file, (height, width, 3), 0
        self._above: NDArray[np.uint8] = np.zeros(3 * width, np.uint8)
        self._packer = zlib.compressobj(EFFORT)
        file.write(b"\x89PNG\r\n\x1a\n")
        self._chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        if mpp is not None:
            a_metre = round(1e6 / mpp)
            self._chunk(b"pHYs", struct.pack(">IIB", a_metre, a_metre, 1))
        for name, text in words.items():
            plain = name.encode("latin-1", "replace")
            self._chunk(b"iTXt", plain + b"\0\0\0\0\0" + text.encode("utf-8"))

    def write(self, rows: Picture) -> None:
        """Write the next rows, (h, width, 3)."""
        flat = rows.reshape(len(rows), -1)
        filtered = np.empty((len(flat), flat.shape[1] + 1), np.uint8)
        filtered[:, 0] = UP
        filtered[0, 1:] = flat[0] - self._above
        np.subtract(flat[1:], flat[:-1], out=filtered[1:, 1:])
        self._above = flat[-1].copy()
        self._rows += len(flat)
        self._data(self._packer.compress(filtered.tobytes()))

    def close(self) -> None:
        assert self._rows == self._shape[0], f"{self._rows} rows of {self._shape[0]}"
        self._data(self._packer.flush())
        self._chunk(b"IEND", b"")

    def _data(self, packed: bytes) -> None:
        if packed:
            self._chunk(b"IDAT", packed)

    def _chunk(self, kind: bytes, data: bytes) -> None:
        self._file.write(struct.pack(">I", len(data)) + kind + data)
        self._file.write(struct.pack(">I", zlib.crc32(data, zlib.crc32(kind))))


def draw_maps(
    slide: Slide,
    tiles: Tiles,
    values: Mapping[str, ArrayLike] | Sequence[TileMap],
    out: Path,
    *,
    kind: Mapping[str, Kind] | None = None,
    scale: Scale = "minmax",
    longest: int = LONGEST,
    annotations: Sequence[Region] = (),
    regions: Sequence[Box] | None = None,
    top: int = 8,
    geojson: bool = False,
    ome_tiff: bool = False,
    dicom: bool = False,
    grey: bool = True,
    answers: Sequence[str] = (),
) -> list[Path]:
    """Draw everything of one slide into the folder `out`, and return the files.

    values: one value per tile by the name of the map: factual, counterfactual, difference, or the class that it is evidence for
    (unless `kind` says otherwise). longest: pixels of the longer side, at most the slide's own. regions: boxes to zoom into, in
    level-0 pixels; by default where the evidence for or against is largest. top: tiles shown at each end of a map; 0 for none.
    answers: lines for the head of the comparison, see `carmil.runs.slide_evidence.answer_lines`.
    """
    maps = tile_maps(values, kind) if isinstance(values, Mapping) else list(values)
    if not maps or not len(tiles):
        raise CarmilError(f"{slide.name}: nothing to draw ({len(maps)} maps of {len(tiles)} tiles)")
    if longest < 16:
        raise CarmilError(f"--longest {longest} is too small for a picture: expected 16 pixels or more")
    for left, top_edge, right, bottom in regions or ():
        if min(left, top_edge) < 0 or right > slide.width or bottom > slide.height:
            raise CarmilError(
                f"--region {left:g},{top_edge:g},{right - left:g},{bottom - top_edge:g} is not inside {slide.name}: expected "
                f"X,Y,WIDTH,HEIGHT within its {slide.width:,} x {slide.height:,} level-0 pixels"
            )
    if dicom:
        check_dicom(slide, maps)
    longest = min(longest, max(slide.width, slide.height))
    painter = Painter(slide, tiles, maps, scale, annotations, grey)
    names = file_names(maps)
    written = write_pngs(painter, [out / f"{name}.png" for name in names], longest=longest)
    written.append(draw_comparison(painter, out / "comparison.png", regions=regions, answers=answers))
    if top > 0:
        for one, name in zip(maps, names, strict=True):
            written.append(draw_extreme_tiles(slide, tiles, one, out / f"tiles_{name}.png", top=top))
    if geojson:
        written.append(write_geojson(tiles, maps, out / f"{safe_name(slide.name)}.geojson", scale=scale))
    if ome_tiff:
        paths = [out / f"{name}.ome.tiff" for name in names]
        written += write_ome_tiff(painter, paths, longest=longest)
    if dicom:
        written.append(write_segmentation(slide, tiles, maps, out / f"{safe_name(slide.name)}.evidence.dcm"))
    return written


def file_names(maps: Sequence[TileMap]) -> list[str]:
    """Return a different file name for each map."""
    names: list[str] = []
    for one in maps:
        words = one.kind if one.name == one.kind else f"{one.kind}_{one.name}"
        words = f"{one.model}_{words}" if one.model else words
        taken = [*names, "comparison"]
        names.append(safe_name(words, taken=taken))
        if names[-1] in taken:
            raise CarmilError(f"two maps are named {words!r}: give them different names")
    return names


def write_pngs(painter: Painter, paths: Sequence[Path], *, longest: int) -> list[Path]:
    """Write one picture per map with its legend below, all in one pass over the slide, with one strip of it in memory."""
    slide = painter.slide
    pixels = picture_size(slide.width, slide.height, longest)
    wide, mpp = max(pixels[0], NARROWEST), slide.mpp * slide.width / pixels[0]
    legends = [
        legend(one, slide=slide.name, scale=painter.scale, width=wide, mpp=mpp, outlined=painter.outlined)
        for one in painter.maps
    ]
    with ExitStack() as stack:
        writers = []
        for one, path, band in zip(painter.maps, paths, legends, strict=True):
            file = stack.enter_context(stack.enter_context(atomic_file(path)).open("wb"))
            words = {"Title": one.title, "Description": f"slide {slide.name}; {RESEARCH}", "Software": "carmil"}
            writers.append(PngWriter(file, wide, pixels[1] + len(band), words=words, mpp=mpp))
        threads = stack.enter_context(ThreadPoolExecutor(len(writers)))  # compression releases Python's lock
        for pictures in painter.strips(pixels, line=max(2, longest // 700)):
            rows = [np.pad(one, ((0, 0), (0, wide - pixels[0]), (0, 0)), constant_values=255) for one in pictures]
            list(threads.map(PngWriter.write, writers, rows))
        for writer, band in zip(writers, legends, strict=True):
            writer.write(band)
            writer.close()
    return list(paths)
