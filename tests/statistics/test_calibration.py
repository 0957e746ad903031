import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss

from carmil.errors import CarmilError
from carmil.statistics.calibration import brier, reliability


def sharpened_predictions(b, classes, seed, sharpness=1.0):
    """Draw labels from probabilities and sharpen these: calibrated at sharpness 1, overconfident above."""
    rng = np.random.default_rng(seed)
    calibrated = rng.dirichlet(np.ones(classes), size=b)
    labels = (calibrated.cumsum(1) < rng.random((b, 1))).sum(1)
    curve = calibrated**sharpness
    return curve / curve.sum(1, keepdims=True), labels


def test_reliability_equals_values_computed_by_hand():
    p1 = np.array([0.1, 0.3, 0.55, 0.6, 0.95, 1.0])
    curve = reliability(np.stack([1 - p1, p1], axis=1), [0, 1, 1, 0, 1, 1], bins=5)
    # Most probable class: 0.9 right, 0.7 wrong, 0.55 right, 0.6 wrong, 0.95 right, 1.0 right.
    assert curve.count.tolist() == [0, 0, 2, 1, 3]
    assert curve.confidence == pytest.approx([math.nan, math.nan, 0.575, 0.7, 0.95], nan_ok=True)
    assert curve.accuracy == pytest.approx([math.nan, math.nan, 0.5, 0, 1], nan_ok=True)
    assert curve.ece == pytest.approx((2 * 0.075 + 1 * 0.7 + 3 * 0.05) / 6)
    assert curve.mce == pytest.approx(0.7)


@pytest.mark.parametrize("classes", [2, 4])
def test_reliability_bins_equal_scikit_learn(classes):
    probabilities, labels = sharpened_predictions(300, classes, seed=classes)
    curve = reliability(probabilities, labels, bins=8)
    right, confidence = probabilities.argmax(1) == labels, probabilities.max(1)
    accuracy, mean_confidence = calibration_curve(right, confidence, n_bins=8)
    filled = curve.count > 0
    assert curve.accuracy[filled] == pytest.approx(accuracy)
    assert curve.confidence[filled] == pytest.approx(mean_confidence)
    assert curve.count.sum() == 300


def test_bin_edges_belong_to_the_bin_below():
    assert reliability([[0.25, 0.75], [0.5, 0.5], [0.0, 1.0]], [1, 1, 1], bins=4).count.tolist() == [0, 1, 1, 1]


def test_calibration_error_is_small_unless_predictions_are_overconfident():
    assert reliability(*sharpened_predictions(20_000, 3, seed=0)).ece < 0.02
    overconfident = reliability(*sharpened_predictions(20_000, 3, seed=0, sharpness=4))
    assert overconfident.ece > 0.1
    assert overconfident.mce >= overconfident.ece
    assert np.nanmax(overconfident.confidence - overconfident.accuracy) > 0.1  # overconfident, not underconfident


@settings(max_examples=60, deadline=None)
@given(b=st.integers(1, 40), classes=st.integers(2, 4), seed=st.integers(0, 1000))
def test_reliability_does_not_depend_on_bag_order(b, classes, seed):
    probabilities, labels = sharpened_predictions(b, classes, seed)
    order = np.random.default_rng(seed).permutation(b)
    curve = reliability(probabilities, labels)
    moved = reliability(probabilities[order], labels[order])
    assert moved.count.tolist() == curve.count.tolist()
    assert (moved.ece, moved.mce) == (pytest.approx(curve.ece), pytest.approx(curve.mce))
    assert 0 <= curve.ece <= curve.mce + 1e-12 <= 1 + 1e-12


@pytest.mark.parametrize("classes", [2, 3])
def test_brier_score_equals_scikit_learn(classes):
    probabilities, labels = sharpened_predictions(50, classes, seed=classes)
    given = probabilities[:, 1] if classes == 2 else probabilities
    assert brier(probabilities, labels) == pytest.approx(brier_score_loss(labels, given))


def test_brier_score_equals_values_computed_by_hand():
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
        ([[0.5, 0.1]], [0], "sum to 0.6: expected 1; apply a softmax if these are logits"),
        ([0.5, 0.1], [0, 1], r"shape \(2,\): expected \(bags, classes\)"),
        (np.empty((0, 2)), [], "at least one bag"),
        ([["a", "b"]], [0], "not a number"),
    ],
)
def test_invalid_arguments_raise_an_error_of_one_line(measure, probabilities, labels, says):
    with pytest.raises(CarmilError, match=says) as error:
        measure(probabilities, labels)
    assert "\n" not in str(error.value)


def test_zero_bins_raise_an_error():
    with pytest.raises(CarmilError, match="0 bins: expected at least one"):
        reliability([[0.2, 0.8]], [1], bins=0)
