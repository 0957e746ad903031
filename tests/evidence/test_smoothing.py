"""Smoothing hands values out to neighbours and keeps their sum."""

import numpy as np
import pytest

from carmil.errors import CarmilError
from carmil.evidence.smoothing import smooth_map

GRID = np.stack(np.meshgrid(np.arange(9), np.arange(7)), axis=-1).reshape(-1, 2).astype(float)


def test_inside_tissue_it_is_the_mean_over_a_disc():
    values = np.random.default_rng(0).normal(size=len(GRID))
    found = smooth_map(values, GRID, 2.0)
    middle = int(np.flatnonzero((GRID == [4, 3]).all(1))[0])
    disc = np.linalg.norm(GRID - GRID[middle], axis=1) <= 2
    assert disc.sum() == 13
    assert np.isclose(smooth_map(np.ones(len(GRID)), GRID, 1.0)[middle], 1.0)
    assert np.isclose(
        found[middle],
        sum(values[i] / (np.linalg.norm(GRID - GRID[i], axis=1) <= 2).sum() for i in np.flatnonzero(disc)),
    )


@pytest.mark.parametrize("radius", [0, 0.5, 1, 3, 100])
def test_the_total_of_every_column_is_kept(radius):
    chance = np.random.default_rng(1)
    values, places = chance.normal(size=(50, 3)), chance.uniform(0, 6, size=(50, 2))
    assert np.allclose(smooth_map(values, places, radius).sum(0), values.sum(0))


def test_nothing_within_reach_leaves_values_as_they_are_and_all_within_reach_share_alike():
    values = np.arange(len(GRID), dtype=float)
    assert np.array_equal(smooth_map(values, GRID, 0.9), values)
    assert np.allclose(smooth_map(values, GRID, 100), values.mean())
    assert smooth_map(np.array([2.0]), np.zeros((1, 2)), 3).tolist() == [2.0]


def test_it_does_not_depend_on_the_order_of_tiles():
    values, order = np.random.default_rng(2).normal(size=len(GRID)), np.random.default_rng(3).permutation(len(GRID))
    assert np.allclose(smooth_map(values[order], GRID[order], 2), smooth_map(values, GRID, 2)[order])


def test_what_cannot_be_smoothed_is_one_line():
    with pytest.raises(CarmilError, match="expected \\(3, 2\\)"):
        smooth_map(np.ones(3), np.ones((4, 2)), 1)
    with pytest.raises(CarmilError, match="a radius of -1"):
        smooth_map(np.ones(3), np.ones((3, 2)), -1)
