"""A small store whose instances raise or lower what is predicted, with labels for every kind of target."""

from pathlib import Path

import numpy as np
import pandas as pd

from carmil.bags.sources import Bag
from carmil.datasets.packing import write_store
from carmil.runs.settings import Settings
from carmil.studies.train import run_study

WIDTH, SLIDES = 6, 36
NAMES = [f"s{i:02d}" for i in range(SLIDES)]
TARGETS = {
    "survival": {"target": "months", "event": "recurrence", "batch": 12, "epochs": 25},
    "value": {"target": "age"},
    "ordinal": {"target": "grade", "kind": "ordinal"},
    "labels": {"target": "node,her2"},
}


def write_cohort(folder: Path, *, truth: bool = True) -> None:
    """Write folder/store, with the truth about the risk, and folder/labels.csv. Feature 0 raises, feature 1 lowers."""
    rng, bags, rows = np.random.default_rng(0), [], []
    for name in NAMES:
        signs = rng.choice([-1, 0, 1], size=12, p=rng.dirichlet((1, 1, 1)))
        features = rng.normal(size=(12, WIDTH)).astype(np.float32)
        features[:, 0] += 3 * (signs == 1)
        features[:, 1] += 3 * (signs == -1)
        bags.append(Bag(name, features, instance_labels=signs.astype(np.int8)[:, None] if truth else None))
        hazard = signs.mean()
        time = rng.exponential(20 * np.exp(-5 * hazard))
        rows.append(
            {
                "slide": name,
                "patient": f"P{name}",
                "months": round(min(time, 60.0), 1),
                "recurrence": int(time <= 60),
                "age": round(60 + 20 * hazard + rng.normal(), 1),
                "grade": int(hazard > -0.2) + int(hazard > 0.2),
                "node": int(hazard > 0),
                "her2": "" if rng.random() < 0.2 else int(rng.random() < 0.5),
            }
        )
    write_store(bags, folder / "store", truth_classes=("risk",) if truth else None)
    pd.DataFrame(rows).to_csv(folder / "labels.csv", index=False)


def train(folder: Path, out: Path, kind: str, **others: object) -> Path:
    given = {"model": "car/abmil", "options": {"hidden": 8, "attention": 4}, "folds": 3, "epochs": 12, "lr": 1e-2}
    where = {"bags": folder / "store", "labels": folder / "labels.csv", "out": out, "device": "cpu", "dtype": "float32"}
    run_study(Settings(**{**where, **given, **TARGETS[kind], **others}))
    return out
