import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import roc_auc_score

from carmil.errors import CarmilError
from carmil.evidence.performance import bag_auc
from carmil.evidence.resampled import WEIGHED
from carmil.evidence.statistics import bootstrap, bootstrap_difference, delong, delong_interval, holm, paired_t


def two_models(b, seed, levels=None):
    """Labels, and scores of two models that share what they see; few levels make ties."""
    rng = np.random.default_rng(seed)
    labels = np.arange(b) % 2
    seen = labels + rng.normal(size=b)
    first, second = seen + 0.5 * rng.normal(size=b), seen + 1.0 * rng.normal(size=b)
    if levels:
        first, second = (np.digitize(s, np.linspace(-1, 2, levels)).astype(float) for s in (first, second))
    return labels, first, second


def pairwise_delong(labels, *scores):
    """AUCs and their covariance by DeLong's structural components, pair by pair."""
    aucs, of_positives, of_negatives = [], [], []
    for s in scores:
        positives, negatives = s[labels == 1], s[labels == 0]
        won = np.array([[(x > y) + 0.5 * (x == y) for y in negatives] for x in positives])
        aucs.append(won.mean())
        of_positives.append(won.mean(1))
        of_negatives.append(won.mean(0))
    m, n = len(of_positives[0]), len(of_negatives[0])
    return np.array(aucs), np.atleast_2d(np.cov(of_positives)) / m + np.atleast_2d(np.cov(of_negatives)) / n


