"""Everything on the page can be reached and works on a desk, a tablet and a phone, in the light and the dark theme.

One page is opened per size and theme; every test opens a slide of its own in it, as somebody at work would.
"""

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from carmil.evidence.smoothing import smooth_map

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, from the dev group")

from carmil.words import probability_text  # noqa: E402

from . import test_page  # noqa: E402
from .fake_server import (  # noqa: E402
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
from .test_page import (  # noqa: E402
    SVG,
    assert_accessible,
    assert_shows,
    downloaded,
    on_screen,
    points,
    settled,
    tiles_within,
    until,
)
from .test_slide_page import magnification, painted, view_of  # noqa: E402

pytestmark = test_page.pytestmark
browser, made_up, axe = test_page.browser, test_page.made_up, test_page.axe  # fixtures

SIZES = {"desk": (1440, 900), "tablet": (1024, 768), "phone": (390, 844)}
PHONE = SIZES["phone"][0]
WHOLE = {"size": (WIDTH, HEIGHT)}
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
    width, height = SIZES[name]
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        reduced_motion="reduce",
        has_touch=name == "phone",
        bypass_csp=True,  # for axe-core
    )
    page, troubles = context.new_page(), []
    page.set_default_timeout(15_000)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda message: message.type in ("error", "warning") and troubles.append(message.text))
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
    until(page, f"document.getElementById('slide').textContent === '{row(number)['slide']}'")
    settled(page)
    until(page, "document.querySelector('.scale-bar')?.textContent !== ''")
    bring_slide(page)
    page.wait_for_timeout(200)


def bring_slide(page):
    page.locator(".stage").first.scroll_into_view_if_needed()


def is_phone(page):
    return page.viewport_size["width"] == PHONE


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


def drawn_at(page, x, y):
    """Return the mean colour (red, green, blue, alpha) of 5 x 5 pixels of the map around a place of the slide."""
    bring_slide(page)
    page.wait_for_timeout(100)
    box, (u, v) = page.locator("canvas.map").first.bounding_box(), on_screen(page, x, y, **WHOLE)
    return page.evaluate(
        """([x, y]) => {
            const pen = new OffscreenCanvas(5, 5).getContext("2d");
            pen.drawImage(document.querySelector("canvas.map"), -x, -y);
            const { data } = pen.getImageData(0, 0, 5, 5);
            return [0, 1, 2, 3].map(c => data.filter((_, i) => i % 4 === c).reduce((sum, one) => sum + one, 0) / 25);
        }""",
        [round(u - box["x"]) - 2, round(v - box["y"]) - 2],
    )


def drag(page, here, there):
    page.mouse.move(*here)
    page.mouse.down()
    page.mouse.move(*there, steps=4)
    page.mouse.up()


def middle_of_stage(page):
    box = page.locator(".stage").first.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def draw(page, corners):
    """Draw a region corner by corner, with a finger on the phone, and end with "Done"."""
    page.get_by_role("button", name="Draw a region").click()
    assert shows_whole(page, page.locator(".stage").first.bounding_box())  # it is in the window to be drawn on
    for x, y in corners:
        spot = on_screen(page, x, y, **WHOLE)
        page.touchscreen.tap(*spot) if is_phone(page) else page.mouse.click(*spot, delay=20)
    page.get_by_role("button", name="Done").click()
    assert page.get_by_role("button", name="Done").is_hidden()


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
        assert page.locator(column).is_visible() == (not was)
    page.reload()
    settled(page)
    assert page.locator("#cohort").is_visible() == (page.viewport_size["width"] <= 1100)
    assert page.locator("#why").is_hidden()
    for name in ("Slides", "Answer"):
        page.get_by_role("button", name=name, exact=True).click()

    page.locator("#full").click()
    until(page, "document.fullscreenElement?.id === 'scene'")
    page.get_by_role("button", name="Leave full screen").click()
    until(page, "document.fullscreenElement === null")


