import numpy as np
import pytest

from carmil.statistics.bootstrap import draws, mean_intervals
from carmil.studies.figures import mean_interval

from .resampling import bootstrap


def test_mean_interval_of_independent_rows_equals_bootstrap():
    values = np.random.default_rng(0).normal(size=200)
    mean, low, high = mean_intervals(values[:, None], np.arange(200), repeats=4000)
    plain = bootstrap(np.mean, values, repeats=4000)
    assert mean[0] == pytest.approx(plain.value)
    assert (low[0], high[0]) == pytest.approx((plain.low, plain.high), abs=0.02)


def test_cases_of_one_bag_are_resampled_together():
    """Ten copies of a value are no more evidence than a single value."""
    values = np.random.default_rng(0).normal(size=50)
    once = mean_intervals(values[:, None], np.arange(50))
    copied = mean_intervals(np.repeat(values, 10)[:, None], np.repeat(np.arange(50), 10))
    assert np.allclose(once, copied)


def test_resampling_seeds_widens_the_interval_if_seeds_differ():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(6, 1)) + 0.1 * rng.normal(size=(6, 100))  # (seeds, bags)
    seeds, bags = np.indices(values.shape)
    alone = mean_intervals(values.reshape(-1, 1), bags.ravel())
    crossed = mean_intervals(values.reshape(-1, 1), bags.ravel(), seeds.ravel())
    assert (alone.high - alone.low)[0] < 0.1
    assert (crossed.high - crossed.low)[0] > 0.5


def test_missing_values_are_excluded_from_their_column_only():
    values = np.array([[1.0, np.nan, np.nan], [3.0, 4.0, np.nan], [5.0, 6.0, np.nan]])
    mean, low, high = mean_intervals(values, np.arange(3))
    assert mean[:2].tolist() == [3.0, 5.0]
    assert 1.0 <= low[0] < high[0] <= 5.0
    assert np.isnan([mean[2], low[2], high[2]]).all()


def test_case_weight_is_the_product_of_bag_and_seed_counts():
    """Compare with explicit weights; seeds lack some bags and repeat others."""
    rng = np.random.default_rng(3)
    bags, seeds = rng.integers(0, 7, size=(2, 25))
    values = rng.normal(size=(25, 3))
    values[rng.random(values.shape) < 0.2] = np.nan
    weights = np.ones((1000, 25))
    for kind, unit in enumerate((bags, seeds)):
        which = np.unique(unit, return_inverse=True)[1]
        weights *= np.concatenate([*draws(which.max() + 1, repeats=1000, seed=(0, kind))])[:, which]
    with np.errstate(invalid="ignore"):
        each = (weights @ np.nan_to_num(values)) / (weights @ ~np.isnan(values))
    result = mean_intervals(values, bags, seeds)
    assert np.allclose(result.mean, np.nanmean(values, axis=0))
    assert np.allclose([result.low, result.high], np.nanquantile(each, (0.025, 0.975), axis=0))


def test_mean_interval_of_a_single_bag_is_nan():
    mean, low, high = mean_intervals(np.array([[1.0], [3.0]]), np.zeros(2))
    assert mean.tolist() == [2.0] and np.isnan([low, high]).all()


def test_interval_of_a_figure_is_the_bootstrap_of_its_mean():
    rng = np.random.default_rng(0)
    values, patients = rng.normal(size=40), rng.integers(0, 9, 40)
    values[7:9], patients[7:9] = np.nan, 20
    known = ~np.isnan(values)
    expected = bootstrap(np.mean, values[known], groups=patients[known], repeats=1000)
    found = mean_interval(values, patients)
    assert (found.value, found.low, found.high) == pytest.approx((expected.value, expected.low, expected.high))
    assert found.slides == 38
    assert np.isnan(mean_interval([0.5, 0.7], ["p", "p"]).low)  # a single patient
