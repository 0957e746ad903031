"""Compare learned references of path evidence with the reversed attention, on digit bags.

    python benchmarks/learned_reference.py --mnist DIR --features FILE.npy [--tasks ...] [--sizes 20,64] [--seeds 4] [--out FILE]

CAR-ABMIL with a second branch u_ref next to u_cf, trained with these terms, alone and together:

    diff      CE(F(u) - F(u_ref), y)         the difference from the reference still predicts the class
    overlap   cos(softmax(u), softmax(u_ref)) the reference attends where the model does not
    neutral   -mean_c log softmax(F(u_ref))_c the reference predicts no class
    spread    -mean_j log(n softmax(u_ref)_j) the reference attends to many instances

Path evidence (AUPRC± under the mirror rule) is measured from the learned reference, and from others that need no training: the
reversed attention softmax(-t u) with t = 1, 1/2 and 2, the mean of the least attended half, and uniform attention. Figures are
validation/test in per cent, means over the seeds.
"""

from pathlib import Path

import torch
from digit_experiment import ABMIL, Experiment, Row, load_studies, train, write_rows
from speed.script import run_script
from speed.timing import DEVICE

from carmil.counterfactual.branches import CAR, Branch, CounterfactualModel
from carmil.counterfactual.objective import evidence_differential_loss, l1_distance
from carmil.datasets.digits import TASKS
from carmil.evidence import evidence_agreement
from carmil.evidence.path import mean_gradient
from carmil.evidence.pooling_pass import pooling_pass
from carmil.evidence.rank_correlation import bag_places
from carmil.models import registry
from carmil.models.pooling import Offsets, bag_mean, bag_softmax, bag_sum

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
    """CAR's attention, and after it the attention of a reference."""

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


def references(attention):
    """Z_ref by name, (b, h, d)."""
    u = attention.scores
    offsets = attention.offsets
    upper = bag_places(-u, offsets) >= (offsets.sizes[offsets.bag_of] // 2).unsqueeze(-1)
    return {
        "reversed": attention.pool_by(-u),
        "reversed, t 1/2": attention.pool_by(-u / 2),
        "reversed, t 2": attention.pool_by(-2 * u),
        "least attended half": attention.pool_by(torch.zeros_like(u).masked_fill(upper, -torch.inf)),
        "uniform": attention.pool_by(torch.zeros_like(u)),
        "learned": attention.pool_by(attention.counterfactual[..., 1, :]),
    }


def measure(experiment: Experiment, point: int) -> list[Row]:
    """One row per seed."""
    rows = []
    for seed, i in enumerate(experiment.rows(point)):
        row: Row = {"point": point, "seed": seed, "loss": float(experiment.losses[seed, point])}
        model = experiment.population.member(i)
        for part, bags in experiment.parts.items():
            row[f"{part} AUC"] = experiment.auc(part, [i])
            offsets = Offsets(bags.offsets, bags.features.device)
            attention = pooling_pass(model, bags.features, offsets, "path evidence")
            for name, start in references(attention).items():
                gradient = mean_gradient(model, start, attention.pool, tolerance=5e-4)
                evidence = attention.shared(gradient, start)
                agreement = evidence_agreement(evidence, -evidence, bags.instance_labels, bags.offsets)
                row[f"{part} {name}"] = float(agreement.both)
        rows.append(row)
    return rows


def summary(rows: list[Row]) -> str:
    """Means over the seeds of one combination of terms."""
    mean = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
    names = [name.removeprefix("validation ") for name in mean if name.startswith("validation ")]
    point = POINTS[rows[0]["point"]]
    terms = " ".join(f"{term} {value:g}" for term, value in zip(TERMS, point, strict=True) if value)
    figures = [f"{name} {100 * mean[f'validation {name}']:.1f}/{100 * mean[f'test {name}']:.1f}" for name in names]
    return f"[{terms or 'CAR alone'}] loss {mean['loss']:.4f}  {'  '.join(figures)}"


def main(
    mnist: str | None = None,
    features: Path | None = None,
    tasks: str = "adjacent_pairs,four_bags",
    sizes: str = "20,64",
    seeds: int = 4,
    epochs: int = 1000,
    device: str = DEVICE,
    out: Path | None = None,
) -> None:
    coefficients = [dict(zip(TERMS, point, strict=True)) for point in POINTS]
    table: list[Row] = []
    for task, study in load_studies(tasks, mnist, features).items():
        for size in map(int, sizes.split(",")):

            def build(task: str = task, size: int = size, width: int = study.train.bags.width):
                model = registry.create("abmil", width, TASKS[task].classes, hidden=size, attention=size, **ABMIL)
                return CounterfactualModel(model, WithReference(model))

            experiment = train(build, study, coefficients, seeds=seeds, epochs=epochs, device=device)
            for point in range(len(POINTS)):
                rows = measure(experiment, point)
                print(f"{task} {size} {summary(rows)}", flush=True)
                table += [{"task": task, "size": size, **row} for row in rows]
    write_rows(out, table)


if __name__ == "__main__":
    run_script(main)
