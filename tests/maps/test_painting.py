"""Values of a slide's tiles become rasters."""

import numpy as np
import pytest

from carmil.errors import CarmilError
from carmil.maps.painting import check_maps, raster
from carmil.maps.tile_maps import tile_maps
from carmil.slides.slide import Tiles


def tiles_at(corners, *, size=4.0, width=16, height=12):
    return Tiles("s", np.array(corners, dtype=np.int64), size, 256, 0.5, width, height, 0.5)


def test_where_tiles_overlap_their_mean_is_drawn_and_nothing_where_there_are_none():
    found = raster(tiles_at([(0, 0), (2, 0), (12, 8)]), [1.0, 3.0, -5.0], longest=16)
    expected = np.full((12, 16), np.nan)
    expected[:4, :2], expected[:4, 2:4], expected[:4, 4:6], expected[8:, 12:] = 1, 2, 3, -5
    np.testing.assert_allclose(found, expected)


def test_a_tile_without_a_value_leaves_the_others_alone():
    found = raster(tiles_at([(0, 0), (2, 0)]), [1.0, np.nan], longest=16)
    assert (found[:4, :4] == 1).all()
    assert np.isnan(found[:4, 4:]).all()


def test_tiles_that_touch_leave_no_gap_even_if_their_side_is_a_fraction():
    corners = [(round(i * 36.57), round(j * 36.57)) for j in range(5) for i in range(7)]
    for longest in (255, 160, 77, 9):
        found = raster(tiles_at(corners, size=36.57, width=256, height=183), np.ones(35), longest=longest)
        assert (found == 1).all()


def test_values_that_do_not_fit_the_tiles_are_refused():
    tiles = tiles_at([(0, 0), (4, 0)])
    with pytest.raises(CarmilError, match=r"shape \(3,\) and there are 2 tiles"):
        check_maps(tile_maps({"DCIS": [1.0, 2.0, 3.0]}), tiles)
    with pytest.raises(CarmilError, match="infinite"):
        check_maps(tile_maps({"DCIS": [1.0, np.inf]}), tiles)
