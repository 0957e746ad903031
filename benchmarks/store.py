"""Reading from the store beside TRIDENT's own layout, and what training from disk costs in memory.

    python benchmarks/store.py FOLDER [--bags 1000]

Writes bags of 10,000 x 1024 into FOLDER: one in TRIDENT's layout (float32 and float16, chunks of one row) and packed into a
store; then a store of `--bags` such bags (20 MB each), over which a gated ABMIL is trained for an epoch. Anonymous memory
(RssAnon) is what the process itself holds; mapped pages of the store are the system's to keep or to drop.
"""

import argparse
import json
import re
import threading
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from carmil.bags.building import build_store
from carmil.bags.finding import find_bags
from carmil.bags.readers import read_bag
from carmil.bags.sources import Bag
from carmil.bags.store import Entry, open_store
from carmil.bags.writers import write_bag
from carmil.counterfactual import create_model
from carmil.provenance import machine_line
from carmil.studies.cohort import replace_labels
from carmil.training import TRAIN, VALIDATION, Member, Population, Recipe, fit

ROWS, WIDTH = 10_000, 1024


def anonymous_mib() -> float:
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1)) / 1024


def best_of(read, repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        read()
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


def reading(folder: Path) -> None:
    values = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    for dtype in (np.float32, np.float16):
        place = folder / f"trident_{np.dtype(dtype).name}"
        coordinates = np.zeros((ROWS, 2), np.float32)
        bag = Bag("slide", values.astype(dtype), coordinates, "level0_px", 256.0, "uni")
        write_bag(bag, place, "trident")
        source = find_bags(place).sources[0]
        store = build_store(place, folder / f"store_{np.dtype(dtype).name}")
        bags = store.bags()
        theirs = best_of(lambda source=source: read_bag(source))
        ours = best_of(lambda bags=bags: bags.features.clone())
        print(
            f"one bag, {np.dtype(dtype).name} in TRIDENT's layout: {theirs:.1f} ms; from the store (float16): {ours:.1f} ms"
        )


def large_store(folder: Path, count: int) -> Path:
    """`count` bags of noise; the same megabytes over and over, since nobody looks at what they say."""
    path = folder / "large"
    if not (path / "index.json").exists():
        path.mkdir(parents=True, exist_ok=True)
        block = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float16).tobytes()
        with (path / "features.bin").open("wb") as file:
            for _ in range(count):
                file.write(block)
        with (path / "coordinates.bin").open("wb") as file:
            file.truncate(8 * ROWS * count)
        entries = [Entry(f"{i:05d}", ROWS, None, None, None, False, "") for i in range(count)]
        facts = {
            "version": 1,
            "dtype": "float16",
            "width": WIDTH,
            "encoder": None,
            "origin": "noise",
            "fingerprint": "",
        }
        facts |= {"empty": [], "left_out": [], "bags": [asdict(entry) for entry in entries]}
        (path / "index.json").write_text(json.dumps(facts))
    return path


def training(folder: Path, count: int) -> None:
    bags = open_store(large_store(folder, count)).bags()
    bags = replace_labels(bags, torch.arange(count) % 2)
    roles = torch.full((count,), TRAIN)
    roles[: max(2, count // 20)] = VALIDATION
    population = Population(lambda: create_model("abmil.gated", WIDTH, 2), [Member(seed=0, lr=2e-4)])
    before = anonymous_mib()
    seen: list[float] = []
    stop = watch(seen.append)
    start = time.perf_counter()
    fit(population, bags, roles, Recipe(epochs=1, batch=1, optimizer="adam", shuffle=True, warmup=0))
    seconds = time.perf_counter() - start
    stop()
    peak = max(seen)
    print(f"{count} bags of {ROWS:,} x {WIDTH} trained on from disk: {seconds:.0f} s, {count / seconds:.2f} bags/s")
    print(f"RssAnon before {before:.0f} MiB, at most {peak:.0f} MiB: grew by {peak - before:.0f} MiB")


def watch(tell):
    """Tells the anonymous memory twenty times a second, from a thread of its own."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            tell(anonymous_mib())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()

    def stop() -> None:
        over.set()
        thread.join()

    return stop


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bags", type=int, default=1000)
    given = parser.parse_args()
    print(machine_line())
    reading(given.folder)
    training(given.folder, given.bags)
