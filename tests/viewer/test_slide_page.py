"""The slide on the page in a real browser: its share of the window, its map, magnification, overview and limits."""

import re
from threading import Event
from unittest.mock import ANY

import numpy as np
import pytest

from carmil.evidence.smoothing import smooth_map

from .fake_server import HEIGHT, SIDE, WIDTH, evidence, link, places
from .pages import (
    BARE,
    DESK,
    DIGITS,
    PHONE,
    SLIDE,
    TABLET,
    broken_words,
    click_overview,
    drag,
    drawn,
    expect,
    hash_of,
    magnification,
    on_screen,
    painted,
    settled,
    shows,
    until,
    until_equal,
    view_of,
)


def share_of_window(page):
    box = page.locator(".stage").first.bounding_box()
    return box["width"] * box["height"] / (page.viewport_size["width"] * page.viewport_size["height"])


def test_slide_gets_half_of_the_window_and_more_when_columns_collapse(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}")
    assert share_of_window(page) > 0.49
    page.get_by_role("button", name="Slides").click()
    page.keyboard.press("]")
    for column in ("#cohort", "#why"):
        expect(page.locator(column)).to_be_hidden()
    expect(page.get_by_role("button", name="Answer")).to_have_attribute("aria-expanded", "false")
    until(page, lambda: share_of_window(page) > 0.75)
    page.reload()
    settled(page)
    for column in ("#cohort", "#why"):
        expect(page.locator(column)).to_be_hidden()
    page.keyboard.press("[")
    expect(page.locator("#cohort")).to_be_visible()
    page.locator("#full").click()
    until(page, "document.fullscreenElement?.id === 'scene'")
    expect(page.locator("#full")).to_have_text("Leave full screen")
    narrow = opened(f"{made_up}/{link(SLIDE)}", viewport=TABLET)
    assert narrow.locator("#cohort").is_hidden() and share_of_window(narrow) > 0.49


def test_map_is_hidden_while_space_is_held_and_by_its_button(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}")
    shown = painted(page)
    assert shown > 10_000
    page.locator("#zoom-in").click()  # the button must not be pressed again by the space bar
    page.locator("#zoom-all").click()
    until_equal(page, lambda: painted(page), shown)
    hides = (lambda: page.keyboard.down(" "), lambda: page.keyboard.up(" "))
    for hide, show in (hides, (page.get_by_role("button", name="Hide map").click, lambda: page.keyboard.press("h"))):
        hide()
        expect(page.locator("#hide-map")).to_have_attribute("aria-pressed", "true")
        until(page, lambda: painted(page) < 0.05 * shown)  # the outlines of annotations stay
        show()
        until_equal(page, lambda: painted(page), shown)


def test_magnification_follows_the_pixel_size(opened, made_up):
    """The made-up slide has 0.5 um/px: at 20x, one pixel of the slide is one pixel of the screen."""
    page = opened(f"{made_up}/{link(SLIDE)}")
    wide = page.locator(".stage").bounding_box()["width"]
    for times in (5, 10, 20, 40):
        page.get_by_role("button", name=f"{times}×", exact=True).click()
        expect(page.locator("#magnification")).to_have_text(f"{times}×")
        until_equal(page, lambda: view_of(page), (ANY, ANY, pytest.approx(wide * 20 / times, rel=0.01)))
    page.keyboard.press("0")
    until(page, "!location.hash.includes('view=')")
    until(page, lambda: magnification(page) < 5)
    bare = opened(f"{made_up}/{link(BARE)}")  # its tiles are known in pixels and micrometres
    bare.get_by_role("button", name="20×", exact=True).click()
    expect(bare.locator("#magnification")).to_have_text("20×")


def test_presets_are_disabled_with_a_reason_where_the_pixel_size_is_unknown(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}")

    def without_pixel_size(route):
        case = route.fetch().json()
        route.fulfill(json={**case, "tile_mpp": None})

    page.route(f"**/api/case/{BARE}", without_pixel_size)
    page.keyboard.press("j")
    shows(page, BARE)
    expect(page.locator("#magnification")).to_have_text("magnification unknown")
    for button in page.locator("#presets button").all():
        expect(button).to_be_disabled()
        expect(button).to_have_attribute("title", re.compile("give it with --mpp"))
    expect(page.locator(".scale-bar")).to_be_hidden()