def test_buttons_cover_neither_each_other_nor_two_slides(page, made_up):
    show(page, made_up, 0, "&split=factual")
    buttons = [one.bounding_box() for one in page.locator("#zooms button").all()]
    stages = [one.bounding_box() for one in page.locator(".stage").all()]
    assert len(buttons) == 10 and len(stages) == 2
    assert (buttons[0]["y"] > stages[1]["y"]) == is_phone(page)  # there the tissue comes first
    for i, one in enumerate(buttons):
        assert min(one["width"], one["height"]) >= 24
        assert all(apart(one, other) for other in [*buttons[i + 1 :], *stages])


def test_map_is_hidden_faded_smoothed_and_outlined(page, made_up):
    show(page, made_up, 4)
    of_class = row(4)["class"]
    values, corners = evidence(4)[:, of_class], places(4)
    shown = painted(page)
    assert shown > 5000
    page.keyboard.down(" ")
    until(page, "document.getElementById('hide-map').getAttribute('aria-pressed') === 'true'")
    page.wait_for_timeout(50)
    hidden = painted(page)
    page.keyboard.up(" ")
    page.wait_for_timeout(50)
    assert painted(page) == shown and hidden < 0.1 * shown  # the outlines of annotations stay
    press(page, "Hide map")
    page.wait_for_timeout(50)
    assert painted(page) == hidden
    press(page, "Hide map")

    strongest = corners[np.abs(values).argmax()] + SIDE / 2
    for opacity in (0.2, 1):
        page.get_by_label("opacity").fill(str(opacity))
        assert drawn_at(page, *strongest)[3] == pytest.approx(255 * opacity, abs=12)

    page.get_by_text("More", exact=True).click()
    page.get_by_label("smoothed over").fill("2")
    page.get_by_label("contours at").fill("50")
    until(page, "location.hash.includes('smooth=2') && location.hash.includes('contours=50')")
    smoothed = smooth_map(values, corners, 2 * SIDE)
    caption = page.locator("figcaption").inner_text()
    assert f"{np.abs(smoothed).max():#.3g}" in caption and "the total stays the same" in caption
    assert smoothed.sum() == pytest.approx(values.sum())
    assert "reach 50 % of the scale" in caption and page.locator(".level").count() == 2
    page.get_by_text("More", exact=True).click()


def test_slide_is_magnified_measured_and_cannot_be_lost(page, made_up):
    show(page, made_up, 8)
    wide = page.locator(".stage").bounding_box()["width"]
    assert page.locator(".overview.idle").count() == 1
    for times in (5, 40, 10):
        press(page, f"{times}×")
        until(page, f"document.getElementById('magnification').textContent === '{times}×'")
        bar = page.locator(".scale-bar")
        length, unit = bar.inner_text().split()
        micrometres = float(length) * (1000 if unit == "mm" else 1)
        assert bar.bounding_box()["width"] == pytest.approx(micrometres * times / 10, abs=1)
        assert bar.evaluate("bar => getComputedStyle(bar).backgroundColor").startswith("rgba(255, 255, 255")
    assert view_of(page)[2] == pytest.approx(2 * wide, rel=0.01)  # at 10x, 1 µm per pixel of the screen

    press(page, "Ruler")
    x, y = middle_of_stage(page)
    drag(page, (x - 60, y), (x + 60, y))
    length, unit = page.locator("#length").inner_text().split()
    assert unit == "µm" and float(length) == pytest.approx(120, abs=3)
    page.get_by_role("button", name="Clear", exact=True).click()

    overview = page.locator(".overview").bounding_box()
    assert page.locator(".overview.idle").count() == 0
    page.mouse.click(overview["x"] + 0.4 * overview["width"], overview["y"] + 0.6 * overview["height"])
    x, y, _ = view_of(page)
    assert (x / WIDTH, y / HEIGHT) == (pytest.approx(0.4, abs=0.02), pytest.approx(0.6, abs=0.02))

    press(page, "Fit")
    left, upper, right, lower = [*places(8).min(0), *(places(8).max(0) + SIDE)]
    x, y, width = view_of(page)
    assert (x, y) == (pytest.approx((left + right) / 2, abs=50), pytest.approx((upper + lower) / 2, abs=50))
    assert width >= right - left
    fitted = magnification(page)
    press(page, "Zoom in")
    press(page, "Zoom in")
    until(page, f"parseFloat(document.getElementById('magnification').textContent) > {2 * fitted}")
    x, y = middle_of_stage(page)
    step = 0.4 * wide
    for _ in range(6):
        drag(page, (x, y), (x + step, y + 200))
    x, y, _ = view_of(page)
    assert (x, y) == (
        pytest.approx(left, abs=60),
        pytest.approx(upper, abs=60),
    )  # the corner of the tissue stays in the middle
    press(page, "Whole")
    until(page, "!location.hash.includes('view=')")


