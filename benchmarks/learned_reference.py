"""Can a branch learn a better reference for path evidence than the reversed attention? Digit bags, all choices on validation bags.

    python benchmarks/learned_reference.py --mnist DIR --features FILE.npy [--tasks ...] [--sizes 20,64] [--seeds 4] [--out FILE]

CAR-ABMIL with a second branch u_ref next to u_cf, trained with these terms, alone and together:

    diff      CE(F(u) - F(u_ref), y)         what is left when the reference is taken away still gives the answer
    overlap   cos(softmax(u), softmax(u_ref)) the reference looks where the model does not
    neutral   -mean_c log softmax(F(u_ref))_c the reference leads to no class
    spread    -mean_j log(n softmax(u_ref)_j) the reference looks at many instances

Every combination is a model of one population. Path evidence of each is then measured from the learned reference and from others
that need no training: reversed attention softmax(-t u) with t = 1, 1/2, 2, the mean of the least attended half, uniform.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from carmil.bags.bags import Bags
from carmil.counterfactual.branches import CAR, Branch, CounterfactualModel
from carmil.counterfactual.objective import evidence_differential_loss, l1_distance
from carmil.datasets.digit_data import load_digits
from carmil.datasets.digits import TASKS
from carmil.evidence import bag_auc, evidence_agreement
from carmil.evidence.path import mean_gradient
from carmil.evidence.pooling_pass import pooling_pass
from carmil.evidence.rank_correlation import bag_places
from carmil.models import registry
from carmil.models.pooling import Offsets, bag_mean, bag_softmax, bag_sum
from carmil.provenance import machine_line
from carmil.reproduce.digit_runs import template
from carmil.reproduce.parallel import run_parallel
from carmil.training.loop import fit
from carmil.training.population import Member, Population
from carmil.training.predict import predict
from carmil.training.recipe import TRAIN, VALIDATION, Recipe

TERMS = ("reference_diff", "overlap", "neutral", "spread")
POINTS = (
    (0.0, 0.0, 0.0, 0.0),
    (0.2, 0.0, 0.0, 0.0),
    (0.2, 0.0, 0.0, 0.05),
    (0.2, 0.0, 0.0, 0.2),
    (1.0, 0.0, 0.0, 0.0),
    (1.0, 0.0, 0.0, 0.2),
    (0.0, 1.0, 0.0, 0.0),
    (0.0, 0.2, 0.0, 0.05),
    (0.0, 1.0, 0.0, 0.2),
    (0.2, 0.2, 0.0, 0.05),
    (1.0, 1.0, 0.0, 0.2),
    (0.0, 0.0, 0.2, 0.0),
    (0.0, 0.0, 0.2, 0.05),
    (0.0, 0.0, 1.0, 0.2),
)


class WithReference(Branch):
    """CAR's map, and behind it the map of a reference."""

    def __init__(self, model):
        super().__init__()
        self.car, self.reference = CAR(model, branch="full"), CAR(model, branch="full")

    def forward(self, model, z, trunk, u, offsets):
        return torch.cat([branch(model, z, trunk, u, offsets) for branch in (self.car, self.reference)], dim=-2)

    def losses(self, model, prediction, labels, terms):
        u, cf, offsets = prediction.scores, prediction.counterfactual, prediction.offsets
        a, a_ref = bag_softmax(u, offsets), bag_softmax(cf.scores[..., 1, :], offsets)
        inner, own, other = (bag_sum(x * y, offsets).squeeze(-1) for x, y in ((a, a_ref), (a, a), (a_ref, a_ref)))
        sizes = offsets.sizes[offsets.bag_of].unsqueeze(-1)
        return {
            "diff": evidence_differential_loss(prediction.logits, cf.logits[..., :1, :], labels),
            "l1": l1_distance(u, cf.scores[..., :1, :], offsets),
            "reference_diff": evidence_differential_loss(prediction.logits, cf.logits[..., 1:, :], labels),
            "overlap": inner / (own * other).clamp_min(1e-16).sqrt(),
            "neutral": -cf.logits[..., 1, :].log_softmax(-1).mean(-1),
            "spread": -bag_mean((a_ref * sizes).clamp_min(1e-12).log(), offsets).squeeze(-1),
        }

    @staticmethod
    def coefficients(alpha=0.2, lambda_=1.0, distance="l1"):
        return {"diff": alpha, "l1": lambda_, **dict.fromkeys(TERMS, 0.0)}


