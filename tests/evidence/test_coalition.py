"""Coalition evidence is what an instance adds to groups of the others: against the definition, and what it promises."""

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
    """Over all orders of all instances, by the definition."""
    count = len(features)
    total = torch.zeros(count, CLASSES, dtype=torch.float64)
    orders = list(permutations(range(count)))
    for order in orders:
        for place, j in enumerate(order):
            total[j] += value(model, features, order[: place + 1]) - value(model, features, order[:place])
    return total / len(orders)


@pytest.mark.parametrize("name", ["abmil.gated", "clam.mb", "acmil", "dsmil", "mean", "max"])
def test_in_groups_of_all_it_is_the_shapley_value_and_sums_to_the_answer(name):
    model, features = scaled(name), instances(4)
    found = coalition_evidence(model, features, torch.tensor([0, 4]), size=4, draws=400)
    assert torch.allclose(found, shapley(model, features), atol=0.02)
    whole = value(model, features, (0, 1, 2, 3)) - value(model, features, ())
    assert torch.allclose(found.sum(0), whole, atol=1e-9), "not only on average: for the groups that were drawn"


@pytest.mark.parametrize("name", ["abmil.gated", "dsmil"])
def test_in_pairs_it_is_the_mean_of_alone_and_beside_each_other_instance(name):
    model, features = scaled(name), instances(5)
    nothing = value(model, features, ())
    expected = torch.stack(
        [
            (value(model, features, (j,)) - nothing) / 2
            + sum(value(model, features, (i, j)) - value(model, features, (i,)) for i in range(5) if i != j) / 8
            for j in range(5)
        ]
    )
    found = coalition_evidence(model, features, torch.tensor([0, 5]), size=2, draws=2000)
    assert torch.allclose(found, expected, atol=0.02)


def test_a_bag_sums_to_its_share_of_the_mean_group():
    model, features, size = scaled(), instances(7), 3
    found = coalition_evidence(model, features, torch.tensor([0, 7]), size=size, draws=1)
    before = _circle(Offsets(torch.tensor([0, 7])), 0).tolist()
    groups = [(before[before[j]], before[j], j) for j in range(7)]
    mean = torch.stack([value(model, features, group) for group in groups]).mean(0) - value(model, features, ())
    assert torch.allclose(found.sum(0), mean * 7 / size, atol=1e-9)


def test_the_zero_is_the_mean_training_instance_so_that_a_whole_slide_may_be_against():
    model = scaled()
    still = model.mean.expand(6, -1)
    assert torch.allclose(coalition_evidence(model, still, torch.tensor([0, 6])), torch.zeros(6, CLASSES).double())
    away = still + instances(1)
    found = coalition_evidence(model, away, torch.tensor([0, 6]))
    assert torch.allclose(found, found[:1].expand(6, -1)) and found.abs().min() > 1e-4, (
        "six alike, and no zero among them"
    )


def test_no_bag_knows_of_the_others_and_one_instance_is_its_own_group():
    model, features = scaled(), instances(9)
    together = coalition_evidence(model, features, torch.tensor([0, 4, 5, 9]), size=3)
    alone = [
        coalition_evidence(model, features[a:b], torch.tensor([0, b - a]), size=3) for a, b in ((0, 4), (4, 5), (5, 9))
    ]
    assert torch.allclose(together, torch.cat(alone))
    assert torch.allclose(together[4], value(model, features, (4,)) - value(model, features, ()))


def test_scores_far_apart_neither_overflow_nor_vanish():
    model, features = scaled().float(), instances(6).float()
    with torch.no_grad():
        model.model.attention.score.weight.mul_(1e6)
    assert coalition_evidence(model, features, torch.tensor([0, 6]), size=4).isfinite().all()


def test_classes_whose_logits_are_swapped_have_their_evidence_swapped():
    """The mirror rule: no class has a place of its own."""
    model, features = scaled(), instances(6)
    here = coalition_evidence(model, features, torch.tensor([0, 6]))
    with torch.no_grad():
        last = model.model.classifier[-1]
        last.weight.copy_(last.weight.flip(0))
        last.bias.copy_(last.bias.flip(0))
    assert torch.allclose(coalition_evidence(model, features, torch.tensor([0, 6])), here.flip(1))


def test_gradients_count_from_the_mean_training_instance_of_a_model_that_scales():
    model, features, offsets = scaled(), instances(4), torch.tensor([0, 4])
    still = model.mean.expand(4, -1)
    change = value(model, features, (0, 1, 2, 3)) - class_logits(model, still, offsets)[0]
    assert torch.allclose(feature_change(model, features, offsets)[0], change)
    assert torch.allclose(integrated_gradients(model, features, offsets).sum(0), change, atol=1e-3)
    assert not input_x_gradient(model, still, offsets).any()
