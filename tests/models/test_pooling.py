import itertools

import pytest
import torch

from carmil.models.pooling import (
    Offsets,
    bag_max,
    bag_mean,
    bag_project,
    bag_ranking,
    bag_softmax,
    bag_sum,
    bag_topk,
    bag_weighted_sum,
)

RAGGED, EVEN, ONE, SINGLES = [0, 1, 4, 9, 11], [0, 4, 8, 12], [0, 7], [0, 1, 2, 3]
SHAPES = [RAGGED, EVEN, ONE, SINGLES]


def naive(pool, x, starts):
    """Apply the pooling bag by bag."""
    return torch.stack([pool(x[..., i:j, :]) for i, j in itertools.pairwise(starts)], dim=-2)


def values(starts, *lead, width=3):
    return torch.randn(*lead, starts[-1], width, dtype=torch.float64)


@pytest.mark.parametrize("starts", SHAPES)
@pytest.mark.parametrize("lead", [(), (5,)])
@pytest.mark.parametrize(
    ("ragged", "plain"),
    [
        (bag_sum, lambda x: x.sum(-2)),
        (bag_mean, lambda x: x.mean(-2)),
        (bag_max, lambda x: x.amax(-2)),
    ],
)
def test_pooling_equals_pooling_each_bag_separately(starts, lead, ragged, plain):
    x = values(starts, *lead)
    assert torch.allclose(ragged(x, Offsets(torch.tensor(starts))), naive(plain, x, starts))


@pytest.mark.parametrize("starts", SHAPES)
def test_softmax_equals_softmax_of_each_bag(starts):
    u = values(starts)
    expected = torch.cat([u[i:j].softmax(0) for i, j in itertools.pairwise(starts)])
    assert torch.allclose(bag_softmax(u, Offsets(torch.tensor(starts))), expected)


@pytest.mark.parametrize("starts", SHAPES)
@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_softmax_is_stable_for_huge_scores_and_single_instances(starts, scale):
    u = scale * torch.rand(starts[-1], 1)
    a = bag_softmax(u, Offsets(torch.tensor(starts)))
    assert torch.isfinite(a).all()
    assert torch.allclose(bag_sum(a, Offsets(torch.tensor(starts))), torch.ones(len(starts) - 1, 1))


def test_instance_with_score_of_minus_infinity_gets_zero_weight():
    for starts in (RAGGED, EVEN):
        u = torch.zeros(starts[-1], 1)
        u[2] = float("-inf")
        assert bag_softmax(u, Offsets(torch.tensor(starts)))[2] == 0


@pytest.mark.parametrize("starts", SHAPES)
def test_weighted_sum_pools_every_head(starts):
    a, z = values(starts, 4, width=2), values(starts, 4, width=3)
    expected = torch.stack([a[:, i:j].mT @ z[:, i:j] for i, j in itertools.pairwise(starts)], dim=1)
    assert torch.allclose(bag_weighted_sum(a, z, Offsets(torch.tensor(starts))), expected)


@pytest.mark.parametrize("starts", SHAPES)
def test_projection_uses_the_directions_of_the_bag_of_each_instance(starts):
    x, directions = values(starts), torch.randn(len(starts) - 1, 2, 3, dtype=torch.float64)
    expected = torch.cat([x[i:j] @ d.T for i, j, d in zip(starts, starts[1:], directions, strict=False)])
    assert torch.allclose(bag_project(x, directions, Offsets(torch.tensor(starts))), expected)


@pytest.mark.parametrize("starts", SHAPES)
@pytest.mark.parametrize("k", [1, 3, 20])
def test_topk_returns_largest_scores_of_each_bag_and_pads_small_bags(starts, k):
    u = values(starts)
    best, rows = bag_topk(u, Offsets(torch.tensor(starts)), k)
    for b, (i, j) in enumerate(itertools.pairwise(starts)):
        valid = min(k, j - i)
        assert torch.equal(best[b, :valid], u[i:j].topk(valid, dim=0).values)
        assert torch.equal(u.gather(0, rows[b, :valid]), best[b, :valid])
        assert (best[b, valid:] == float("-inf")).all()
        assert ((rows[b] >= i) & (rows[b] < j)).all()


def test_ranking_keeps_tied_instances_in_input_order():
    u = torch.tensor([[1.0], [1.0], [2.0], [0.0], [0.0]])
    assert bag_ranking(u, Offsets(torch.tensor([0, 3, 5]))).squeeze(-1).tolist() == [2, 0, 1, 3, 4]


@pytest.mark.parametrize("starts", SHAPES)
@pytest.mark.parametrize(
    "pool",
    [
        bag_softmax,
        bag_sum,
        bag_mean,
        bag_max,
        lambda x, offsets: bag_weighted_sum(x, x, offsets),
        lambda x, offsets: bag_topk(x, offsets, 1)[0],
    ],
)
def test_every_pooling_function_is_differentiable_and_works_under_vmap(starts, pool):
    offsets = Offsets(torch.tensor(starts))
    x = values(starts, width=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: pool(x, offsets), (x,))
    stacked = values(starts, 3, width=2)
    together = torch.vmap(lambda x: pool(x, offsets))(stacked)
    assert torch.allclose(together, torch.stack([pool(one, offsets) for one in stacked]))
    assert torch.allclose(pool(stacked, offsets), together)


def test_offsets_have_a_size_only_if_all_bags_are_equally_large():
    assert Offsets(torch.tensor(EVEN)).size == 4
    assert Offsets(torch.tensor(RAGGED)).size is None
    assert Offsets(torch.tensor(RAGGED)).bag_of.tolist() == [0, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3]
