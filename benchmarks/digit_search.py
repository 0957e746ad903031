"""Search the size, depth, alpha and lambda of CAR-ABMIL on digit bags, and measure the path evidence of each.

    python benchmarks/digit_search.py --mnist DIR --features FILE.npy [--sizes 20,64,128] [--layers 1,2] [--seeds 4] [--out FILE]

One population for every size and depth, with `seeds` initialisations of every alpha and lambda. Printed in the order of the
validation loss, by which one would choose; path evidence is AUPRC± under the mirror rule. The ensemble is one map per bag: the
mean of the maps of all seeds, each scaled to unit deviation in its bag.
"""

from itertools import product
from pathlib import Path

import torch
from digit_experiment import ABMIL, Experiment, Row, load_studies, train, write_rows
from speed.script import run_script
from speed.timing import DEVICE

from carmil.counterfactual import create_model
from carmil.counterfactual.branches import branch_coefficients
from carmil.datasets.digits import TASKS
from carmil.evidence import evidence_agreement, explain
from carmil.models.pooling import Offsets, bag_mean

MODEL = "car/abmil"
POINTS = tuple(product((0.2, 0.8, 1.0), (0.2, 0.8, 1.0)))  # the paper's alpha and lambda
FIGURES = ("AUC", "path", "deviation", "ensemble AUC", "ensemble path")


def scale_to_unit(evidence: torch.Tensor, offsets: Offsets) -> torch.Tensor:
    """Divide each bag's map by its standard deviation over all classes."""
    spread = bag_mean(evidence.square().mean(-1, keepdim=True), offsets).sqrt().clamp_min(1e-12)
    return evidence / spread[offsets.bag_of]


def measure(experiment: Experiment, point: int) -> Row:
    row: Row = {"alpha": POINTS[point][0], "lambda": POINTS[point][1]}
    row["loss"] = float(experiment.losses[:, point].mean())
    rows = experiment.rows(point)
    for name, bags in experiment.parts.items():
        assert bags.instance_labels is not None
        truth, offsets = bags.instance_labels.cpu(), Offsets(bags.offsets.cpu())
        maps = torch.stack([explain(experiment.population.member(i), bags, "path") for i in rows])
        ensemble = torch.stack([scale_to_unit(each, offsets) for each in maps]).mean(0)
        path = evidence_agreement(maps, -maps, truth, offsets.starts).both
        row[f"{name} AUC"] = sum(experiment.auc(name, [i]) for i in rows) / len(rows)
        row[f"{name} path"], row[f"{name} deviation"] = float(path.mean()), float(path.std())
        row[f"{name} ensemble AUC"] = experiment.auc(name, rows)
        row[f"{name} ensemble path"] = float(evidence_agreement(ensemble, -ensemble, truth, offsets.starts).both)
    return row


def main(
    mnist: str | None = None,
    features: Path | None = None,
    tasks: str = "adjacent_pairs,four_bags",
    sizes: str = "20,64,128",
    layers: str = "1,2",
    seeds: int = 4,
    epochs: int = 1000,
    device: str = DEVICE,
    out: Path | None = None,
) -> None:
    coefficients = [branch_coefficients(MODEL, alpha=alpha, lambda_=lambda_) for alpha, lambda_ in POINTS]
    table: list[Row] = []
    for task, study in load_studies(tasks, mnist, features).items():
        rows: list[Row] = []
        for size, depth in product(map(int, sizes.split(",")), map(int, layers.split(","))):
            options = {**ABMIL, "hidden": size, "attention": size, "output_layers": depth, "branch": "full"}

            def build(task: str = task, options: dict = options, width: int = study.train.bags.width):
                return create_model(MODEL, width, TASKS[task].classes, **options)

            experiment = train(build, study, coefficients, seeds=seeds, epochs=epochs, device=device)
            about = {"task": task, "size": size, "layers": depth}
            rows += [{**about, **measure(experiment, point)} for point in range(len(POINTS))]
        for row in sorted(rows, key=lambda row: row["loss"]):
            figures = [
                f"{name} {100 * row[f'validation {name}']:.1f}/{100 * row[f'test {name}']:.1f}" for name in FIGURES
            ]
            print(
                f"{task} {row['size']}/{row['layers']} alpha {row['alpha']} lambda {row['lambda']}: loss {row['loss']:.4f}  "
                + "  ".join(figures),
                flush=True,
            )
        table += rows
    write_rows(out, table)


if __name__ == "__main__":
    run_script(main)
