"""Titles of heat maps, and scaling of their values to colours."""

import numpy as np
import pytest

from carmil.maps.tile_maps import TileMap, colour_limits, leading_map, logits_apart, scale_values, tile_maps
from carmil.targets.target import EvidenceWords


def test_minmax_scaling_preserves_proportions_and_zero_of_signed_maps():
    np.testing.assert_allclose(scale_values(np.array([2.0, 3.0, 6.0]), "minmax", signed=False), [0, 0.25, 1])
    np.testing.assert_allclose(scale_values(np.array([-1.0, 0.0, 4.0]), "minmax", signed=True), [-0.25, 0, 1])


def test_rank_scaling_depends_on_the_order_only():
    values = np.random.default_rng(0).normal(size=50)
    np.testing.assert_allclose(
        scale_values(values, "rank", signed=False), scale_values(np.exp(3 * values), "rank", signed=False)
    )
    signed = scale_values(np.array([-9.0, 0.0, 1.0, 2.0]), "rank", signed=True)
    np.testing.assert_allclose(signed, [-1, 0, 1 / 3, 2 / 3])


@pytest.mark.parametrize("scale", ["minmax", "rank"])
@pytest.mark.parametrize("signed", [True, False])
def test_scaling_a_constant_or_empty_map_gives_zero_or_nan(scale, signed):
    assert (scale_values(np.zeros(4), scale, signed=signed) == 0).all()
    assert np.isnan(scale_values(np.full(4, np.nan), scale, signed=signed)).all()
    assert len(scale_values(np.empty(0), scale, signed=signed)) == 0


def test_map_title_and_sign_depend_on_its_kind():
    factual, counterfactual, difference, evidence = tile_maps(
        {"factual": [1.0], "counterfactual": [1.0], "difference": [1.0], "DCIS": [1.0]}
    )
    assert [one.signed for one in (factual, counterfactual, difference, evidence)] == [False, False, True, True]
    assert evidence.title == "evidence for DCIS"
    assert evidence.ends == ("against DCIS", "for DCIS")
    assert tile_maps({"DCIS": [1.0]}, {"DCIS": "factual"}, model="car")[0].title == "car: attention weight for DCIS"


@pytest.mark.finding(n=9)
def test_map_titles_distinguish_attention_weights_from_attention_scores():
    values = np.array([0.2, 0.8])
    assert [one.title for one in tile_maps({"factual": values, "counterfactual": values, "difference": values})] == [
        "attention weight",
        "counterfactual attention weight",
        "attention weight minus counterfactual attention weight",
    ]
    scores = TileMap("factual", np.array([-3.0, 1.0]), "factual", scores=True)
    assert scores.title == "attention score"
    assert scores.scaling("minmax").startswith("from the lowest to the highest value")
    assert colour_limits(scores, "minmax") == ("(−3)", "(1)") and scores.shades("minmax").tolist() == [0, 1]
    (weights, *_) = tile_maps({"factual": values})
    assert weights.scaling("minmax").startswith("from 0 to the largest weight")
    assert colour_limits(weights, "minmax") == ("(0)", "(0.8)") and weights.shades("minmax").tolist() == [0.25, 1]


@pytest.mark.finding(n=3)
def test_negligible_or_constant_map_is_not_stretched_over_the_colour_scale():
    rng = np.random.default_rng(0)
    noise = 1e-5 * rng.normal(size=100)
    evidence, difference = tile_maps({"DCIS": noise, "difference": noise})
    assert evidence.negligible and difference.negligible
    for scale in ("minmax", "rank"):
        assert (evidence.shades(scale) == 0).all() and evidence.scaling(scale).startswith("negligible, drawn as 0")
    (uniform,) = tile_maps({"factual": 0.01 + noise / 100})
    assert uniform.even and (uniform.shades("minmax") > 0.99).all() and (uniform.shades("rank") == 0).all()
    (one_tile,) = tile_maps({"DCIS": np.array([0.0, 0.0, 0.02])})
    assert not one_tile.negligible and one_tile.shades("minmax").tolist() == [0, 0, 1]


