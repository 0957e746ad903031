"""What a map is called, and its values scaled for colours."""

import numpy as np
import pytest

from carmil.maps.tile_maps import scaled, tile_maps


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
