"""What torch.compile makes of a training step, beside the step as it is.

    python benchmarks/compiled.py [--digits] [--models 50] [--instances 10000]

A step of a CAR-ABMIL population on one bag of noise: as it is, with plain layers instead of our own kernels, and with these and
their gradients compiled; each asked for operation by operation, and as a recorded CUDA graph. Compiling is in the seconds until
a step is warm. With --digits model and bags are those of Table 1: 16 bags of 30 instances, 256 features, 20 hidden units, SGD.
"""

import argparse
import time

import torch
from speed.arithmetic import work
from speed.ours import MODEL, new_population, noise_bags

from carmil.bags.bags import Bags
from carmil.counterfactual import create_model
from carmil.models import fused
from carmil.provenance import machine_line
from carmil.reproduce.digit_runs import template
from carmil.training.early_stopping import TrainingState
from carmil.training.feeder import Feeder
from carmil.training.population import Member, Population
from carmil.training.recipe import Recipe
from carmil.training.step import Batch, Stepper


def step_of(population: Population, bags: Bags, recipe: Recipe):
    """One training step on all bags, operation by operation."""
    population.train()
    stepper = Stepper(TrainingState(population, recipe))
    chosen = torch.arange(len(bags))
    (fed,) = Feeder(bags, population.device, torch.bfloat16 if population.in_half else None).feed([chosen])
    share = torch.full((len(population), len(bags)), 1 / len(bags), device=population.device)
    everyone = torch.ones(len(population), dtype=torch.bool)
    batch = Batch(fed.features, fed.labels, fed.offsets, fed.rows, share, everyone)
    return lambda: stepper._step(batch)


def digit_step(models: int):
    members = [Member(seed=seed) for seed in range(models)]
    name = "car/abmil"
    population = Population(lambda: create_model(name, 256, 4, **template(name)), members, device="cuda")
    bags = Bags(torch.randn(16 * 30, 256), torch.arange(17) * 30, torch.arange(16) % 4)
    return step_of(population, bags, Recipe(optimizer="sgd", batch=16))


def slide_step(models: int, instances: int):
    return step_of(new_population(MODEL, models, "cuda"), noise_bags([instances], "cuda"), Recipe(optimizer="adam"))


def recorded(step):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def milliseconds(step, repeats: int = 50) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start) / repeats


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--digits", action="store_true")
    parser.add_argument("--models", type=int, default=50)
    parser.add_argument("--instances", type=int, default=10_000)
    given = parser.parse_args()
    print(machine_line())
    operations = work(MODEL, given.instances).operations * given.models

    def tell(what: str) -> None:
        begun = time.perf_counter()
        step = digit_step(given.models) if given.digits else slide_step(given.models, given.instances)
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        warm = time.perf_counter() - begun
        for how, run in (("operation by operation", step), ("recorded", recorded(step))):
            ms = milliseconds(run)
            rate = "" if given.digits else f", {operations / ms / 1e9:.0f} TFLOP/s"
            print(f"{what}, {how}: {ms:.3f} ms a step{rate}; warm after {warm:.1f} s", flush=True)

    tell("as it is")
    fused.available = lambda: False
    if not given.digits:
        tell("plain layers")
    Stepper.means = staticmethod(torch.compile(Stepper.means, dynamic=False))
    tell("plain layers, compiled")
