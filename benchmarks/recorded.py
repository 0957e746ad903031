"""Check that a replayed CUDA graph computes what the operations compute, and time a step both ways.

    python benchmarks/recorded.py [--models transmil,car/transmil,rrt,dsmil,acmil,clam.sb,cia/abmil.gated,weno] [--instances 5000]

Three models on 24 ragged bags, six epochs, in bfloat16: the validation losses of a training with CUDA graphs and of one
without, and, since some operations add in any order on a GPU, of two trainings without. Then the milliseconds of a step on one
bag. Needs a GPU; CI has none.
"""

import torch
from speed.ours import new_population, noise_bags, our_step
from speed.script import run_script
from speed.timing import time_step

from carmil import Bags, create_model
from carmil.recording import Recorder
from carmil.training.protocol import GridPoint, train_protocol
from carmil.training.recipe import TRAIN, VALIDATION, Recipe

MODELS = "transmil,car/transmil,rrt,dsmil,acmil,clam.sb,cia/abmil.gated,car/abmil.gated,weno"
RECORD = Recorder.record


def validation_losses(name: str, *, recorded: bool) -> torch.Tensor:
    """(epochs, models)."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(24) % 2
    sizes = torch.randint(300, 900, (24,), generator=generator).tolist()
    parts = [
        (torch.randn(n, 128, generator=generator) + 0.2 * y).half() for n, y in zip(sizes, labels.tolist(), strict=True)
    ]
    roles = torch.full((3, 1, 24), TRAIN)
    roles[:2, 0, 16:], roles[2, 0, :8] = VALIDATION, VALIDATION  # two divisions of the bags
    Recorder.record = RECORD if recorded else _decline
    try:
        history = train_protocol(
            lambda: create_model(name, 128, 2),
            Bags.from_list(parts, labels=labels),
            roles,
            recipe=Recipe(epochs=6, batch=1, shuffle=True),
            seeds=range(3),
            grid=[GridPoint(lr=1e-3)],
            device="cuda",
            precision="bfloat16",
        ).history
    finally:
        Recorder.record = RECORD
    return history.validation.cpu().nan_to_num()


def _decline(self: Recorder, work: object) -> None:
    self.full = True


def main(models: str = MODELS, instances: int = 5000) -> None:
    bags = noise_bags([instances], "cuda")
    for name in models.split(","):
        replayed, plain, again = (validation_losses(name, recorded=recorded) for recorded in (True, False, False))
        times = [
            1000
            * time_step(
                lambda recorded=recorded, name=name: our_step(new_population(name, 3, "cuda"), bags, recorded=recorded),
                device="cuda",
                seconds=1,
            ).seconds
            for recorded in (True, False)
        ]
        print(
            f"{name}: validation losses differ by {(replayed - plain).abs().max():.1e}, without CUDA graphs by "
            f"{(plain - again).abs().max():.1e}; a step on {instances:,} instances takes {times[0]:.1f} ms, "
            f"without a CUDA graph {times[1]:.1f} ms",
            flush=True,
        )


if __name__ == "__main__":
    run_script(main)
