"""A whole study as one population: what a cross-validation with seeds and a grid takes."""

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from carmil.counterfactual import create_model
from carmil.counterfactual.branches import branch_coefficients
from carmil.progress import training_progress
from carmil.training.loop import fit
from carmil.training.population import Member, Population
from carmil.training.recipe import TRAIN, UNUSED, VALIDATION, Recipe

from .arithmetic import CLASSES, WIDTH, work
from .bench import TOO_LARGE, Bench
from .measure import DoesNotFitError, peak_memory, release, shortage_told, synchronize
from .ours import MODEL, noise_bags
from .plain import LEARNING_RATE, WEIGHT_DECAY
from .plan import WHOLE_BAG, Study
from .records import Fact


def study(bench: Bench) -> Iterator[Fact]:
    """Folds x seeds x a grid of alpha and lambda, trained by `fit` as one population, from the first step to the last epoch."""
    asked, instances = bench.plan.study, bench.plan.bag
    about = f"{asked.models} models, {asked.slides} slides of {instances:,}, {asked.epochs} epochs"
    try:
        with shortage_told(), peak_memory(bench.device) as peak:
            seconds, trained = _studied(asked, instances, bench.device)
    except DoesNotFitError:
        yield Fact("study", about, None, "s", TOO_LARGE)
        return
    finally:
        release(bench.device)
    operations = trained * work(MODEL, instances).operations
    yield Fact("study", about, seconds, "s", "training and validation, loading not included")
    yield Fact(
        "study", "arithmetic of the training", operations / seconds / 1e12, "TFLOP/s", "bags that a model trains on"
    )
    yield Fact("study", "memory", peak[0] / 2**30, "GiB", "features included")
    whole = Study()
    part = asked.models * asked.slides * asked.epochs * instances
    share = part / (whole.models * whole.slides * whole.epochs * WHOLE_BAG)
    if share != 1:
        about = f"at this pace: {whole.models} models, {whole.slides} slides of {WHOLE_BAG:,}, {whole.epochs} epochs"
        yield Fact("study", about, seconds / share, "s", "scaled, not measured")


def _studied(asked: Study, instances: int, device: str) -> tuple[float, int]:
    """Seconds, and how many times a model was trained on a bag."""
    bags = noise_bags([instances] * asked.slides, device)
    fold = torch.arange(asked.slides) % asked.folds
    roles = torch.stack([_roles(fold, tested) for tested in range(asked.folds)])
    members, owner = [], []
    for tested in range(asked.folds):
        for seed in range(asked.seeds):
            for i in range(asked.grid):
                weights = branch_coefficients(MODEL, alpha=0.1 * (1 + i // 3), lambda_=0.5 * (1 + i % 3))
                members.append(Member(seed=seed, lr=LEARNING_RATE, coefficients=weights))
                owner.append(tested)
    recipe = Recipe(
        epochs=asked.epochs, batch=1, optimizer="adam", weight_decay=WEIGHT_DECAY, shuffle=True, patience=asked.epochs
    )
    everyone = Population(lambda: create_model(MODEL, WIDTH, CLASSES), members, device=device, precision="bfloat16")
    synchronize(device)
    begun = time.perf_counter()
    with training_progress("study", asked.epochs, len(members)) as on_epoch:
        fit(everyone, bags, roles[owner], recipe, on_epoch=on_epoch)
    synchronize(device)
    return time.perf_counter() - begun, int((roles[owner] == TRAIN).sum()) * asked.epochs


def _roles(fold: Tensor, tested: int) -> Tensor:
    """One fold is for a test that does not happen here, one in eight of the others validates, the rest trains."""
    roles = torch.full_like(fold, TRAIN)
    rest = (fold != tested).nonzero().squeeze(-1)
    roles[rest[::8]] = VALIDATION
    roles[fold == tested] = UNUSED
    return roles
