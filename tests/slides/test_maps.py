"""Values of tiles become rasters and colours."""

import numpy as np
import pytest

from carmil.errors import CarmilError
from carmil.slides.maps import checked, mosaic, pixel_boxes, raster, scaled, tile_maps
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


def test_any_tiles_are_laid_out_as_one_would_paint_them_one_by_one():
    rng = np.random.default_rng(0)
    corners, values = rng.integers(-40, 300, (200, 2)), rng.normal(size=(2, 200))
    values[1, ::7] = np.nan
    tiles = tiles_at(corners, size=37.3, width=256, height=200)
    total, count = np.zeros((2, 100, 128)), np.zeros((2, 100, 128))
    boxes = pixel_boxes(tiles, (0, 0, 256, 200), (128, 100))
    for i, (left, top, right, bottom) in enumerate(boxes):
        for m in np.flatnonzero(~np.isnan(values[:, i])):
            total[m, max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)] += values[m, i]
            count[m, max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)] += 1
    with np.errstate(invalid="ignore"):
        expected = total / count
    laid = mosaic(boxes, values, (128, 100))
    np.testing.assert_allclose([laid.spread(cells) for cells in laid.cells], expected, atol=1e-9)


def test_tiles_that_touch_leave_no_gap_even_if_their_side_is_a_fraction():
    corners = [(round(i * 36.57), round(j * 36.57)) for j in range(5) for i in range(7)]
    for longest in (255, 160, 77, 9):
        found = raster(tiles_at(corners, size=36.57, width=256, height=183), np.ones(35), longest=longest)
        assert (found == 1).all()


def test_min_max_keeps_proportions_and_zero_stays_where_it_was():
    np.testing.assert_allclose(scaled(np.array([2.0, 3.0, 6.0]), "minmax", signed=False), [0, 0.25, 1])
    np.testing.assert_allclose(scaled(np.array([-1.0, 0.0, 4.0]), "minmax", signed=True), [-0.25, 0, 1])


def test_by_rank_only_the_order_counts():
    values = np.random.default_rng(0).normal(size=50)
    np.testing.assert_allclose(scaled(values, "rank", signed=False), scaled(np.exp(3 * values), "rank", signed=False))
    signed = scaled(np.array([-9.0, 0.0, 1.0, 2.0]), "rank", signed=True)
    np.testing.assert_allclose(signed, [-1, 0, 1 / 3, 2 / 3])


@pytest.mark.parametrize("scale", ["minmax", "rank"])
@pytest.mark.parametrize("signed", [True, False])
def test_a_map_that_is_all_the_same_or_empty_has_no_colour_to_choose(scale, signed):
    assert (scaled(np.zeros(4), scale, signed=signed) == 0).all()
    assert np.isnan(scaled(np.full(4, np.nan), scale, signed=signed)).all()
    assert len(scaled(np.empty(0), scale, signed=signed)) == 0


def test_the_name_of_a_map_says_what_it_is():
    factual, counterfactual, difference, evidence = tile_maps(
        {"factual": [1.0], "counterfactual": [1.0], "difference": [1.0], "DCIS": [1.0]}
    )
    assert [one.signed for one in (factual, counterfactual, difference, evidence)] == [False, False, True, True]
    assert evidence.title == "evidence for DCIS"
    assert evidence.ends == ("refutes DCIS", "supports DCIS")
    assert tile_maps({"DCIS": [1.0]}, {"DCIS": "factual"}, model="car")[0].title == "car: factual attention for DCIS"


def test_values_that_do_not_fit_the_tiles_are_refused():
    tiles = tiles_at([(0, 0), (4, 0)])
    with pytest.raises(CarmilError, match=r"shape \(3,\) and there are 2 tiles"):
        checked(tile_maps({"DCIS": [1.0, 2.0, 3.0]}), tiles)
    with pytest.raises(CarmilError, match="infinite"):
        checked(tile_maps({"DCIS": [1.0, np.inf]}), tiles)
