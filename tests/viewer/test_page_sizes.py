"""Everything on the page can be reached and works on a desk, a tablet and a phone, in the light and the dark theme.

One page is opened per size and theme; every test opens a slide of its own in it, as somebody at work would.
"""

import re
from pathlib import Path
from unittest.mock import ANY
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from carmil.evidence.smoothing import smooth_map
from carmil.words import probability_text

from .fake_server import (
    CLASSES,
    FAINT,
    HEIGHT,
    NEGLIGIBLE,
    SIDE,
    TINY,
    TRUTH,
    WHY_FAINT,
    WIDTH,
    answer,
    evidence,
    link,
    places,
    row,
    top,
    whatif,
)
from .pages import (
    DESK,
    PATIENCE,
    PHONE,
    SVG,
    TABLET,
    assert_accessible,
    assert_shows,
    broken_words,
    click_overview,
    colour_at,
    downloaded,
    drag,
    drawn,
    expect,
    hash_of,
    magnification,
    on_screen,
    painted,
    points,
    removals_compared,
    settled,
    shows,
    tiles_within,
    troubles_of,
    until,
    until_equal,
    view_of,
)

SIZES = {"desk": DESK, "tablet": TABLET, "phone": PHONE}
CORNERS = [(5120, 4096), (9216, 4096), (9216, 7680), (5120, 7680)]  # edges of tiles
LONG = "Squamous cell carcinoma of the head and neck, keratinising"


@pytest.fixture(
    scope="module",
    params=[(size, scheme) for size in SIZES for scheme in ("light", "dark")],
    ids=lambda look: "-".join(look),
)
def workbench(browser, made_up, request):
    """Yield a page of one size and theme, and what it logged."""
    name, scheme = request.param
    context = browser.new_context(
        viewport=SIZES[name],
        color_scheme=scheme,
        reduced_motion="reduce",
        has_touch=name == "phone",
        bypass_csp=True,  # for axe-core
    )
    context.set_default_timeout(1000 * PATIENCE)
    page = context.new_page()
    troubles = troubles_of(page)
    page.goto(f"{made_up}/{link(0)}")
    yield page, troubles
    context.close()


@pytest.fixture
def page(workbench):
    """Return the page; after the test nothing reaches beyond its edge, and it has logged no errors."""
    page, troubles = workbench
    yield page
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    assert not troubles


def show(page, made_up, number, more=""):
    """Open a slide, with all of it in view."""
    page.goto(f"{made_up}/{link(number)}{more}")
    shows(page, number)
    bring_slide(page)


def bring_slide(page):
    page.locator(".stage").first.scroll_into_view_if_needed()
    drawn(page)


def is_phone(page):
    return page.viewport_size == PHONE


def press(page, name):
    """Press a button, and come back to the slide, which on a phone may be above the button."""
    page.get_by_role("button", name=name, exact=True).click()
    bring_slide(page)


def shows_whole(page, box):
    """Return whether all of an element is in the window."""
    size = page.viewport_size
    return (
        box["x"] >= 0
        and box["y"] >= 0
        and box["x"] + box["width"] <= size["width"]
        and box["y"] + box["height"] <= size["height"]
    )


def apart(one, other):
    """Return whether two boxes do not overlap."""
    return (
        one["x"] + one["width"] <= other["x"]
        or other["x"] + other["width"] <= one["x"]
        or one["y"] + one["height"] <= other["y"]
        or other["y"] + other["height"] <= one["y"]
    )


def pixels_per_micrometre(page):
    """Return the scale of the view by its scale bar."""
    bar = page.locator(".scale-bar")
    length, unit = bar.inner_text().split()
    return bar.bounding_box()["width"] / (float(length) * (1000 if unit == "mm" else 1))


def middle_of_stage(page):
    box = page.locator(".stage").first.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def draw(page, corners):
    """Draw a region corner by corner, with a finger on the phone, and end with "Done"."""
    page.get_by_role("button", name="Draw a region").click()
    drawn(page)
    assert shows_whole(page, page.locator(".stage").first.bounding_box())  # it is in the window to be drawn on
    for x, y in corners:
        spot = on_screen(page, x, y)
        page.touchscreen.tap(*spot) if is_phone(page) else page.mouse.click(*spot, delay=20)
    page.get_by_role("button", name="Done").click()
    expect(page.get_by_role("button", name="Done")).to_be_hidden()


