"""Smoothing distributes values over neighbouring tiles and preserves their sum."""

import numpy as np
import pytest

from carmil.errors import CarmilError
from carmil.evidence.smoothing import smooth_map

GRID = np.stack(np.meshgrid(np.arange(9), np.arange(7)), axis=-1).reshape(-1, 2).astype(float)


def test_smoothing_inside_tissue_averages_over_a_disc():
    values = np.random.default_rng(0).normal(size=len(GRID))
    result = smooth_map(values, GRID, 2.0)
    middle = int(np.flatnonzero((GRID == [4, 3]).all(1))[0])
    disc = np.linalg.norm(GRID - GRID[middle], axis=1) <= 2
    assert disc.sum() == 13
    assert np.isclose(smooth_map(np.ones(len(GRID)), GRID, 1.0)[middle], 1.0)
    assert np.isclose(
        result[middle],
        sum(values[i] / (np.linalg.norm(GRID - GRID[i], axis=1) <= 2).sum() for i in np.flatnonzero(disc)),
    )


@pytest.mark.parametrize("radius", [0, 0.5, 1, 3, 100])
def test_smoothing_preserves_the_sum_of_every_column(radius):
    rng = np.random.default_rng(1)
    values, places = rng.normal(size=(50, 3)), rng.uniform(0, 6, size=(50, 2))
    assert np.allclose(smooth_map(values, places, radius).sum(0), values.sum(0))


def test_smoothing_radius_ranges_from_no_change_to_the_overall_mean():
    values = np.arange(len(GRID), dtype=float)
    assert np.array_equal(smooth_map(values, GRID, 0.9), values)
    assert np.allclose(smooth_map(values, GRID, 100), values.mean())
    assert smooth_map(np.array([2.0]), np.zeros((1, 2)), 3).tolist() == [2.0]


def test_smoothing_does_not_depend_on_the_order_of_tiles():
    values, order = np.random.default_rng(2).normal(size=len(GRID)), np.random.default_rng(3).permutation(len(GRID))
    assert np.allclose(smooth_map(values[order], GRID[order], 2), smooth_map(values, GRID, 2)[order])


def test_invalid_smoothing_arguments_raise_an_error():
    with pytest.raises(CarmilError, match="expected places \\(3, 2\\)"):
        smooth_map(np.ones(3), np.ones((4, 2)), 1)
    with pytest.raises(CarmilError, match="a radius of -1"):
        smooth_map(np.ones(3), np.ones((3, 2)), -1)