def test_selected_tile_is_flown_to(page, made_up):
    show(page, made_up, 12)
    before, best = magnification(page), top(12, row(12)["class"], 8)["supporting"][0]
    page.locator(".tile.for").first.click()
    x, y, width = view_of(page)
    assert (x, y, width) == pytest.approx((best["x"] + SIDE / 2, best["y"] + SIDE / 2, 8 * SIDE), rel=0.01)
    assert magnification(page) > 2 * before
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
    assert f"the {len(inside)} removed tiles are hatched" in page.locator("figcaption").inner_text()
    red, green, blue, alpha = drawn_at(page, 6000, 5888)
    assert min(red, green, blue) > 150 and alpha > 180  # a light hatch over a light slide, in both themes

    page.get_by_role("button", name="Mark its tiles: labelled macro").click()
    page.get_by_role("button", name="Keep only these").click()
    labelled = tiles_within([tuple(corner) for corner in TRUTH[:4]], places(number) + SIDE // 2)
    labelled = [j for j in labelled if j not in inside]  # what is removed stays removed
    only = whatif(number, {"keep": labelled})
    page.wait_for_selector(".trials tbody tr:nth-child(2)")
    assert_shows(page, only["before"], only["after"], CLASSES)
    n = len(places(number))
    assert [line.locator("th, td").all_inner_texts() for line in page.locator(".trials tbody tr").all()] == [
        [name, f"{len(one['removed'])} ({100 * len(one['removed']) / n:.0f} %)", one["answer_after"],
         points(one["after"][of_class] - one["before"][of_class])]
        for name, one in (("region 1", without), (f"all but {len(labelled)} tiles", only))
    ]  # fmt: skip
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


def test_faint_and_negligible_maps_say_so(page, made_up):
    for number, words, alpha in (
        (FAINT, f"Drawn faint: {WHY_FAINT}.", 0.4),
        (TINY, f"Negligible, drawn as 0: {NEGLIGIBLE}.", 0.1),
    ):
        show(page, made_up, number)
        assert words in page.locator("figcaption").inner_text()
        strongest = np.abs(evidence(number)[:, row(number)["class"]]).argmax()
        assert drawn_at(page, *(places(number)[strongest] + SIDE / 2))[3] < 255 * alpha


def test_view_is_exported_and_its_link_restores_it_with_long_names(page, made_up):
    number = 28
    show(page, made_up, number, "&map=factual")
    page.get_by_role("button", name="Remove the top 10 %").click()
    page.wait_for_selector(".moves")
    if page.locator("#cohort").is_hidden():
        page.get_by_role("button", name="Slides", exact=True).click()
    page.get_by_role("searchbox").fill("patient_00")
    until(page, "location.hash.includes('find=patient_00') && location.hash.includes('removal=0')")
    assert page.locator("#count").inner_text() == "30 of 3,000"

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
    again.goto(f"{made_up}/{page.evaluate('location.hash')}")
    settled(again)
    again.wait_for_selector(".moves")
    assert (
        again.locator("#slide").inner_text() == row(number)["slide"]
        and again.locator("#map").input_value() == "factual"
    )
    assert again.locator(".moves td").all_inner_texts() == page.locator(".moves td").all_inner_texts()
    assert again.get_by_role("searchbox").input_value() == "patient_00"
    assert again.locator("#count").inner_text() == "30 of 3,000"
    assert again.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    broken = again.evaluate(
        """() => [...document.querySelectorAll(".chances tbody th button, .moves tbody th")].flatMap(name => {
            const text = name.firstChild, range = document.createRange();
            return [...text.data.matchAll(/\\S+/g)].filter(word => {
                range.setStart(text, word.index);
                range.setEnd(text, word.index + word[0].length);
                return range.getClientRects().length > 1;
            }).map(word => word[0]);
        })"""
    )
    assert broken == []
    again.close()
