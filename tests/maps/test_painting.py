"""Tile values of a slide are painted as rasters."""

import numpy as np
import pytest

from carmil.errors import CarmilError
from carmil.maps.painting import check_maps, raster
from carmil.maps.tile_maps import tile_maps
from carmil.slides.slide import Tiles


def tiles_at(corners, *, size=4.0, width=16, height=12):
    return Tiles("s", np.array(corners, dtype=np.int64), size, 256, 0.5, width, height, 0.5)


def test_raster_averages_overlapping_tiles_and_is_nan_without_tiles():
    result = raster(tiles_at([(0, 0), (2, 0), (12, 8)]), [1.0, 3.0, -5.0], side=1)
    expected = np.full((12, 16), np.nan)
    expected[:4, :2], expected[:4, 2:4], expected[:4, 4:6], expected[8:, 12:] = 1, 2, 3, -5
    np.testing.assert_allclose(result, expected)


def test_raster_ignores_tiles_without_a_value():
    result = raster(tiles_at([(0, 0), (2, 0)]), [1.0, np.nan], side=1)
    assert (result[:4, :4] == 1).all()
    assert np.isnan(result[:4, 4:]).all()


def test_raster_has_no_gaps_between_adjacent_tiles_with_a_fractional_side():
    corners = [(round(i * 36.57), round(j * 36.57)) for j in range(5) for i in range(7)]
    for side in (1.004, 1.6, 3.3, 28):
        result = raster(tiles_at(corners, size=36.57, width=256, height=183), np.ones(35), side=side)
        assert (result[: int(183 / side), : int(256 / side)] == 1).all()


def test_raster_keeps_tiles_in_place_if_pixels_do_not_fill_the_slide():
    result = raster(tiles_at([(4, 4), (8, 4)], width=17, height=13), [1.0, 2.0], side=2)
    assert result.shape == (7, 9)
    assert (result[2:4, 2:4] == 1).all() and (result[2:4, 4:6] == 2).all() and np.isnan(result[:, 6:]).all()


def test_values_that_do_not_match_the_tiles_raise_an_error():
    tiles = tiles_at([(0, 0), (4, 0)])
    with pytest.raises(CarmilError, match=r"the shape \(3,\), but there are 2 tiles"):
        check_maps(tile_maps({"DCIS": [1.0, 2.0, 3.0]}), tiles)
    with pytest.raises(CarmilError, match="infinite"):
        check_maps(tile_maps({"DCIS": [1.0, np.inf]}), tiles)
