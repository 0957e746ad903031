"""Confidence intervals equal published ones, never collapse, and cover the true value as often as stated."""

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score

from carmil.bags.splits import TEST, make_splits
from carmil.errors import CarmilError
from carmil.statistics.intervals import (
    FoldAnswers,
    clopper_pearson,
    delong,
    difference_interval,
    difference_p,
    estimate,
    figure_interval,
    wilson,
)

FIGURES = ("auc", "f1_macro", "balanced_accuracy", "accuracy", "sensitivity", "specificity")
LABELS = np.arange(16) % 2


def two_columns(p):
    return np.stack([1 - np.asarray(p), p], axis=1)


def two_models(b, seed, levels=None):
    """Return labels and the correlated scores of two models; few levels produce ties."""
    rng = np.random.default_rng(seed)
    labels = np.arange(b) % 2
    signal = labels + rng.normal(size=b)
    first, second = signal + 0.5 * rng.normal(size=b), signal + 1.0 * rng.normal(size=b)
    if levels:
        first, second = (np.digitize(s, np.linspace(-1, 2, levels)).astype(float) for s in (first, second))
    return labels, first, second


def area(labels, scores, **others):
    return estimate("auc", FoldAnswers.of(labels, two_columns(scores), **others))


def test_wilson_and_clopper_pearson_intervals_equal_published_values():
    # Newcombe 1998, table I, methods 3 and 5
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0 / 20, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert clopper_pearson(81 / 263, 263) == pytest.approx((0.2527, 0.3676), abs=1e-4)
    assert clopper_pearson(0 / 20, 20) == pytest.approx((0.0, 0.1684), abs=1e-4)


@pytest.mark.finding(n=4)
def test_proportions_have_clopper_pearson_intervals():
    right = np.arange(40) < 31
    result = figure_interval("accuracy", FoldAnswers.of(np.ones(40, int), two_columns(right.astype(float))))
    assert (result.value, result.low, result.high) == pytest.approx((31 / 40, *clopper_pearson(31 / 40, 40)))
    truth, labels = 0.95, np.array([1] * 3 + [0] * 13)
    coverage_reached = 0.0
    for hits in range(4):
        answers = np.where(np.arange(16) < hits, 0.9, 0.1)
        one = figure_interval("sensitivity", FoldAnswers.of(labels, two_columns(answers)))
        coverage_reached += (
            math.comb(3, hits) * truth**hits * (1 - truth) ** (3 - hits) * (one.low <= truth <= one.high)
        )
    assert coverage_reached == pytest.approx(0.99275)  # the Wilson interval covers 0.857


def test_auc_interval_equals_newcombe_unless_delong_variance_is_larger():
    # n = 16 of each class, no overlap: 1 - t = z sqrt(V(t)), V by Newcombe 2006
    result = figure_interval("auc", FoldAnswers.of(np.repeat([0, 1], 16), two_columns(np.repeat([0.2, 0.8], 16))))
    t, middle = result.low, 15
    variance = t * (1 - t) / 256 * (1 + middle * (1 - t) / (2 - t) + middle * t / (1 + t))
    assert 1 - t == pytest.approx(1.959964 * math.sqrt(variance), rel=1e-4)
    assert (result.value, result.high) == (1, 1)
    assert 0.83 < result.low < 0.9


@pytest.mark.finding(n=4)
def test_intervals_do_not_collapse_if_all_predictions_are_right_or_all_wrong():
    given = FoldAnswers.of(LABELS, two_columns(0.2 + 0.6 * LABELS))
    for name in FIGURES:
        result = figure_interval(name, given)
        assert (result.value, result.high) == (1, 1)
        assert 0.6 < result.low < 0.85, name
    wrong = FoldAnswers.of(LABELS, two_columns(0.8 - 0.6 * LABELS))
    for name in FIGURES:
        result = figure_interval(name, wrong)
        assert (result.value, result.low) == (0, 0)
        assert 0.15 < result.high < 0.4, name


@pytest.mark.finding(n=4)
def test_interval_of_16_patients_equals_the_documented_example():
    """Compare with docs/study.md: one test set, and the mean over the five folds of `carmil train`."""
    names = [str(i) for i in range(16)]
    folds = (make_splits(names, names, LABELS.tolist(), folds=5).roles == TEST).argmax(0)
    for fold, expected in ((None, (0.756, 0.806)), (folds, (0.680, 0.788))):
        given = FoldAnswers.of(LABELS, two_columns(0.2 + 0.6 * LABELS), folds=fold)
        result = tuple(figure_interval(name, given).low for name in ("auc", "balanced_accuracy"))
        assert result == pytest.approx(expected, abs=5e-4)


