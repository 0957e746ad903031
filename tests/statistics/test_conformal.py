"""Class-conditional conformal sets: ranks, quantiles, sets, and their coverage by simulation."""

import numpy as np
import pytest

from carmil.errors import CarmilError
from carmil.statistics.conformal import (
    class_quantiles,
    expected_coverage,
    fewest_cases,
    prediction_sets,
    quantile_rank,
    set_figures,
)


@pytest.mark.parametrize(("level", "fewest"), [(0.5, 1), (0.8, 4), (0.9, 9), (0.95, 19), (0.99, 99)])
def test_class_needs_at_least_as_many_cases_as_the_rank_of_its_quantile(level, fewest):
    assert fewest_cases(level) == fewest
    assert quantile_rank(fewest, level) == fewest
    assert quantile_rank(fewest - 1, level) > fewest - 1


@pytest.mark.parametrize("level", [0, 1, -0.1, 90, float("nan")])
def test_coverage_that_is_not_between_0_and_1_is_refused(level):
    with pytest.raises(CarmilError, match="between 0 and 1"):
        fewest_cases(level)


def test_quantile_at_90_per_cent_is_the_largest_of_9_scores_and_the_second_largest_of_19():
    scores = np.tile(np.arange(28.0)[:, None], (1, 2))
    labels = np.repeat([0, 1], [9, 19])
    assert class_quantiles(scores, labels, 0.9).tolist() == [8.0, 26.0]
    with pytest.raises(CarmilError, match=r"class 1 has 8 calibration cases.*0\.9 needs at least 9"):
        class_quantiles(scores, np.repeat([0, 1], [20, 8]), 0.9)


def test_set_contains_classes_below_their_own_quantiles_and_sets_of_grades_have_no_gaps():
    scores = np.array([[0.1, 0.9, 0.3], [0.5, 0.9, 0.9]])
    quantiles = np.array([0.2, 0.5, 0.4])
    assert prediction_sets(scores, quantiles).tolist() == [[True, False, True], [False, False, False]]
    assert prediction_sets(scores, quantiles, contiguous=True).tolist() == [[True, True, True], [False, False, False]]


def test_coverage_of_each_class_equals_the_theorem_even_if_scores_of_a_class_are_poor():
    draw = np.random.default_rng(0)
    labels = np.repeat([0, 1, 0, 1], [9, 25, 100, 100])
    covered = []
    for _ in range(400):
        scores = draw.random((len(labels), 2)) + labels[:, None] * np.array([0, 3])
        quantiles = class_quantiles(scores[:34], labels[:34], 0.9)
        sets = prediction_sets(scores[34:], quantiles)
        covered.append(
            [set_figures(sets[labels[34:] == c], labels[34:][labels[34:] == c]).coverage.value for c in (0, 1)]
        )
    expected = [expected_coverage(9, 0.9), expected_coverage(25, 0.9)]
    assert expected == [0.9, 24 / 26]
    assert np.mean(covered, 0) == pytest.approx(expected, abs=0.012)


def test_figures_of_sets_measure_coverage_size_and_empty_sets():
    sets = np.array([[True, False], [True, True], [False, False], [False, True]])
    figures = set_figures(sets, np.array([0, 1, 1, 0]))
    assert (figures.cases, figures.size, figures.singletons, figures.empty) == (4, 1.0, 0.5, 0.25)
    assert figures.coverage.value == 0.5
    assert (figures.coverage.low, figures.coverage.high) == pytest.approx((0.0676, 0.9324), abs=1e-4)
    assert np.isnan(set_figures(sets[:0], np.zeros(0, dtype=int)).size)
