"""Intervals of figures: those that are published, that do not collapse, and that hold the true value as often as they say."""

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
    """Labels, and scores of two models that share what they see; few levels make ties."""
    rng = np.random.default_rng(seed)
    labels = np.arange(b) % 2
    seen = labels + rng.normal(size=b)
    first, second = seen + 0.5 * rng.normal(size=b), seen + 1.0 * rng.normal(size=b)
    if levels:
        first, second = (np.digitize(s, np.linspace(-1, 2, levels)).astype(float) for s in (first, second))
    return labels, first, second


def area(labels, scores, **others):
    return estimate("auc", FoldAnswers.of(labels, two_columns(scores), **others))


def test_wilsons_and_clopper_pearsons_intervals_are_the_published_ones():
    # Newcombe 1998, table I, methods 3 and 5
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0 / 20, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert clopper_pearson(81 / 263, 263) == pytest.approx((0.2527, 0.3676), abs=1e-4)
    assert clopper_pearson(0 / 20, 20) == pytest.approx((0.0, 0.1684), abs=1e-4)


@pytest.mark.finding(n=4)
def test_shares_of_cases_have_clopper_pearsons_interval_and_hold_the_truth_of_three_positives():
    right = np.arange(40) < 31
    found = figure_interval("accuracy", FoldAnswers.of(np.ones(40, int), two_columns(right.astype(float))))
    assert (found.value, found.low, found.high) == pytest.approx((31 / 40, *clopper_pearson(31 / 40, 40)))
    truth, labels = 0.95, np.array([1] * 3 + [0] * 13)
    held = 0.0
    for hits in range(4):
        answers = np.where(np.arange(16) < hits, 0.9, 0.1)
        one = figure_interval("sensitivity", FoldAnswers.of(labels, two_columns(answers)))
        held += math.comb(3, hits) * truth**hits * (1 - truth) ** (3 - hits) * (one.low <= truth <= one.high)
    assert held == pytest.approx(0.99275)  # Wilson's: 0.857


def test_the_aucs_interval_is_newcombes_where_delongs_variance_is_not_larger():
    # n = 16 of each class, no overlap: 1 - t = z sqrt(V(t)), V by Newcombe 2006
    found = figure_interval("auc", FoldAnswers.of(np.repeat([0, 1], 16), two_columns(np.repeat([0.2, 0.8], 16))))
    t, middle = found.low, 15
    variance = t * (1 - t) / 256 * (1 + middle * (1 - t) / (2 - t) + middle * t / (1 + t))
    assert 1 - t == pytest.approx(1.959964 * math.sqrt(variance), rel=1e-4)
    assert (found.value, found.high) == (1, 1)
    assert 0.83 < found.low < 0.9


@pytest.mark.finding(n=4)
def test_no_interval_collapses_where_all_answers_of_16_patients_are_right():
    given = FoldAnswers.of(LABELS, two_columns(0.2 + 0.6 * LABELS))
    for name in FIGURES:
        found = figure_interval(name, given)
        assert (found.value, found.high) == (1, 1)
        assert 0.6 < found.low < 0.85, name
    wrong = FoldAnswers.of(LABELS, two_columns(0.8 - 0.6 * LABELS))
    for name in FIGURES:
        found = figure_interval(name, wrong)
        assert (found.value, found.low) == (0, 0)
        assert 0.15 < found.high < 0.4, name


@pytest.mark.finding(n=4)
def test_the_example_of_16_patients_in_the_documentation():
    """docs/study.md: one test set, and the mean over five folds as `carmil train` cuts them."""
    names = [str(i) for i in range(16)]
    folds = (make_splits(names, names, LABELS.tolist(), folds=5).roles == TEST).argmax(0)
    for fold, expected in ((None, (0.756, 0.806)), (folds, (0.680, 0.788))):
        given = FoldAnswers.of(LABELS, two_columns(0.2 + 0.6 * LABELS), folds=fold)
        found = tuple(figure_interval(name, given).low for name in ("auc", "balanced_accuracy"))
        assert found == pytest.approx(expected, abs=5e-4)


@pytest.mark.finding(n=4)
def test_balanced_accuracy_of_one_answer_for_all_is_50_with_an_interval_around_it():
    for labels in (LABELS, np.repeat([0, 1], [20, 4])):
        found = figure_interval("balanced_accuracy", FoldAnswers.of(labels, np.tile([0.3, 0.7], (len(labels), 1))))
        assert found.value == 0.5
        assert 0.25 < found.low < 0.45 < 0.55 < found.high < 0.75


@pytest.mark.finding(n=4)
@pytest.mark.parametrize("classes", [2, 3])
def test_the_interval_is_of_the_mean_over_folds_and_seeds(classes):
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
        found = figure_interval(name, given)
        of = [(folds == f) & (seeds == s) for f in range(4) for s in (0, 1)]
        assert found.value == pytest.approx(np.mean([measure(y[rows], p[rows]) for rows in of])), name
        assert found.low < found.value < found.high
        once = figure_interval(name, FoldAnswers.of(y[:60], p[:60], folds=folds[:60]))
        assert found.high - found.low == pytest.approx(once.high - once.low, rel=0.2)  # a seed is no further patient


