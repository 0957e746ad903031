"""The page in a real browser, on runs that predict a risk or a number."""

import json

import numpy as np
import pytest

from carmil.viewer.app import guarded_app
from carmil.viewer.cases import read_cases
from carmil.viewer.guard import known_hosts
from carmil.viewer.responses import Responses
from carmil.viewer.slide_files import SlideFiles

from .pages import expect


def text_of(value, decimals, *, signed=False):
    """Return a number as the page shows it."""
    text = f"{abs(value):.{decimals}f}"
    sign = "" if float(text) == 0 else "−" if value < 0 else "+" if signed else ""
    return sign + text


def viewer_of(folder):
    responses = Responses(read_cases(folder), SlideFiles(None, []))
    return responses, guarded_app(responses, is_known=known_hosts([], any_address=False))


def target_of(responses):
    return json.loads(responses.cohort())["target"]


def test_page_shows_a_risk_and_the_tiles_that_raise_and_lower_it(opened, serve, run_of_kind):
    """Check list, answer, legend, tiles, what-if and deletion curve of a survival run."""
    responses, app = viewer_of(run_of_kind("survival"))
    cases, decimals = responses.run.cases, target_of(responses)["format"]["decimals"]
    risks = [float(case.predicted[0]) for case in cases]
    page = opened(f"{serve(app)}/#slide={cases[4].slide}")
    assert not page.get_by_label("errors only").is_visible() and not page.locator("#class").is_visible()
    heading = page.locator("[role=columnheader].value button")
    assert heading.inner_text() == "risk"
    heading.click()
    heading.click()
    first = page.locator(".rows .row").first
    highest = int(np.argmax(risks))
    expect(first.locator(".slide")).to_have_text(cases[highest].slide)
    expect(first.locator(".value")).to_have_text(text_of(max(risks), decimals, signed=True))
    expect(first.locator(".label")).to_have_text(cases[highest].label)
    expect(first.locator(".answer")).to_have_text("higher risk")

    answer = page.locator("#answer")
    assert cases[4].answer in answer.inner_text() and cases[4].label in answer.inner_text()
    both = (risks[4], float(cases[4].counterfactual[0]))
    shown = answer.locator(".figure").all_inner_texts()
    assert shown == [text_of(risk, decimals, signed=True) for risk in both]
    assert "0 is the mean of the training slides" in answer.inner_text()

    legend = page.locator("figcaption").inner_text()
    assert "lowers the risk" in legend and "raises the risk" in legend
    assert "Evidence: risk" in legend and legend.count("contribution to the log hazard") == 1
    for title in ("What raises and what lowers the risk", "Raises the risk most", "Lowers the risk most"):
        assert page.get_by_role("heading", name=title).is_visible()

    button = page.get_by_role("button", name="Remove the top 10 % of evidence")
    assert button.get_attribute("title") == "the 10 % of the tiles that raise the risk most"
    button.click()
    page.wait_for_selector(".moves")
    removed = responses._removed(4, {"top": 0.1, "map": "evidence", "class": 0})
    before, after = (responses.whatif.answer(4, gone).factual[0] for gone in ([], removed))
    words = [text_of(value, decimals, signed=True) for value in (before, after, after - before)]
    expect(page.locator(".moves")).to_contain_text(f"{words[0]} → {words[1]}")
    expect(page.locator(".moves tbody td").nth(1)).to_have_text(words[2])
    assert after < before
    stays = responses.run.cases[4].decision.answer([after]) == cases[4].answer
    expect(page.locator("#whatif")).to_contain_text(f"the answer {'stays' if stays else 'changes to'}")

    page.locator("#deletion").scroll_into_view_if_needed()
    page.wait_for_selector("#deletion svg")
    assert "Risk (log hazard)" in page.locator("#deletion").inner_text()
    assert "what raises it most first" in page.locator("#deletion .key").inner_text()
    assert f"instead of {words[0]}" in page.locator("#deletion").inner_text()
    for text in ("probability", "supports", "refutes", "For and against", "class"):
        assert text not in page.locator("main").inner_text()


@pytest.mark.parametrize(
    ("kind", "name", "unit"),
    [
        ("value", "age", "the age in standard deviations"),
        ("ordinal", "grade", "the logit of a higher grade"),
        ("labels", "node", "the logit of node"),
    ],
)
def test_page_shows_all_other_kinds_of_targets(opened, serve, run_of_kind, kind, name, unit):
    responses, app = viewer_of(run_of_kind(kind))
    target = target_of(responses)
    page = opened(f"{serve(app)}/#slide={responses.run.cases[3].slide}")
    assert page.get_by_label("errors only").is_visible() == (kind == "ordinal")
    assert page.locator("#class").is_visible() == (kind == "labels")
    assert page.locator("[role=columnheader].answer").count() == int(kind != "value")
    legend = page.locator("figcaption").inner_text()
    assert f"Evidence: {name}" in legend and legend.count(f"contribution to {unit}") == 1
    rows = page.locator(".chances tbody th").all_inner_texts()
    assert [row.replace("\n", " ") for row in rows] == [row["name"] for row in target["rows"]]
    page.get_by_role("button", name="Remove the top 10 % of evidence").click()
    page.wait_for_selector(".moves")
    assert page.locator(".moves tbody tr").count() == len(target["rows"])
    assert ("the answer" in page.locator("#whatif .verdict").inner_text()) == (kind != "value")
    if kind == "labels":
        page.locator("#class").select_option("her2")
        expect(page.locator("#tiles")).to_contain_text("Most supporting “her2”")
