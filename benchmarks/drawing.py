"""Time and memory of drawing the evidence of many tiles, each task in its own process.

    python benchmarks/drawing.py FOLDER [--tiles 100000]

The slide is computed, not read, so that no file is decoded. Memory is the peak of the process, with Python and its libraries.
"""

import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from shapely import Polygon
from speed.script import run_script

from carmil.maps.drawing import draw_maps, write_pngs
from carmil.maps.mosaic import mosaic, pixel_boxes
from carmil.maps.overlays import write_geojson, write_ome_tiff
from carmil.maps.painting import Painter, raster
from carmil.maps.regions import Region
from carmil.maps.tile_labels import label_tiles
from carmil.maps.tile_maps import tile_maps
from carmil.slides.slide import Level, Picture, Slide, Tiles

SIZE = 256


class ComputedSlide(Slide):
    """Waves of pink, of any size."""

    def __init__(self, side: int) -> None:
        self.path, self.width, self.height, self.mpp, self.mpp_from = Path("computed.svs"), side, side, 0.5, "computed"
        self.levels = (Level(side, side, 1.0),)

    def read(self, x: float, y: float, width: float, height: float, pixels: tuple[int, int]) -> Picture:
        across = (np.sin((x + np.arange(pixels[0]) * width / pixels[0]) / 900) * 60).astype(np.int16)
        down = (np.cos((y + np.arange(pixels[1]) * height / pixels[1]) / 700) * 40).astype(np.int16)
        grey = (150 + across[None] + down[:, None]).astype(np.uint8)
        return np.stack([grey, grey // 2, grey - grey // 4], axis=-1)


def tasks(count: int, folder: Path) -> dict[str, Callable[[], object]]:
    """What is timed, by name, on `count` tiles."""
    side = int(np.ceil(count**0.5))
    y, x = np.divmod(np.arange(count), side)
    slide = ComputedSlide(side * SIZE)
    tiles = _tiles(np.stack([x, y], axis=1) * SIZE, slide)
    shift = np.random.default_rng(1).integers(-SIZE, SIZE, tiles.corners.shape)
    off_grid = _tiles(np.clip(tiles.corners + shift, 0, slide.width - SIZE), slide)  # as many edges as there can be
    rng, wave = np.random.default_rng(0), np.sin(x / 20) * np.cos(y / 30)
    names = ("factual", "counterfactual", "difference", "tumour")
    values = {name: wave + rng.normal(0, 0.2, count) for name in names}
    tumour, four = tile_maps({"tumour": values["tumour"]}), tile_maps(values)
    boxes = pixel_boxes(tiles.corners, tiles.size, (0, 0, slide.width, slide.height), (4000, 4000))

    def png(name: str, tiles: Tiles, longest: int) -> Callable[[], object]:
        return lambda: write_pngs(Painter(slide, tiles, tumour), [folder / name], longest=longest)

    return {
        "nothing: libraries and tiles": lambda: None,
        "one map laid out on cells": lambda: mosaic(boxes, values["tumour"][None], (4000, 4000)),
        "one map as a raster, 4000 px": lambda: raster(tiles, values["tumour"], longest=4000),
        "a raster, tiles off the grid": lambda: raster(off_grid, values["tumour"], longest=4000),
        "one PNG, 4000 px": png("one.png", tiles, 4000),
        "one PNG, tiles off the grid": png("off_grid.png", off_grid, 4000),
        "one map, all pictures, 4000 px": lambda: draw_maps(slide, tiles, tumour, folder / "one"),
        "four maps, all pictures, 4000 px": lambda: draw_maps(slide, tiles, four, folder / "four"),
        "one PNG, 20,000 px": png("large.png", tiles, 20_000),
        "GeoJSON of four maps": lambda: write_geojson(tiles, four, folder / "tiles.geojson"),
        "OME-TIFF of one map, 4000 px": lambda: write_ome_tiff(
            Painter(slide, tiles, tumour), [folder / "one.ome.tiff"], longest=4000
        ),
        "labels from a polygon of 20,000 corners": lambda: label_tiles(tiles, [_star(slide.width)], complete=True),
    }


def _tiles(corners: np.ndarray, slide: Slide) -> Tiles:
    return Tiles("computed", corners, float(SIZE), SIZE, 0.5, slide.width, slide.height, 0.5)


def _star(side: int) -> Region:
    turn = np.linspace(0, 2 * np.pi, 20_000, endpoint=False)
    reach = side * (0.3 + 0.1 * np.sin(9 * turn))
    return Region("tumour", Polygon(side / 2 + reach[:, None] * np.stack([np.cos(turn), np.sin(turn)], axis=1)))


def measure(name: str, count: int, folder: Path) -> str:
    task = tasks(count, folder)[name]
    begin, busy = time.perf_counter(), time.process_time()
    task()
    seconds, busy = time.perf_counter() - begin, time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return f"{count:,} tiles, {name}: {seconds:.2f} s ({busy:.2f} s of processor time), {peak:.0f} MiB"


def main(folder: Path, tiles: int = 100_000) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for name in tasks(1, folder):
            print(pool.submit(measure, name, tiles, folder).result(), flush=True)


if __name__ == "__main__":
    run_script(main)
