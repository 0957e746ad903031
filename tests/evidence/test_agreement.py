import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score

from carmil.datasets.digits import TASKS, sample_digits
from carmil.evidence import average_precision, bag_performance, evidence_agreement
from carmil.models.pooling import Offsets


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    levels=st.integers(1, 6),
    seed=st.integers(0, 10_000),
)
def test_average_precision_equals_scikit_learn_with_ties(sizes, levels, seed):
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    scores, targets = rng.integers(0, levels, (n, 2)) / levels, rng.random((n, 2)) < 0.4
    starts = np.concatenate([[0], np.cumsum(sizes)])
    ours = average_precision(torch.from_numpy(scores), torch.from_numpy(targets), Offsets(torch.from_numpy(starts)))
    for bag, (i, j) in enumerate(itertools.pairwise(starts)):
        for c in range(2):
            if targets[i:j, c].any():
                assert ours[bag, c] == pytest.approx(average_precision_score(targets[i:j, c], scores[i:j, c]))
            else:
                assert ours[bag, c].isnan()


def test_average_precision_treats_equal_infinite_scores_as_ties():
    scores, targets = torch.tensor([[float("inf")], [float("inf")]]), torch.tensor([[True], [False]])
    assert average_precision(scores, targets, Offsets(torch.tensor([0, 2]))) == 0.5


def xmil_reference(supporting, refuting, truth, size):
    """Compute the agreement with the loop over bags and classes of the xMIL benchmark."""
    plus, both = [], []
    for start in range(0, len(truth), size):
        rows = slice(start, start + size)
        for c in range(truth.shape[1]):
            results = []
            for sign, scores in ((1, supporting), (-1, refuting)):
                target = truth[rows, c] == sign
                if 0 < target.sum() < size:
                    results.append(average_precision_score(target, scores[rows, c]))
                    if sign == 1:
                        plus.append(results[-1])
            if results:
                both.append(np.mean(results))
    return np.mean(plus), np.mean(both), len(plus), len(both)


@pytest.mark.parametrize("task", TASKS)
def test_agreement_equals_xmil_reference_implementation(task):
    truth = TASKS[task].evidence(sample_digits(40, np.random.default_rng(3))).reshape(-1, TASKS[task].classes)
    rng = np.random.default_rng(0)
    s, t = rng.normal(size=(2, *truth.shape))
    ours = evidence_agreement(torch.from_numpy(s), torch.from_numpy(t), torch.from_numpy(truth), torch.arange(41) * 30)
    expected = xmil_reference(s, t, truth, 30)
    assert (ours.positive, ours.both) == (pytest.approx(expected[0]), pytest.approx(expected[1]))
    assert (ours.positive_pairs, ours.both_pairs) == expected[2:]


def test_ideal_scores_reach_published_reference_values():
    digits = sample_digits(4000, np.random.default_rng(0))
    truth = torch.from_numpy(TASKS["four_bags"].evidence(digits).reshape(-1, 4))
    attended = torch.from_numpy(np.isin(digits, (8, 9)).reshape(-1, 1).astype(float))
    attention = (attended + 1e-3 * torch.rand_like(attended)).expand(-1, 4)  # the order among 8s and 9s is random
    starts = torch.arange(4001) * 30
    mirror = evidence_agreement(attention, -attention, truth, starts)
    control = evidence_agreement(attention, attention, truth, starts)
    oracle = evidence_agreement(truth.double(), -truth.double(), truth, starts)
    reached = [100 * float(x) for x in (mirror.positive, mirror.both, control.both)]
    assert reached == pytest.approx([89.2, 54.4, 93.7], abs=0.7)
    assert (oracle.positive, oracle.both) == (1, 1)


def test_agreement_of_a_population_equals_agreement_of_each_model():
    truth = torch.from_numpy(TASKS["four_bags"].evidence(sample_digits(20, np.random.default_rng(1))).reshape(-1, 4))
    s, starts = torch.randn(3, 600, 4), torch.arange(21) * 30
    together = evidence_agreement(s, -s, truth, starts)
    alone = [evidence_agreement(one, -one, truth, starts) for one in s]
    assert together.positive.tolist() == pytest.approx([float(a.positive) for a in alone])
    assert together.both.tolist() == pytest.approx([float(a.both) for a in alone])


def test_bag_metrics_equal_known_values_and_auc_of_one_class_is_nan():
    probabilities = np.array([[0.8, 0.2], [0.4, 0.6], [0.3, 0.7], [0.6, 0.4]])
    measured = bag_performance(probabilities, [0, 0, 1, 1])
    assert measured == {
        "auc": pytest.approx(0.75),
        "f1_macro": pytest.approx(0.5),
        "balanced_accuracy": pytest.approx(0.5),
    }
    three = np.eye(3)[[0, 1, 2, 2]] * 0.7 + 0.1
    assert bag_performance(three, [0, 1, 2, 2])["auc"] == 1
    assert np.isnan(bag_performance(probabilities, [0, 0, 0, 0])["auc"])
