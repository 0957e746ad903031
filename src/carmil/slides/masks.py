"""Mask TIFFs: a whole number a pixel, 0 where nothing is annotated. Read strip by strip, as finely as tiles need."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carmil.errors import CarmilError
from carmil.slides.annotations import Region

LONGEST = 8192  # pixels of a mask that are looked at, along its longer side
STRIP = 256  # rows read at a time
PROPORTION = 0.02  # how much the sides of a mask may differ from the slide's


def read_mask(path: Path, *, width: int, height: int) -> list[Region]:
    """A region a value, named after it, with all its parts and holes; the mask is stretched over the slide."""
    from skimage.measure import find_contours

    mask, seen = _looked_at(path, width / height)
    scale = np.array([width / seen[1], height / seen[0]])
    regions = []
    for value in np.unique(mask):
        if value == 0:
            continue
        around = np.pad(mask == value, 1).astype(np.uint8)  # so that what touches the border is closed
        rings = [np.clip((ring[:-1, ::-1] - 0.5) * scale, 0, [width, height]) for ring in find_contours(around, 0.5)]
        regions.append(Region(str(value), tuple(ring for ring in rings if len(ring) >= 3)))
    return [one for one in regions if one.rings]


def _looked_at(path: Path, proportion: float) -> tuple[NDArray[Any], tuple[float, float]]:
    """Every so-and-so-many-th pixel, and how many of those the whole mask is high and wide."""
    import tifffile
    import zarr

    try:
        with tifffile.TiffFile(path) as file:
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
            strip = STRIP * step
            parts = [np.asarray(held[top : top + strip])[::step, ::step] for top in range(0, height, strip)]
    except CarmilError:
        raise
    except Exception as error:  # a broken TIFF fails in many ways
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CarmilError(
            f"{path} cannot be read as a mask ({said}): expected a TIFF with a whole number a pixel"
        ) from error
    mask = np.concatenate(parts)
    return (mask if mask.ndim == 2 else mask[..., 0]), (height / step, width / step)


def _shape(level: Any, path: Path) -> tuple[int, int]:
    if level.axes not in ("YX", "YXS") or level.dtype.kind not in "bui":
        raise CarmilError(
            f"{path} holds {level.dtype} with the axes {level.axes}: expected a mask, a whole number a pixel and one page"
        )
    return level.shape[0], level.shape[1]
