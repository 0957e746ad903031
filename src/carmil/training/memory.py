"""Estimate how many models fit into memory at once.

The memory that a model needs for its gradient grows with the instances of a step; it is measured on two small bags.
"""

import os
from pathlib import Path

import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.models.pooling import Offsets
from carmil.recording import release_cached_memory
from carmil.training.population import Population
from carmil.training.recipe import Recipe

USED = 0.8  # share of the free memory
PEAK = 3.0  # peak memory, as a multiple of the memory stored for the gradient
COPIES = 7  # copies of the weights: current, best, two of Adam, gradient, one in 16 bits, one of a subset
FEW, SOME = 64, 192  # instances of the two bags


def models_that_fit(population: Population, bags: Bags, recipe: Recipe, device: torch.device | str) -> int:
    """Return how many models of this kind, at least 1, can take a step on the largest bags of the cohort."""
    instances = int(bags.sizes.topk(min(recipe.batch, len(bags))).values.sum())
    assert bags.labels is not None
    kept = [_kept_for_gradient(population, bags.width, count, bags.labels[:1]) for count in (FEW, SOME)]
    per_instance = max(0.0, (kept[1] - kept[0]) / (SOME - FEW))
    per_model = PEAK * per_instance * instances + COPIES * 4 * population.weights.shape[1]
    free = USED * free_memory(device)
    if torch.device(device).type == "cuda":  # features stay on the GPU if they need at most half
        features = bags.features.numel() * 2
        free = free - features if features < free / 2 else free
    return max(1, int(free / per_model))


def free_memory(device: torch.device | str) -> int:
    """Return the number of bytes that can still be allocated: on the GPU, on the machine, or within its cgroup limit."""
    if torch.device(device).type == "cuda":
        release_cached_memory()
        return torch.cuda.mem_get_info(device)[0]
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 2**33
    available = _number("/proc/meminfo", "MemAvailable:", 1024) or pages
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    return available if limit is None or used is None else min(available, max(0, limit - used))


def _number(path: str, name: str = "", unit: int = 1) -> int | None:
    """Return the number on the line that starts with `name`, times `unit`; None if the file, line or number is missing."""
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    words = next((line.removeprefix(name).split() for line in lines if line.startswith(name)), [])
    return int(words[0]) * unit if words and words[0].isdigit() else None


def _kept_for_gradient(population: Population, width: int, instances: int, label: Tensor) -> int:
    """Return the bytes that one model stores for its gradient on a bag of this size, without the features. label (1, ...)."""
    two = population.subset(torch.arange(min(2, len(population)), device=population.device))
    features = torch.zeros(instances, width, device=population.device)
    storages: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    two.train()
    two.begin(two.model.phases[0], 0)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        prediction = two(features, Offsets(torch.tensor([0, instances]), population.device), leaves=two.leaves())
        two.losses(prediction, label.to(population.device))
    storages.pop(features.untyped_storage().data_ptr(), None)
    return sum(storages.values()) // len(two)
