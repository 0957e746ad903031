"""Measure how well perturbed nuclei of crc are told from test patients by their distance from the training cohort.

    python benchmarks/conformal.py --crc ../shared/data/crc --out crc_sets
    python benchmarks/perturbed_nuclei.py --crc ../shared/data/crc --weights WEIGHTS --nuclei 6 --out nuclei
    python benchmarks/out_of_scope.py --run crc_sets/run --crc ../shared/data/crc --nuclei nuclei

WEIGHTS is a file of Caffe's ResNet50. Each patient is judged by the model of the fold that tests the patient. AUC: perturbed
against the same few nuclei of the same patients, untouched (their rows of features.npy). All nuclei of the test patients are
judged too.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from perturbed_nuclei import PERTURBATIONS
from sklearn.metrics import roc_auc_score
from speed.script import run_script

from carmil.bags.bags import Bags
from carmil.datasets.crc_nuclei import read_nuclei
from carmil.runs.run import read_run
from carmil.runs.scopes import read_scopes
from carmil.training.bag_moments import bag_moments


def main(
    run: Annotated[Path, typer.Option(help="The run of benchmarks/conformal.py.")],
    crc: Annotated[Path, typer.Option(help="Folder with features.npy and instances.csv.")],
    nuclei: Annotated[Path, typer.Option(help="Output of benchmarks/perturbed_nuclei.py.")],
) -> None:
    torch.set_num_threads(1)
    study = read_run(run)
    scopes, tested = read_scopes(study), study.predictions().set_index("slide")
    assert scopes is not None
    patients, features, rows = read_nuclei(crc).patients, np.load(crc / "features.npy"), np.load(nuclei / "rows.npy")
    whole = {"all nuclei, untouched": (features, patients), "few nuclei, untouched": (features[rows], patients[rows])}
    perturbed = {name: (np.load(nuclei / f"{name}.npy"), patients[rows]) for name in PERTURBATIONS}
    far = {}
    for name, (values, owners) in (whole | perturbed).items():
        bags = _bags(values.astype(np.float32), owners)
        moments = bag_moments(bags, torch.arange(len(bags)))
        folds = [study.tested_folds.index(fold) for fold in tested.loc[list(bags.ids), "fold"]]
        far[name] = np.array([scopes[row].distance(moments[np.array([i])])[0] for i, row in enumerate(folds)])
    base = far["few nuclei, untouched"]
    print(f"{len(rows):,} nuclei of {len(base)} patients")
    for name, distances in far.items():
        auc = roc_auc_score(np.repeat([0, 1], [len(base), len(distances)]), [*base, *distances])
        print(
            f"{name}: AUC {auc:.3f}, median distance {np.median(distances):.2f}, flagged {100 * (distances > 1).mean():.1f} %"
        )


def _bags(features: NDArray[np.float32], patients: NDArray) -> Bags:
    names, of = np.unique(patients, return_inverse=True)
    order, sizes = np.argsort(of, kind="stable"), np.bincount(of)
    offsets = torch.from_numpy(np.concatenate([[0], sizes.cumsum()]))
    return Bags(torch.from_numpy(features[order]), offsets, None, tuple(names.tolist()))


if __name__ == "__main__":
    run_script(main)