@pytest.mark.parametrize("levels", [None, 4])
@pytest.mark.parametrize("b", [12, 61])
def test_delong_by_midranks_is_delong_by_pairs_ties_included(b, levels):
    labels, first, second = two_models(b, seed=1, levels=levels)
    (a1, a2), covariance = pairwise_delong(labels, first, second)
    test = delong(labels, first, second)
    z = (a1 - a2) / math.sqrt(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    assert (test.difference, test.n) == (pytest.approx(a1 - a2), b)
    assert test.statistic == pytest.approx(z)
    assert test.p == pytest.approx(2 * stats.norm.sf(abs(z)))
    interval = delong_interval(labels, first, 0.9)
    reach = stats.norm.ppf(0.95) * math.sqrt(covariance[0, 0])
    assert interval.value == pytest.approx(roc_auc_score(labels, first))
    assert (interval.low, interval.high) == (pytest.approx(max(0, a1 - reach)), pytest.approx(min(1, a1 + reach)))


def test_delong_is_about_as_sure_as_exchanging_the_models():
    labels, first, second = two_models(160, seed=5)
    # Ranks, so that the two models' scores may be exchanged case by case.
    first, second = stats.rankdata(first), stats.rankdata(second)
    rng = np.random.default_rng(0)
    swaps = rng.random((1500, len(labels))) < 0.5

    def auc(s):
        return (stats.rankdata(s, axis=-1)[..., labels == 1].sum(-1) - 80 * 81 / 2) / 80**2

    exchanged = auc(np.where(swaps, first, second)) - auc(np.where(swaps, second, first))
    test = delong(labels, first, second)
    assert test.difference == pytest.approx(auc(first) - auc(second))
    assert test.p == pytest.approx((np.abs(exchanged) >= abs(test.difference)).mean(), abs=0.05)


def test_delong_and_the_bootstrap_give_about_the_same_interval():
    labels, first, second = two_models(400, seed=1)
    probabilities = [np.stack([1 - p, p], axis=1) for p in (1 / (1 + np.exp(-s)) for s in (first, second))]
    one, resampled = delong_interval(labels, first), bootstrap(bag_auc, probabilities[0], labels)
    assert (resampled.low, resampled.high) == (pytest.approx(one.low, abs=0.01), pytest.approx(one.high, abs=0.01))
    test, difference = delong(labels, first, second), bootstrap_difference(bag_auc, labels, *probabilities)
    assert difference.value == pytest.approx(test.difference)
    assert difference.p == pytest.approx(test.p, abs=0.03)


def test_delong_knows_scores_that_rank_alike_and_scores_that_never_vary():
    labels, first, _ = two_models(30, seed=0)
    alike = delong(labels, first, np.exp(first))
    assert (alike.statistic, alike.p, alike.difference) == (0, 1, 0)
    perfect = delong([0, 0, 1, 1], [1, 2, 3, 4], [4, 3, 2, 1])
    assert (perfect.statistic, perfect.p, perfect.difference) == (math.inf, 0, 1)
    assert delong([0, 0, 1, 1], [0.5] * 4, [0.5] * 4).p == 1
    whole = delong_interval([0, 0, 1, 1], [1, 2, 3, 4])
    assert (whole.low, whole.high, whole.value) == (1, 1, 1)


@settings(max_examples=60, deadline=None)
@given(b=st.integers(6, 40), levels=st.integers(2, 6), seed=st.integers(0, 1000))
def test_delong_does_not_see_the_order_of_the_cases_nor_which_model_is_first(b, levels, seed):
    labels, first, second = two_models(b, seed, levels)
    order = np.random.default_rng(seed).permutation(b)
    test, moved = delong(labels, first, second), delong(labels[order], first[order], second[order])
    turned = delong(labels, second, first)
    assert (moved.p, moved.difference) == (pytest.approx(test.p), pytest.approx(test.difference, abs=1e-12))
    assert (turned.p, turned.difference) == (pytest.approx(test.p), pytest.approx(-test.difference, abs=1e-12))


def test_the_paired_t_test_is_scipys():
    rng = np.random.default_rng(0)
    for n in (2, 5, 30):
        first, second = rng.random((2, n))
        ours, theirs = paired_t(first, second), stats.ttest_rel(first, second)
        assert (ours.statistic, ours.p) == (pytest.approx(theirs.statistic), pytest.approx(theirs.pvalue))
        assert (ours.difference, ours.n) == (pytest.approx((first - second).mean()), n)


def test_a_paired_t_test_by_hand():
    test = paired_t([3, 4, 5, 8], [2, 2, 2, 4])  # differences 1 2 3 4: mean 2.5, sd sqrt(5/3)
    assert test.statistic == pytest.approx(2.5 / math.sqrt(5 / 12))
    assert test.p == pytest.approx(0.030466, abs=1e-6)


def test_differences_that_never_vary_are_no_difference_or_a_sure_one():
    same = paired_t([0.9, 0.8, 0.7], [0.9, 0.8, 0.7])
    assert (same.statistic, same.p, same.difference) == (0, 1, 0)
    assert paired_t([0.1 + 0.2, 0.5], [0.3, 0.5]).p == 1  # apart by rounding only
    lower = paired_t([0.8, 0.7, 0.6], [0.9, 0.8, 0.7])
    assert (lower.statistic, lower.p, lower.difference) == (-math.inf, 0, pytest.approx(-0.1))


def test_holm_is_the_textbooks():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9, 0.6]) == pytest.approx([1, 1, 1])
    assert holm([0.01, math.nan, 0.04]) == pytest.approx([0.02, math.nan, 0.04], nan_ok=True)
    assert holm([]).shape == (0,)
    assert np.isnan(holm([math.nan])).all()


@given(st.lists(st.floats(0, 1) | st.just(math.nan), max_size=12))
def test_holm_never_lowers_a_p_nor_changes_their_order(p_values):
    p, adjusted = np.array(p_values, dtype=float), holm(p_values)
    there = ~np.isnan(p)
    assert (np.isnan(adjusted) == ~there).all()
    p, adjusted = p[there], adjusted[there]
    assert ((adjusted >= p) & (adjusted <= 1)).all()
    assert (np.diff(adjusted[p.argsort()]) >= 0).all()
    assert (adjusted <= np.minimum(1, len(p) * p)).all()  # never stricter than Bonferroni


