"""Time reading from the store and from TRIDENT's layout, and measure the memory of training from disk.

    python benchmarks/store.py FOLDER [--bags 1000]

Writes bags of 10,000 x 1024 into FOLDER: one in TRIDENT's layout (float32 and float16, chunks of one row), packed into a store;
then a store of `--bags` such bags (20 MB each), on which a gated ABMIL is trained for one epoch. Anonymous memory (RssAnon) is what
the process itself holds; mapped pages of the store are the system's to keep or to drop.
"""

import time
from pathlib import Path

import numpy as np
import torch
from speed.arithmetic import WIDTH
from speed.ours import noise_store
from speed.script import run_script
from speed.timing import anonymous_memory, peak_memory, time_step

from carmil.bags.building import build_store
from carmil.bags.finding import find_bags
from carmil.bags.readers import read_bag
from carmil.bags.sources import Bag
from carmil.bags.writers import write_bag
from carmil.counterfactual import create_model
from carmil.studies.cohort import replace_labels
from carmil.training.protocol import train_protocol
from carmil.training.recipe import TRAIN, VALIDATION, Recipe

ROWS = 10_000


def time_reading(folder: Path) -> None:
    values = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    for dtype in ("float32", "float16"):
        place = folder / f"trident_{dtype}"
        write_bag(
            Bag("slide", values.astype(dtype), np.zeros((ROWS, 2), np.float32), "level0_px", 256.0, "uni"),
            place,
            "trident",
        )
        source = find_bags(place).sources[0]
        bags = build_store(place, folder / f"store_{dtype}").bags()
        reads = (lambda source=source: read_bag(source), lambda bags=bags: bags.features.clone())
        trident, store = (time_step(lambda read=read: read, device="cpu", seconds=1).fastest for read in reads)
        print(
            f"one bag, {dtype} in TRIDENT's layout: {1000 * trident:.1f} ms; from the store (float16): {1000 * store:.1f} ms"
        )


def measure_training(folder: Path, count: int) -> None:
    bags = replace_labels(noise_store(folder / "large", count, ROWS).bags(), torch.arange(count) % 2)
    roles = torch.full((1, count), TRAIN)
    roles[0, : max(2, count // 20)] = VALIDATION
    recipe = Recipe(epochs=1, batch=1, optimizer="adam", shuffle=True, warmup=0)
    before = anonymous_memory()
    with peak_memory("cpu") as peak:
        begin = time.perf_counter()
        train_protocol(lambda: create_model("abmil.gated", WIDTH, 2), bags, roles, recipe=recipe)
        seconds = time.perf_counter() - begin
    print(f"{count} bags of {ROWS:,} x {WIDTH} trained on from disk: {seconds:.0f} s, {count / seconds:.2f} bags/s")
    print(f"RssAnon before {before / 2**20:.0f} MiB, grew by at most {peak[0] / 2**20:.0f} MiB")


def main(folder: Path, bags: int = 1000) -> None:
    time_reading(folder)
    measure_training(folder, bags)


if __name__ == "__main__":
    run_script(main)
