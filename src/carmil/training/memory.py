"""How many models fit into memory at once.

What a model keeps for its gradient grows with the instances of a step; it is measured on two small bags.
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

USED = 0.8  # of the free memory
PEAK = 3.0  # peak memory, as a multiple of what is kept for the gradient
COPIES = 7  # of the weights: the weights, the best so far, two of Adam, the gradient, one in 16 bits, one of a subset
FEW, SOME = 64, 192  # instances of the two bags


def models_that_fit(population: Population, bags: Bags, recipe: Recipe, device: torch.device | str) -> int:
    """How many models of this kind, at least 1, can take a step on the largest bags of the cohort."""
    instances = int(bags.sizes.topk(min(recipe.batch, len(bags))).values.sum())
    kept = [_kept_for_gradient(population, bags.width, count) for count in (FEW, SOME)]
    per_instance = max(0.0, (kept[1] - kept[0]) / (SOME - FEW))
    per_model = PEAK * per_instance * instances + COPIES * 4 * population.weights.shape[1]
    free = USED * free_memory(device)
    if torch.device(device).type == "cuda":  # features stay on the GPU if they take no more than half
        features = bags.features.numel() * 2
        free = free - features if features < free / 2 else free
    return max(1, int(free / per_model))


def free_memory(device: torch.device | str) -> int:
    """Bytes that can still be allocated: on the GPU, on the machine, or within its cgroup limit."""
    if torch.device(device).type == "cuda":
        release_cached_memory()
        return torch.cuda.mem_get_info(device)[0]
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 2**33
    available = _number("/proc/meminfo", "MemAvailable:", 1024) or pages
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    return available if limit is None or used is None else min(available, max(0, limit - used))


def _number(path: str, name: str = "", unit: int = 1) -> int | None:
    """The number on the line that starts with `name`, times `unit`; None if the file, the line or the number is missing."""
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    words = next((line.removeprefix(name).split() for line in lines if line.startswith(name)), [])
    return int(words[0]) * unit if words and words[0].isdigit() else None


def _kept_for_gradient(population: Population, width: int, instances: int) -> int:
    """Bytes that one model keeps for its gradient on a bag of this size, without the features."""
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
        two.losses(prediction, torch.zeros(1, dtype=torch.long, device=population.device))
    storages.pop(features.untyped_storage().data_ptr(), None)
    return sum(storages.values()) // len(two)