def test_a_fold_without_a_class_is_left_out_of_what_needs_it():
    y, folds = np.array([0, 1, 0, 1, 0, 0]), np.array([0, 0, 1, 1, 2, 2])
    given = FoldAnswers.of(y, two_columns([0.1, 0.9, 0.8, 0.2, 0.1, 0.1]), folds=folds)
    assert figure_interval("auc", given).value == 0.5
    assert figure_interval("accuracy", given).value == pytest.approx(2 / 3)
    none = figure_interval("auc", FoldAnswers.of([1, 1], two_columns([0.9, 0.8])))
    assert np.isnan([none.value, none.low, none.high]).all()


def test_slides_of_a_patient_and_divisions_of_the_same_cases_are_no_further_patients():
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
def test_two_perfect_models_do_not_certainly_agree():
    perfect = area(LABELS, 0.1 + 0.8 * LABELS)
    found = difference_interval(perfect, perfect)
    assert found.value == 0
    assert -0.3 < found.low < -0.1 < 0.1 < found.high < 0.3
    assert difference_p(perfect, perfect) == 1


def test_the_p_of_a_difference_says_what_its_interval_says():
    labels, first, second = two_models(60, seed=3)
    one, other = area(labels, first), area(labels, second)
    p = difference_p(one, other)
    inside, outside = (difference_interval(one, other, 1 - p * by) for by in (0.98, 1.02))
    assert inside.low < 0 < inside.high
    assert not outside.low < 0 < outside.high
    assert difference_p(other, one) == pytest.approx(p)
    mirror = area(labels, -first)
    assert difference_p(one, mirror) < 0.01 and difference_interval(one, mirror).low > 0


def test_the_p_of_a_difference_is_small_by_chance_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    labels = np.repeat([0, 1], 60)
    small = [difference_p(*(area(labels, labels + rng.normal(size=120)) for _ in range(2))) < 0.1 for _ in range(200)]
    assert np.mean(small) == pytest.approx(0.1, abs=0.07)


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
def test_delong_by_ranks_is_delong_by_pairs_ties_included(b, levels):
    labels, first, second = two_models(b, seed=1, levels=levels)
    (a1, a2), covariance = pairwise_delong(labels, first, second)
    test = delong(area(labels, first), area(labels, second))
    z = (a1 - a2) / math.sqrt(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    assert (test.difference, test.n) == (pytest.approx(a1 - a2), b)
    assert test.statistic == pytest.approx(z)
    assert test.p == pytest.approx(2 * stats.norm.sf(abs(z)))
    assert area(labels, first).value == pytest.approx(roc_auc_score(labels, first))


def test_delong_knows_scores_that_rank_alike_and_does_not_know_scores_that_never_vary():
    labels, first, _ = two_models(30, seed=0)
    alike = delong(area(labels, first), area(labels, np.exp(first)))
    assert (alike.statistic, alike.p, alike.difference) == (0, 1, 0)
    apart = delong(area([0, 0, 1, 1], [1, 2, 3, 4]), area([0, 0, 1, 1], [4, 3, 2, 1]))
    assert apart.difference == 1 and math.isnan(apart.p)


def test_the_mean_over_slides_has_the_interval_of_its_spread_and_does_not_collapse():
    values = 0.6 + 0.1 * np.random.default_rng(0).normal(size=30)
    found = figure_interval("mean", FoldAnswers.of(np.ones(30, int), values))
    reach = 1.96 * values.std(ddof=1) / math.sqrt(30)
    assert (found.high - found.low) / 2 == pytest.approx(reach, rel=0.4)
    all_right = figure_interval("mean", FoldAnswers.of(np.ones(8, int), np.ones(8)))
    assert (all_right.low, all_right.high) == pytest.approx((wilson(1, 8)[0], 1))


@pytest.fixture(scope="module")
def coverage():
    """benchmarks/coverage.py, imported as Python does when the script is run."""
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
def test_the_95_per_cent_interval_holds_the_true_auc_in_92_to_99_per_cent(coverage, n, positives, auc):
    """300 of the simulations of benchmarks/coverage.py, whose standard error is 1.3 %; docs/study.md has 2,000 of each cell."""
    cell, rng = coverage.Cell(n, positives, auc), np.random.default_rng(0)
    for folds in (None, cell.folds):
        found = [estimate("auc", cell.answers(rng, folds)).interval() for _ in range(300)]
        held = np.mean([one.low <= auc <= one.high for one in found])
        assert 0.90 <= held <= 0.999
        assert np.mean([one.high - one.low for one in found]) < 0.5


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
def test_what_does_not_fit_is_said_in_one_line(broken, says):
    with pytest.raises(CarmilError, match=says) as error:
        broken()
    assert "\n" not in str(error.value)