@pytest.mark.parametrize("measure", WEIGHED)
@pytest.mark.parametrize("classes", [2, 3])
def test_a_measure_resampled_at_once_is_resampled_one_by_one(measure, classes):
    def slow(probabilities, labels):
        return measure(probabilities, labels)

    rng = np.random.default_rng(classes)
    labels = np.repeat(np.arange(classes), [12, 2, 9][:classes])
    probabilities = (rng.integers(1, 6, (len(labels), classes)) + 2 * np.eye(classes)[labels]).astype(float)
    probabilities /= probabilities.sum(1, keepdims=True)
    patients = np.arange(len(labels)) // 2
    for groups in (None, patients):
        at_once = bootstrap(measure, probabilities, labels, groups=groups, repeats=50)
        one_by_one = bootstrap(slow, probabilities, labels, groups=groups, repeats=50)
        assert at_once.left_out == one_by_one.left_out
        assert (at_once.left_out > 0) == (measure is bag_auc)  # the others leave out a class that is not drawn
        assert (at_once.low, at_once.high) == pytest.approx((one_by_one.low, one_by_one.high))
    other = probabilities[rng.permutation(len(labels))]
    at_once = bootstrap_difference(measure, labels, probabilities, other, repeats=50)
    one_by_one = bootstrap_difference(slow, labels, probabilities, other, repeats=50)
    assert (at_once.low, at_once.high, at_once.p) == pytest.approx((one_by_one.low, one_by_one.high, one_by_one.p))


def test_many_rows_are_resampled_in_pieces(monkeypatch):
    monkeypatch.setattr("carmil.evidence.statistics.CHUNK", 64)
    values = np.random.default_rng(0).normal(size=40)
    interval = bootstrap(np.mean, values, repeats=500)
    error = values.std() / math.sqrt(40)
    assert (interval.high - interval.low) == pytest.approx(2 * 1.96 * error, rel=0.15)


def test_the_interval_has_the_true_value_in_it_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    truth = stats.norm.cdf(1 / math.sqrt(2))
    labels = np.repeat([0, 1], 60)
    within = []
    for _ in range(120):
        p = 1 / (1 + np.exp(-labels - rng.normal(size=120)))
        interval = bootstrap(bag_auc, np.stack([1 - p, p], axis=1), labels, repeats=300, level=0.9)
        within.append(interval.low <= truth <= interval.high)
    assert np.mean(within) == pytest.approx(0.9, abs=0.07)


def test_the_bootstrap_p_is_small_by_chance_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    labels = np.repeat([0, 1], 60)
    small = []
    for _ in range(120):
        p = 1 / (1 + np.exp(-labels - rng.normal(size=(2, 120))))
        both = np.stack([1 - p, p], axis=2)
        small.append(bootstrap_difference(bag_auc, labels, *both, repeats=300).p < 0.1)
    assert np.mean(small) == pytest.approx(0.1, abs=0.07)


def test_slides_of_a_patient_are_resampled_together():
    patients = np.random.default_rng(0).normal(size=25)
    slides = np.repeat(patients, 4)
    names = np.repeat([f"patient {i}" for i in range(25)], 4)
    by_patient = bootstrap(np.mean, slides, groups=names, repeats=300)
    apart = np.arange(100).reshape(25, 4).T.ravel()
    scattered = bootstrap(np.mean, slides[apart], groups=names[apart], repeats=300)
    alone, as_if_independent = bootstrap(np.mean, patients, repeats=300), bootstrap(np.mean, slides, repeats=300)
    assert (by_patient.low, by_patient.high) == pytest.approx((alone.low, alone.high))
    assert (scattered.low, scattered.high) == pytest.approx((alone.low, alone.high))
    assert as_if_independent.high - as_if_independent.low < 0.7 * (alone.high - alone.low)


