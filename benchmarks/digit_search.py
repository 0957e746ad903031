"""Which CAR-ABMIL gives the best path evidence on digit bags? Sizes, depth, alpha and lambda, chosen on validation bags.

    python benchmarks/digit_search.py --mnist DIR --features FILE.npy [--sizes 20,64,128] [--layers 1,2] [--seeds 4] [--out FILE]

A population for every size and depth, with every alpha and lambda and `seeds` initialisations in it. Chosen by the validation
loss; what path evidence (AUPRC±, mirror rule) would have chosen on validation bags stands beside. The last columns are of one
map a bag, the mean of the seeds' maps, each scaled to unit deviation in its bag.
"""

import argparse
import json
from itertools import product
from pathlib import Path

import torch

from carmil.bags.bags import Bags
from carmil.counterfactual import create_model
from carmil.counterfactual.branches import branch_coefficients
from carmil.datasets.digit_data import load_digits
from carmil.datasets.digits import TASKS
from carmil.evidence import bag_auc, evidence_agreement, explain
from carmil.models.pooling import Offsets, bag_mean
from carmil.provenance import machine_line
from carmil.reproduce.digit_runs import template
from carmil.reproduce.parallel import run_parallel
from carmil.training.loop import fit
from carmil.training.population import Member, Population
from carmil.training.predict import predict
from carmil.training.recipe import TRAIN, VALIDATION, Recipe

MODEL = "car/abmil"
POINTS = tuple(product((0.2, 0.8, 1.0), (0.2, 0.8, 1.0)))  # the paper's alpha and lambda


def unit(evidence: torch.Tensor, offsets: Offsets) -> torch.Tensor:
    """Each bag's map over its standard deviation, all classes together."""
    spread = bag_mean(evidence.square().mean(-1, keepdim=True), offsets).sqrt().clamp_min(1e-12)
    return evidence / spread[offsets.bag_of]


def run(task: str, size: int, layers: int, study, seeds: int, epochs: int, device: str) -> list[dict]:
    bags = Bags.concatenate([study.train.bags, study.validation.bags])
    roles = torch.tensor([TRAIN] * len(study.train.bags) + [VALIDATION] * len(study.validation.bags))
    options = {**template(MODEL), "hidden": size, "attention": size, "output_layers": layers}
    members = [
        Member(seed=seed, lr=1e-3, coefficients=branch_coefficients(MODEL, alpha=alpha, lambda_=lambda_))
        for alpha, lambda_ in POINTS
        for seed in range(seeds)
    ]
    population = Population(
        lambda: create_model(MODEL, bags.width, TASKS[task].classes, **options), members, device=device
    )
    history = fit(population, bags, roles, Recipe(epochs=epochs))
    loss = history.validation.nan_to_num(torch.inf).amin(0)
    parts = {"validation": study.validation.bags.to(device), "test": study.test.bags.to(device)}
    answers = {name: predict(population, part).probabilities.cpu() for name, part in parts.items()}
    rows = []
    for i, point in enumerate(POINTS):
        mine = range(i * seeds, (i + 1) * seeds)
        row = {"task": task, "size": size, "layers": layers, "alpha": point[0], "lambda": point[1]}
        row["loss"] = float(loss[list(mine)].mean())
        for name, part in parts.items():
            truth, offsets = part.instance_labels.cpu(), Offsets(part.offsets.cpu())
            maps = torch.stack([explain(population.member(j), part, "path") for j in mine])
            together = torch.stack([unit(one, offsets) for one in maps]).mean(0)
            row[f"{name} AUC"] = sum(bag_auc(answers[name][j], part.labels.cpu()) for j in mine) / seeds
            each = evidence_agreement(maps, -maps, truth, offsets.starts).both
            row[f"{name} path"], row[f"{name} deviation"] = float(each.mean()), float(each.std())
            row[f"{name} ensemble AUC"] = bag_auc(answers[name][list(mine)].mean(0), part.labels.cpu())
            row[f"{name} ensemble path"] = float(evidence_agreement(together, -together, truth, offsets.starts).both)
        rows.append(row)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", required=True)
    parser.add_argument("--features", type=Path)
    parser.add_argument("--tasks", default="adjacent_pairs,four_bags")
    parser.add_argument("--sizes", default="20,64,128")
    parser.add_argument("--layers", default="1,2")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    print(machine_line())
    tasks = given.tasks.split(",")
    data = load_digits(tasks, mnist=given.mnist, features=given.features, pool="shared")
    choices = [
        (task, int(s), int(n)) for task in tasks for s in given.sizes.split(",") for n in given.layers.split(",")
    ]
    jobs = [
        (lambda choice=choice: run(*choice, data.studies[choice[0]], given.seeds, given.epochs, given.device))
        for choice in choices
    ]
    rows = [row for rows in run_parallel(jobs, given.device) for row in rows]
    for task in tasks:
        mine = sorted((row for row in rows if row["task"] == task), key=lambda row: row["loss"])
        for row in mine:
            print(
                f"{task} {row['size']}/{row['layers']} alpha {row['alpha']} lambda {row['lambda']}: loss {row['loss']:.4f}  "
                + "  ".join(
                    f"{what} {100 * row[f'validation {what}']:.1f}/{100 * row[f'test {what}']:.1f}"
                    for what in ("AUC", "path", "deviation", "ensemble AUC", "ensemble path")
                )
            )
    if given.out:
        given.out.write_text(json.dumps(rows))
