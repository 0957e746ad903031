"""Is what a GPU replays what it would have computed? Trainings recorded and not, and what a step of each costs.

    python benchmarks/recorded.py [--models transmil,car/transmil,rrt,dsmil,acmil,clam.sb,cia/abmil.gated,weno] [--instances 5000]

Three models on 24 ragged bags, six epochs, in 16 bits: the validation losses of a recorded training beside those of one that is
not, and, since some operations add in any order on a GPU, of two that are not. Then a step on one bag, in milliseconds. For a GPU;
CI has none, and its tests run what is recorded without recording it.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from carmil import Bags, Member, Population, Recipe, create_model, fit
from carmil.provenance import machine_line
from carmil.recording import Recorder
from carmil.training import TRAIN, VALIDATION
from carmil.training.early_stopping import TrainingState
from carmil.training.feeder import Feeder
from carmil.training.step import Batch, Stepper

MODELS = "transmil,car/transmil,rrt,dsmil,acmil,clam.sb,cia/abmil.gated,car/abmil.gated,weno"
RECORD = Recorder.record


def not_at_all(self: Recorder, work: Callable[[], Any]) -> None:
    self.full = True


def population(name: str, width: int) -> Population:
    members = [Member(seed=seed, lr=1e-3) for seed in range(3)]
    return Population(lambda: create_model(name, width, 2), members, device="cuda", precision="bfloat16")


def losses(name: str, record: Any) -> torch.Tensor:
    """(epochs, models)."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(24) % 2
    sizes = torch.randint(300, 900, (24,), generator=generator).tolist()
    parts = [
        (torch.randn(n, 128, generator=generator) + 0.2 * y).half() for n, y in zip(sizes, labels.tolist(), strict=True)
    ]
    roles = torch.full((3, 24), TRAIN)
    roles[:2, 16:], roles[2, :8] = VALIDATION, VALIDATION  # two folds
    Recorder.record = record  # type: ignore[method-assign]
    try:
        history = fit(
            population(name, 128), Bags.from_list(parts, labels=labels), roles, Recipe(epochs=6, batch=1, shuffle=True)
        )
    finally:
        Recorder.record = RECORD  # type: ignore[method-assign]
    return history.validation.cpu().nan_to_num()


def step(name: str, instances: int, *, recorded: bool) -> float:
    """Milliseconds of three models on one bag."""
    models = population(name, 1024)
    models.train()
    models.begin(models.model.phases[0], 0)
    bags = Bags(torch.randn(instances, 1024).half(), torch.tensor([0, instances]), torch.tensor([1]))
    (fed,) = Feeder(bags, models.device, torch.bfloat16).feed([torch.tensor([0])])
    share, learners = torch.ones(3, 1, device="cuda"), torch.ones(3, dtype=torch.bool)
    batch = Batch(fed.features, fed.labels, fed.offsets, fed.rows, share, learners, 0 if recorded else None)
    stepper = Stepper(TrainingState(models, Recipe(epochs=1)))
    for _ in range(3):
        stepper(batch)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(20):
        stepper(batch)
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) * 1000 / 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--instances", type=int, default=5000)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU here, and only a GPU records")
    print(machine_line())
    for name in given.models.split(","):
        replayed, plain, again = losses(name, RECORD), losses(name, not_at_all), losses(name, not_at_all)
        took = [step(name, given.instances, recorded=recorded) for recorded in (True, False)]
        print(
            f"{name}: validation losses differ by {(replayed - plain).abs().max():.1e}, of two that are not recorded by "
            f"{(plain - again).abs().max():.1e}; a step on {given.instances:,} instances {took[0]:.1f} ms, "
            f"not recorded {took[1]:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
