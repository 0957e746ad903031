import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score, ndcg_score, roc_auc_score

from carmil.errors import CarmilError
from carmil.evidence.localisation import FALSE_ALARMS, auroc, dice, dice_threshold, froc_interval, ndcg

BAGS = dict(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6), levels=st.integers(1, 9), seed=st.integers(0, 10_000)
)


def bags_of(sizes, levels, seed):
    rng = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    scores, targets = rng.integers(0, levels, (starts[-1], 2)) / 7, rng.random((starts[-1], 2)) < 0.4
    return scores, targets, starts, list(itertools.pairwise(starts))


@settings(max_examples=50, deadline=None)
@given(**BAGS)
def test_auroc_ndcg_and_dice_equal_scikit_learn_with_ties(sizes, levels, seed):
    scores, targets, starts, bags = bags_of(sizes, levels, seed)
    given = torch.from_numpy(scores), torch.from_numpy(targets), torch.from_numpy(starts)
    area, gain, overlap = auroc(*given), ndcg(*given), dice(*given, threshold=0.5)
    for (bag, (i, j)), c in itertools.product(enumerate(bags), range(2)):
        s, t = scores[i:j, c], targets[i:j, c]
        if 0 < t.sum() < len(t):
            assert float(area[bag, c]) == pytest.approx(roc_auc_score(t, s))
        else:
            assert area[bag, c].isnan()
        if t.any():
            assert float(overlap[bag, c]) == pytest.approx(f1_score(t, s >= 0.5, zero_division=0))
            if len(t) > 1:
                assert float(gain[bag, c]) == pytest.approx(ndcg_score(t[None].astype(float), s[None]))
            else:
                assert float(gain[bag, c]) == pytest.approx(1)
        else:
            assert overlap[bag, c].isnan() and gain[bag, c].isnan()


def test_ndcg_with_graded_gains_equals_scikit_learn_and_rejects_negative_gains():
    evidence, scores = torch.randint(-1, 2, (30, 1)), torch.randn(30, 1, dtype=torch.float64)
    ours = ndcg(scores, evidence + 1, torch.tensor([0, 30]))
    assert float(ours) == pytest.approx(ndcg_score((evidence + 1).numpy().T, scores.numpy().T))
    with pytest.raises(CarmilError, match="a gain is negative"):
        ndcg(scores, torch.full_like(evidence, -1), torch.tensor([0, 30]))


@settings(max_examples=100, deadline=None)
@given(**BAGS)
def test_dice_threshold_maximises_mean_dice(sizes, levels, seed):
    scores, targets, starts, _ = bags_of(sizes, levels, seed)
    s, t, starts = torch.from_numpy(scores[:, 0]), torch.from_numpy(targets[:, 0]), torch.from_numpy(starts)
    if not t.any():
        with pytest.raises(CarmilError, match="no bag has a target"):
            dice_threshold(s, t, starts)
        return
    best, *others = (
        float(dice(s[:, None], t[:, None], starts, threshold=float(value)).nanmean())
        for value in (dice_threshold(s, t, starts), *s.unique())
    )
    assert best == pytest.approx(max(others))


def test_metrics_of_a_population_equal_metrics_of_each_model():
    scores, targets, starts = torch.randn(3, 20, 2), torch.rand(20, 2) < 0.4, torch.tensor([0, 8, 20])
    for measure in (auroc, ndcg, lambda *given: dice(*given, threshold=0.1)):
        together = measure(scores, targets, starts)
        for model in range(3):
            assert torch.allclose(together[model], measure(scores[model], targets, starts), equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(**BAGS)
def test_froc_is_the_mean_of_the_highest_sensitivities_for_each_number_of_false_alarms(sizes, levels, seed):
    scores, targets, starts, bags = bags_of(sizes, levels, seed)
    s, t = scores[:, 0], targets[:, 0]
    result = froc_interval(torch.from_numpy(s), torch.from_numpy(t), torch.from_numpy(starts), repeats=30)
    if not t.any():
        assert np.isnan(result.value)
        return
    marks = [s >= value for value in [*np.unique(s), np.inf]]
    highest = [
        max((m & t).sum() / t.sum() for m in marks if (m & ~t).sum() <= allowed * len(bags)) for allowed in FALSE_ALARMS
    ]
    assert result.value == pytest.approx(np.mean(highest))
    assert len(sizes) == 1 or 0 <= result.low <= result.high <= 1


def test_froc_interval_of_identical_bags_is_a_point():
    scores, targets = torch.tensor([3.0, 1.0, 0.0] * 6), torch.tensor([True, False, False] * 6)
    result = froc_interval(scores, targets, torch.arange(0, 19, 3))
    assert (result.low, result.value, result.high) == (1, 1, 1)


def test_froc_interval_resamples_patients_with_all_their_slides():
    """Two patients with four slides each: the map finds every target of the first and none of the second."""
    scores = torch.tensor([3.0, 1.0, 0.0] * 4 + [0.0, 1.0, 2.0] * 4)
    targets, starts = torch.tensor([True, False, False] * 8), torch.arange(0, 25, 3)
    slides = froc_interval(scores, targets, starts)
    patients = froc_interval(scores, targets, starts, groups=["a"] * 4 + ["b"] * 4)
    assert patients.value == slides.value
    assert patients.high - patients.low > slides.high - slides.low
    one = froc_interval(scores, targets, starts, groups=["a"] * 8)
    assert one.value == slides.value and np.isnan([one.low, one.high]).all()
