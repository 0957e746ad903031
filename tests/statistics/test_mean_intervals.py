import numpy as np
import pytest

from carmil.statistics.bootstrap import bootstrap, draws, mean_intervals


def test_rows_resampled_one_by_one_have_the_interval_of_the_plain_bootstrap():
    values = np.random.default_rng(0).normal(size=200)
    mean, low, high = mean_intervals(values[:, None], np.arange(200), repeats=4000)
    plain = bootstrap(np.mean, values, repeats=4000)
    assert mean[0] == pytest.approx(plain.value)
    assert (low[0], high[0]) == pytest.approx((plain.low, plain.high), abs=0.02)


def test_cases_of_one_bag_are_drawn_together():
    """Ten copies of a value are no more evidence than one."""
    values = np.random.default_rng(0).normal(size=50)
    once = mean_intervals(values[:, None], np.arange(50))
    copied = mean_intervals(np.repeat(values, 10)[:, None], np.repeat(np.arange(50), 10))
    assert np.allclose(once, copied)


def test_seeds_that_differ_widen_the_interval_that_bags_alone_have():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(6, 1)) + 0.1 * rng.normal(size=(6, 100))  # (seeds, bags)
    seeds, bags = np.indices(values.shape)
    alone = mean_intervals(values.reshape(-1, 1), bags.ravel())
    crossed = mean_intervals(values.reshape(-1, 1), bags.ravel(), seeds.ravel())
    assert (alone.high - alone.low)[0] < 0.1
    assert (crossed.high - crossed.low)[0] > 0.5


def test_a_case_without_a_value_is_left_out_of_its_column_only():
    values = np.array([[1.0, np.nan, np.nan], [3.0, 4.0, np.nan], [5.0, 6.0, np.nan]])
    mean, low, high = mean_intervals(values, np.arange(3))
    assert mean[:2].tolist() == [3.0, 5.0]
    assert 1.0 <= low[0] < high[0] <= 5.0
    assert np.isnan([mean[2], low[2], high[2]]).all()


def test_a_case_counts_as_often_as_its_bag_and_its_seed_were_drawn_together():
    """As if every case had its weight; not every seed has every bag, and one has a bag twice."""
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
    found = mean_intervals(values, bags, seeds)
    assert np.allclose(found.mean, np.nanmean(values, axis=0))
    assert np.allclose([found.low, found.high], np.nanquantile(each, (0.025, 0.975), axis=0))


def test_the_interval_of_a_single_unit_is_nan():
    mean, low, high = mean_intervals(np.array([[1.0], [3.0]]), np.zeros(2))
    assert mean.tolist() == [2.0] and np.isnan([low, high]).all()
