"""Drawn legends say what a value is, what 0 means, and that nearly uniform attention shows nothing."""

import numpy as np
import pytest

from carmil.maps import comparison, legend
from carmil.maps.comparison import draw_comparison
from carmil.maps.drawing import write_pngs
from carmil.maps.painting import Painter
from carmil.maps.tile_maps import TileMap, tile_maps
from carmil.targets.target import EvidenceWords

CAUTION = "attention is nearly uniform: on this slide it is spread over 100 % of the instances, so maps of attention point nowhere"


@pytest.fixture
def painted(plain_slide, grid_of_tiles):
    """Return a function that makes a painter of maps of a slide with 18 tiles."""
    slide = plain_slide(3000, 1500)
    return lambda values: Painter(slide, grid_of_tiles(slide, 500), tile_maps(values))


@pytest.fixture
def texts(monkeypatch):
    """Return the list of texts drawn into pictures."""
    drawn, draw_text = [], legend.draw_text

    def record(draw, at, text, size, **how):
        drawn.append(text)
        return draw_text(draw, at, text, size, **how)

    for module in (legend, comparison):
        monkeypatch.setattr(module, "draw_text", record)
    return drawn


def test_picture_and_comparison_state_that_attention_is_nearly_uniform(painted, texts, tmp_path):
    uniform = painted({"factual": np.full(18, 1 / 18)})
    write_pngs(uniform, [tmp_path / "a.png"], longest=1200)
    assert CAUTION in texts
    texts.clear()
    draw_comparison(uniform, tmp_path / "b.png")
    assert CAUTION in " ".join(texts)
    texts.clear()
    concentrated = painted({"factual": np.eye(18)[3]})
    write_pngs(concentrated, [tmp_path / "a.png"], longest=1200)
    draw_comparison(concentrated, tmp_path / "b.png")
    assert "nearly uniform" not in " ".join(texts)


def test_smoothing_does_not_make_attention_uniform(painted):
    weights = np.zeros(18)
    weights[7] = 1
    smoothed = TileMap("factual", weights, "factual").smooth(painted({"factual": weights}).tiles.corners, 1e5, "a lot")
    assert np.allclose(smoothed.values, 1 / 18) and smoothed.why_uniform == ""


def test_tiles_without_a_value_are_excluded_from_the_share_of_instances():
    values = np.append(np.full(9, 1 / 9), [np.nan] * 9)
    assert "spread over 100 % of the instances" in TileMap("counterfactual", values, "counterfactual").why_uniform


def test_legend_explains_the_values_of_a_map(painted, texts, tmp_path):
    maps = painted({"DCIS": np.linspace(-3, 1, 18), "factual": np.full(18, 1 / 18)})
    write_pngs(maps, [tmp_path / "a.png", tmp_path / "b.png"], longest=1200)
    assert "contribution to the logit of DCIS: blue supports, orange refutes, 0 neither" in texts
    assert "share of the slide's attention: all weights add up to 1, and 0 is none" in texts


def test_legend_explains_that_blue_raises_and_orange_lowers_a_number():
    words = EvidenceWords("raises", "lowers", "log hazard")
    risk = TileMap("risk", np.ones(3), "evidence", words=words)
    assert risk.meaning == "contribution to the log hazard: blue raises it, orange lowers it, 0 neither"