def test_page_states_that_a_slide_is_still_being_read(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}")
    reading, held, is_read = page.locator(".reading"), [], Event()
    expect(reading).to_have_count(0)
    page.route("**/zoom/**", lambda route: route.continue_() if is_read.is_set() else held.append(route))
    page.reload()
    expect(reading).to_have_text("Reading the slide …")
    until(page, lambda: held)
    is_read.set()
    for route in held:
        route.continue_()
    expect(reading).to_have_count(0)


def test_overview_shows_the_view_and_moves_it(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}")
    page.wait_for_selector(".overview.idle", state="attached")  # the whole slide is in view
    page.get_by_role("button", name="10×", exact=True).click()
    page.wait_for_selector(".overview:not(.idle)")
    drawn(page)
    box = page.locator(".overview").bounding_box()
    assert box["width"] / box["height"] == pytest.approx(WIDTH / HEIGHT, rel=0.02)
    click_overview(page, 0.3, 0.6)
    middle = pytest.approx(0.3 * WIDTH, abs=0.02 * WIDTH), pytest.approx(0.6 * HEIGHT, abs=0.02 * HEIGHT)
    _, _, width = until_equal(page, lambda: view_of(page), (*middle, ANY))
    region = page.locator(".displayregion").bounding_box()
    assert region["width"] == pytest.approx(box["width"] * width / WIDTH, abs=6)
    assert region["x"] + region["width"] / 2 == pytest.approx(box["x"] + 0.3 * box["width"], abs=4)
    drag(page, *((box["x"] + u * box["width"], box["y"] + v * box["height"]) for u, v in ((0.3, 0.6), (0.5, 0.5))))
    middle = pytest.approx(0.5 * WIDTH, abs=0.03 * WIDTH), pytest.approx(0.5 * HEIGHT, abs=0.03 * HEIGHT)
    until_equal(page, lambda: view_of(page), (*middle, ANY))


def test_panning_keeps_tissue_in_view_and_fit_shows_all_of_it(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}&view=10000,7000,6000")
    box, corners = page.locator(".stage").bounding_box(), places(SLIDE)
    left, top, right, bottom = [*corners.min(0), *(corners.max(0) + SIDE)]
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    for _ in range(4):
        drag(page, middle, (middle[0] + 400, middle[1] + 300))
    until_equal(page, lambda: view_of(page), (pytest.approx(left, abs=20), pytest.approx(top, abs=20), ANY))
    page.keyboard.press("f")
    centre = [pytest.approx((low + high) / 2, abs=20) for low, high in ((left, right), (top, bottom))]
    _, _, width = until_equal(page, lambda: view_of(page), (*centre, ANY))
    height = width * box["height"] / box["width"]
    assert (
        width >= right - left and height >= bottom - top and min(width / (right - left), height / (bottom - top)) < 1.15
    )


def test_drawing_has_a_done_button_on_a_phone(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}", viewport=PHONE, has_touch=True)
    page.get_by_role("button", name="Draw a region").click()
    page.evaluate("scrollTo(0, 0)")
    page.get_by_role("button", name="Done").click()
    expect(page.locator("#said")).to_contain_text("three corners")
    drawn(page)
    for x, y in [(5120, 4096), (10240, 4096), (10240, 8192), (5120, 8192)]:
        page.touchscreen.tap(*on_screen(page, x, y))
    page.get_by_role("button", name="Done").click()
    expect(page.get_by_role("button", name="Done")).to_be_hidden()
    expect(page.locator("button.strong:has-text('Remove')")).to_be_visible()