def test_slide_comes_first_and_columns_collapse(page, made_up):
    show(page, made_up, 0)
    assert page.locator("#cohort").is_visible() == (page.viewport_size["width"] > 1100)
    stage, controls = (page.locator(name).first.bounding_box() for name in (".stage", ".controls"))
    assert (stage["y"] < controls["y"]) == is_phone(page) and stage["y"] < 170
    window = page.viewport_size["width"] * page.viewport_size["height"]
    assert stage["width"] * stage["height"] > (0.45 if is_phone(page) else 0.49) * window
    for name, column in (("Slides", "#cohort"), ("Answer", "#why")):
        was = page.locator(column).is_visible()
        page.get_by_role("button", name=name, exact=True).click()
        expect(page.locator(column)).to_be_visible(visible=not was)
    page.reload()
    settled(page)
    expect(page.locator("#cohort")).to_be_visible(visible=page.viewport_size["width"] <= 1100)
    expect(page.locator("#why")).to_be_hidden()
    for name in ("Slides", "Answer"):
        page.get_by_role("button", name=name, exact=True).click()

    page.locator("#full").click()
    until(page, "document.fullscreenElement?.id === 'scene'")
    page.get_by_role("button", name="Leave full screen").click()
    until(page, "document.fullscreenElement === null")
    expect(page.locator("#full")).to_have_text("Full screen")


def test_buttons_overlap_neither_each_other_nor_slides_side_by_side(page, made_up):
    show(page, made_up, 0, "&split=factual")
    buttons = [one.bounding_box() for one in page.locator("#zooms button").all()]
    stages = [one.bounding_box() for one in page.locator(".stage").all()]
    assert len(buttons) == 10 and len(stages) == 2
    assert (buttons[0]["y"] > stages[1]["y"]) == is_phone(page)  # there the tissue comes first
    for i, one in enumerate(buttons):
        assert min(one["width"], one["height"]) >= 24
        assert all(apart(one, other) for other in [*buttons[i + 1 :], *stages])


def test_map_can_be_hidden_faded_smoothed_and_outlined(page, made_up):
    show(page, made_up, 4)
    of_class = row(4)["class"]
    values, corners = evidence(4)[:, of_class], places(4)
    shown = painted(page)
    assert shown > 5000
    page.keyboard.down(" ")
    until(page, lambda: painted(page) < 0.1 * shown)  # the outlines of annotations stay
    page.keyboard.up(" ")
    until_equal(page, lambda: painted(page), shown)
    press(page, "Hide map")
    until(page, lambda: painted(page) < 0.1 * shown)
    press(page, "Hide map")

    strongest = corners[np.abs(values).argmax()] + SIDE / 2
    for opacity in (0.2, 1):
        page.get_by_label("opacity").fill(str(opacity))
        bring_slide(page)
        until_equal(page, lambda: colour_at(page, *strongest)[3], pytest.approx(255 * opacity, abs=12))

    page.get_by_text("More", exact=True).click()
    page.get_by_label("smoothed over").fill("2")
    page.get_by_label("contours at").fill("50")
    until(page, "location.hash.includes('smooth=2') && location.hash.includes('contours=50')")
    smoothed = smooth_map(values, corners, 2 * SIDE)
    assert smoothed.sum() == pytest.approx(values.sum())
    for words in (f"{np.abs(smoothed).max():#.3g}", "the total stays the same", "reach 50 % of the scale"):
        expect(page.locator("figcaption")).to_contain_text(words)
    expect(page.locator(".level")).to_have_count(2)
    page.get_by_text("More", exact=True).click()


