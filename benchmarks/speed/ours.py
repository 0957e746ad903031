"""Our training step on bags of noise, as a benchmark takes it. r models, b bags, n instances."""

from collections.abc import Sequence
from itertools import cycle

import torch

from carmil.bags.bags import Bags
from carmil.counterfactual import create_model
from carmil.training.early_stopping import TrainingState
from carmil.training.feeder import choose_feeder
from carmil.training.population import Member, Population
from carmil.training.recipe import Recipe
from carmil.training.step import Batch, Stepper

from .arithmetic import CLASSES, WIDTH
from .measure import Step
from .plain import LEARNING_RATE, WEIGHT_DECAY

MODEL = "car/abmil.gated"  # the paper's, which the larger figures are about


def noise_bags(sizes: Sequence[int], device: str, *, dtype: torch.dtype = torch.float16) -> Bags:
    """Bags of normal noise, of two classes in turn, as they lie in a store."""
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    features = torch.empty(int(offsets[-1]), WIDTH, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(0)
    for part in features.split(10_000):  # float32 noise for all of it would be twice the size of what is wanted
        part.copy_(torch.randn(part.shape, generator=generator, device=device))
    labels = torch.arange(len(sizes), device=device) % CLASSES
    return Bags.trusted(features, offsets, tuple(str(i) for i in range(len(sizes))), labels=labels)


def new_population(name: str, models: int, device: str) -> Population:
    """In the precision of a study, which on a CPU is float32."""
    members = [Member(seed=i, lr=LEARNING_RATE) for i in range(models)]
    return Population(lambda: create_model(name, WIDTH, CLASSES), members, device=device, precision="bfloat16")


def our_step(population: Population, bags: Bags, *, together: int = 1) -> Step:
    """A training step of all models on the next `together` bags, in turn, fed and recorded as `fit` does.

    For a method of several phases a step of each.
    """
    population.train()
    phases = population.model.phases
    population.begin(phases[0], 0)
    stepper = Stepper(TrainingState(population, Recipe(batch=together, optimizer="adam", weight_decay=WEIGHT_DECAY)))
    share = torch.full((len(population), together), 1 / together, device=population.device)
    plan = list(torch.arange(len(bags) // together * together).split(together))
    feeder = choose_feeder(population, bags, plan)
    everyone = torch.ones(len(population), dtype=torch.bool)
    following = cycle(
        [
            Batch(fed.features, fed.labels, fed.offsets, fed.rows, share, everyone, feeder.like(chosen))
            for chosen, fed in zip(plan, feeder.feed(plan), strict=True)
        ]
    )

    def step() -> None:
        for phase in phases:
            if len(phases) > 1:
                population.begin(phase, 0)
            stepper(next(following))

    return step
