"""Measure the coverage of prediction sets on crc over resampled divisions of its patients into calibration and new ones.

    python benchmarks/conformal.py --crc ../shared/data/crc --out crc_sets

Each patient is predicted by a model that was not trained or selected on it: one study of five folds by patient. The divisions
are drawn afterwards, so that calibration patients and new ones are exchangeable, as the theorem assumes; half of each class
calibrates. Features as they are, gated ABMIL, 20 epochs, 32 hidden units: the coverage does not depend on the model.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from speed.script import run_script

from carmil.bags.sources import Bag
from carmil.bags.writers import write_bag
from carmil.datasets.crc_nuclei import patient_bags
from carmil.files import write_text
from carmil.runs.settings import Settings
from carmil.statistics.conformal import class_quantiles, expected_coverage, prediction_sets, set_figures
from carmil.studies.predictions import outcomes, predicted
from carmil.studies.train import run_study


def main(
    crc: Annotated[Path, typer.Option(help="Folder with features.npy and instances.csv.")],
    out: Annotated[Path, typer.Option(help="Folder for the cohort and the run.")],
    divisions: Annotated[int, typer.Option(help="Divisions of the patients.")] = 200,
    level: Annotated[float, typer.Option(help="Coverage of the sets.")] = 0.9,
) -> None:
    torch.set_num_threads(1)
    if not (out / "labels.csv").exists():
        _write_cohort(crc, out)
    run = run_study(
        Settings(
            bags=out / "features",
            labels=out / "labels.csv",
            out=out / "run",
            model="abmil.gated",
            options={"hidden": 32, "attention": 16},
            epochs=20,
            device="cpu",
        )
    )
    frame = run.predictions()
    scores, labels = run.target.nonconformity(predicted(frame, run.target)), outcomes(frame, run.target)
    draw = np.random.default_rng(0)
    found = []
    for _ in range(divisions):
        calibrates = np.zeros(len(labels), dtype=bool)
        for c in (0, 1):
            own = np.flatnonzero(labels == c)
            calibrates[draw.permutation(own)[: len(own) // 2]] = True
        quantiles = class_quantiles(scores[calibrates], labels[calibrates], level)
        sets, truth = prediction_sets(scores[~calibrates], quantiles), labels[~calibrates]
        parts = [set_figures(sets[truth == c], truth[truth == c]).coverage.value for c in (0, 1)]
        whole = set_figures(sets, truth)
        found.append((whole.coverage.value, *parts, whole.size, whole.singletons, whole.empty))
    mean = np.mean(found, 0)
    counts = [int((labels == c).sum()) // 2 for c in (0, 1)]
    expected = [expected_coverage(n, level) for n in counts]
    shares = np.array([int((labels == c).sum()) - n for c, n in enumerate(counts)])
    print(f"AUC of the run: {100 * run.metrics.summary['auc'].mean:.1f}")
    print(f"coverage of new patients, mean of {divisions} divisions: {100 * mean[0]:.2f} %")
    print(f"expected: {100 * np.average(expected, weights=shares):.2f} %")
    for name, n, e, value in zip(run.target.answer_names, counts, expected, mean[1:3], strict=True):
        print(f"class {name}: {n} calibration patients, coverage {100 * value:.2f} %, expected {100 * e:.2f} %")
    print(f"mean size {mean[3]:.3f}, one class {100 * mean[4]:.1f} %, empty {100 * mean[5]:.1f} %")


def _write_cohort(crc: Path, out: Path) -> None:
    bags = patient_bags(crc)
    lines = ["slide,patient,label"]
    for i, name in enumerate(bags.ids):
        write_bag(Bag(id=name, features=bags[i].features.numpy()), out / "features", "npy")
        lines.append(f"{name},{name},{'cancer' if int(bags.labels[i]) else 'normal'}")
    write_text(out / "labels.csv", "\n".join(lines) + "\n")


if __name__ == "__main__":
    run_script(main)