def test_resamples_without_a_value_are_left_out_and_counted():
    probabilities, labels = np.array([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]]), np.array([0, 1, 1])
    interval = bootstrap(bag_auc, probabilities, labels, repeats=4000)
    # Of 27 resamples 1 has only the negative, 8 only positives.
    assert interval.left_out / 4000 == pytest.approx(9 / 27, abs=0.03)
    assert (interval.low, interval.high, interval.value) == (1, 1, 1)
    none = bootstrap_difference(bag_auc, np.ones(3, int), probabilities, probabilities, repeats=50)
    assert none.left_out == 50
    assert np.isnan([none.low, none.high, none.value, none.p]).all()


def test_the_same_seed_gives_the_same_interval():
    values = np.arange(10.0)
    assert bootstrap(np.mean, values, seed=3) == bootstrap(np.mean, values, seed=3)
    assert bootstrap(np.mean, values, seed=3) != bootstrap(np.mean, values, seed=4)


def test_a_model_does_not_differ_from_itself_and_differs_from_its_mirror():
    labels, first, _ = two_models(60, seed=0)
    p = stats.rankdata(first) / 61
    both = np.stack([1 - p, p], axis=1)
    assert bootstrap_difference(bag_auc, labels, both, both).p == 1
    mirror = bootstrap_difference(bag_auc, labels, both, 1 - both, repeats=999)
    assert mirror.p == pytest.approx(2 / 1000)
    assert mirror.low > 0


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda: paired_t([1], [2]), "of 1 pair: expected at least two"),
        (lambda: paired_t([1, 2], [2]), "first has 2 entries, second 1"),
        (lambda: paired_t([1, math.nan], [2, 3]), "first is nan at case 1"),
        (lambda: paired_t(["a", "b"], [2, 3]), "not a number"),
        (lambda: delong([0, 1, 2, 1], [1, 2, 3, 4], [1, 2, 3, 4]), "label 2 of case 2: expected 0 or 1"),
        (lambda: delong(["no", "yes"], [1, 2], [1, 2]), "label 'no' of case 0"),
        (lambda: delong([0, 1, 1], [1, 2, 3], [1, 2]), "labels has 3 entries, second_scores 2"),
        (lambda: delong([0, 1, 1], [1, 2, 3], [1, 2, math.inf]), "second_scores is inf at case 2"),
        (lambda: delong([0, 1, 1], [1, 2, 3], [1, 2, 3]), "class 1 has 2 of the cases, class 0 1"),
        (lambda: delong_interval([], []), "no cases"),
        (lambda: delong_interval([0, 0, 1, 1], np.ones((4, 2))), r"scores has shape \(4, 2\)"),
        (lambda: delong_interval([0, 0, 1, 1], [1, 2, 3, 4], 95), "a level of 95"),
        (lambda: holm([0.1, 1.2]), "p-value 1.2"),
        (lambda: bootstrap(np.mean, [1.0, math.nan]), "array 1 has a value that is not finite"),
        (lambda: bootstrap(np.mean, []), "array 1 has no rows"),
        (lambda: bootstrap(np.mean), "nothing to resample"),
        (lambda: bootstrap(np.mean, [1.0, 2.0], groups=["a"]), "rows has 2 entries, groups 1"),
        (lambda: bootstrap(np.mean, [1.0, 2.0], groups=["a", None]), "row 1 has no group"),
        (lambda: bootstrap(np.mean, [1.0, 2.0], repeats=0), "0 resamples"),
        (lambda: bootstrap(np.mean, [1.0, 2.0], level=1.0), "a level of 1"),
        (lambda: bootstrap_difference(bag_auc, [0, 1], np.eye(2), np.eye(3)), "labels has 2 entries, second 3"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(broken, says):
    with pytest.raises(CarmilError, match=says) as error:
        broken()
    assert "\n" not in str(error.value)


def test_one_row_or_group_has_no_interval():
    for found in (
        bootstrap(np.mean, [1.5]),
        bootstrap(np.mean, [1.0, 2.0], groups=["a", "a"]),
        bootstrap_difference(lambda s, y: roc_auc_score(y, s), [1, 0], [0.9, 0.1], [0.4, 0.4], groups=["a", "a"]),
    ):
        assert not np.isnan(found.value) and np.isnan([found.low, found.high]).all()
