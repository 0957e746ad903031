"""The slide on the page in a real browser: its share of the window, its map, magnification, overview and limits."""

import numpy as np
import pytest

from carmil.evidence.smoothing import smooth_map

pytest.importorskip("playwright.sync_api", reason="needs playwright, from the dev group")

from . import test_page
from .fake_server import HEIGHT, SIDE, WIDTH, evidence, link, places
from .test_page import BARE, DIGITS, PHONE, SLIDE, on_screen, settled, until

pytestmark = test_page.pytestmark
browser, made_up, opened = test_page.browser, test_page.made_up, test_page.opened  # fixtures

DESK, TABLET = {"width": 1440, "height": 900}, {"width": 1024, "height": 768}


def share_of_window(page):
    box = page.locator(".stage").first.bounding_box()
    return box["width"] * box["height"] / (page.viewport_size["width"] * page.viewport_size["height"])


def view_of(page):
    """Return centre and width of the view, in level-0 pixels; None if it is the whole slide."""
    until(page, "document.activeElement !== null")
    page.wait_for_timeout(300)  # the address is written after a moment
    words = page.evaluate("location.hash").split("view=")
    return None if len(words) == 1 else [float(part) for part in words[1].split("&")[0].split(",")]


def magnification(page):
    return float(page.locator("#magnification").inner_text().rstrip("×"))


def painted(page):
    """Return the number of pixels that the map covers."""
    return page.evaluate(
        """() => {
            const canvas = document.querySelector(".stage > canvas.map");
            const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
            copy.drawImage(canvas, 0, 0);
            const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
            let count = 0;
            for (let i = 3; i < data.length; i += 4) count += data[i] > 0;
            return count;
        }"""
    )


def test_slide_gets_half_of_the_window_and_more_when_columns_collapse(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}", viewport=DESK)
    assert share_of_window(page) > 0.49
    page.get_by_role("button", name="Slides").click()
    page.keyboard.press("]")
    assert page.locator("#cohort").is_hidden() and page.locator("#why").is_hidden()
    assert page.get_by_role("button", name="Answer").get_attribute("aria-expanded") == "false"
    assert share_of_window(page) > 0.75
    page.reload()
    settled(page)
    assert page.locator("#cohort").is_hidden() and page.locator("#why").is_hidden()
    page.keyboard.press("[")
    assert page.locator("#cohort").is_visible()
    page.locator("#full").click()
    until(page, "document.fullscreenElement?.id === 'scene'")
    until(page, "document.getElementById('full').textContent === 'Leave full screen'")
    narrow = opened(f"{made_up}/{link(SLIDE)}", viewport=TABLET)
    assert narrow.locator("#cohort").is_hidden() and share_of_window(narrow) > 0.49


def test_map_is_hidden_while_space_is_held_and_by_its_button(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}", viewport=DESK)
    until(page, "document.querySelector('.stage > canvas.map')?.width > 0")
    page.wait_for_timeout(200)
    shown = painted(page)
    assert shown > 10_000
    page.locator("#zoom-in").click()  # the button must not be pressed again by the space bar
    page.locator("#zoom-all").click()
    page.keyboard.down(" ")
    until(page, "document.getElementById('hide-map').getAttribute('aria-pressed') === 'true'")
    page.wait_for_timeout(100)
    assert painted(page) < 0.05 * shown  # the outlines of annotations stay
    page.keyboard.up(" ")
    page.wait_for_timeout(100)
    assert painted(page) == shown
    page.get_by_role("button", name="Hide map").click()
    page.wait_for_timeout(100)
    assert painted(page) < 0.05 * shown  # the outlines of annotations stay
    page.keyboard.press("h")
    page.wait_for_timeout(100)
    assert painted(page) == shown


def test_magnification_follows_the_pixel_size(opened, made_up):
    """The made-up slide has 0.5 um/px: at 20x, one of its pixels is one of the screen."""
    page = opened(f"{made_up}/{link(SLIDE)}", viewport=DESK)
    wide = page.locator(".stage").bounding_box()["width"]
    for times in (5, 10, 20, 40):
        page.get_by_role("button", name=f"{times}×", exact=True).click()
        until(page, f"document.getElementById('magnification').textContent === '{times}×'")
        assert view_of(page)[2] == pytest.approx(wide * 20 / times, rel=0.01)
    page.keyboard.press("0")
    until(page, "!location.hash.includes('view=')")
    assert magnification(page) < 5
    bare = opened(f"{made_up}/{link(BARE)}", viewport=DESK)  # its tiles are known in pixels and micrometres
    bare.get_by_role("button", name="20×", exact=True).click()
    until(bare, "document.getElementById('magnification').textContent === '20×'")


def test_presets_are_disabled_with_a_reason_where_the_pixel_size_is_unknown(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}", viewport=DESK)

    def without_pixel_size(route):
        case = route.fetch().json()
        route.fulfill(json={**case, "tile_mpp": None})

    page.route(f"**/api/case/{BARE}", without_pixel_size)
    page.keyboard.press("j")
    until(page, "document.getElementById('magnification').textContent === 'magnification unknown'")
    for button in page.locator("#presets button").all():
        assert button.is_disabled() and "give it with --mpp" in button.get_attribute("title")
    assert page.locator(".scale-bar").is_hidden()


