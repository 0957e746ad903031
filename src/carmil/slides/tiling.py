"""Cut tissue into tiles on a grid in micrometres; read and write tiles in the files of TRIDENT and others."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from carmil.array_files import as_number, as_text, in_memory, open_arrays
from carmil.bags.geometry import TileGeometry
from carmil.errors import CarmilError, unknown
from carmil.files import safe_name
from carmil.hdf5 import attribute_text, new_hdf5
from carmil.slides.slide import Slide, Tiles
from carmil.slides.tissue import Tissue
from carmil.untrusted import one_line_errors

# Points of a tile, in shares of its side; a tile is kept if one of them lies in tissue.
POINTS = {
    "centre": np.array([(0.5, 0.5)]),
    "four-point": np.array([(0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75)]),  # as in CLAM
}
LARGEST = 2**31  # limit of any number of pixels in a file
_ATTRIBUTES = (
    *("name", "patch_size", "patch_size_level0", "level0_width", "level0_height"),
    *("mpp", "slide_mpp", "target_magnification", "level0_magnification", "carmil"),
)
_COARSER = 1.5  # maximum ratio of the mpp of slide and tile; beyond it, most of a tile would be interpolated


def cut(
    slide: Slide,
    tissue: Tissue,
    *,
    pixels: int = 256,
    mpp: float = 0.5,
    overlap: float = 0.0,
    rule: str = "centre",
) -> Tiles:
    """Return tiles of `pixels` tile pixels of `mpp` micrometres whose centre (or another `rule` of POINTS) lies in tissue.

    Neighbours share `overlap` of their side. The grid begins at the slide's corner; tiles are ordered by row and lie inside it.
    """
    check_tiles(pixels, mpp, overlap, rule)
    if slide.mpp > _COARSER * mpp:
        raise CarmilError(
            f"{slide.path} has {slide.mpp:.3g} um/px, too coarse for tiles of {mpp:g} um/px: use --tile-mpp {slide.mpp:.3g}"
        )
    side = pixels * mpp
    step = side * (1 - overlap)
    x, y = (
        np.arange(max(0, int((length * slide.mpp + slide.mpp / 2 - side) // step) + 1)) * step
        for length in (slide.width, slide.height)
    )
    corners = np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)
    within = np.zeros(len(corners), bool)
    for point in POINTS[rule]:
        within |= tissue.holds(corners + point * side)
    return Tiles(
        slide=slide.name,
        corners=np.rint(corners[within] / slide.mpp).astype(np.int64),
        size=side / slide.mpp,
        pixels=pixels,
        mpp=mpp,
        width=slide.width,
        height=slide.height,
        slide_mpp=slide.mpp,
    )


def check_tiles(pixels: int, mpp: float, overlap: float, rule: str) -> None:
    """Refuse impossible tile settings before any slide is opened."""
    if not 8 <= pixels <= 16384:
        raise CarmilError(f"tiles of {pixels} pixels: expected 8 to 16384")
    if not 0.05 <= mpp <= 20:
        raise CarmilError(f"tiles of {mpp:g} micrometres per pixel: expected 0.05 to 20, for instance 0.5 for 20x")
    if not 0 <= overlap <= 0.9:
        raise CarmilError(f"an overlap of {overlap:g}: expected a share of the side, from 0 to 0.9")
    if rule not in POINTS:
        raise CarmilError(unknown("rule for tiles", rule, POINTS))


def tiling_text(*, preset: str, rule: str, overlap: float, keep: Iterable[str]) -> str:
    """Describe how tiles of one geometry are chosen, as options of `carmil slides tile`."""
    kept = ",".join(sorted(keep))
    return f"--preset {preset} --rule {rule} --overlap {overlap:.9g}{f' --keep {kept}' if kept else ''}"


def tiles_file(folder: Path, slide: str) -> Path:
    """Return the path of a slide's tiles in a folder with TRIDENT's layout: carmil's file, or TRIDENT's if only that exists."""
    ours = folder / "patches" / f"{safe_name(slide)}_patches.h5"
    if ours.exists() or os.path.basename(slide) != slide or "\0" in slide:
        return ours
    theirs = folder / "patches" / f"{slide}_patches.h5"
    return theirs if theirs.is_file() else ours


def write_tiles(tiles: Tiles, folder: Path, *, overlap: float = 0.0, more: Mapping[str, Any] | None = None) -> Path:
    """Write folder/patches/SLIDE_patches.h5 as TRIDENT does, plus mpp and slide_mpp, and `more` as JSON."""
    path = tiles_file(folder, tiles.slide)
    with new_hdf5(path) as file:
        coords = file.create_dataset("coords", data=tiles.corners.astype(np.int64))
        coords.attrs.update(
            patch_size=tiles.pixels,
            patch_size_level0=int(tiles.size) if float(tiles.size).is_integer() else tiles.size,
            level0_magnification=10 / tiles.slide_mpp,
            target_magnification=10 / tiles.mpp,
            overlap=round(overlap * tiles.pixels),
            name=attribute_text(tiles.slide),
            savetodir=str(path.parent),
            level0_width=tiles.width,
            level0_height=tiles.height,
            mpp=tiles.mpp,
            slide_mpp=tiles.slide_mpp,
            carmil=json.dumps(more or {}),
        )
    return path


def read_tiles(path: Path) -> Tiles:
    """Read tiles that carmil or TRIDENT wrote; TRIDENT records magnifications instead of micrometres."""
    corners, attributes = _read(path)

    def number(name: str) -> float:
        value = as_number(attributes.get(name), f"{path}: {name}")
        if value is None:
            raise CarmilError(f"{path} has no {name}: expected a file of tiles in TRIDENT's format")
        if value > LARGEST:
            raise CarmilError(f"{path}: {name} is {value:g}: expected at most {LARGEST:,}, in TRIDENT's format")
        return value

    with one_line_errors(path, "expected numbers in the attributes of coords, as TRIDENT writes them"):
        return Tiles(
            slide=as_text(attributes.get("name")) or path.stem.removesuffix("_patches"),
            corners=corners,
            size=number("patch_size_level0"),
            pixels=int(number("patch_size")),
            mpp=number("mpp") if "mpp" in attributes else 10 / number("target_magnification"),
            width=int(number("level0_width")),
            height=int(number("level0_height")),
            slide_mpp=number("slide_mpp") if "slide_mpp" in attributes else 10 / number("level0_magnification"),
            tiling=_recorded_tiling(_more(attributes)),
        )


def _recorded_tiling(more: Mapping[str, Any]) -> str | None:
    """Return how carmil chose the tiles of a file; None for other tools, which do not record all of it."""
    try:
        settings = more["settings"]
        return tiling_text(**{name: settings[name] for name in ("preset", "rule", "overlap", "keep")})
    except (KeyError, TypeError, ValueError):
        return None


def geometries_in(folder: Path) -> dict[Path, TileGeometry]:
    """Return the geometry of every readable file of tiles in a folder with TRIDENT's layout."""
    geometries = {}
    for path in sorted((folder / "patches").glob("*_patches.h5")):
        try:
            geometries[path] = read_tiles(path).geometry
        except CarmilError:  # damaged, so that the slide will be cut again
            continue
    return geometries


def read_more(path: Path) -> dict[str, Any]:
    """Return the `more` passed to `write_tiles`; empty if another tool wrote the file."""
    return _more(_read(path)[1])


def _more(attributes: Mapping[str, Any]) -> dict[str, Any]:
    try:
        more = json.loads(attributes.get("carmil", "{}"))
    except (TypeError, ValueError, RecursionError):
        return {}
    return more if isinstance(more, dict) else {}


def _read(path: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the corners (n, 2) and the attributes of a file."""
    with open_arrays(path) as file:
        coords = file.array("coords")
        if len(coords.shape) != 2 or coords.shape[1] != 2 or np.dtype(coords.dtype).kind not in "iu":
            raise CarmilError(f"{path}: coords are {coords.dtype} {coords.shape}: expected whole numbers (tiles, 2)")
        attributes = {name: coords.attribute(name) for name in _ATTRIBUTES}
        return in_memory(coords.read(), "int64"), {
            name: value for name, value in attributes.items() if value is not None
        }
