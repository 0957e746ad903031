import itertools

import numpy as np
import pytest
import torch
from scipy.stats import entropy, spearmanr

from carmil.errors import CarmilError
from carmil.evidence.concentration import concentration_of, stability
from carmil.models.pooling import Offsets, bag_softmax

STARTS = torch.tensor([0, 5, 6, 17])


def gini(a):
    """Half the mean absolute difference of two draws, over the mean."""
    return np.abs(a[:, None] - a[None]).mean() / (2 * a.mean())


def test_of_every_bag_and_head_as_by_definition():
    a = bag_softmax(3 * torch.randn(2, 17, 3, dtype=torch.float64), Offsets(STARTS))
    a[:, 0] = a[:, 1]  # a tie
    found = concentration_of(4 * a, STARTS)
    for model, bag, head in itertools.product(range(2), range(3), range(3)):
        own = a[model, STARTS[bag] : STARTS[bag + 1], head].numpy()
        own = own / own.sum()
        where = (model, bag, head)
        assert float(found.entropy[where]) == pytest.approx(entropy(own), abs=1e-12)
        assert float(found.effective[where]) == pytest.approx(np.exp(entropy(own)))
        assert float(found.effective_squares[where]) == pytest.approx(1 / (own**2).sum())
        assert float(found.gini[where]) == pytest.approx(gini(own), abs=1e-12)
        if bag != 1:
            assert float(found.normalised_entropy[where]) == pytest.approx(entropy(own) / np.log(len(own)))


def test_even_single_and_empty_maps():
    weights = torch.tensor([[1.0], [1.0], [1.0], [1.0], [0.0], [2.0], [0.0], [0.0], [3.0], [0.0], [0.0]])
    found = concentration_of(weights, torch.tensor([0, 4, 8, 9, 11]))
    assert found.normalised_entropy[:, 0].tolist() == pytest.approx([1, 0, np.nan, np.nan], nan_ok=True)
    assert found.effective[:, 0].tolist() == pytest.approx([4, 1, 1, np.nan], nan_ok=True)
    assert found.effective_squares[:, 0].tolist() == pytest.approx([4, 1, 1, np.nan], nan_ok=True)
    assert found.gini[:, 0].tolist() == pytest.approx([0, 0.75, 0, np.nan], nan_ok=True)
    with pytest.raises(CarmilError, match="a negative weight"):
        concentration_of(-weights, torch.tensor([0, 11]))


def test_maps_of_seeds_are_compared_two_by_two():
    maps = torch.randn(4, 17, 2, dtype=torch.float64)
    found = stability(maps, STARTS, count=3)
    assert found.pairs.tolist() == [list(pair) for pair in itertools.combinations(range(4), 2)]
    for p, (i, j) in enumerate(found.pairs.tolist()):
        for bag in (0, 2):
            x, y = (maps[m, STARTS[bag] : STARTS[bag + 1], 1].numpy() for m in (i, j))
            assert float(found.spearman[p, bag, 1]) == pytest.approx(spearmanr(x, y)[0])
            assert float(found.pearson[p, bag, 1]) == pytest.approx(np.corrcoef(x, y)[0, 1])
            best = [set(np.argsort(-values)[:3]) for values in (x, y)]
            assert float(found.overlap[p, bag, 1]) == pytest.approx(len(best[0] & best[1]) / 3)
        assert found.spearman[p, 1].isnan().all()  # one instance has no order
        assert (found.overlap[p, 1] == 1).all()


def test_a_seed_that_says_the_same_is_stable_and_one_seed_is_none():
    maps = torch.randn(1, 17, 1)
    found = stability(torch.cat([maps, 2 * maps + 1, -maps]), STARTS, count=2)
    assert found.spearman[:, [0, 2], 0].flatten().tolist() == pytest.approx([1, 1, -1, -1, -1, -1])
    assert found.overlap[:, 2, 0].tolist() == [1, 0, 0]
    with pytest.raises(CarmilError, match="expected at least two"):
        stability(maps, STARTS)
