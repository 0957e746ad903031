import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import pearsonr, rankdata, spearmanr

from carmil.evidence.rank_correlation import bag_places, bag_ranks, pearson, spearman, top_overlap
from carmil.models.pooling import Offsets

BAGS = dict(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5), levels=st.integers(1, 9), seed=st.integers(0, 10_000)
)


def two_maps(sizes, levels, seed):
    """Return two maps with many ties, and the offsets of their bags."""
    rng = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    x, y = rng.integers(0, levels, (2, starts[-1], 2)) / 7
    return x, y, starts, list(itertools.pairwise(starts))


@settings(max_examples=100, deadline=None)
@given(**BAGS)
def test_ranks_and_correlations_equal_scipy_with_ties(sizes, levels, seed):
    x, y, starts, bags = two_maps(sizes, levels, seed)
    offsets = Offsets(torch.from_numpy(starts))
    tx, ty = torch.from_numpy(x), torch.from_numpy(y)
    ranks, r, rho = bag_ranks(tx, offsets), pearson(tx, ty, offsets), spearman(tx, ty, offsets)
    for bag, (i, j) in enumerate(bags):
        for c in range(2):
            a, b = x[i:j, c], y[i:j, c]
            assert ranks[i:j, c].tolist() == rankdata(a).tolist()
            if len(set(a)) == 1 or len(set(b)) == 1:
                assert r[bag, c].isnan() and rho[bag, c].isnan()
            else:
                assert float(r[bag, c]) == pytest.approx(pearsonr(a, b)[0])
                assert float(rho[bag, c]) == pytest.approx(spearmanr(a, b)[0])


@settings(max_examples=50, deadline=None)
@given(**BAGS)
def test_top_overlap_counts_common_instances_with_ties_in_input_order(sizes, levels, seed):
    x, y, starts, bags = two_maps(sizes, levels, seed)
    offsets = Offsets(torch.from_numpy(starts))
    shared = top_overlap(torch.from_numpy(x), torch.from_numpy(y), offsets, count=3)
    for bag, (i, j) in enumerate(bags):
        best = [set(np.argsort(-values[i:j, 0], kind="stable")[:3]) for values in (x, y)]
        assert float(shared[bag, 0]) == pytest.approx(len(best[0] & best[1]) / min(3, j - i))


def test_bag_places_rank_instances_within_each_bag():
    x, offsets = torch.randn(3, 9, 2), Offsets(torch.tensor([0, 4, 9]))
    places = bag_places(x, offsets)
    for model, (i, j) in itertools.product(range(3), [(0, 4), (4, 9)]):
        assert torch.equal(places[model, i:j], (-x[model, i:j]).argsort(0).argsort(0))
        assert torch.equal(spearman(x, x.flip(0), offsets)[model], spearman(x[model], x[2 - model], offsets))


def test_correlation_with_inexactly_averaged_constant_is_nan():
    x = torch.full((7, 1), 0.1, dtype=torch.float64)
    assert pearson(x, torch.randn(7, 1), Offsets(torch.tensor([0, 7]))).isnan().all()
