"""Coalition evidence, the mean contribution of an instance to groups of others: definition and properties."""

from itertools import permutations

import pytest
import torch

from carmil import create_model
from carmil.evidence.coalition import _circle, coalition_evidence
from carmil.evidence.gradients import class_logits, feature_change, input_x_gradient, integrated_gradients
from carmil.models.pooling import Offsets
from carmil.models.scaled_model import ScaledModel

WIDTH, CLASSES = 5, 3


def scaled(name: str = "abmil.gated", **options) -> ScaledModel:
    torch.manual_seed(0)
    model = ScaledModel(create_model(name, WIDTH, CLASSES, hidden=8, **options), WIDTH).double().eval()
    model.mean.copy_(torch.arange(WIDTH) / 3)
    model.deviation.copy_(1 + torch.arange(WIDTH) / 5)
    return model


def instances(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def value(model, features: torch.Tensor, group: tuple[int, ...]) -> torch.Tensor:
    x = features[list(group)] if group else model.reference(features).unsqueeze(0)
    return class_logits(model, x, torch.tensor([0, len(x)]))[0]


def shapley(model, features: torch.Tensor) -> torch.Tensor:
    """Compute Shapley values by definition, over all orders of all instances."""
    count = len(features)
    total = torch.zeros(count, CLASSES, dtype=torch.float64)
    orders = list(permutations(range(count)))
    for order in orders:
        for place, j in enumerate(order):
            total[j] += value(model, features, order[: place + 1]) - value(model, features, order[:place])
    return total / len(orders)


@pytest.mark.parametrize("name", ["abmil.gated", "clam.mb", "acmil", "dsmil", "mean", "max"])
def test_evidence_with_groups_of_all_instances_is_the_shapley_value(name):
    model, features = scaled(name), instances(4)
    result = coalition_evidence(model, features, torch.tensor([0, 4]), size=4, draws=400)
    assert torch.allclose(result, shapley(model, features), atol=0.02)
    whole = value(model, features, (0, 1, 2, 3)) - value(model, features, ())
    assert torch.allclose(result.sum(0), whole, atol=1e-9), "the sum holds for the sampled groups, not only on average"


@pytest.mark.parametrize("name", ["abmil.gated", "dsmil"])
def test_evidence_with_pairs_averages_contributions_alone_and_in_pairs(name):
    model, features = scaled(name), instances(5)
    nothing = value(model, features, ())
    expected = torch.stack(
        [
            (value(model, features, (j,)) - nothing) / 2
            + sum(value(model, features, (i, j)) - value(model, features, (i,)) for i in range(5) if i != j) / 8
            for j in range(5)
        ]
    )
    result = coalition_evidence(model, features, torch.tensor([0, 5]), size=2, draws=2000)
    assert torch.allclose(result, expected, atol=0.02)


def test_evidence_of_a_bag_sums_to_the_scaled_mean_value_of_its_groups():
    model, features, size = scaled(), instances(7), 3
    result = coalition_evidence(model, features, torch.tensor([0, 7]), size=size, draws=1)
    before = _circle(Offsets(torch.tensor([0, 7])), 0).tolist()
    groups = [(before[before[j]], before[j], j) for j in range(7)]
    mean = torch.stack([value(model, features, group) for group in groups]).mean(0) - value(model, features, ())
    assert torch.allclose(result.sum(0), mean * 7 / size, atol=1e-9)


def test_evidence_is_relative_to_the_mean_training_instance():
    model = scaled()
    at_mean = model.mean.expand(6, -1)
    assert torch.allclose(coalition_evidence(model, at_mean, torch.tensor([0, 6])), torch.zeros(6, CLASSES).double())
    away = at_mean + instances(1)
    result = coalition_evidence(model, away, torch.tensor([0, 6]))
    assert torch.allclose(result, result[:1].expand(6, -1)) and result.abs().min() > 1e-4, (
        "six equal values, none of them zero"
    )


def test_bags_are_independent_and_a_single_instance_is_its_own_group():
    model, features = scaled(), instances(9)
    together = coalition_evidence(model, features, torch.tensor([0, 4, 5, 9]), size=3)
    alone = [
        coalition_evidence(model, features[a:b], torch.tensor([0, b - a]), size=3) for a, b in ((0, 4), (4, 5), (5, 9))
    ]
    assert torch.allclose(together, torch.cat(alone))
    assert torch.allclose(together[4], value(model, features, (4,)) - value(model, features, ()))


def test_evidence_is_finite_for_widely_spread_attention_scores():
    model, features = scaled().float(), instances(6).float()
    with torch.no_grad():
        model.model.attention.score.weight.mul_(1e6)
    assert coalition_evidence(model, features, torch.tensor([0, 6]), size=4).isfinite().all()


def test_swapping_class_logits_swaps_class_evidence():
    """Mirror symmetry: no class is treated specially."""
    model, features = scaled(), instances(6)
    here = coalition_evidence(model, features, torch.tensor([0, 6]))
    with torch.no_grad():
        last = model.model.classifier[-1]
        last.weight.copy_(last.weight.flip(0))
        last.bias.copy_(last.bias.flip(0))
    assert torch.allclose(coalition_evidence(model, features, torch.tensor([0, 6])), here.flip(1))


def test_gradients_of_a_scaled_model_are_relative_to_the_mean_training_instance():
    model, features, offsets = scaled(), instances(4), torch.tensor([0, 4])
    at_mean = model.mean.expand(4, -1)
    change = value(model, features, (0, 1, 2, 3)) - class_logits(model, at_mean, offsets)[0]
    assert torch.allclose(feature_change(model, features, offsets)[0], change)
    assert torch.allclose(integrated_gradients(model, features, offsets).sum(0), change, atol=1e-3)
    assert not input_x_gradient(model, at_mean, offsets).any()