@pytest.mark.finding(n=3)
def test_evidence_that_is_small_compared_with_the_distance_to_another_answer_is_drawn_faint():
    """The whole map changes the difference between the two classes by 0.12; the answer changes at 4."""
    values = np.array([0.03, 0.02, -0.01, 0.0])
    known, of_enough, without = (
        TileMap("a", values, "evidence", apart=0.12, turning=turning) for turning in (4.0, 1.0, None)
    )
    assert known.fill == pytest.approx(0.12 / 0.4)
    assert known.shades("minmax") == pytest.approx(0.3 * values / 0.03)
    assert known.shades("rank") == pytest.approx(0.3 * of_enough.shades("rank"))
    assert colour_limits(known, "minmax") == ("(−0.1)", "(+0.1)")
    words = (
        "all tiles together change the difference between any two class logits by at most 0.12; another answer needs 4"
    )
    assert known.why_faint == words and f"faint: {words}" in known.scaling("minmax")
    assert not known.negligible and known.signs.tolist() == [1, 1, -1, 0]
    for one in (of_enough, without):
        assert one.fill == 1 and one.why_faint == "" and one.shades("minmax")[0] == 1
    risk = EvidenceWords("raises the", "lowers the", "log hazard")
    (one,) = [TileMap("risk", values, "evidence", turning=1.0, words=risk)]
    assert one.fill == pytest.approx(0.6)
    assert one.why_faint == "all tiles together change the log hazard by at most 0.06; another answer needs 1"
    assert TileMap("difference", values, "difference", turning=100.0).fill in (0, 1)


def test_evidence_is_negligible_if_it_hardly_changes_class_differences():
    large, small = np.array([2.0, -3.0, 1.0]), np.array([4e-3, -2e-3, 1e-3])
    assert logits_apart([large, large + small]) == pytest.approx(7e-3)
    same_for_both = tile_maps({"a": large, "b": large + small})  # both logits change equally, so no probability changes
    assert [one.negligible for one in same_for_both] == [True, True]
    assert same_for_both[0].scaling("minmax") == (
        "negligible, drawn as 0: all tiles together change the difference between any two class logits by less than 0.01"
    )
    opposite = tile_maps({"a": small, "b": -small})  # 0.007 for each class, but a difference of 0.014
    assert logits_apart([small, -small]) == pytest.approx(0.014)
    assert [one.apart for one in opposite] == pytest.approx([0.014, 0.014])
    assert opposite[0].why_negligible == "all tiles together change the logit of a by less than 0.01"
    twice = tile_maps({"a": 2 * small, "b": -2 * small, "factual": np.full(3, 1 / 3)})
    assert not any(one.negligible for one in twice)
    three = [np.array([0.0, 1.0]), np.array([2.0, 1.0]), np.array([5.0, -1.0])]
    assert logits_apart(three) == 5 + 2


@pytest.mark.finding(n=3)
def test_logit_difference_is_undefined_for_one_class_or_identical_maps():
    attention = np.array([0.9, 0.1])
    assert (
        logits_apart([]) is None and logits_apart([attention]) is None and logits_apart([attention, attention]) is None
    )
    assert not any(one.negligible for one in tile_maps({"a": attention, "b": attention}))
    assert logits_apart([np.array([np.nan, 1.0]), np.array([np.nan, 3.0])]) == 2
    assert logits_apart([np.zeros(2), np.zeros(2)]) == 0
    assert logits_apart([np.array([np.inf, 1.0]), np.array([np.inf, 3.0])]) == 2


@pytest.mark.finding(n=3)
def test_leading_map_is_the_first_evidence_map_or_else_attention():
    maps = tile_maps({"factual": [1.0], "difference": [1.0], "DCIS": [1.0], "benign": [1.0]})
    assert leading_map(maps).name == "DCIS"
    assert leading_map(maps[:2]).name == "factual"
