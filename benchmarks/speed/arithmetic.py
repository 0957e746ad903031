"""Floating-point operations that a training step on one bag needs at least, forward and backward.

n instances, d features. ABMIL and CAR-ABMIL are counted by formula: the first layer needs no gradient for its input, the attention
layers do, and scores, pooling and classifier are too small to count. For the other models, torch's flop counter counts every matrix
product and convolution of a step on fake tensors.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from carmil.counterfactual import create_model
from carmil.models.contract import BagModel
from carmil.models.pooling import Offsets

WIDTH, CLASSES, HIDDEN, ATTENTION = 1024, 2, 512, 128
GATES = {"abmil": 1, "abmil.gated": 2}


@dataclass(frozen=True)
class Work:
    """Cost of one model on one bag: operations of all passes, bytes kept for the backward pass, and how they were counted."""

    operations: int
    kept: int
    counted_by: str


@cache
def work(name: str, instances: int) -> Work:
    """Return the cost of a training step of a model on a bag of this size."""
    operations, kept = _count(name, instances)
    prefix, _, base = name.rpartition("/")
    if base in GATES and prefix in ("", "car"):
        return Work(abmil_operations(instances, gates=GATES[base]), kept, "formula")
    return Work(operations, kept, "counter")


def abmil_operations(instances: int, *, gates: int) -> int:
    """2 n (2 d h + 3 h a): the embedding forward and for its weights; V, and U if gated, also for their input."""
    return 2 * instances * (2 * WIDTH * HIDDEN + 3 * HIDDEN * gates * ATTENTION)


def _count(name: str, instances: int) -> tuple[int, int]:
    """Return the operations of all passes, and the bytes kept by the pass that keeps most."""
    from torch._subclasses import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    kept: dict[int, Tensor] = {}  # by storage: a tensor and its views are kept once

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    offsets = Offsets(torch.tensor([0, instances]))
    operations, sizes = 0, []
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = create_model(name, WIDTH, CLASSES).train()
        bag, label = torch.empty(instances, WIDTH), torch.zeros(1, dtype=torch.long)
        for phase in model.phases:
            model.begin(phase, 0)
            counter = FlopCounterMode(display=False)
            with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                one_bag_loss(model, bag, offsets, label).backward()
            operations += counter.get_total_flops()
            sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
            kept.clear()
    return operations, max(sizes)


def one_bag_loss(model: BagModel, features: Tensor, offsets: Offsets, labels: Tensor) -> Tensor:
    """Return the weighted sum of a single model's loss terms."""
    terms = {term for term, weight in model.coefficients.items() if weight}
    losses = model.losses(model(features, offsets), labels, terms)
    return torch.stack([model.coefficients[term] * losses[term].sum() for term in losses if term in terms]).sum()
