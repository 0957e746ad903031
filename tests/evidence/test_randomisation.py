import copy
from itertools import permutations

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from carmil.bags.bags import Bags
from carmil.counterfactual.branches import create_model
from carmil.evidence import explain
from carmil.evidence.randomisation import (
    chance_correlation,
    shuffle_weights,
    similarity_over_chance,
)
from carmil.evidence.rank_correlation import spearman
from carmil.models.pooling import Offsets

WIDTH = 6


def bags_of(*sizes):
    return Bags.from_list([torch.randn(size, WIDTH) for size in sizes])


def test_map_that_ignores_the_model_is_unchanged_by_shuffling_weights():
    model, bags = create_model("abmil", WIDTH, 3, hidden=16), bags_of(60, 80)
    before = copy.deepcopy(model.state_dict())
    other, offsets = shuffle_weights(model), Offsets(bags.offsets)
    random, path = (
        spearman(explain(model, bags, name), explain(other, bags, name), offsets) for name in ("random", "path")
    )
    assert torch.allclose(random, torch.ones(2, 3).double())
    assert path.abs().mean() < 0.6
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for own, other in zip(model.parameters(), shuffle_weights(model).parameters(), strict=True):
        assert torch.equal(own.flatten().sort().values, other.flatten().sort().values)


@pytest.mark.parametrize("size", [3, 4, 5, 9, 30])
def test_chance_is_mean_absolute_correlation_of_random_orders(size):
    rng = np.random.default_rng(0)
    orders = list(permutations(range(size))) if size < 6 else [rng.permutation(size) for _ in range(3000)]
    result = np.mean([abs(spearmanr(order, np.arange(size)).statistic) for order in orders])
    assert chance_correlation(size) == pytest.approx(result, abs=1e-9 if size < 6 else 0.012)


def test_similarity_is_one_for_equal_or_negated_maps_and_zero_for_random_maps():
    sizes = [4] * 3000
    offsets = Offsets(torch.tensor([0, *np.cumsum(sizes)]))
    x, y = torch.rand(2, sum(sizes), 1).double()
    assert torch.allclose(similarity_over_chance(x, x, offsets), torch.ones(3000, 1).double())
    assert torch.allclose(similarity_over_chance(x, -x, offsets), torch.ones(3000, 1).double())
    assert similarity_over_chance(x, y, offsets).mean() == pytest.approx(0, abs=0.03)


def test_similarity_is_nan_for_tiny_bags_and_constant_maps():
    offsets = Offsets(torch.tensor([0, 1, 3, 8]))
    x = torch.rand(8, 1)
    assert similarity_over_chance(x, torch.rand(8, 1), offsets).isnan().squeeze(-1).tolist() == [True, True, False]
    assert similarity_over_chance(x, torch.zeros(8, 1), offsets).isnan().all()
