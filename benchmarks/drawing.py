"""Seconds and memory of drawing the evidence of many tiles, each measured in a process of its own.

    python benchmarks/drawing.py FOLDER [--tiles 100000]

The slide is computed, not read: what is measured is ours, without a file's decoding. Memory is the most that the process ever
held, with Python and its libraries in it.
"""

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

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
        self.path, self.width, self.height, self.mpp, self.mpp_from = Path("computed.svs"), side, side, 0.5, "made up"
        self.levels = (Level(side, side, 1.0),)

    def read(self, x: float, y: float, width: float, height: float, pixels: tuple[int, int]) -> Picture:
        across = (np.sin((x + np.arange(pixels[0]) * width / pixels[0]) / 900) * 60).astype(np.int16)
        down = (np.cos((y + np.arange(pixels[1]) * height / pixels[1]) / 700) * 40).astype(np.int16)
        grey = (150 + across[None] + down[:, None]).astype(np.uint8)
        return np.stack([grey, grey // 2, grey - grey // 4], axis=-1)


def made_up(count: int) -> tuple[Slide, Tiles, dict[str, np.ndarray]]:
    side = int(np.ceil(count**0.5))
    y, x = np.divmod(np.arange(count), side)
    corners = np.stack([x, y], axis=1) * SIZE
    slide = ComputedSlide(side * SIZE)
    tiles = Tiles("computed", corners, float(SIZE), SIZE, 0.5, slide.width, slide.height, 0.5)
    rng = np.random.default_rng(0)
    wave = np.sin(x / 20) * np.cos(y / 30)
    names = ("factual", "counterfactual", "difference", "tumour")
    return slide, tiles, {name: wave + rng.normal(0, 0.2, count) for name in names}


def jittered(tiles: Tiles) -> Tiles:
    """Tiles on no grid, each over its neighbours: the most edges there can be."""
    shift = np.random.default_rng(1).integers(-SIZE, SIZE, tiles.corners.shape)
    corners = np.clip(tiles.corners + shift, 0, tiles.width - SIZE)
    return Tiles("jittered", corners, tiles.size, SIZE, 0.5, tiles.width, tiles.height, 0.5)


def star(side: int) -> Region:
    turn = np.linspace(0, 2 * np.pi, 20_000, endpoint=False)
    reach = side * (0.3 + 0.1 * np.sin(9 * turn))
    return Region("tumour", (np.stack([side / 2 + reach * np.cos(turn), side / 2 + reach * np.sin(turn)], axis=1),))


def measured(task: str, count: int, folder: Path) -> None:
    slide, tiles, values = made_up(count)
    evidence, every = tile_maps({"tumour": values["tumour"]}), tile_maps(values)
    star_of, loose = star(slide.width), jittered(tiles)
    boxes = pixel_boxes(tiles.corners, tiles.size, (0, 0, slide.width, slide.height), (4000, 4000))
    tasks = {
        "nothing: libraries and tiles": lambda: None,
        "one map laid out on cells": lambda: mosaic(boxes, values["tumour"][None], (4000, 4000)),
        "one map as a raster, 4000 px": lambda: raster(tiles, values["tumour"], longest=4000),
        "a raster, tiles on no grid": lambda: raster(loose, values["tumour"], longest=4000),
        "one PNG, 4000 px": lambda: write_pngs(Painter(slide, tiles, evidence), [folder / "one.png"], longest=4000),
        "one PNG, tiles on no grid": lambda: write_pngs(
            Painter(slide, loose, evidence), [folder / "loose.png"], longest=4000
        ),
        "one map, all pictures, 4000 px": lambda: draw_maps(slide, tiles, evidence, folder / "one"),
        "four maps, all pictures, 4000 px": lambda: draw_maps(slide, tiles, every, folder / "four"),
        "one PNG, 20,000 px": lambda: write_pngs(
            Painter(slide, tiles, evidence), [folder / "large.png"], longest=20_000
        ),
        "GeoJSON of four maps": lambda: write_geojson(tiles, every, folder / "tiles.geojson"),
        "OME-TIFF of one map, 4000 px": lambda: write_ome_tiff(
            Painter(slide, tiles, evidence), [folder / "one.ome.tiff"], longest=4000
        ),
        "labels from a polygon of 20,000 corners": lambda: label_tiles(tiles, [star_of], complete=True),
    }
    if task == "all":
        for name in tasks:
            subprocess.run([sys.executable, __file__, str(folder), "--tiles", str(count), "--task", name], check=True)
        return
    start, busy = time.perf_counter(), time.process_time()
    tasks[task]()
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{count:,} tiles, {task}: {seconds:.2f} s ({busy:.2f} s of a processor), {most:.0f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiles", type=int, default=100_000)
    parser.add_argument("--task", default="all")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    measured(asked.task, asked.tiles, asked.folder)


if __name__ == "__main__":
    main()