def test_overview_shows_the_view_and_moves_it(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}", viewport=DESK)
    page.wait_for_selector(".overview.idle", state="attached")  # the whole slide is in view
    page.get_by_role("button", name="10×", exact=True).click()
    page.wait_for_selector(".overview:not(.idle)")
    page.wait_for_timeout(300)
    box = page.locator(".overview").bounding_box()
    assert box["width"] / box["height"] == pytest.approx(WIDTH / HEIGHT, rel=0.02)
    page.mouse.click(box["x"] + 0.3 * box["width"], box["y"] + 0.6 * box["height"])
    x, y, width = view_of(page)
    assert (x / WIDTH, y / HEIGHT) == (pytest.approx(0.3, abs=0.02), pytest.approx(0.6, abs=0.02))
    region = page.locator(".displayregion").bounding_box()
    assert region["width"] == pytest.approx(box["width"] * width / WIDTH, abs=6)
    assert region["x"] + region["width"] / 2 == pytest.approx(box["x"] + 0.3 * box["width"], abs=4)
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.6 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"], steps=5)
    page.mouse.up()
    x, y, _ = view_of(page)
    assert (x / WIDTH, y / HEIGHT) == (pytest.approx(0.5, abs=0.03), pytest.approx(0.5, abs=0.03))


def test_panning_cannot_lose_the_tissue_and_fit_shows_all_of_it(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}&view=10000,7000,6000", viewport=DESK)
    box, corners = page.locator(".stage").bounding_box(), places(SLIDE)
    left, top, right, bottom = [*corners.min(0), *(corners.max(0) + SIDE)]
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    for _ in range(4):
        page.mouse.move(*middle)
        page.mouse.down()
        page.mouse.move(middle[0] + 400, middle[1] + 300, steps=4)
        page.mouse.up()
    x, y, _ = view_of(page)
    assert (x, y) == (pytest.approx(left, abs=20), pytest.approx(top, abs=20))
    page.keyboard.press("f")
    x, y, width = view_of(page)
    assert x == pytest.approx((left + right) / 2, abs=20) and y == pytest.approx((top + bottom) / 2, abs=20)
    height = width * box["height"] / box["width"]
    assert (
        width >= right - left and height >= bottom - top and min(width / (right - left), height / (bottom - top)) < 1.15
    )


def test_drawing_has_a_done_button_on_a_phone(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}", viewport=PHONE, has_touch=True)
    page.wait_for_timeout(300)
    page.get_by_role("button", name="Draw a region").click()
    page.evaluate("scrollTo(0, 0)")
    page.get_by_role("button", name="Done").click()
    assert "three corners" in page.locator("#said").inner_text()
    for x, y in [(5120, 4096), (10240, 4096), (10240, 8192), (5120, 8192)]:
        page.touchscreen.tap(*on_screen(page, x, y, size=(WIDTH, HEIGHT)))
    page.get_by_role("button", name="Done").click()
    assert page.get_by_role("button", name="Done").is_hidden()
    assert page.locator("button.strong:has-text('Remove')").is_visible()


def test_long_class_names_wrap_between_words(opened, made_up):
    name = "Squamous cell carcinoma of the head and neck, keratinising"
    page = opened(f"{made_up}/{link(DIGITS)}", viewport=DESK)

    def long_names(route):
        cohort = route.fetch().json()
        for row in cohort["target"]["rows"]:
            row["name"] = name
        route.fulfill(json=cohort)

    page.route("**/api/cohort", long_names)
    for size in (DESK, TABLET, PHONE):
        page.set_viewport_size(size)
        page.reload()
        settled(page)
        broken = page.evaluate(
            """() => {
                const text = document.querySelector(".chances tbody th button").firstChild, range = document.createRange();
                return [...text.data.matchAll(/\\S+/g)].filter(word => {
                    range.setStart(text, word.index);
                    range.setEnd(text, word.index + word[0].length);
                    return range.getClientRects().length > 1;
                }).map(word => word[0]);
            }"""
        )
        assert broken == [], size
        assert page.evaluate(
            "document.querySelector('.chances').scrollWidth <= document.querySelector('#answer').clientWidth"
        )


