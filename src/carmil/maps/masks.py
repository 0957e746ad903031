"""Mask TIFFs: one whole number per pixel, 0 where nothing is annotated. Read strip by strip, as finely as tiles need.

A mask has at most MOST_VALUES classes and regions with an outline of at most MOST_EDGES pixels. More than that is a picture, or
one number per nucleus, and is refused.
"""

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carmil.errors import CarmilError
from carmil.maps.regions import Region

LONGEST = 8192  # pixels of a mask that are looked at, along its longer side
STRIP = 256  # rows read at a time
LARGEST = 2**28  # bytes of a mask that are read, or decoded, at once
MOST_SAMPLES = 4  # numbers per pixel, of which the first is used
PROPORTION = 0.02  # how much the sides of a mask may differ from the slide's
MOST_VALUES = 256  # different numbers in a mask, 0 included: those of 8 bits
MOST_EDGES = 2**22  # neighbouring pixels of different values
MOST_TRACED = 2**29  # pixels of all regions' boxes together; of a mask with more, every other row and column is used


def read_mask(path: Path, *, width: int, height: int) -> list[Region]:
    """One region per value, named after it, with all its parts and holes; the mask is stretched over the slide."""
    from scipy import ndimage
    from skimage.measure import find_contours

    mask, seen = _looked_at(path, width / height)
    values = _values(mask, path)
    numbers = np.empty(mask.shape, np.uint16)  # 0, or the place of the pixel's value + 1
    for top in range(0, len(mask), STRIP):
        strip = mask[top : top + STRIP]
        numbers[top : top + STRIP] = np.where(strip == 0, 0, np.searchsorted(values, strip) + 1)
    boxes = ndimage.find_objects(numbers, max_label=len(values))
    while (
        sum((rows.stop - rows.start) * (columns.stop - columns.start) for rows, columns in filter(None, boxes))
        > MOST_TRACED
    ):
        numbers, seen = numbers[::2, ::2], (seen[0] / 2, seen[1] / 2)
        boxes = ndimage.find_objects(numbers, max_label=len(values))
    scale = np.array([width / seen[1], height / seen[0]])
    regions = []
    for number, box in enumerate(boxes, start=1):
        if box is None:
            continue
        corner = np.array([box[1].start, box[0].start]) - 0.5  # x, y of the padded box's upper left pixel's centre
        around = np.pad(numbers[box] == number, 1).astype(np.uint8)  # so that what touches the border is closed
        rings = [np.clip((ring[:-1, ::-1] + corner) * scale, 0, [width, height]) for ring in find_contours(around, 0.5)]
        regions.append(Region(str(values[number - 1]), tuple(ring for ring in rings if len(ring) >= 3)))
    return [one for one in regions if one.rings]


def _values(mask: NDArray[Any], path: Path) -> NDArray[Any]:
    """The values other than 0, sorted; of a picture that is no mask none, but an error."""
    found = np.empty(0, mask.dtype)
    for top in range(0, len(mask), STRIP):
        found = np.union1d(found, mask[top : top + STRIP])
        if len(found) > MOST_VALUES:
            raise CarmilError(
                f"{path} has more than {MOST_VALUES} different values: expected a mask with one number per class, "
                "not a picture or one number per object"
            )
    edges = np.count_nonzero(mask[1:] != mask[:-1]) + np.count_nonzero(mask[:, 1:] != mask[:, :-1])
    if edges > MOST_EDGES:
        raise CarmilError(
            f"{path} changes its value at {edges:,} pixels, more than {MOST_EDGES:,}: expected a mask of regions, not a picture"
        )
    return found[found != 0]


def _looked_at(path: Path, proportion: float) -> tuple[NDArray[Any], tuple[float, float]]:
    """Every so-and-so-many-th pixel, and how many of those the whole mask is high and wide."""
    import zarr

    from carmil.slides.tiff_files import open_tiff

    try:
        with open_tiff(path) as file:
            levels = file.series[0].levels
            level = next((i for i in reversed(range(len(levels))) if max(levels[i].shape[:2]) >= LONGEST), 0)
            height, width = _shape(levels[level], path)
            if abs(width / height / proportion - 1) > PROPORTION:
                raise CarmilError(
                    f"{path} is {width:,} x {height:,} and the slide {proportion:.3f} times as wide as high: "
                    "expected a mask of this slide"
                )
            step = max(1, max(height, width) // LONGEST)
            held: Any = zarr.open(file.aszarr(series=0, level=level), mode="r")
            mask = np.empty((-(-height // step), -(-width // step)), held.dtype)
            rows = max(1, min(STRIP, LARGEST // (width * step * held.dtype.itemsize)))  # of the mask, read at a time
            for top in range(0, len(mask), rows):
                part = np.asarray(held[top * step : (top + rows) * step])[::step, ::step]
                mask[top : top + rows] = part if part.ndim == 2 else part[..., 0]
    except CarmilError:
        raise
    except Exception as error:  # a broken TIFF fails in many ways
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CarmilError(
            f"{path} cannot be read as a mask ({said}): expected a TIFF with one whole number per pixel"
        ) from error
    return mask, (height / step, width / step)


def _shape(level: Any, path: Path) -> tuple[int, int]:
    """Height and width of a level, if it can be a mask."""
    if level.axes not in ("YX", "YXS") or level.dtype.kind not in "bui":
        raise CarmilError(
            f"{path} holds {level.dtype} with the axes {level.axes}: expected a mask with one whole number per pixel and one page"
        )
    if len(level.shape) == 3 and level.shape[2] > MOST_SAMPLES:
        raise CarmilError(f"{path} has {level.shape[2]:,} numbers per pixel: expected a mask, a whole number a pixel")
    page = level.keyframe
    if prod(page.chunks) * level.dtype.itemsize > LARGEST:
        raise CarmilError(
            f"{path} stores {' x '.join(f'{size:,}' for size in page.chunks)} numbers in one piece, which would have to be "
            "decoded whole; write it again as a tiled TIFF"
        )
    return level.shape[0], level.shape[1]