def references(seen):
    """Z_ref by name, (b, h, d)."""
    u = seen.scores
    half = bag_places(-u, seen.offsets) >= (seen.offsets.sizes[seen.offsets.bag_of] // 2).unsqueeze(-1)
    return {
        "reversed": seen.pool_by(-u),
        "reversed, t 1/2": seen.pool_by(-u / 2),
        "reversed, t 2": seen.pool_by(-2 * u),
        "least attended half": seen.pool_by(torch.zeros_like(u).masked_fill(half, -torch.inf)),
        "uniform": seen.pool_by(torch.zeros_like(u)),
        "learned": seen.pool_by(seen.counterfactual[..., 1, :]),
    }


def evidence(model, bags: Bags) -> dict[str, torch.Tensor]:
    seen = pooling_pass(model, bags.features, Offsets(bags.offsets, bags.features.device), "path evidence")
    maps = {}
    for name, start in references(seen).items():
        maps[name] = seen.shared(mean_gradient(model, start, seen.pool, tolerance=5e-4), start)
    return maps


def run(task: str, size: int, study, seeds: int, epochs: int, device: str) -> list[dict]:
    bags = Bags.concatenate([study.train.bags, study.validation.bags])
    roles = torch.tensor([TRAIN] * len(study.train.bags) + [VALIDATION] * len(study.validation.bags))
    options = {**template("abmil"), "hidden": size, "attention": size}

    def build():
        model = registry.create("abmil", bags.width, TASKS[task].classes, **options)
        return CounterfactualModel(model, WithReference(model))

    members = [
        Member(seed=seed, lr=1e-3, coefficients=dict(zip(TERMS, point, strict=True)))
        for point in POINTS
        for seed in range(seeds)
    ]
    population = Population(build, members, device=device)
    history = fit(population, bags, roles, replace(Recipe(epochs=epochs), optimizer="sgd"))
    loss = history.validation.nan_to_num(torch.inf).amin(0)
    rows = []
    parts = {"validation": study.validation.bags.to(device), "test": study.test.bags.to(device)}
    answers = {name: predict(population, part).probabilities for name, part in parts.items()}
    for i in range(len(members)):
        row = {"task": task, "size": size, "point": i // seeds, "seed": i % seeds, "loss": float(loss[i])}
        model = population.member(i)
        for name, part in parts.items():
            row[f"{name} AUC"] = bag_auc(answers[name][i].cpu(), part.labels.cpu())
            for reference, e in evidence(model, part).items():
                agreement = evidence_agreement(e, -e, part.instance_labels, part.offsets)
                row[f"{name} {reference}"] = float(agreement.both)
        rows.append(row)
    return rows


def told(rows: list[dict], seeds: int) -> None:
    """A line a task, size and point: means over the seeds, the best reference by validation, and its figures on test bags."""
    names = [name.removeprefix("validation ") for name in rows[0] if name.startswith("validation ")]
    for key in dict.fromkeys((row["task"], row["size"], row["point"]) for row in rows):
        mine = [row for row in rows if (row["task"], row["size"], row["point"]) == key]
        mean = {name: 100 * sum(row[name] for row in mine) / len(mine) for name in mine[0] if name not in ("task",)}
        point = " ".join(f"{term} {value:g}" for term, value in zip(TERMS, POINTS[key[2]], strict=True) if value)
        shown = "  ".join(f"{n} {mean[f'validation {n}']:.1f}/{mean[f'test {n}']:.1f}" for n in names)
        print(f"{key[0]} {key[1]} [{point or 'CAR alone'}] loss {mean['loss'] / 100:.4f}  {shown}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", required=True)
    parser.add_argument("--features", type=Path)
    parser.add_argument("--tasks", default="adjacent_pairs,four_bags")
    parser.add_argument("--sizes", default="20,64")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    print(machine_line(), "| validation/test, AUPRC± under the mirror rule, mean over seeds, per cent")
    data = load_digits(given.tasks.split(","), mnist=given.mnist, features=given.features, pool="shared")
    jobs = [
        (lambda task=task, size=size: run(task, size, data.studies[task], given.seeds, given.epochs, given.device))
        for task in given.tasks.split(",")
        for size in map(int, given.sizes.split(","))
    ]
    rows = [row for rows in run_parallel(jobs, given.device) for row in rows]
    told(rows, given.seeds)
    if given.out:
        given.out.write_text(json.dumps(rows))
