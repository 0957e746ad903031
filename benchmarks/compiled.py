"""Compare a training step with what torch.compile makes of it.

    python benchmarks/compiled.py [--digits] [--models 50] [--instances 10000]

A step of a CAR-ABMIL population on a bag of noise: with carmil's kernels, with plain layers instead of them, and with the plain
layers and their gradients compiled; each launched operation by operation, and replayed as a CUDA graph. Compiling is included
in the seconds of the warm-up. With --digits, model and bags are those of Table 1: 16 bags of 30 instances, 256 features, 20
hidden units, SGD.
"""

import time
from collections.abc import Callable

import torch
from speed.arithmetic import work
from speed.ours import MODEL, new_population, noise_bags, our_step
from speed.script import run_script
from speed.timing import Step, time_step

from carmil.bags.bags import Bags
from carmil.counterfactual import create_model
from carmil.models import fused
from carmil.training.population import Member, Population
from carmil.training.step import Stepper

DIGIT_MODEL = {"hidden": 20, "branch": "full"}


def digit_step(models: int, recorded: bool) -> Step:
    members = [Member(seed=seed) for seed in range(models)]
    population = Population(lambda: create_model("car/abmil", 256, 4, **DIGIT_MODEL), members, device="cuda")
    bags = Bags(torch.randn(16 * 30, 256), torch.arange(17) * 30, torch.arange(16) % 4)
    return our_step(population, bags, together=16, optimizer="sgd", recorded=recorded)


def slide_step(models: int, instances: int, recorded: bool) -> Step:
    bags = noise_bags([instances], "cuda")
    return our_step(new_population(MODEL, models, "cuda"), bags, recorded=recorded)


def main(digits: bool = False, models: int = 50, instances: int = 10_000) -> None:
    operations = work(MODEL, instances).operations * models

    def measure(what: str) -> None:
        for how, recorded in (("operation by operation", False), ("replayed", True)):
            begin = time.perf_counter()
            step = digit_step(models, recorded) if digits else slide_step(models, instances, recorded)
            for _ in range(5):
                step()
            torch.cuda.synchronize()
            warm_up = time.perf_counter() - begin
            seconds = time_step(_constant(step), device="cuda", seconds=1).seconds
            speed = "" if digits else f", {operations / seconds / 1e12:.0f} TFLOP/s"
            print(f"{what}, {how}: {1000 * seconds:.3f} ms per step{speed}; warm after {warm_up:.1f} s", flush=True)

    measure("carmil's kernels")
    fused.available = lambda: False
    if not digits:
        measure("plain layers")
    Stepper.means = staticmethod(torch.compile(Stepper.means, dynamic=False))
    measure("plain layers, compiled")


def _constant(step: Step) -> Callable[[], Step]:
    return lambda: step


if __name__ == "__main__":
    run_script(main)
