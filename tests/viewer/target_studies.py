"""Small studies of every kind of target, with tiles on a plane; the first feature of a slide's tiles tells its outcome."""

from pathlib import Path

import numpy as np
from tools.small_study import train_small_run

from carmil.bags.geometry import TileGeometry
from carmil.bags.sources import Bag
from carmil.bags.writers import write_bag

SLIDES, TILES, WIDTH, TILE = 18, 20, 5, 64
OPTIONS = {
    "survival": {"target": "months", "event": "recurrence"},
    "value": {"target": "age"},
    "ordinal": {"target": "grade", "kind": "ordinal"},
    "labels": {"target": "node,her2"},
}


def train_study(kind: str, folder: Path) -> Path:
    """Write features and labels, train a run of this kind of target, and return its folder."""
    rng = np.random.default_rng(0)
    rows = ["slide_id,case_id,months,recurrence,age,grade,node,her2"]
    corners = np.array([(x * TILE, y * TILE) for y in range(4) for x in range(5)], dtype=np.float32)
    for s in range(SLIDES):
        features = rng.normal(size=(TILES, WIDTH)).astype(np.float32)
        features[:, 0] += s % 6 - 2.5
        position = {"coordinates": corners, "coordinate_unit": "level0_px", "tile_size": TILE}
        bag = Bag(f"s{s}", features, **position, encoder="made", geometry=TileGeometry(TILE, 0.5))
        write_bag(bag, folder / "features", "trident")
        months, age = 40 - 6 * (s % 6) + s / 10, 50 + 4 * (s % 6) + s / 10
        her2 = "" if s % 7 == 0 else s % 2
        rows.append(f"s{s},P{s},{months},{int(s % 4 > 0)},{age},{1 + s % 6 // 2},{int(s % 6 > 2)},{her2}")
    lasting = {"folds": 2, "seeds": 2, "epochs": 8, "lr": 1e-2, "dtype": "float32"}
    return train_small_run(folder, rows, **OPTIONS[kind], **lasting)
