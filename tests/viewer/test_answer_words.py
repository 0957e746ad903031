"""The words of the answer and of the legends: what a value is, what its sign and 0 mean, and what no map can show."""

import numpy as np
import pytest
import torch

from carmil.evidence.concentration import UNIFORM as NEARLY_ALL
from carmil.evidence.concentration import effective_share, uniform_caution
from carmil.models.pooling import Offsets
from carmil.viewer.maps import CaseMaps
from carmil.viewer.responses import Responses
from carmil.viewer.slide_files import SlideFiles

from .fake_server import CAUTION, CLASSES, UNIFORM, link
from .pages import SLIDE, expect


@pytest.fixture
def with_attention(run, number_of):
    """Return a function that gives slide s3 attention weights, and returns the responses about it and its number."""

    def change(weights):
        responses, number = Responses(run, SlideFiles(None, [])), number_of["s3"]
        responses.maps.evidence_of(number).columns["a"] = torch.as_tensor(weights, dtype=torch.float32)
        return responses, number

    return change


def test_answer_and_legend_state_that_attention_is_nearly_uniform(run, number_of, with_attention):
    n = run.size(number_of["s3"])
    weights = torch.linspace(0.9, 1.1, n).softmax(0)
    share = float(effective_share(weights.unsqueeze(1), Offsets(torch.tensor([0, n]))))
    caution = uniform_caution(share, "attention", where="on this slide", maps="maps of attention")
    assert share > NEARLY_ALL and caution.startswith("attention is nearly uniform: on this slide it is spread over")
    responses, number = with_attention(weights)
    assert responses.maps.attention_caution(number, 0) == caution
    assert responses.maps.shown(number, "factual", 0).caution == caution
    assert responses.maps.shown(number, "evidence", 0).caution == ""


def test_concentrated_attention_has_no_caution(run, number_of, with_attention):
    weights = torch.zeros(run.size(number_of["s3"]))
    weights[:3] = 1 / 3
    responses, number = with_attention(weights)
    assert responses.maps.attention_caution(number, 0) == responses.maps.shown(number, "factual", 0).caution == ""


def test_legend_of_evidence_explains_unit_sign_zero_and_sum(run, number_of):
    shown = CaseMaps(run).shown(number_of["s3"], "evidence", 1)
    assert shown.of == (
        "blue supports, orange refutes, 0 neither: contribution to the logit of b; all add up to its change from what is "
        "attended least"
    )
    weights = CaseMaps(run).shown(number_of["s3"], "factual", 1)
    assert weights.of == "share of the slide's attention: all weights add up to 1, and 0 is none" and weights.low == 0
    assert np.sum(weights.values) == pytest.approx(1, abs=1e-5)


def test_page_states_that_attention_is_nearly_uniform(opened, made_up):
    page = opened(f"{made_up}/{link(UNIFORM)}")
    said = f"{CAUTION[0].upper()}{CAUTION[1:]}."
    expect(page.locator("#caution")).to_have_text(said)
    expect(page.locator("figcaption .caution")).to_have_count(0)  # of the map of evidence
    page.locator("#map").select_option("factual")
    expect(page.locator("figcaption .caution")).to_have_text(said)
    page.goto(f"{made_up}/{link(SLIDE)}&map=factual")
    expect(page.locator("figcaption .pane-title")).to_contain_text("Share of the slide's attention")
    expect(page.locator("#caution")).to_be_hidden()
    expect(page.locator("figcaption .caution")).to_have_count(0)


def test_legends_explain_both_ends_and_zero(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}&class=2")
    ends = page.locator(".ends span")
    meaning = f"Blue supports, orange refutes, 0 neither: contribution to the logit of {CLASSES[2]};"
    expect(page.locator("figcaption .of").first).to_contain_text(meaning)
    expect(ends.nth(1)).to_have_text("0 neither")
    page.locator("#map").select_option("factual")
    expect(ends.first).to_contain_text("no attention")
    expect(ends.last).to_contain_text("most on this slide")
    page.locator("#map").select_option("difference")
    expect(ends.nth(1)).to_have_text("0 equal")