def test_slide_can_be_magnified_and_measured_and_stays_in_view(page, made_up):
    show(page, made_up, 8)
    wide = page.locator(".stage").bounding_box()["width"]
    expect(page.locator(".overview.idle")).to_have_count(1)
    for times in (5, 40, 10):
        press(page, f"{times}×")
        expect(page.locator("#magnification")).to_have_text(f"{times}×")
        until_equal(page, lambda: 10 * pixels_per_micrometre(page), pytest.approx(times, rel=0.01))
        colour = page.locator(".scale-bar").evaluate("bar => getComputedStyle(bar).backgroundColor")
        assert colour.startswith("rgba(255, 255, 255")
    until_equal(
        page, lambda: view_of(page)[2], pytest.approx(2 * wide, rel=0.01)
    )  # at 10x, 1 µm per pixel of the screen

    press(page, "Ruler")
    x, y = middle_of_stage(page)
    drag(page, (x - 60, y), (x + 60, y))
    length, unit = page.locator("#length").inner_text().split()
    assert unit == "µm" and float(length) == pytest.approx(120, abs=3)
    page.get_by_role("button", name="Clear", exact=True).click()

    expect(page.locator(".overview.idle")).to_have_count(0)
    click_overview(page, 0.4, 0.6)
    middle = pytest.approx(0.4 * WIDTH, abs=0.02 * WIDTH), pytest.approx(0.6 * HEIGHT, abs=0.02 * HEIGHT)
    until_equal(page, lambda: view_of(page), (*middle, ANY))

    press(page, "Fit")
    left, upper, right, lower = [*places(8).min(0), *(places(8).max(0) + SIDE)]
    middle = [pytest.approx((low + high) / 2, abs=50) for low, high in ((left, right), (upper, lower))]
    _, _, width = until_equal(page, lambda: view_of(page), (*middle, ANY))
    assert width >= right - left
    fitted = magnification(page)
    press(page, "Zoom in")
    press(page, "Zoom in")
    until(page, f"parseFloat(document.getElementById('magnification').textContent) > {2 * fitted}")
    x, y = middle_of_stage(page)
    step = 0.4 * wide
    for _ in range(6):
        drag(page, (x, y), (x + step, y + 200))
    corner = pytest.approx(left, abs=60), pytest.approx(upper, abs=60)
    until_equal(page, lambda: view_of(page), (*corner, ANY))  # the corner of the tissue stays in the middle
    press(page, "Whole")
    until(page, "!location.hash.includes('view=')")


def test_view_moves_to_the_selected_tile(page, made_up):
    show(page, made_up, 12)
    before, best = magnification(page), top(12, row(12)["class"], 8)["supporting"][0]
    page.locator(".tile.for").first.click()
    view = pytest.approx((best["x"] + SIDE / 2, best["y"] + SIDE / 2, 8 * SIDE), rel=0.01)
    until_equal(page, lambda: view_of(page), view)
    until(page, lambda: magnification(page) > 2 * before)
    drawn(page)
    assert shows_whole(page, page.locator(".stage").bounding_box())


