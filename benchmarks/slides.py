"""Time cutting and drawing of each slide, in one process, with libraries loaded before timing starts.

    python benchmarks/slides.py SLIDE... [--mpp 0.5] --out FOLDER

Cutting is what `carmil slides tile` does, with its sheet. Drawing is what `carmil slides run` does: factual and counterfactual
attention, their difference and evidence for two classes (random numbers, which cost the same), all pictures, and GeoJSON.
"""

import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from speed.script import run_script

from carmil.maps.drawing import draw_maps
from carmil.maps.tile_maps import tile_maps
from carmil.slides.opening import find_slides, open_slide
from carmil.slides.tile_cohort import tile_slides

MAPS = ("factual", "counterfactual", "difference", "this class", "that class")


def main(slides: list[Path], out: Annotated[Path, typer.Option()], mpp: float | None = None) -> None:
    rng = np.random.default_rng(0)
    paths = find_slides(slides)
    for turn, path in enumerate([paths[0], *paths]):
        folder = out / f"{turn}-{path.stem}"
        begin = time.perf_counter()
        (outcome,) = tile_slides([path], folder / "tiles", mpp=mpp)
        tiled = time.perf_counter()
        if outcome.tiles is None:
            raise typer.BadParameter(f"{path.name} was not cut: {outcome.problem}")
        maps = tile_maps({name: rng.normal(size=len(outcome.tiles)) for name in MAPS})
        with open_slide(path, mpp=mpp) as slide:
            longest = min(4000, max(slide.width, slide.height))
            draw_maps(slide, outcome.tiles, maps, folder / "maps", longest=longest, geojson=True)
        end = time.perf_counter()
        if turn:  # the first slide is drawn twice: the first time loads libraries
            print(
                f"{path.name}: {len(outcome.tiles)} tiles, cutting {tiled - begin:.1f} s, drawing {end - tiled:.1f} s"
            )


if __name__ == "__main__":
    run_script(main)
