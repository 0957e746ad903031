"""The answer on the page: its numbers are those of the server, on made-up cases and on a trained run."""

import numpy as np
import pytest

from carmil.viewer.app import guarded_app
from carmil.viewer.guard import known_hosts
from carmil.words import probability_text

from .fake_server import answer, deletion, evidence, link, top
from .pages import (
    BARE,
    DIGITS,
    SLIDE,
    assert_probabilities,
    assert_shows,
    expect,
    hash_of,
    lasso,
    settled,
    shows,
    tiles_within,
    until,
)


def test_page_writes_probabilities_as_reports_do(opened, made_up):
    page = opened(f"{made_up}/")
    chances = [*np.linspace(0, 1, 1001).tolist(), 0.0625, 0.9994, 0.9995, 1e-9]
    texts = page.evaluate(
        "async chances => { const words = await import('/page/words.js'); return chances.map(words.probability); }",
        chances,
    )
    assert texts == [probability_text(p) for p in chances]


def test_page_shows_the_numbers_of_the_server(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}&class=1")
    everything = np.arange(len(evidence(SLIDE)))
    assert_probabilities(page, answer(SLIDE, everything))
    assert_probabilities(page, answer(SLIDE, everything, counterfactual=True), column=1)
    best = top(SLIDE, 1, 8)["supporting"][0]
    assert page.locator(".tile.for").first.get_attribute("aria-label").startswith(f"tile {best['instance']}, +")
    page.locator("#deletion").scroll_into_view_if_needed()
    curve = deletion(SLIDE, 1)
    half = next(s for s, p in zip(curve["share"], curve["most"], strict=True) if p < curve["most"][0] / 2)
    expect(page.locator("#deletion")).to_contain_text(f"loses half of its probability after {100 * half:.0f} %")


@pytest.mark.finding(n=1)
def test_header_shows_pixels_and_micrometres_per_pixel_of_tiles(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}")
    assert "tiles of 256 px at 1 µm/px · slide 0.5 µm/px" in page.locator("#facts").inner_text()
    page = opened(f"{made_up}/{link(DIGITS)}")
    assert "px" not in page.locator("#facts").inner_text()


def test_page_reports_that_the_server_has_stopped(opened, made_up):
    page = opened(f"{made_up}/{link(BARE)}", refused=True)
    page.route("**/api/**", lambda route: route.abort())
    page.get_by_role("button", name="Remove the top 10 %").click()
    expect(page.get_by_text("Is “carmil view” still running?")).to_be_visible()


def test_page_shows_the_results_of_a_trained_run(opened, serve, answers, run, number_of):
    """Open, step, switch maps and classes, zoom, split, remove a region, compare with Python, and follow a deep link."""
    address = serve(guarded_app(answers, is_known=known_hosts([], any_address=False)))
    number = number_of["s1"]
    page = opened(f"{address}/#slide=s1&class=1")
    everything = answers.whatif.answer(number, [])
    assert_probabilities(page, everything.factual)
    assert_probabilities(page, everything.counterfactual, column=1)
    expect(page.locator("#count")).to_have_text("9")

    corners = [(4, 4), (320, 4), (320, 128), (4, 128)]
    lasso(page, corners, size=(1000, 700))
    inside = tiles_within(corners, answers.pictures.places(number).centres.tolist())
    assert 0 in inside and 5 <= len(inside) < 31
    page.get_by_role("button", name=f"Remove {len(inside)} tiles").click()
    assert_shows(page, everything.factual, answers.whatif.answer(number, inside).factual, run.outputs)

    for name in ("factual", "counterfactual", "difference", "evidence"):
        page.locator("#map").select_option(name)
        settled(page)
    page.locator("#class").select_option("a")
    page.get_by_text("More", exact=True).click()
    page.locator("#split").select_option("factual")
    page.get_by_text("More", exact=True).click()
    expect(page.locator(".pane")).to_have_count(2)
    expect(page.locator("figcaption").nth(0)).to_contain_text("supports “a”")
    settled(page)
    page.locator("#deletion").scroll_into_view_if_needed()
    page.wait_for_selector("#deletion svg")
    page.get_by_role("button", name="Zoom in").click()
    until(page, "location.hash.includes('view=')")

    page.keyboard.press("j")
    shows(page, answers.run.cases[number + 1].slide)
    page.go_back()
    shows(page, "s1")
    again = opened(f"{address}/{hash_of(page)}")
    expect(again.locator("#slide")).to_have_text("s1")
    expect(again.locator("#class")).to_have_value("0")
