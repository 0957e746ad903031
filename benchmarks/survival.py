"""Time the training of Cox models beside that of classifiers: 5 folds x 5 seeds x 9 points at once on slides of 10,000 x 1024.

    python benchmarks/survival.py [--slides 300] [--instances 10000] [--epochs 30] [--device cuda]

Both train in the same run on the same features, without early stopping, each with its default number of bags per step.
The time is that of the epochs after the first, per training bag, model and epoch. Features are random, on the CPU.
"""

import time

import torch
from speed.script import run_script
from speed.timing import DEVICE

from carmil.bags.bags import Bags
from carmil.counterfactual.branches import branch_coefficients, create_model
from carmil.models.scaled_model import ScaledModel
from carmil.targets import Classes, Survival, Target
from carmil.training.protocol import GridPoint, train_protocol
from carmil.training.recipe import TRAIN, UNUSED, VALIDATION, Recipe

FOLDS, SEEDS, WIDTH = 5, 5, 1024
RATES = (1e-4, 5e-4, 1e-3)
ALPHAS = (0.02, 0.05, 0.1)


def main(
    slides: int = 300,
    instances: int = 10_000,
    epochs: int = 30,
    model: str = "car/abmil.gated",
    device: str = DEVICE,
    precision: str = "bfloat16",
) -> None:
    torch.manual_seed(0)
    features = torch.randn(slides * instances, WIDTH, dtype=torch.float16)
    offsets = torch.arange(0, (slides + 1) * instances, instances)
    fold_of = torch.arange(slides) % FOLDS
    folds = torch.arange(FOLDS).unsqueeze(-1)
    roles = torch.full((FOLDS, slides), TRAIN).masked_fill(fold_of == folds, UNUSED)
    roles = roles.masked_fill(fold_of == (folds + 1) % FOLDS, VALIDATION)
    times = torch.stack([torch.rand(slides) * 60, (torch.rand(slides) < 0.5).float()], dim=1)
    seconds = {}
    outcomes: list[tuple[str, Target, torch.Tensor]] = [
        ("classes", Classes(names=("a", "b")), torch.randint(2, (slides,))),
        ("survival", Survival(), times),
    ]
    for name, target, labels in outcomes:
        bags = Bags.trusted(features=features, offsets=offsets, labels=labels, ids=tuple(map(str, range(slides))))
        seconds[name] = _seconds(target, bags, roles, epochs, model, device, precision)
        print(f"{name}: {1000 * seconds[name]:.4f} ms per bag and model, {target.batch} bags per step", flush=True)
    print(f"survival takes {seconds['survival'] / seconds['classes']:.2f} times as long as classes")


def _seconds(
    target: Target, bags: Bags, roles: torch.Tensor, epochs: int, model: str, device: str, precision: str
) -> float:
    """Return the seconds per training bag, model and epoch, without the first epoch."""
    recipe = Recipe(
        epochs=epochs, batch=target.batch, optimizer="adam", weight_decay=1e-2, shuffle=True, warmup=0, patience=epochs
    )
    grid = [GridPoint(lr=lr, coefficients=branch_coefficients(model, alpha=alpha)) for lr in RATES for alpha in ALPHAS]
    ends: list[float] = []

    def on_epoch(epoch: int, losses: dict[str, float], running: int) -> None:
        if device != "cpu":
            torch.cuda.synchronize()
        ends.append(time.perf_counter())

    train_protocol(
        lambda: ScaledModel(create_model(model, WIDTH, len(target.outputs), link=target.link()), WIDTH),
        bags,
        roles,
        recipe=recipe,
        seeds=range(SEEDS),
        grid=grid,
        device=device,
        precision=precision,
        on_epoch=on_epoch,
    )
    parts = [ends[first : first + epochs] for first in range(0, len(ends), epochs)]
    trained = int((roles == TRAIN).sum()) * SEEDS * len(grid)  # bags x models of one epoch
    return sum(part[-1] - part[0] for part in parts) / (epochs - 1) / trained


if __name__ == "__main__":
    run_script(main)