def test_ruler_measures_by_two_clicks_or_a_drag(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}", viewport=DESK)
    page.wait_for_timeout(300)
    here, there = (on_screen(page, x, 7000, size=(WIDTH, HEIGHT)) for x in (6000, 10_000))
    micrometres = 0.5 * 4000
    page.get_by_role("button", name="Ruler").click()
    for spot in (here, there):
        page.mouse.click(*spot, delay=20)
    until(page, "document.getElementById('ruler').getAttribute('aria-pressed') === 'false'")
    length = page.locator("#length").inner_text()
    assert length.endswith(" mm") and float(length.split()[0]) == pytest.approx(micrometres / 1000, rel=0.02)
    assert f"length {length}" in page.locator("#said").inner_text()
    assert "view=" not in page.evaluate("location.hash")  # measuring moves nothing
    page.keyboard.press("Escape")
    assert page.locator("#measuring").is_hidden()

    page.keyboard.press("d")
    page.mouse.move(*here)
    page.mouse.down()
    page.mouse.move(here[0], here[1] + 50, steps=4)
    page.mouse.up()
    scale = (there[0] - here[0]) / micrometres
    length, unit = page.locator("#length").inner_text().split()
    assert unit == "µm" and float(length) == pytest.approx(50 / scale, rel=0.03)
    page.get_by_role("button", name="Clear", exact=True).click()
    assert page.locator("#measuring").is_hidden() and "marked" not in page.locator("#said").inner_text()


def test_page_smooths_maps_as_drawn_maps_are(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}", viewport=DESK)
    values, corners = evidence(SLIDE)[:, 2], places(SLIDE)
    for radius in (0.5 * SIDE, 2 * SIDE, 3.3 * SIDE):
        smoothed = page.evaluate(
            "async ([values, x, y, radius]) => [...(await import('/page/smoothing.js')).smoothed(values, { x, y }, radius)]",
            [values.tolist(), corners[:, 0].tolist(), corners[:, 1].tolist(), radius],
        )
        np.testing.assert_allclose(smoothed, smooth_map(values, corners, radius), rtol=0, atol=1e-12)
        assert sum(smoothed) == pytest.approx(values.sum(), abs=1e-9)

    before = page.locator(".ends").inner_text()
    page.get_by_text("More", exact=True).click()
    page.get_by_label("smoothed over").fill("2")
    until(page, "location.hash.includes('smooth=2')")
    legend = page.locator("figcaption").inner_text()
    assert "tiles within 2 tiles (512 µm); the total stays the same" in legend
    largest = np.abs(smooth_map(values, corners, 2 * SIDE)).max()
    assert f"+{largest:#.3g}" in legend and page.locator(".ends").inner_text() != before
    page.get_by_label("Unit of the radius").select_option("um")
    page.get_by_label("smoothed over").fill("300")
    until(page, "location.hash.includes('smooth=300um')")
    assert "within 1.17 tiles (300 µm)" in page.locator("figcaption").inner_text()
    again = opened(f"{made_up}/{page.evaluate('location.hash')}", viewport=DESK)
    assert "within 1.17 tiles (300 µm)" in again.locator("figcaption").inner_text()


def test_contours_enclose_the_tiles_that_reach_a_level(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}&contours=50", viewport=DESK)
    assert "Lines around tiles that reach 50 % of the scale" in page.locator("figcaption").inner_text()
    assert page.locator(".level").count() == 2  # for and against
    drawn = page.evaluate(
        """async SLIDE => {
            const fetched = async path => (await fetch(`/api/case/${SLIDE}/${path}`)).json();
            const { paint } = await import("/page/colours.js"), { Places } = await import("/page/plane.js");
            const { contours } = await import("/page/contours.js");
            const places = new Places(await fetched("places"), 512);
            const painted = paint(await fetched("map/evidence?class=2"), { byRank: false, dark: false });
            return contours(painted, places, [50]).map(({ edges }) => edges);
        }""",
        SLIDE,
    )
    values, cells = evidence(SLIDE)[:, 2], places(SLIDE) // SIDE
    for edges, sign in zip(drawn, (1, -1), strict=True):
        inside = {tuple(cell) for cell in cells[sign * values >= 0.5 * np.abs(values).max()].tolist()}
        assert inside
        border = sum((x + dx, y + dy) not in inside for x, y in inside for dx, dy in ((1, 0), (-1, 0), (0, 1), (0, -1)))
        assert len(edges) == 4 * border
        lengths = {abs(x - u) + abs(y - v) for x, y, u, v in np.reshape(edges, (-1, 4)).tolist()}
        assert lengths == {SIDE}
    page.get_by_text("More", exact=True).click()
    page.get_by_label("contours at").fill("25, 80")
    until(page, "location.hash.includes('contours=25,80')")
    assert page.locator(".level").count() == 4
    page.get_by_label("contours at").fill("0, many")
    assert (
        page.get_by_label("contours at")
        .evaluate("field => field.validationMessage")
        .startswith("expected up to six numbers")
    )
    assert "contours=25,80" in page.evaluate("location.hash")


def test_list_shows_the_tissue_of_slides_that_have_a_file(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}", refused=True, viewport=DESK)
    until(page, "[...document.querySelectorAll('.thumbnail')].some(one => one.naturalWidth === 112)")
    for case, count in ((SLIDE, 1), (BARE, 0)):
        assert page.locator(f"#case-{case} img.thumbnail").count() == count
    page.route("**/thumbnail.jpeg", lambda route: route.abort())
    page.get_by_role("searchbox").fill("patient_040")
    until(page, "!document.querySelector('.rows .thumbnail')")