@pytest.mark.finding(n=4)
def test_constant_predictions_have_balanced_accuracy_of_half_with_an_interval():
    for labels in (LABELS, np.repeat([0, 1], [20, 4])):
        result = figure_interval("balanced_accuracy", FoldAnswers.of(labels, np.tile([0.3, 0.7], (len(labels), 1))))
        assert result.value == 0.5
        assert 0.25 < result.low < 0.45 < 0.55 < result.high < 0.75


@pytest.mark.finding(n=4)
@pytest.mark.parametrize("classes", [2, 3])
def test_interval_surrounds_the_mean_over_folds_and_seeds(classes):
    rng = np.random.default_rng(0)
    y = np.tile(np.arange(60) % classes, 2)
    folds, seeds = np.tile(np.arange(60) // 15, 2), np.repeat([0, 1], 60)
    p = np.tile(rng.random((60, classes)), (2, 1)) + 0.4 * np.eye(classes)[y] + 0.1 * rng.random((120, classes))
    p /= p.sum(1, keepdims=True)
    given = FoldAnswers.of(y, p, folds=folds, seeds=seeds, cases=np.tile(np.arange(60), 2))
    by_hand = {
        "auc": lambda y, p: roc_auc_score(y, p if classes > 2 else p[:, 1], multi_class="ovr"),
        "f1_macro": lambda y, p: f1_score(y, p.argmax(1), average="macro"),
        "balanced_accuracy": lambda y, p: balanced_accuracy_score(y, p.argmax(1)),
        "accuracy": lambda y, p: (p.argmax(1) == y).mean(),
    }
    for name, measure in by_hand.items():
        result = figure_interval(name, given)
        groups = [(folds == f) & (seeds == s) for f in range(4) for s in (0, 1)]
        assert result.value == pytest.approx(np.mean([measure(y[rows], p[rows]) for rows in groups])), name
        assert result.low < result.value < result.high
        once = figure_interval(name, FoldAnswers.of(y[:60], p[:60], folds=folds[:60]))
        assert result.high - result.low == pytest.approx(
            once.high - once.low, rel=0.2
        )  # further seeds do not count as further patients


def test_fold_without_both_classes_is_excluded_from_auc_only():
    y, folds = np.array([0, 1, 0, 1, 0, 0]), np.array([0, 0, 1, 1, 2, 2])
    given = FoldAnswers.of(y, two_columns([0.1, 0.9, 0.8, 0.2, 0.1, 0.1]), folds=folds)
    assert figure_interval("auc", given).value == 0.5
    assert figure_interval("accuracy", given).value == pytest.approx(2 / 3)
    none = figure_interval("auc", FoldAnswers.of([1, 1], two_columns([0.9, 0.8])))
    assert np.isnan([none.value, none.low, none.high]).all()


def test_repeated_slides_and_repeated_folds_do_not_narrow_the_interval():
    rng = np.random.default_rng(0)
    y = np.arange(40) % 2
    p = two_columns(np.clip(0.5 + 0.3 * (y - 0.5) + 0.3 * rng.normal(size=40), 0.01, 0.99))
    for name in FIGURES:
        alone = figure_interval(name, FoldAnswers.of(y, p))
        copies = figure_interval(
            name, FoldAnswers.of(np.tile(y, 3), np.tile(p, (3, 1)), patients=np.tile(np.arange(40), 3))
        )
        again = figure_interval(
            name,
            FoldAnswers.of(
                np.tile(y, 3), np.tile(p, (3, 1)), folds=np.repeat([0, 1, 2], 40), cases=np.tile(np.arange(40), 3)
            ),
        )
        for other in (copies, again):
            assert other.value == pytest.approx(alone.value)
            assert (other.low, other.high) == pytest.approx((alone.low, alone.high), abs=0.03), name
    perfect = FoldAnswers.of(
        np.tile(LABELS, 3), two_columns(np.tile(LABELS, 3) * 0.8 + 0.1), patients=np.tile(np.arange(16), 3)
    )
    assert figure_interval("accuracy", perfect).low == pytest.approx(clopper_pearson(1, 16)[0])


@pytest.mark.finding(n=4)
def test_difference_of_two_perfect_models_has_a_nonzero_interval():
    perfect = area(LABELS, 0.1 + 0.8 * LABELS)
    result = difference_interval(perfect, perfect)
    assert result.value == 0
    assert -0.3 < result.low < -0.1 < 0.1 < result.high < 0.3
    assert difference_p(perfect, perfect) == 1


def test_p_value_of_a_difference_agrees_with_its_interval():
    labels, first, second = two_models(60, seed=3)
    one, other = area(labels, first), area(labels, second)
    p = difference_p(one, other)
    inside, outside = (difference_interval(one, other, 1 - p * by) for by in (0.98, 1.02))
    assert inside.low < 0 < inside.high
    assert not outside.low < 0 < outside.high
    assert difference_p(other, one) == pytest.approx(p)
    mirror = area(labels, -first)
    assert difference_p(one, mirror) < 0.01 and difference_interval(one, mirror).low > 0


def test_p_values_of_equal_models_are_uniformly_distributed():
    rng = np.random.default_rng(1)
    labels = np.repeat([0, 1], 60)
    small = [difference_p(*(area(labels, labels + rng.normal(size=120)) for _ in range(2))) < 0.1 for _ in range(200)]
    assert np.mean(small) == pytest.approx(0.1, abs=0.07)


def pairwise_delong(labels, *scores):
    """Compute AUCs and their covariance from DeLong's structural components, pair by pair."""
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
def test_delong_by_ranks_equals_delong_by_pairs_with_ties(b, levels):
    labels, first, second = two_models(b, seed=1, levels=levels)
    (a1, a2), covariance = pairwise_delong(labels, first, second)
    test = delong(area(labels, first), area(labels, second))
    z = (a1 - a2) / math.sqrt(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    assert (test.difference, test.n) == (pytest.approx(a1 - a2), b)
    assert test.statistic == pytest.approx(z)
    assert test.p == pytest.approx(2 * stats.norm.sf(abs(z)))
    assert area(labels, first).value == pytest.approx(roc_auc_score(labels, first))


def test_delong_p_is_one_for_equal_rankings_and_nan_without_variance():
    labels, first, _ = two_models(30, seed=0)
    equal = delong(area(labels, first), area(labels, np.exp(first)))
    assert (equal.statistic, equal.p, equal.difference) == (0, 1, 0)
    opposite = delong(area([0, 0, 1, 1], [1, 2, 3, 4]), area([0, 0, 1, 1], [4, 3, 2, 1]))
    assert opposite.difference == 1 and math.isnan(opposite.p)


def test_interval_of_the_mean_over_slides_reflects_its_spread_and_never_collapses():
    values = 0.6 + 0.1 * np.random.default_rng(0).normal(size=30)
    result = figure_interval("mean", FoldAnswers.of(np.ones(30, int), values))
    half_width = 1.96 * values.std(ddof=1) / math.sqrt(30)
    assert (result.high - result.low) / 2 == pytest.approx(half_width, rel=0.4)
    all_right = figure_interval("mean", FoldAnswers.of(np.ones(8, int), np.ones(8)))
    assert (all_right.low, all_right.high) == pytest.approx((wilson(1, 8)[0], 1))


@pytest.fixture(scope="module")
def coverage():
    """Import benchmarks/coverage.py as if it were run as a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        spec = importlib.util.spec_from_file_location(
            "coverage_benchmark", Path(__file__).parents[2] / "benchmarks" / "coverage.py"
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    return module


@pytest.mark.finding(n=4)
@pytest.mark.parametrize(("n", "positives", "auc"), [(16, 8, 0.95), (30, 5, 0.95)])
def test_95_per_cent_interval_of_auc_has_nominal_coverage(coverage, n, positives, auc):
    """Run 300 simulations of benchmarks/coverage.py (standard error 1.3 %); docs/study.md reports 2,000."""
    cell, rng = coverage.Cell(n, positives, auc), np.random.default_rng(0)
    for folds in (None, cell.folds):
        result = [estimate("auc", cell.answers(rng, folds)).interval() for _ in range(300)]
        coverage_reached = np.mean([one.low <= auc <= one.high for one in result])
        assert 0.90 <= coverage_reached <= 0.999
        assert np.mean([one.high - one.low for one in result]) < 0.5


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda: FoldAnswers.of([], np.empty((0, 2))), "no cases"),
        (lambda: FoldAnswers.of([0, 1], [[0.5, 0.5]]), "2 labels, 1 answers"),
        (lambda: FoldAnswers.of([0, 1], [[0.5, 0.5], [math.nan, 0.5]]), "not finite"),
        (lambda: figure_interval("auroc", FoldAnswers.of([0, 1], np.eye(2))), "auroc"),
        (lambda: figure_interval("auc", FoldAnswers.of([0, 1], np.eye(2)), 95), "a level of 95"),
    ],
)
def test_invalid_arguments_raise_an_error_of_one_line(broken, says):
    with pytest.raises(CarmilError, match=says) as error:
        broken()
    assert "\n" not in str(error.value)
