import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss

from carmil.errors import CarmilError
from carmil.statistics.calibration import brier, reliability


def sure_answers(b, classes, seed, sharpness=1.0):
    """Labels drawn from probabilities, and these probabilities sharpened: calibrated at sharpness 1, boastful above."""
    rng = np.random.default_rng(seed)
    honest = rng.dirichlet(np.ones(classes), size=b)
    labels = (honest.cumsum(1) < rng.random((b, 1))).sum(1)
    told = honest**sharpness
    return told / told.sum(1, keepdims=True), labels


def test_reliability_by_hand():
    p1 = np.array([0.1, 0.3, 0.55, 0.6, 0.95, 1.0])
    told = reliability(np.stack([1 - p1, p1], axis=1), [0, 1, 1, 0, 1, 1], bins=5)
    # Likeliest class: 0.9 right, 0.7 wrong, 0.55 right, 0.6 wrong, 0.95 right, 1.0 right.
    assert told.count.tolist() == [0, 0, 2, 1, 3]
    assert told.confidence == pytest.approx([math.nan, math.nan, 0.575, 0.7, 0.95], nan_ok=True)
    assert told.accuracy == pytest.approx([math.nan, math.nan, 0.5, 0, 1], nan_ok=True)
    assert told.ece == pytest.approx((2 * 0.075 + 1 * 0.7 + 3 * 0.05) / 6)
    assert told.mce == pytest.approx(0.7)


@pytest.mark.parametrize(("adaptive", "strategy"), [(False, "uniform"), (True, "quantile")])
@pytest.mark.parametrize("classes", [2, 4])
def test_bins_are_scikit_learns(adaptive, strategy, classes):
    probabilities, labels = sure_answers(300, classes, seed=classes)
    told = reliability(probabilities, labels, bins=8, adaptive=adaptive)
    right, confidence = probabilities.argmax(1) == labels, probabilities.max(1)
    accuracy, mean_confidence = calibration_curve(right, confidence, n_bins=8, strategy=strategy)
    filled = told.count > 0
    assert told.accuracy[filled] == pytest.approx(accuracy)
    assert told.confidence[filled] == pytest.approx(mean_confidence)
    assert told.count.sum() == 300
    if adaptive:
        assert told.count.min() >= 300 // 8


def test_an_edge_belongs_to_the_bin_below_it():
    assert reliability([[0.25, 0.75], [0.5, 0.5], [0.0, 1.0]], [1, 1, 1], bins=4).count.tolist() == [0, 1, 1, 1]


def test_calibrated_answers_have_a_small_error_and_boastful_ones_a_large_one():
    for adaptive in (False, True):
        assert reliability(*sure_answers(20_000, 3, seed=0), adaptive=adaptive).ece < 0.02
        boastful = reliability(*sure_answers(20_000, 3, seed=0, sharpness=4), adaptive=adaptive)
        assert boastful.ece > 0.1
        assert boastful.mce >= boastful.ece
        assert np.nanmax(boastful.confidence - boastful.accuracy) > 0.1  # too sure, not too shy


def test_equal_answers_share_an_adaptive_bin():
    told = reliability([[0.3, 0.7]] * 4, [1, 1, 1, 0], adaptive=True)
    assert told.count.max() == 4
    assert told.ece == told.mce == pytest.approx(0.05)


@settings(max_examples=60, deadline=None)
@given(b=st.integers(1, 40), classes=st.integers(2, 4), seed=st.integers(0, 1000), adaptive=st.booleans())
def test_the_order_of_the_bags_does_not_matter(b, classes, seed, adaptive):
    probabilities, labels = sure_answers(b, classes, seed)
    order = np.random.default_rng(seed).permutation(b)
    told = reliability(probabilities, labels, adaptive=adaptive)
    moved = reliability(probabilities[order], labels[order], adaptive=adaptive)
    assert moved.count.tolist() == told.count.tolist()
    assert (moved.ece, moved.mce) == (pytest.approx(told.ece), pytest.approx(told.mce))
    assert 0 <= told.ece <= told.mce + 1e-12 <= 1 + 1e-12


@pytest.mark.parametrize("classes", [2, 3])
def test_the_brier_score_equals_that_of_scikit_learn(classes):
    probabilities, labels = sure_answers(50, classes, seed=classes)
    given = probabilities[:, 1] if classes == 2 else probabilities
    assert brier(probabilities, labels) == pytest.approx(brier_score_loss(labels, given))


def test_the_brier_score_of_two_bags_is_as_by_hand():
    assert brier([[0.2, 0.8], [0.5, 0.5]], [1, 0]) == pytest.approx((0.04 + 0.25) / 2)
    assert brier([[0.0, 1.0, 0.0]], [0]) == 2


@pytest.mark.parametrize("measure", [reliability, brier])
@pytest.mark.parametrize(
    ("probabilities", "labels", "says"),
    [
        ([[0.2, 0.8]], [0, 1], r"labels have shape \(2,\), probabilities \(1, 2\)"),
        ([[0.2, 0.8]], [2], "label 2 of bag 0: expected 0 to 1"),
        ([[0.2, 0.8]], ["tumour"], "label 'tumour' of bag 0"),
        ([[0.2, 0.8]], [math.nan], "label nan of bag 0"),
        ([[0.2, math.nan]], [0], "probabilities of bag 0"),
        ([[0.5, 0.5], [-3.0, 2.0]], [0, 1], "probabilities of bag 1 .* expected numbers from 0 to 1"),
        ([[0.5, 0.1]], [0], "sum to 0.6: expected 1; are these logits"),
        ([0.5, 0.1], [0, 1], r"shape \(2,\): expected \(bags, classes\)"),
        (np.empty((0, 2)), [], "at least one bag"),
        ([["a", "b"]], [0], "not a number"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(measure, probabilities, labels, says):
    with pytest.raises(CarmilError, match=says) as error:
        measure(probabilities, labels)
    assert "\n" not in str(error.value)


def test_no_bins_is_said_in_one_line():
    with pytest.raises(CarmilError, match="0 bins: expected at least one"):
        reliability([[0.2, 0.8]], [1], bins=0)
