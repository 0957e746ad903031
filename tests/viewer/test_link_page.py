"""The address of the page: it restores what was looked at, and may be wrong."""

import pytest

from .fake_server import CLASSES, SIDE, link, row, top, whatif
from .pages import (
    BARE,
    SLIDE,
    assert_shows,
    expect,
    hash_of,
    lasso,
    settled,
    shows,
    until,
    until_equal,
    view_of,
)


def test_link_contains_the_zoom_and_split_views_move_together(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}&split=factual")
    expect(page.locator(".pane")).to_have_count(2)
    expect(page.locator("figcaption").nth(0)).to_contain_text("Evidence: macro")
    expect(page.locator("figcaption").nth(1)).to_contain_text("Attention weight")
    page.locator(".tile.for").first.click()
    best = top(SLIDE, 2, 8)["supporting"][0]
    middle = [pytest.approx(best[axis] + SIDE / 2, abs=2) for axis in ("x", "y")]
    _, _, width = until_equal(page, lambda: view_of(page), (*middle, pytest.approx(8 * SIDE, rel=0.01)))

    def scale_bars(page):
        bars = page.locator(".scale-bar").evaluate_all("bars => bars.map(bar => [bar.textContent, bar.offsetWidth])")
        return [(text, pytest.approx(pixels, rel=0.01)) for text, pixels in bars]

    until(page, lambda: scale_bars(page)[0][0] == scale_bars(page)[1][0])
    page.get_by_role("button", name="Zoom in").click()
    until(page, lambda: view_of(page)[2] < 0.8 * width)
    again = opened(f"{made_up}/{hash_of(page)}")
    expect(again.locator(".scale-bar").nth(1)).to_have_text(page.locator(".scale-bar").nth(1).inner_text())
    page.keyboard.press("0")
    until(page, "!location.hash.includes('view=')")
    page.keyboard.press("s")
    expect(page.locator(".pane")).to_have_count(1)


def test_link_restores_the_view_and_browser_history_works(opened, made_up):
    page = opened(f"{made_up}/{link(4)}&map=difference&class=1&split=evidence&split_class=0&opacity=0.4")
    assert page.locator("#slide").inner_text() == row(4)["slide"]
    assert page.locator("#map").input_value() == "difference" and page.locator("#class").input_value() == "1"
    assert page.locator("#split").input_value() == "evidence" and page.locator("#opacity").input_value() == "0.4"
    assert "Evidence: normal" in page.locator("figcaption").nth(1).inner_text()
    page.keyboard.press("j")
    shows(page, 5)
    page.locator("#map").select_option("counterfactual")
    settled(page)
    page.go_back()
    expect(page.locator("#map")).to_have_value("difference")
    expect(page.locator("#slide")).to_have_text(row(5)["slide"])
    page.go_back()
    shows(page, 4)
    page.go_forward()
    shows(page, 5)


@pytest.mark.parametrize("hash_", ["#slide=99999999", "#map=none&class=77&split=x&opacity=9&view=a,b", "#%E0%A4%A"])
def test_invalid_link_does_not_break_the_page(opened, made_up, hash_):
    page = opened(f"{made_up}/{hash_}")
    words = "There is no slide “99999999” in this run" if "9999" in hash_ else "Evidence"
    expect(page.locator("#panes")).to_contain_text(words)


def test_link_restores_removals_and_the_list(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}")
    lasso(page, [(5120, 4096), (9216, 4096), (9216, 7680), (5120, 7680)])
    page.get_by_role("button", name="Keep only these").click()
    page.wait_for_selector(".moves")
    page.get_by_role("button", name="Remove the top 10 %").click()
    expect(page.locator(".trials tbody tr")).to_have_count(2)
    page.get_by_role("button", name="all but region 1", exact=True).click()
    expect(page.locator(".trials tr.chosen th")).to_have_text("all but region 1")
    page.get_by_role("searchbox").fill("patient_00")
    page.get_by_role("button", name="probability").click()
    until(page, "location.hash.includes('removal=0') && location.hash.includes('sort=value')")
    compared, moved = page.locator(".trials").inner_text(), page.locator(".moves").inner_text()
    again = opened(f"{made_up}/{hash_of(page)}")
    until_equal(
        again, lambda: [again.locator(name).all_inner_texts() for name in (".trials", ".moves")], [[compared], [moved]]
    )
    expect(again.locator(".trials tr.chosen th")).to_have_text("all but region 1")
    for one in (page, again):
        expect(one.locator("#count")).to_have_text("30 of 3,000")
    expect(again.locator("[role=columnheader].value")).to_have_attribute("aria-sort", "ascending")
    again.get_by_role("button", name="Undo").click()
    expect(again.locator(".moves")).to_have_count(0)
    again.keyboard.press("j")
    until(again, "!location.hash.includes('removed=')")
    again.get_by_role("button", name="Copy link").click()
    until_equal(again, lambda: again.locator("#link").input_value(), again.evaluate("location.href"))


def test_link_opened_in_the_same_tab_is_followed_even_while_another_is_loading(opened, made_up):
    page = opened(f"{made_up}/{link(BARE)}")
    page.route("**/case/0/whatif", lambda route: None)  # never answered
    page.goto(f"{made_up}/{link(SLIDE)}&removed=0-9:edge&removal=0")
    shows(page, SLIDE)
    page.goto(f"{made_up}/{link(BARE)}")
    shows(page, BARE)
    page.goto(f"{made_up}/{link(BARE)}&removed=0-9:edge&removal=0")
    expected = whatif(BARE, {"remove": list(range(10))})
    assert_shows(page, expected["before"], expected["after"], CLASSES)


def test_numbers_in_a_link_are_read_back_or_refused(opened, made_up):
    page = opened(
        f"{made_up}/#removed=7-3:x&removed=0-99999999:y&removed=1:z&removal=2&removed=:&removed=1-2&removal=5&sort=no"
    )
    sets = [[], [0], [0, 1, 2], [5, 7, 8, 9], [0, 2, 4], list(range(400))]
    found = page.evaluate(
        "async sets => { const { ranges, numbersIn } = await import('/page/state.js');"
        " return sets.map(one => numbersIn(ranges(one), 400)); }",
        sets,
    )
    assert found == [None, *sets[1:]]
    bad = ["", "3-1", "400", "0-400", "a", "1..2", "-1", "1-", "0-399.0", "99999999999"]
    assert page.evaluate(
        "async bad => { const { numbersIn } = await import('/page/state.js'); return bad.map(one => numbersIn(one, 400)); }",
        bad,
    ) == [None] * len(bad)
    until(page, "location.hash.endsWith('#removed=1:z&removal=0&sort=no')")
    expect(page.locator("#whatif .verdict")).to_contain_text("without 1 tile")
    page.keyboard.press("u")
    expect(page.locator(".trials tbody th")).to_have_text(["z"])
