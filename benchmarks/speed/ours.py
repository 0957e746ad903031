"""carmil's training step on bags of noise, and a store of noise. r models, b bags, n instances."""

import os
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
import torch

from carmil.bags.bags import Bags
from carmil.bags.building import build_store
from carmil.bags.sources import Bag
from carmil.bags.store import Store, is_store, open_store
from carmil.bags.writers import write_bag
from carmil.counterfactual import create_model
from carmil.training.early_stopping import TrainingState
from carmil.training.feeder import choose_feeder
from carmil.training.population import Member, Population
from carmil.training.recipe import Recipe
from carmil.training.step import Batch, Stepper

from .arithmetic import CLASSES, WIDTH
from .plain import LEARNING_RATE, WEIGHT_DECAY
from .timing import Step

MODEL = "car/abmil.gated"  # the paper's model, which the main figures are about


def noise_bags(sizes: Sequence[int], device: str, *, dtype: torch.dtype = torch.float16) -> Bags:
    """Bags of normal noise with alternating classes, in the type of a store."""
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    features = torch.empty(int(offsets[-1]), WIDTH, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(0)
    for part in features.split(10_000):  # float32 noise for all bags at once would take twice their memory
        part.copy_(torch.randn(part.shape, generator=generator, device=device))
    labels = torch.arange(len(sizes), device=device) % CLASSES
    return Bags.trusted(features, offsets, tuple(str(i) for i in range(len(sizes))), labels=labels)


def noise_store(folder: Path, count: int, rows: int) -> Store:
    """Pack `count` bags that hold the same noise into the store folder/store; an existing store is used again."""
    path = folder / "store"
    if not is_store(path):
        values = np.random.default_rng(0).normal(size=(rows, WIDTH)).astype(np.float16)
        first = write_bag(Bag("00000", values), folder / "features", "trident")
        for i in range(1, count):
            os.link(first, first.with_name(f"{i:05d}.h5"))
        build_store(folder / "features", path)
    return open_store(path)


def new_population(name: str, models: int, device: str) -> Population:
    """New models in the precision of a study, which is float32 on a CPU."""
    members = [Member(seed=i, lr=LEARNING_RATE) for i in range(models)]
    return Population(lambda: create_model(name, WIDTH, CLASSES), members, device=device, precision="bfloat16")


def our_step(
    population: Population, bags: Bags, *, together: int = 1, optimizer: str = "adam", recorded: bool = True
) -> Step:
    """A training step of all models on the next `together` bags, fed and (if `recorded`) captured as in `fit`.

    For a method with several phases, one step of each phase.
    """
    population.train()
    phases = population.model.phases
    population.begin(phases[0], 0)
    stepper = Stepper(TrainingState(population, Recipe(batch=together, optimizer=optimizer, weight_decay=WEIGHT_DECAY)))
    share = torch.full((len(population), together), 1 / together, device=population.device)
    plan = list(torch.arange(len(bags) // together * together).split(together))
    feeder = choose_feeder(population, bags, plan)
    learners = torch.ones(len(population), dtype=torch.bool)
    batches = cycle(
        [
            Batch(
                fed.features,
                fed.labels,
                fed.offsets,
                fed.rows,
                share,
                share > 0,
                learners,
                feeder.graph_key(positions) if recorded else None,
            )
            for positions, fed in zip(plan, feeder.feed(plan), strict=True)
        ]
    )

    def step() -> None:
        for phase in phases:
            if len(phases) > 1:
                population.begin(phase, 0)
            stepper(next(batches))

    return step
