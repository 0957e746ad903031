"""Seconds of cutting and of drawing each slide, in one process, libraries loaded before the clock starts.

    python benchmarks/slides.py SLIDE... [--mpp 0.5] --out FOLDER

Cutting is what `carmil slides tile` does, with its sheet; drawing what `carmil slides run` does: factual, counterfactual, their
difference and evidence for two classes (numbers of chance, as what is drawn costs the same), all pictures, and GeoJSON.
"""

import argparse
import time
from pathlib import Path

import numpy as np

from carmil.maps.drawing import draw_maps
from carmil.maps.tile_maps import tile_maps
from carmil.provenance import machine_line
from carmil.slides.opening import open_slide, slides_in
from carmil.slides.tile_cohort import tile_slides

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slides", nargs="+", type=Path)
    parser.add_argument("--mpp", type=float)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    print(machine_line())
    rng = np.random.default_rng(0)
    for turn, path in enumerate([slides_in(given.slides)[0], *slides_in(given.slides)]):
        folder = given.out / f"{turn}-{path.stem}"
        begun = time.perf_counter()
        (outcome,) = tile_slides([path], folder / "tiles", mpp=given.mpp)
        cut = time.perf_counter()
        tiles = outcome.tiles
        if tiles is None:
            parser.error(f"{path.name} was not cut: {outcome.problem}")
        names = ("factual", "counterfactual", "difference", "this class", "that class")
        maps = tile_maps({name: rng.normal(size=len(tiles)) for name in names})
        with open_slide(path, mpp=given.mpp) as slide:
            draw_maps(
                slide, tiles, maps, folder / "maps", longest=min(4000, max(slide.width, slide.height)), geojson=True
            )
        drawn = time.perf_counter()
        if turn:  # the first is to load what is loaded when first used
            print(f"{path.name}: {len(tiles)} tiles, cutting {cut - begun:.1f} s, drawing {drawn - cut:.1f} s")
