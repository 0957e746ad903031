"""Small cohorts of slides for recipes: tiles on a grid, some of which show the class, with a rule that can be learned."""

from pathlib import Path

import numpy as np

from carmil.bags.building import build_store
from carmil.bags.sources import Bag
from carmil.bags.writers import write_bag
from carmil.datasets.study_cohort import Protocol, StudyCohort

WIDTH, SIDE, TILE = 6, 12, 256


def make_cohort(folder: Path, *, classes: int = 2, slides: int = 30, seed: int = 0, **others) -> StudyCohort:
    """Write slides; those of class c > 0 have a disc of tiles with a large feature c; train, val and test are thirds."""
    rng = np.random.default_rng(seed)
    lines = ["slide,patient,label,split"]
    y, x = np.mgrid[:SIDE, :SIDE].reshape(2, -1)
    for i in range(slides):
        label, split = i % classes, ("train", "val", "test")[i // classes % 3]
        features = rng.normal(size=(SIDE**2, WIDTH)).astype(np.float32)
        middle = rng.uniform(2, SIDE - 3, 2)
        truth = ((x - middle[0]) ** 2 + (y - middle[1]) ** 2 < rng.uniform(2, 8)) & (label > 0)
        features[truth, label] += 4.0
        places = (np.stack([x, y], axis=1) * TILE).astype(np.float32)
        bag = Bag(f"s{i:02d}", features, places, "level0_px", float(TILE), "made", truth.astype(np.int64))
        write_bag(bag, folder / "work", "safetensors")
        lines.append(f"s{i:02d},p{i:02d},{'abcdefg'[label]},{split}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    build_store(folder / "work", folder / "made", workers=1)
    return StudyCohort(
        name=folder.name,
        title=f"made, {classes} classes",
        bags=folder / "made",
        labels=folder / "labels.csv",
        measures=("auc", "f1_macro"),
        encoder="made",
        protocol=Protocol(official=True, seeds=2, lr=5e-3),
        notes=("made for a test",),
        **others,
    )
