"""Small runs on a CPU, for the fuzzer and for tests: of a given table of labels, and of nine slides with two classes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from carmil.bags.geometry import TileGeometry
from carmil.bags.sources import Bag
from carmil.bags.writers import write_bag
from carmil.runs.settings import Settings
from carmil.studies.train import run_study

SLIDES, WIDTH, TILE = 9, 6, 64  # features per tile, pixels of a tile's side
MODEL = {"hidden": 8, "attention": 4}


def train_small_run(folder: Path, rows: Sequence[str], **settings: Any) -> Path:
    """Write the rows of labels.csv, train a small CAR-ABMIL on the bags of folder/features, and return the folder of the run."""
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")
    run = folder / "run"
    files = {"bags": folder / "features", "labels": folder / "labels.csv", "out": run}
    of_model = {"model": "car/abmil", "options": MODEL, "device": "cpu"}
    run_study(Settings(**files, **of_model, **settings), log=lambda line: None)
    return run


def train_small_study(folder: Path, *, tiles: int) -> None:
    """Write features, labels.csv and a run of CAR-ABMIL. tiles: of the first slide; each slide has one more than the last.

    The first tile of a slide shows its class; tiles lie in rows of twelve.
    """
    rng = np.random.default_rng(0)
    rows = ["slide_id,case_id,label"]
    for s in range(SLIDES):
        features = rng.normal(size=(tiles + s, WIDTH)).astype(np.float32)
        features[0, s % 2] = 5.0
        corners = np.array([(x * TILE, y * TILE) for y in range(10) for x in range(12)])[: len(features)]
        position = {"coordinates": corners.astype(np.float32), "coordinate_unit": "level0_px", "tile_size": TILE}
        bag = Bag(f"s{s}", features, **position, encoder="made", geometry=TileGeometry(TILE, 0.5))
        write_bag(bag, folder / "features", "trident")
        rows.append(f"s{s},P{s},{'ab'[s % 2]}")
    train_small_run(folder, rows, folds=3, seeds=2, epochs=4, lr=5e-3, dtype="float32")
