import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from carmil.errors import CarmilError
from carmil.statistics.bootstrap import draws, holm, paired_t

from .resampling import bootstrap


def area(probabilities, labels):
    """Return the AUC over all pairs; NaN if a class is missing."""
    p = probabilities[:, 1]
    return float((p[labels == 1][:, None] > p[labels == 0]).mean()) if len(set(labels.tolist())) == 2 else math.nan


def test_paired_t_test_equals_scipy():
    rng = np.random.default_rng(0)
    for n in (2, 5, 30):
        first, second = rng.random((2, n))
        ours, expected = paired_t(first, second), stats.ttest_rel(first, second)
        assert (ours.statistic, ours.p) == (pytest.approx(expected.statistic), pytest.approx(expected.pvalue))
        assert (ours.difference, ours.n) == (pytest.approx((first - second).mean()), n)


def test_paired_t_test_equals_values_computed_by_hand():
    test = paired_t([3, 4, 5, 8], [2, 2, 2, 4])  # differences 1 2 3 4: mean 2.5, sd sqrt(5/3)
    assert test.statistic == pytest.approx(2.5 / math.sqrt(5 / 12))
    assert test.p == pytest.approx(0.030466, abs=1e-6)


def test_paired_t_test_of_constant_differences_has_p_of_one_or_zero():
    same = paired_t([0.9, 0.8, 0.7], [0.9, 0.8, 0.7])
    assert (same.statistic, same.p, same.difference) == (0, 1, 0)
    assert paired_t([0.1 + 0.2, 0.5], [0.3, 0.5]).p == 1  # they differ by rounding errors only
    lower = paired_t([0.8, 0.7, 0.6], [0.9, 0.8, 0.7])
    assert (lower.statistic, lower.p, lower.difference) == (-math.inf, 0, pytest.approx(-0.1))


def test_holm_equals_textbook_example():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9, 0.6]) == pytest.approx([1, 1, 1])
    assert holm([0.01, math.nan, 0.04]) == pytest.approx([0.02, math.nan, 0.04], nan_ok=True)
    assert holm([]).shape == (0,)
    assert np.isnan(holm([math.nan])).all()


@given(st.lists(st.floats(0, 1) | st.just(math.nan), max_size=12))
def test_holm_never_lowers_p_values_or_changes_their_order(p_values):
    p, adjusted = np.array(p_values, dtype=float), holm(p_values)
    defined = ~np.isnan(p)
    assert (np.isnan(adjusted) == ~defined).all()
    p, adjusted = p[defined], adjusted[defined]
    assert ((adjusted >= p) & (adjusted <= 1)).all()
    assert (np.diff(adjusted[p.argsort()]) >= 0).all()
    assert (adjusted <= np.minimum(1, len(p) * p)).all()  # never stricter than Bonferroni


def test_bootstrap_in_chunks_has_the_expected_width(monkeypatch):
    monkeypatch.setattr("carmil.statistics.bootstrap.CHUNK", 64)
    values = np.random.default_rng(0).normal(size=40)
    interval = bootstrap(np.mean, values, repeats=500)
    error = values.std() / math.sqrt(40)
    assert (interval.high - interval.low) == pytest.approx(2 * 1.96 * error, rel=0.15)


def test_bootstrap_resamples_all_slides_of_a_patient_together():
    patients = np.random.default_rng(0).normal(size=25)
    slides = np.repeat(patients, 4)
    names = np.repeat([f"patient {i}" for i in range(25)], 4)
    by_patient = bootstrap(np.mean, slides, groups=names, repeats=300)
    shuffled = np.arange(100).reshape(25, 4).T.ravel()
    scattered = bootstrap(np.mean, slides[shuffled], groups=names[shuffled], repeats=300)
    alone, as_if_independent = bootstrap(np.mean, patients, repeats=300), bootstrap(np.mean, slides, repeats=300)
    assert (by_patient.low, by_patient.high) == pytest.approx((alone.low, alone.high))
    assert (scattered.low, scattered.high) == pytest.approx((alone.low, alone.high))
    assert as_if_independent.high - as_if_independent.low < 0.7 * (alone.high - alone.low)


def test_resamples_without_a_value_are_excluded_and_counted():
    probabilities, labels = np.array([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]]), np.array([0, 1, 1])
    interval = bootstrap(area, probabilities, labels, repeats=4000)
    # Of 27 resamples, 1 has only the negative case and 8 have only positive cases.
    assert interval.left_out / 4000 == pytest.approx(9 / 27, abs=0.03)
    assert (interval.low, interval.high, interval.value) == (1, 1, 1)


@pytest.mark.finding(n=4)
def test_stratified_resamples_contain_every_class():
    labels = np.repeat([0, 1], [15, 3])
    probabilities = np.stack([1 - labels, labels], axis=1) * 0.8 + 0.1
    interval = bootstrap(area, probabilities, labels, strata=labels, repeats=500)
    assert interval.left_out == 0 < bootstrap(area, probabilities, labels, repeats=500).left_out
    (counts,) = draws(18, strata=labels, repeats=400, seed=0)
    assert (counts[:, :15].sum(1) == 15).all() and (counts[:, 15:].sum(1) == 3).all()
    # patient 0 has slides of both classes and counts as class 1
    patients = np.array([0, 0, 1, 1, 2, 2, 3, 3])
    (counts,) = draws(8, patients, strata=[0, 1, 0, 0, 1, 1, 0, 0], repeats=400, seed=0)
    assert (counts[:, ::2] == counts[:, 1::2]).all()
    assert (counts[:, 0] + counts[:, 4] == 2).all()


def test_equal_seeds_give_equal_intervals():
    values = np.arange(10.0)
    assert bootstrap(np.mean, values, seed=3) == bootstrap(np.mean, values, seed=3)
    assert bootstrap(np.mean, values, seed=3) != bootstrap(np.mean, values, seed=4)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda: paired_t([1], [2]), "of 1 pair: expected at least two"),
        (lambda: paired_t([1, 2], [2]), "first has 2 entries, second 1"),
        (lambda: paired_t([1, math.nan], [2, 3]), "first is nan at case 1"),
        (lambda: paired_t(["a", "b"], [2, 3]), "not a number"),
        (lambda: holm([0.1, 1.2]), "p-value 1.2"),
        (lambda: bootstrap(np.mean, [1.0, 2.0], groups=["a"]), "rows has 2 entries, groups 1"),
        (lambda: bootstrap(np.mean, [1.0, 2.0], groups=["a", None]), "row 1 has no group"),
        (lambda: bootstrap(np.mean, [1.0, 2.0], repeats=0), "0 resamples"),
        (lambda: bootstrap(np.mean, [1.0, 2.0], level=1.0), "a level of 1"),
    ],
)
def test_invalid_arguments_raise_an_error_of_one_line(broken, says):
    with pytest.raises(CarmilError, match=says) as error:
        broken()
    assert "\n" not in str(error.value)


def test_interval_of_one_row_or_group_is_nan():
    for result in (
        bootstrap(np.mean, [1.5]),
        bootstrap(np.mean, [1.0, 2.0], groups=["a", "a"]),
    ):
        assert not np.isnan(result.value) and np.isnan([result.low, result.high]).all()