def test_long_class_names_wrap_between_words(opened, made_up):
    name = "Squamous cell carcinoma of the head and neck, keratinising"
    page = opened(f"{made_up}/{link(DIGITS)}")

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
        broken = broken_words(page, ".chances tbody th button")
        assert broken == [], size
        assert page.evaluate(
            "document.querySelector('.chances').scrollWidth <= document.querySelector('#answer').clientWidth"
        )


def test_ruler_measures_by_two_clicks_or_a_drag(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}")
    here, there = (on_screen(page, x, 7000) for x in (6000, 10_000))
    micrometres = 0.5 * 4000
    page.get_by_role("button", name="Ruler").click()
    for spot in (here, there):
        page.mouse.click(*spot, delay=20)
    expect(page.locator("#ruler")).to_have_attribute("aria-pressed", "false")
    length = page.locator("#length").inner_text()
    assert length.endswith(" mm") and float(length.split()[0]) == pytest.approx(micrometres / 1000, rel=0.02)
    expect(page.locator("#said")).to_contain_text(f"length {length}")
    page.keyboard.press("Escape")
    expect(page.locator("#measuring")).to_be_hidden()

    page.keyboard.press("d")
    expect(page.locator("#ruler")).to_have_attribute("aria-pressed", "true")
    drag(page, here, (here[0], here[1] + 50))
    expect(page.locator("#ruler")).to_have_attribute("aria-pressed", "false")
    scale = (there[0] - here[0]) / micrometres
    length, unit = page.locator("#length").inner_text().split()
    assert unit == "µm" and float(length) == pytest.approx(50 / scale, rel=0.03)
    page.get_by_role("button", name="Clear", exact=True).click()
    expect(page.locator("#measuring")).to_be_hidden()
    assert "marked" not in page.locator("#said").inner_text()
    page.get_by_label("opacity").fill("0.5")  # the address is written after a moment, and with it any view
    until(page, "location.hash.includes('opacity=0.5')")
    assert view_of(page) is None  # measuring moves nothing


def test_page_smooths_maps_as_drawn_maps_are(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}")
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
    legend = page.locator("figcaption")
    expect(legend).to_contain_text("tiles within 2 tiles (512 µm); the total stays the same")
    largest = np.abs(smooth_map(values, corners, 2 * SIDE)).max()
    expect(legend).to_contain_text(f"+{largest:#.3g}")
    assert page.locator(".ends").inner_text() != before
    page.get_by_label("Unit of the radius").select_option("um")
    page.get_by_label("smoothed over").fill("300")
    until(page, "location.hash.includes('smooth=300um')")
    again = opened(f"{made_up}/{hash_of(page)}")
    for one in (page, again):
        expect(one.locator("figcaption")).to_contain_text("within 1.17 tiles (300 µm)")


def test_contours_enclose_the_tiles_that_reach_a_level(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}&contours=50")
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
    expect(page.locator(".level")).to_have_count(4)
    levels = page.get_by_label("contours at")
    levels.fill("0, many")
    until(page, lambda: levels.evaluate("field => field.validationMessage").startswith("expected up to six numbers"))
    assert "contours=25,80" in hash_of(page)


def test_list_shows_the_tissue_of_slides_that_have_a_file(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}", refused=True)
    until(page, "[...document.querySelectorAll('.thumbnail')].some(one => one.naturalWidth === 112)")
    for case, count in ((SLIDE, 1), (BARE, 0)):
        assert page.locator(f"#case-{case} img.thumbnail").count() == count
    page.route("**/thumbnail.jpeg", lambda route: route.abort())
    page.get_by_role("searchbox").fill("patient_040")
    until(page, "!document.querySelector('.rows .thumbnail')")


def test_small_pictures_leave_connections_for_the_tiles_of_the_slide(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}", refused=True)
    held = []
    page.route("**/thumbnail.jpeg", lambda route: held.append(route))
    page.get_by_role("searchbox").fill("patient_04")
    until(page, lambda: len(held) == 2)
    settled(page)
    assert len(held) == 2
    held[0].abort()
    held[1].abort()
    until(page, lambda: len(held) == 4)  # the next two, once the first have ended
