"""A small cohort of npy files and a CSV, with a rule that can be learned."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from carmil.bags.sources import Bag
from carmil.bags.writers import write_bag
from carmil.runs.settings import Settings

WIDTH = 6
SMALL = {"hidden": 8, "attention": 4}


@dataclass
class Files:
    features: Path
    labels: Path

    def settings(self, out: Path, **others) -> Settings:
        given = dict(
            model="car/abmil", options=SMALL, folds=3, epochs=6, lr=5e-3, patience=4, device="cpu", dtype="float32"
        )
        return Settings(bags=self.features, labels=self.labels, out=out, **{**given, **others})


def make_files(folder: Path, *, patients: int = 24, classes: int = 2, seed: int = 0, slides: int = 2) -> Files:
    """Write a cohort with `slides` per patient; the first instance of a slide with class c has a large feature c."""
    rng = np.random.default_rng(seed)
    lines = ["slide_id,case_id,label"]
    for p in range(patients):
        label = p % classes
        for s in range(slides):
            features = rng.normal(size=(int(rng.integers(3, 9)), WIDTH)).astype(np.float32)
            features[0, label] = 5.0
            name = f"{p:03d}-{s}"
            write_bag(Bag(id=name, features=features), folder / "features", "npy")
            lines.append(f"{name},P{p:03d},{'abc'[label]}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return Files(folder / "features", folder / "labels.csv")


@pytest.fixture
def files(tmp_path) -> Files:
    return make_files(tmp_path)
