"""Smoothing of heat maps for display: its radius, its description and what it preserves."""

import numpy as np
import pytest

from carmil.errors import CarmilError
from carmil.maps.tile_maps import Smoothing, TileMap
from carmil.slides.slide import Tiles

CORNERS = np.array([[0, 0], [100, 0], [200, 0], [0, 100], [900, 900]])
TILES = Tiles("s", CORNERS, 100.0, 50, 1.0, 1000, 1000, 0.5)
VALUES = np.array([4.0, -1.0, np.nan, 2.0, 3.0])


def test_smoothing_radius_is_given_in_tiles_or_micrometres():
    one = TileMap("tumour", VALUES, "evidence")
    in_tiles, in_microns = Smoothing.parse("1")(one, TILES), Smoothing.parse("50um")(one, TILES)
    assert np.array_equal(in_tiles.values, in_microns.values, equal_nan=True)
    # Tiles 0, 1 and 3 are neighbours; 2 has no value and receives none; 4 has no neighbour.
    assert np.allclose(in_tiles.values, [4 / 3 - 1 / 2 + 1, 4 / 3 - 1 / 2, np.nan, 4 / 3 + 1, 3], equal_nan=True)
    assert in_tiles.title == "evidence for tumour, smoothed over 1 tile"
    assert in_microns.title == "evidence for tumour, smoothed over 50 µm"
    assert np.isclose(np.nansum(in_tiles.values), np.nansum(VALUES))


def test_zero_radius_negligible_maps_and_score_maps_are_not_smoothed():
    one = TileMap("tumour", VALUES, "evidence")
    assert Smoothing.parse("0")(one, TILES) is one
    negligible = TileMap("tumour", VALUES * 1e-6, "evidence")
    assert negligible.negligible and Smoothing.parse("2")(negligible, TILES) is negligible
    scores = TileMap("factual", VALUES, "factual", scores=True)
    assert Smoothing.parse("2")(scores, TILES) is scores


@pytest.mark.parametrize("words", ["", "two", "-1", "2 miles", "1e400", "inf"])
def test_invalid_smoothing_radius_raises_an_error(words):
    with pytest.raises(CarmilError, match="expected a radius in tiles, such as 2, or in micrometres, such as 300um"):
        Smoothing.parse(words)
