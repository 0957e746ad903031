"""Mask TIFFs: one whole number per pixel, 0 where nothing is annotated. They are read strip by strip, as finely as tiles need.

A mask has at most MOST_VALUES classes, and their outlines at most MOST_EDGES pixels. A file with more is a picture, or has one
number per nucleus, and is refused.
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carmil.errors import CarmilError
from carmil.maps.regions import Region
from carmil.untrusted import one_line_errors

LONGEST = 8192  # pixels of a mask that are sampled, along its longer side
STRIP = 256  # rows read at a time
LARGEST = 2**28  # bytes of a mask that are read, or decoded, at once
MOST_SAMPLES = 4  # numbers per pixel, of which the first is used
PROPORTION = 0.02  # how much the sides of a mask may differ from the slide's
MOST_VALUES = 256  # different numbers in a mask, 0 included: those of 8 bits
MOST_EDGES = 2**22  # neighbouring pixels of different values
MOST_TRACED = 2**29  # pixels of all regions' boxes together; of a mask with more, every other row and column is used


def read_mask(path: Path, width: int, height: int) -> Iterator[Region]:
    """Return one region per value, named after it, with all its parts and holes; the mask is stretched over the slide."""
    mask, sampled = _sampled(path, width / height)
    return _regions(mask, _values(mask, path), sampled, (width, height))


def _regions(
    mask: NDArray[Any], values: NDArray[Any], sampled: tuple[float, float], slide: tuple[int, int]
) -> Iterator[Region]:
    """Trace each value of a mask that is `sampled` (height, width) in all over a slide of (width, height) level-0 pixels."""
    import shapely
    from scipy import ndimage
    from skimage.measure import find_contours

    numbers = np.empty(mask.shape, np.uint16)  # 0, or the index of the pixel's value + 1
    for top in range(0, len(mask), STRIP):
        strip = mask[top : top + STRIP]
        numbers[top : top + STRIP] = np.where(strip == 0, 0, np.searchsorted(values, strip) + 1)
    boxes = ndimage.find_objects(numbers, max_label=len(values))
    while sum(numbers[box].size for box in boxes if box is not None) > MOST_TRACED:
        numbers, sampled = numbers[::2, ::2], (sampled[0] / 2, sampled[1] / 2)
        boxes = ndimage.find_objects(numbers, max_label=len(values))
    scale = np.array([slide[0] / sampled[1], slide[1] / sampled[0]])
    for number, box in enumerate(boxes, start=1):
        if box is None:
            continue
        corner = np.array([box[1].start, box[0].start]) - 0.5  # x, y of the centre of the padded box's upper left pixel
        padded = np.pad(numbers[box] == number, 1).astype(np.uint8)  # closes what touches the border
        rings = [np.clip((ring[:, ::-1] + corner) * scale, 0, slide) for ring in find_contours(padded, 0.5)]
        shape = shapely.build_area(shapely.MultiLineString([ring for ring in rings if len(ring) > 3]))
        if not shape.is_empty:
            yield Region(str(values[number - 1]), shape)


def _values(mask: NDArray[Any], path: Path) -> NDArray[Any]:
    """Return the values other than 0, sorted; refuse a picture that is no mask."""
    values = np.empty(0, mask.dtype)
    for top in range(0, len(mask), STRIP):
        values = np.union1d(values, mask[top : top + STRIP])
        if len(values) > MOST_VALUES:
            raise CarmilError(
                f"{path} has more than {MOST_VALUES} different values: expected a mask with one number per class, "
                "not a picture or one number per object"
            )
    edges = np.count_nonzero(mask[1:] != mask[:-1]) + np.count_nonzero(mask[:, 1:] != mask[:, :-1])
    if edges > MOST_EDGES:
        raise CarmilError(
            f"{path} changes its value at {edges:,} pixels, more than {MOST_EDGES:,}: expected a mask of regions, not a picture"
        )
    return values[values != 0]


def _sampled(path: Path, proportion: float) -> tuple[NDArray[Any], tuple[float, float]]:
    """Return every n-th pixel in both directions, and the height and width of the mask in steps of n pixels."""
    import zarr

    from carmil.slides.tiff_files import open_tiff

    with one_line_errors(path, "expected a TIFF with one whole number per pixel"), open_tiff(path) as file:
        levels = file.series[0].levels
        level = next((i for i in reversed(range(len(levels))) if max(levels[i].shape[:2]) >= LONGEST), 0)
        height, width = _shape(levels[level], path)
        if abs(width / height / proportion - 1) > PROPORTION:
            raise CarmilError(
                f"{path} is {width:,} x {height:,} and the slide {proportion:.3f} times as wide as high: "
                "expected a mask of this slide"
            )
        step = max(1, max(height, width) // LONGEST)
        pixels: Any = zarr.open(file.aszarr(series=0, level=level), mode="r")
        mask = np.empty((-(-height // step), -(-width // step)), pixels.dtype)
        rows = max(1, min(STRIP, LARGEST // (width * step * pixels.dtype.itemsize)))  # of the mask, read at a time
        for top in range(0, len(mask), rows):
            part = np.asarray(pixels[top * step : (top + rows) * step])[::step, ::step]
            mask[top : top + rows] = part if part.ndim == 2 else part[..., 0]
    return mask, (height / step, width / step)


def _shape(level: Any, path: Path) -> tuple[int, int]:
    """Return the height and width of a level; refuse one that is no mask."""
    if level.axes not in ("YX", "YXS") or level.dtype.kind not in "bui":
        raise CarmilError(
            f"{path} holds {level.dtype} with the axes {level.axes}: expected a mask with one whole number per pixel and one page"
        )
    if len(level.shape) == 3 and level.shape[2] > MOST_SAMPLES:
        raise CarmilError(
            f"{path} has {level.shape[2]:,} numbers per pixel: expected a mask with one whole number per pixel"
        )
    page = level.keyframe
    if prod(page.chunks) * level.dtype.itemsize > LARGEST:
        raise CarmilError(
            f"{path} stores {' x '.join(f'{size:,}' for size in page.chunks)} numbers in one piece, which would have to be "
            "decoded whole; write it again as a tiled TIFF"
        )
    return level.shape[0], level.shape[1]
