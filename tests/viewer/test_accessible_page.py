"""The page for everybody: keys, themes, phones, and what axe-core finds."""

import pytest

from .fake_server import BROKEN, link, row
from .pages import BARS, DIGITS, PHONE, SLIDE, assert_accessible, expect, hash_of, settled, until_equal


def test_keyboard_shortcuts_are_listed_and_can_be_disabled(opened, made_up):
    page = opened(f"{made_up}/{link(0)}")
    page.keyboard.press("?")
    keys = page.get_by_role("dialog", name="Keys")
    expect(keys).to_be_visible()
    page.get_by_label("single-key shortcuts are on").uncheck()
    page.keyboard.press("Escape")
    expect(keys).to_be_hidden()
    page.keyboard.press("j")
    page.keyboard.press("?")  # this key is always on, and comes after the other
    expect(keys).to_be_visible()
    assert hash_of(page).startswith(link(0)) and page.locator("#slide").inner_text() == row(0)["slide"]


def test_theme_follows_the_system_until_the_user_selects_one(opened, made_up):
    page = opened(f"{made_up}/{link(1)}", color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    until_equal(page, lambda: page.evaluate(ground), "rgb(18, 22, 29)")
    page.get_by_role("button", name="Theme: system").click()
    until_equal(page, lambda: page.evaluate(ground), "rgb(246, 247, 249)")
    page.reload()
    settled(page)
    until_equal(page, lambda: page.evaluate(ground), "rgb(246, 247, 249)")


def test_phone_shows_tissue_before_controls_and_answer_without_overflow(opened, made_up):
    for number in (SLIDE, DIGITS, BARS):
        page = opened(f"{made_up}/{link(number)}&split=factual", viewport=PHONE)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        tops = [page.locator(name).first.bounding_box()["y"] for name in (".stage", ".controls", "#why")]
        assert tops == sorted(tops) and tops[0] < 200 and page.locator("#cohort").is_hidden()
        page.get_by_role("button", name="Slides").click()
        expect(page.locator("#cohort")).to_be_visible()
        assert page.locator("#cohort").bounding_box()["y"] < page.locator(".stage").first.bounding_box()["y"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "hash_",
    [
        f"{link(0)}&split=factual&view=7000,5000,6000&contours=50",
        link(1),
        link(2),
        link(3),
        link(BROKEN),
        "keys",
        "phone",
    ],
)
def test_axe_finds_no_violation(opened, made_up, axe, scheme, hash_):
    look = {"viewport": PHONE} if hash_ == "phone" else {}
    page = opened(
        f"{made_up}/{hash_ if hash_[0] == '#' else link(0)}",
        refused=True,
        color_scheme=scheme,
        bypass_csp=True,
        **look,
    )
    if hash_ == "keys":
        page.keyboard.press("?")
        expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    elif hash_ != link(BROKEN):
        page.get_by_role("button", name="Remove the top 10 %").click()
        page.wait_for_selector(".moves")
        page.locator("#deletion").scroll_into_view_if_needed()
        page.wait_for_selector("#deletion svg")
        if page.locator("#zooms").is_visible():
            page.get_by_role("button", name="Ruler").click()
        page.get_by_text("More", exact=True).click()
    assert_accessible(page, axe)