def test_region_is_drawn_named_removed_kept_undone_and_compared(page, made_up):
    number, of_class = 16, row(16)["class"]
    show(page, made_up, number)
    inside = tiles_within(CORNERS, places(number) + SIDE // 2)
    draw(page, CORNERS)
    remove = page.get_by_role("button", name=f"Remove {len(inside)} tiles")
    name = page.get_by_label("Name of the drawn region")
    for offered in (remove, name):  # without scrolling
        assert shows_whole(page, offered.bounding_box())
    name.fill("tumour bed")
    page.get_by_role("button", name="Save region").click()
    page.get_by_label("Name of tumour bed").wait_for()
    remove.click()
    without = whatif(number, {"remove": inside})
    assert_shows(page, without["before"], without["after"], CLASSES)
    expect(page.locator("figcaption")).to_contain_text(f"the {len(inside)} removed tiles are hatched")
    bring_slide(page)
    red, green, blue, alpha = colour_at(page, 6000, 5888)
    assert min(red, green, blue) > 150 and alpha > 180  # a light hatch over a light slide, in both themes

    page.get_by_role("button", name="Mark its tiles: labelled macro").click()
    page.get_by_role("button", name="Keep only these").click()
    labelled = tiles_within([tuple(corner) for corner in TRUTH[:4]], places(number) + SIDE // 2)
    labelled = [j for j in labelled if j not in inside]  # what is removed stays removed
    only = whatif(number, {"keep": labelled})
    assert_shows(page, only["before"], only["after"], CLASSES)
    n = len(places(number))
    expected = [
        [name, f"{len(one['removed'])} ({100 * len(one['removed']) / n:.0f} %)", one["answer_after"],
         points(one["after"][of_class] - one["before"][of_class])]
        for name, one in (("tumour bed", without), (f"all but {len(labelled)} tiles", only))
    ]  # fmt: skip
    until_equal(page, lambda: removals_compared(page), expected)
    assert broken_words(page, ".trials td") == []
    for table in (".moves", ".trials"):  # no column leaves the card
        assert page.evaluate(
            f"(at => at.scrollWidth <= at.parentElement.clientWidth)(document.querySelector('{table}'))"
        )
    page.get_by_role("button", name="Undo").click()
    assert_shows(page, without["before"], without["after"], CLASSES)
    page.get_by_role("button", name="Redo").click()
    assert_shows(page, only["before"], only["after"], CLASSES)


def test_axe_finds_no_violation_after_a_removal(page, made_up, axe):
    show(page, made_up, 32)
    draw(page, CORNERS)
    page.get_by_role("button", name="Keep only these").click()
    page.wait_for_selector(".moves")
    assert_accessible(page, axe)


def test_faint_and_negligible_maps_are_explained(page, made_up):
    for number, words, alpha in (
        (FAINT, f"Drawn faint: {WHY_FAINT}.", 0.4),
        (TINY, f"Negligible, drawn as 0: {NEGLIGIBLE}.", 0.1),
    ):
        show(page, made_up, number)
        expect(page.locator("figcaption")).to_contain_text(words)
        strongest = np.abs(evidence(number)[:, row(number)["class"]]).argmax()
        assert colour_at(page, *(places(number)[strongest] + SIDE / 2))[3] < 255 * alpha


def test_view_is_exported_and_its_link_restores_it_with_long_names(page, made_up):
    number = 28
    show(page, made_up, number, "&map=factual")
    page.get_by_role("button", name="Remove the top 10 %").click()
    page.wait_for_selector(".moves")
    if page.locator("#cohort").is_hidden():
        page.get_by_role("button", name="Slides", exact=True).click()
    page.get_by_role("searchbox").fill("patient_00")
    until(page, "location.hash.includes('find=patient_00') && location.hash.includes('removal=0')")
    expect(page.locator("#count")).to_have_text("30 of 3,000")

    name, content = downloaded(page, "Picture (SVG)")
    words = " ".join("".join(text.itertext()) for text in ElementTree.fromstring(content).iter(f"{SVG}text"))
    words = re.sub(r"\s+", " ", words)
    before = answer(number, np.arange(len(evidence(number))))
    assert name == f"{row(number)['slide']}.svg" and row(number)["slide"] in words
    assert f"Answer: {row(number)['prediction']}, probability {probability_text(max(before))}" in words
    assert "Attention weight" in words and "research use only" in words.lower()
    with page.expect_download() as download:
        page.get_by_role("link", name="Tiles (CSV)").click()
    table = pd.read_csv(Path(download.value.path()))
    assert table[["x_level0_px", "y_level0_px"]].to_numpy().tolist() == places(number).tolist()

    def long_names(route):
        cohort = route.fetch().json()
        for line in cohort["target"]["rows"]:
            line["name"] = LONG
        route.fulfill(json=cohort)

    again = page.context.new_page()
    again.route("**/api/cohort", long_names)
    again.goto(f"{made_up}/{hash_of(page)}")
    shows(again, number)
    expect(again.locator("#map")).to_have_value("factual")
    expect(again.locator(".moves td")).to_have_text(page.locator(".moves td").all_text_contents())
    expect(again.get_by_role("searchbox")).to_have_value("patient_00")
    expect(again.locator("#count")).to_have_text("30 of 3,000")
    assert again.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    assert broken_words(again, ".chances tbody th button, .moves tbody th") == []
    again.close()
