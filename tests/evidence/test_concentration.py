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
    """Return half the mean absolute difference between two draws, divided by the mean."""
    return np.abs(a[:, None] - a[None]).mean() / (2 * a.mean())


def test_concentration_of_every_bag_and_head_equals_definition():
    a = bag_softmax(3 * torch.randn(2, 17, 3, dtype=torch.float64), Offsets(STARTS))
    a[:, 0] = a[:, 1]  # a tie
    result = concentration_of(4 * a, STARTS)
    for model, bag, head in itertools.product(range(2), range(3), range(3)):
        weights = a[model, STARTS[bag] : STARTS[bag + 1], head].numpy()
        weights = weights / weights.sum()
        where = (model, bag, head)
        assert float(result.entropy[where]) == pytest.approx(entropy(weights), abs=1e-12)
        assert float(result.effective[where]) == pytest.approx(np.exp(entropy(weights)))
        assert float(result.effective_squares[where]) == pytest.approx(1 / (weights**2).sum())
        assert float(result.gini[where]) == pytest.approx(gini(weights), abs=1e-12)
        if bag != 1:
            assert float(result.normalised_entropy[where]) == pytest.approx(entropy(weights) / np.log(len(weights)))


def test_concentration_of_uniform_single_and_empty_maps():
    weights = torch.tensor([[1.0], [1.0], [1.0], [1.0], [0.0], [2.0], [0.0], [0.0], [3.0], [0.0], [0.0]])
    result = concentration_of(weights, torch.tensor([0, 4, 8, 9, 11]))
    assert result.normalised_entropy[:, 0].tolist() == pytest.approx([1, 0, np.nan, np.nan], nan_ok=True)
    assert result.effective[:, 0].tolist() == pytest.approx([4, 1, 1, np.nan], nan_ok=True)
    assert result.effective_squares[:, 0].tolist() == pytest.approx([4, 1, 1, np.nan], nan_ok=True)
    assert result.gini[:, 0].tolist() == pytest.approx([0, 0.75, 0, np.nan], nan_ok=True)
    with pytest.raises(CarmilError, match="a negative weight"):
        concentration_of(-weights, torch.tensor([0, 11]))


def test_stability_compares_every_pair_of_seeds():
    maps = torch.randn(4, 17, 2, dtype=torch.float64)
    result = stability(maps, STARTS, count=3)
    assert result.pairs.tolist() == [list(pair) for pair in itertools.combinations(range(4), 2)]
    for p, (i, j) in enumerate(result.pairs.tolist()):
        for bag in (0, 2):
            x, y = (maps[m, STARTS[bag] : STARTS[bag + 1], 1].numpy() for m in (i, j))
            assert float(result.spearman[p, bag, 1]) == pytest.approx(spearmanr(x, y)[0])
            assert float(result.pearson[p, bag, 1]) == pytest.approx(np.corrcoef(x, y)[0, 1])
            best = [set(np.argsort(-values)[:3]) for values in (x, y)]
            assert float(result.overlap[p, bag, 1]) == pytest.approx(len(best[0] & best[1]) / 3)
        assert result.spearman[p, 1].isnan().all()  # a single instance has no ranking
        assert (result.overlap[p, 1] == 1).all()


def test_stability_ignores_linear_rescaling_and_requires_two_seeds():
    maps = torch.randn(1, 17, 1)
    result = stability(torch.cat([maps, 2 * maps + 1, -maps]), STARTS, count=2)
    assert result.spearman[:, [0, 2], 0].flatten().tolist() == pytest.approx([1, 1, -1, -1, -1, -1])
    assert result.overlap[:, 2, 0].tolist() == [1, 0, 0]
    with pytest.raises(CarmilError, match="expected at least two"):
        stability(maps, STARTS)
