"""The page in a real browser: on made-up cases, and on a run that was trained."""

import json
import shutil
import socket
import subprocess
import threading
from contextlib import contextmanager

import numpy as np
import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, from the dev group")

from carmil.maps.colours import NOTHING, colour_table  # noqa: E402
from carmil.viewer.app import PAGE, guarded_app  # noqa: E402
from carmil.viewer.guard import known_hosts  # noqa: E402

from . import fake_server  # noqa: E402
from .fake_server import BROKEN, CASES, CLASSES, answer, deletion, evidence, places, row, serving, top, whatif  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
AXE = "axe-core@4.14.0"
SLIDE, BARE, DIGITS, BARS = 0, 1, 2, 3  # cases of the made-up run, one of each kind
WIDE, PHONE = {"width": 1400, "height": 900}, {"width": 390, "height": 844}

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)"),
    pytest.mark.skipif(
        not (PAGE / "openseadragon.min.js").is_file(),
        reason="needs OpenSeadragon (python tools/fetch_openseadragon.py)",
    ),
]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        one = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield one
        one.close()


@pytest.fixture(scope="module")
def made_up():
    with serving() as address:
        yield address


@pytest.fixture
def opened(browser):
    """Opens an address; at the end the page must have said nothing it should not. `refused`: an answer may be no answer."""
    contexts, troubles = [], []

    def go(address, *, refused=False, **look):
        context = browser.new_context(**{"viewport": WIDE, "reduced_motion": "reduce", **look})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on(
            "console",
            lambda said: (
                troubles.append(said.text)
                if said.type in ("error", "warning") and not (refused and "Failed to load resource" in said.text)
                else None
            ),
        )
        page.goto(address)
        settled(page)
        return page

    yield go
    for context in contexts:
        context.close()
    assert not troubles


def until(page, expression):
    """Asks from here: a page that waits by itself needs eval, which its security policy forbids."""
    for _ in range(300):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never came true: {expression}")


def settled(page):
    page.wait_for_selector("#panes[aria-busy=false]")
    until(page, "!document.querySelector('.waits')")


def quiet(page):
    """Until nothing has come for a second: the picture of a slide comes tile by tile, on a busy machine for long."""
    before = -1
    while (come := page.evaluate("performance.getEntriesByType('resource').length")) != before:
        before = come
        page.wait_for_timeout(1000)


def chances(page, column=0):
    """Probabilities as the page writes them, class by class."""
    return page.locator(f".chances tbody tr td:nth-of-type({column + 1}) .figure").all_inner_texts()


def moved(page):
    """What the what-if says of every class: before, after, points."""
    page.wait_for_selector(".moves")
    lines = [line.inner_text().split() for line in page.locator(".moves tbody tr").all()]
    return {line[0]: " ".join(line[1:]) for line in lines}


def percent(p):
    hundred = 100 * p
    return "> 99 %" if 99.5 < hundred < 100 else "< 1 %" if 0 < hundred < 0.5 else f"{int(hundred + 0.5)} %"


def points(change):
    size = abs(100 * change)
    return "±0" if size < 0.05 else f"{'+' if change > 0 else '−'}{size:.{1 if size < 9.95 else 0}f}"


def shows(page, before, after, classes):
    """Does the page say of every class what these two lists say?"""
    said = moved(page)
    for name, was, now in zip(classes, before, after, strict=True):
        assert said[name].startswith(f"{percent(was)} → {percent(now)} {points(now - was)}"), (name, was, now)


def on_screen(page, x, y, *, size):
    """Where a place of the slide is in the window, when the whole slide is shown."""
    width, height = size
    box = page.locator("canvas.map").first.bounding_box()
    scale = min(box["width"] / width, box["height"] / height)
    left, upper = (box["width"] - scale * width) / 2, (box["height"] - scale * height) / 2
    return box["x"] + left + scale * x, box["y"] + upper + scale * y


def lasso(page, corners, *, size):
    page.get_by_role("button", name="Draw a region").click()
    here = [on_screen(page, x, y, size=size) for x, y in corners]
    page.mouse.move(*here[0])
    page.mouse.down()
    for x, y in [*here[1:], here[0]]:
        page.mouse.move(x, y, steps=8)
    page.mouse.up()


def tiles_within(corners, middles):
    """By the even-odd rule, as in a textbook."""
    inside = []
    for i, (x, y) in enumerate(middles):
        odd = False
        for (xa, ya), (xb, yb) in zip(corners, corners[1:] + corners[:1], strict=True):
            if (ya > y) != (yb > y) and x < (xb - xa) * (y - ya) / (yb - ya) + xa:
                odd = not odd
        if odd:
            inside.append(i)
    return inside


def test_the_cohort_is_there_first(opened, made_up):
    page = opened(f"{made_up}/")
    assert page.locator("#count").inner_text() == f"{CASES:,}"
    assert page.locator("#grid").get_attribute("aria-rowcount") == str(CASES + 1)
    assert page.locator(".rows .row").count() < 60  # only what is in sight exists
    assert page.get_by_text("RESEARCH USE ONLY").is_visible()
    assert page.title().endswith("(research use only)")


def test_the_cohort_sorts_filters_and_finds(opened, made_up):
    page = opened(f"{made_up}/")
    first = page.locator(".rows .row").first
    page.get_by_role("button", name="probability").click()
    lowest = min(range(CASES), key=lambda i: (row(i)["confidence"], i))
    assert first.locator(".slide").inner_text() == row(lowest)["slide"]
    assert page.locator("[role=columnheader].confidence").get_attribute("aria-sort") == "ascending"
    page.get_by_role("button", name="probability").click()
    assert first.locator(".confidence").inner_text() == percent(max(row(i)["confidence"] for i in range(CASES)))
    page.get_by_label("errors only").check()
    wrong = sum(row(i)["right"] is False for i in range(CASES))
    assert page.locator("#count").inner_text() == f"{wrong} of {CASES:,}"
    assert page.locator(".rows .row:not(:has(.wrong))").count() == 0
    page.get_by_role("searchbox").fill("patient_007 node_2")
    assert page.locator(".rows .slide").all_inner_texts() == ["patient_007_node_2"]
    page.get_by_role("searchbox").fill("nobody")
    assert page.get_by_text("No slide matches.").is_visible()


def test_stepping_through_with_keys_shows_one_case_after_the_other(opened, made_up):
    page = opened(f"{made_up}/#case=0")
    for number in (1, 2, 3):
        page.keyboard.press("j")
        until(page, f"document.getElementById('slide').textContent === '{row(number)['slide']}'")
        settled(page)
        assert chances(page) == [percent(p) for p in answer(number, np.arange(len(evidence(number))))]
    page.keyboard.press("k")
    until(page, f"document.getElementById('slide').textContent === '{row(2)['slide']}'")
    page.locator("#grid").focus()
    page.keyboard.press("End")
    assert page.locator("#grid").get_attribute("aria-activedescendant") == f"case-{CASES - 1}"
    assert page.locator(f"#case-{CASES - 1}").is_visible()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("location.hash").startswith("#case=1")


def test_the_numbers_are_those_of_the_server(opened, made_up):
    page = opened(f"{made_up}/#case={SLIDE}&class=1")
    everything = np.arange(len(evidence(SLIDE)))
    assert chances(page) == [percent(p) for p in answer(SLIDE, everything)]
    assert chances(page, 1) == [percent(p) for p in answer(SLIDE, everything, turned=True)]
    best = top(SLIDE, 1, 8)["supporting"][0]
    assert page.locator(".tile.for").first.get_attribute("aria-label").startswith(f"tile {best['instance']}, +")
    page.locator("#deletion").scroll_into_view_if_needed()
    page.wait_for_selector("#deletion svg")
    curve = deletion(SLIDE, 1)
    half = next(s for s, p in zip(curve["share"], curve["most"], strict=True) if p < curve["most"][0] / 2)
    assert f"loses half of its probability after {percent(half)}" in page.locator("#deletion").inner_text()


@pytest.mark.finding(n=1)
def test_the_header_has_pixels_and_micrometres_per_pixel_of_the_tiles(opened, made_up):
    page = opened(f"{made_up}/#case={SLIDE}")
    assert "tiles of 256 px at 1 µm/px · slide 0.5 µm/px" in page.locator("#facts").inner_text()
    page = opened(f"{made_up}/#case={DIGITS}")
    assert "px" not in page.locator("#facts").inner_text()


def test_maps_and_classes_change_and_the_legend_says_what_the_colours_mean(opened, made_up):
    page = opened(f"{made_up}/#case={SLIDE}")
    legend = page.locator("figcaption")
    assert "refutes “macro”" in legend.inner_text() and "supports “macro”" in legend.inner_text()
    page.locator("#class").select_option("micro")
    settled(page)
    assert "supports “micro”" in legend.inner_text() and page.evaluate("location.hash").endswith("class=1")
    assert page.get_by_role("heading", name="Most supporting “micro”").is_visible()
    page.locator("#map").select_option("factual")
    settled(page)
    assert "low attention weight" in legend.inner_text() and "map=factual" in page.evaluate("location.hash")
    page.keyboard.press("3")
    settled(page)
    assert page.get_by_role("heading", name="Most supporting “macro”").is_visible()


def test_the_overlay_is_blue_where_the_tissue_supports_and_orange_where_it_refutes(opened, made_up):
    page = opened(f"{made_up}/#case={BARE}", device_scale_factor=1)
    until(page, "document.querySelector('canvas.map')?.width > 0")
    page.wait_for_timeout(200)
    strongest, weakest = evidence(BARE)[:, 2].argmax(), evidence(BARE)[:, 2].argmin()

    box = page.locator("canvas.map").bounding_box()
    spots = [on_screen(page, *(places(BARE)[i] + 256), size=(20480, 14336)) for i in (strongest, weakest)]
    blue, orange = page.evaluate(
        """spots => {
            const canvas = document.querySelector("canvas.map");
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return spots.map(([x, y]) => [...data.slice(4 * (Math.round(y) * canvas.width + Math.round(x)))].slice(0, 4));
        }""",
        [[x - box["x"], y - box["y"]] for x, y in spots],
    )
    assert blue[2] > blue[0] + 60 and blue[3] == 255
    assert orange[0] > orange[2] + 60 and orange[3] == 255


@pytest.mark.finding(n=3)
def test_a_negligible_map_is_drawn_as_0_and_says_why(opened, made_up):
    page = opened(f"{made_up}/#case={fake_server.TINY}")
    assert f"Negligible, drawn as 0: {fake_server.NEGLIGIBLE}." in page.locator("figcaption").inner_text()
    assert page.locator("#tiles .tile").count() == 0
    assert "the evidence is negligible" in page.locator("#tiles").inner_text()
    for scale in ("value", "rank"):
        page.locator("#scale").select_option(scale)
        settled(page)
        strengths = page.evaluate(
            """async ({ TINY, byRank }) => {
                const map = await (await fetch(`/api/case/${TINY}/map/evidence?class=2`)).json();
                const { paint } = await import("/page/colours.js");
                return [...paint(map, { byRank, dark: false }).strength];
            }""",
            {"TINY": fake_server.TINY, "byRank": scale == "rank"},
        )
        assert len(strengths) == len(evidence(fake_server.TINY)) and not any(strengths)


def test_the_colours_hold_for_red_green_blindness(opened, made_up):
    """For and against stay apart for protanopes and deuteranopes (Machado 2009); every scale changes steadily in lightness."""
    from skimage.color import rgb2lab

    blind = {
        "nobody": np.eye(3),
        "protanopes": [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ],
        "deuteranopes": [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ],
    }

    def lab(colours, matrix):
        part = np.asarray(colours)[:, :3] / 255
        linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4) @ np.asarray(matrix).T
        seen = np.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear.clip(0.0031308, None) ** (1 / 2.4) - 0.055)
        return rgb2lab(seen.clip(0, 1))

    page = opened(f"{made_up}/#case={BARE}")
    for dark in (False, True):
        sequence, diverging = page.evaluate(
            "dark => import('/page/colours.js').then(({ palette }) => [palette(false, dark), palette(true, dark)])",
            dark,
        )
        for who, matrix in blind.items():
            seen, middle = lab(diverging, matrix), len(diverging) // 2
            for step in range(middle // 4, middle + 1):  # from a quarter of the scale on
                apart = np.linalg.norm(seen[middle + step] - seen[middle - step])
                assert apart > 20, (who, dark, step, apart)
            for lightness in (lab(sequence, matrix)[:, 0], seen[middle:, 0], seen[middle::-1, 0]):
                change = np.diff(lightness) * (1 if dark else -1)
                assert change.min() > -0.5 and change.sum() > 40, (who, dark, change.min(), change.sum())


def test_between_the_stops_the_page_mixes_as_drawn_maps_do(opened, made_up):
    page = opened(f"{made_up}/#case={BARE}")
    for signed in (False, True):
        palette = page.evaluate(
            "signed => import('/page/colours.js').then(found => found.palette(signed, false))", signed
        )
        at = np.linspace(-1 if signed else 0, 1, len(palette))
        drawn = colour_table(signed=signed)[:NOTHING, :3].astype(float)
        scale = np.linspace(-1 if signed else 0, 1, NOTHING)
        expected = np.stack([np.interp(at, scale, drawn[:, c]) for c in range(3)], axis=1)
        np.testing.assert_allclose(np.array(palette)[:, :3], expected, atol=1.1)


def test_opacity_and_ranks_change_without_asking_the_server(opened, made_up):
    page = opened(f"{made_up}/#case={SLIDE}")
    quiet(page)
    asked = []
    page.on("request", lambda request: asked.append(request.url) if "/api/" in request.url else None)
    page.locator("#opacity").fill("0.2")
    page.locator("#scale").select_option("rank")
    assert "rank" in page.locator("figcaption").inner_text()
    until(page, "location.hash.includes('scale=rank') && location.hash.includes('opacity=0.2')")
    assert not asked


def test_the_slide_is_grey_below_a_map_until_its_stain_is_asked_for(opened, made_up):
    page = opened(f"{made_up}/#case={SLIDE}")
    until(page, "document.querySelector('.openseadragon-canvas canvas')")
    look = "getComputedStyle(document.querySelector('.openseadragon-canvas canvas')).filter"
    assert page.evaluate(look).startswith("grayscale(1)")
    page.get_by_label("stain").check()
    assert page.evaluate(look) == "none"
    until(page, "location.hash.includes('stain=1')")
    page.get_by_label("stain").uncheck()
    page.locator("#opacity").fill("0")
    assert page.evaluate(look) == "none"  # without a map there is nothing to mistake
    bare = opened(f"{made_up}/#case={BARE}")
    assert bare.get_by_label("stain").is_hidden()


def test_zoom_and_flight_are_in_the_link_and_a_split_view_moves_together(opened, made_up):
    page = opened(f"{made_up}/#case={SLIDE}&split=factual")
    assert page.locator(".pane").count() == 2
    assert "Evidence: macro" in page.locator("figcaption").nth(0).inner_text()
    assert "attention weight" in page.locator("figcaption").nth(1).inner_text()
    page.locator(".tile.for").first.click()
    until(page, "location.hash.includes('view=')")
    best = top(SLIDE, 2, 8)["supporting"][0]
    x, y, width = (float(part) for part in page.evaluate("location.hash").split("view=")[1].split(","))
    assert (x, y) == pytest.approx((best["x"] + 256, best["y"] + 256), abs=2) and width == pytest.approx(
        14 * 512, rel=0.01
    )
    rulers = page.locator(".ruler")
    assert rulers.nth(0).inner_text() == rulers.nth(1).inner_text()
    assert rulers.nth(0).bounding_box()["width"] == pytest.approx(rulers.nth(1).bounding_box()["width"], rel=0.01)
    page.get_by_role("button", name="Zoom in").click()
    until(page, f"Number(location.hash.split(',')[2]) < {width * 0.8}")
    again = opened(f"{made_up}/{page.evaluate('location.hash')}")
    until(again, "document.querySelector('.ruler').textContent !== ''")
    again.wait_for_timeout(300)
    assert again.locator(".ruler").nth(1).inner_text() == page.locator(".ruler").nth(1).inner_text()
    page.keyboard.press("0")
    until(page, "!location.hash.includes('view=')")
    page.keyboard.press("s")
    settled(page)
    assert page.locator(".pane").count() == 1


def test_a_region_that_is_drawn_is_removed_and_comes_back(opened, made_up):
    page = opened(f"{made_up}/#case={SLIDE}")
    page.wait_for_timeout(300)
    corners = [(5120, 4096), (9216, 4096), (9216, 7680), (5120, 7680)]  # edges of tiles
    lasso(page, corners, size=(20480, 14336))
    inside = tiles_within(corners, places(SLIDE) + 256)
    assert len(inside) > 20
    page.get_by_role("button", name=f"Remove {len(inside)} tiles").click()
    said = whatif(SLIDE, {"remove": inside})
    shows(page, said["before"], said["after"], CLASSES)
    assert f"{len(inside)} tiles removed" in page.locator("#said").inner_text()
    page.get_by_role("button", name="Remove the top 10 %").click()  # in addition
    both = sorted({*inside, *whatif(SLIDE, {"top": 0.1, "map": "evidence", "class": 2})["removed"]})
    page.get_by_text(f"{len(both)} tiles").first.wait_for()
    shows(page, said["before"], whatif(SLIDE, {"remove": both})["after"], CLASSES)
    page.get_by_role("button", name="Undo").click()
    shows(page, said["before"], said["after"], CLASSES)
    page.keyboard.press("u")
    assert page.locator(".moves").count() == 0


def test_a_region_can_be_drawn_corner_by_corner_and_given_up(opened, made_up):
    page = opened(f"{made_up}/#case={BARE}")
    page.wait_for_timeout(300)
    corners = [(5120, 4096), (10240, 4096), (10240, 8192), (5120, 8192)]
    page.keyboard.press("l")
    for x, y in corners:
        page.mouse.click(*on_screen(page, x, y, size=(20480, 14336)), delay=20)
    page.keyboard.press("Enter")
    inside = tiles_within(corners, places(BARE) + 256)
    assert page.get_by_role("button", name=f"Remove {len(inside)} tiles").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator(".line:has-text('Clear marks')").is_visible()
    page.keyboard.press("l")
    assert page.get_by_role("button", name="Stop drawing").is_visible()
    page.keyboard.press("Escape")
    assert page.get_by_role("button", name="Draw a region").is_visible()


def test_the_keyboard_alone_can_take_tissue_away(opened, made_up):
    page = opened(f"{made_up}/#case={BARE}")
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('#whatif input[type=range]')"):
            break
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Remove the top 15 % of evidence"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    said = whatif(BARE, {"top": 0.15, "map": "evidence", "class": CLASSES.index(row(BARE)["prediction"])})
    shows(page, said["before"], said["after"], CLASSES)


@pytest.mark.finding(n=3)
def test_the_top_is_that_of_the_map_that_is_shown_and_is_removed_once(opened, made_up):
    page = opened(f"{made_up}/#case={BARE}&map=counterfactual")
    of_class = CLASSES.index(row(BARE)["prediction"])
    button = page.get_by_role("button", name="Remove the top 10 % of counterfactual attention weight")
    assert "with the highest counterfactual attention weight" in button.get_attribute("title")
    button.click()
    said = whatif(BARE, {"top": 0.1, "map": "counterfactual", "class": of_class})
    assert said["removed"] != whatif(BARE, {"top": 0.1, "map": "evidence", "class": of_class})["removed"]
    shows(page, said["before"], said["after"], CLASSES)
    button.click()
    until(page, "document.getElementById('said').textContent === 'no more tiles removed'")
    page.keyboard.press("u")
    assert page.locator(".moves").count() == 0
    page.locator("#map").select_option("evidence")
    assert "that support" in page.get_by_role("button", name="Remove the top 10 % of evidence").get_attribute("title")


def test_digits_are_pictures_and_what_has_neither_place_nor_picture_is_a_strip(opened, made_up):
    page = opened(f"{made_up}/#case={DIGITS}")
    order = np.argsort(-evidence(DIGITS)[:, CLASSES.index(row(DIGITS)["prediction"])], kind="stable").tolist()
    shown = page.locator(".instance").evaluate_all("all => all.map(one => Number(one.dataset.instance))")
    assert shown == order
    page.locator(".instance").nth(0).click()
    page.locator(".instance").nth(0).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    page.keyboard.press("x")
    said = whatif(DIGITS, {"remove": order[:2]})
    shows(page, said["before"], said["after"], CLASSES)
    assert page.locator(".instance.gone").count() == 2

    page = opened(f"{made_up}/#case={BARS}")
    strip = page.locator("canvas.bars").bounding_box()
    page.mouse.move(strip["x"] + 2, strip["y"] + 50)
    page.mouse.down()
    page.mouse.move(strip["x"] + 100, strip["y"] + 50, steps=5)
    page.mouse.up()
    words = page.get_by_role("button", name="instances").first.inner_text()
    count = int(words.split()[1])
    assert 100 < count < 400
    page.keyboard.press("x")
    order = np.argsort(-evidence(BARS)[:, CLASSES.index(row(BARS)["prediction"])], kind="stable").tolist()
    first = round(2 / strip["width"] * len(order) - 0.5)
    said = whatif(BARS, {"remove": order[first : first + count]})
    shows(page, said["before"], said["after"], CLASSES)


def test_a_link_shows_the_same_again_and_back_goes_back(opened, made_up):
    page = opened(f"{made_up}/#case=4&map=difference&class=1&split=evidence&split_class=0&opacity=0.4")
    assert page.locator("#slide").inner_text() == row(4)["slide"]
    assert page.locator("#map").input_value() == "difference" and page.locator("#class").input_value() == "1"
    assert page.locator("#split").input_value() == "evidence" and page.locator("#opacity").input_value() == "0.4"
    assert "Evidence: normal" in page.locator("figcaption").nth(1).inner_text()
    page.keyboard.press("j")
    until(page, f"document.getElementById('slide').textContent === '{row(5)['slide']}'")
    settled(page)
    page.locator("#map").select_option("counterfactual")
    settled(page)
    page.go_back()
    until(page, "document.getElementById('map').value === 'difference'")
    assert page.locator("#slide").inner_text() == row(5)["slide"]
    page.go_back()
    until(page, f"document.getElementById('slide').textContent === '{row(4)['slide']}'")
    page.go_forward()
    until(page, f"document.getElementById('slide').textContent === '{row(5)['slide']}'")


@pytest.mark.parametrize(
    "hash_", ["#case=99999999", "#case=-1&map=none&class=77&split=x&opacity=9&view=a,b", "#%E0%A4%A"]
)
def test_a_link_that_means_nothing_breaks_nothing(opened, made_up, hash_):
    page = opened(f"{made_up}/{hash_}")
    shown = page.locator("#panes").inner_text()
    assert "There is no case 99999999" in shown if "9999" in hash_ else "Evidence" in shown


def test_a_case_that_cannot_be_read_says_so_and_the_next_one_opens(opened, made_up):
    page = opened(f"{made_up}/#case={BROKEN}", refused=True)
    assert "its features are not where the run says" in page.get_by_role("alert").first.inner_text()
    page.keyboard.press("j")
    until(page, f"document.getElementById('slide').textContent === '{row(BROKEN + 1)['slide']}'")
    settled(page)
    assert page.locator(".chances").is_visible()


def test_a_server_that_is_gone_is_named(opened, made_up):
    page = opened(f"{made_up}/#case={BARE}", refused=True)
    page.route("**/api/**", lambda route: route.abort())
    page.get_by_role("button", name="Remove the top 10 %").click()
    page.get_by_text("Is “carmil view” still running?").wait_for()


def test_the_keys_are_listed_and_can_be_switched_off(opened, made_up):
    page = opened(f"{made_up}/#case=0")
    page.keyboard.press("?")
    assert page.get_by_role("dialog", name="Keys").is_visible()
    page.get_by_label("single-key shortcuts are on").uncheck()
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.wait_for_timeout(200)
    assert page.locator("#slide").inner_text() == row(0)["slide"]


def test_the_theme_is_the_system_s_until_one_is_chosen(opened, made_up):
    page = opened(f"{made_up}/#case=1", color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(ground) == "rgb(18, 22, 29)"
    page.get_by_role("button", name="Theme: system").click()
    assert page.evaluate(ground) == "rgb(246, 247, 249)"
    page.reload()
    settled(page)
    assert page.evaluate(ground) == "rgb(246, 247, 249)"


def test_on_a_phone_the_columns_stack_and_nothing_sticks_out(opened, made_up):
    for number in (SLIDE, DIGITS, BARS):
        page = opened(f"{made_up}/#case={number}&split=factual", viewport=PHONE)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        tops = [page.locator(f"#{name}").bounding_box()["y"] for name in ("cohort", "scene", "why")]
        assert tops == sorted(tops) and len(set(tops)) == 3


@pytest.fixture(scope="session")
def axe(pytestconfig):
    """axe-core's script, fetched once and kept with pytest's cache."""
    kept = pytestconfig.cache.mkdir("axe") / f"{AXE}.js"
    if not kept.is_file():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("needs npm to fetch axe-core")
        done = subprocess.run(
            [npm, "pack", "--silent", AXE], cwd=kept.parent, capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"npm could not fetch {AXE}")
        package = kept.parent / done.stdout.strip().splitlines()[-1]
        shutil.unpack_archive(package, kept.parent / "unpacked", filter="data")
        shutil.copy(kept.parent / "unpacked" / "package" / "axe.min.js", kept)
    return kept.read_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "hash_", ["#case=0&split=factual", "#case=1", "#case=2", "#case=3", f"#case={BROKEN}", "keys", "phone"]
)
def test_axe_finds_no_serious_violation(opened, made_up, axe, scheme, hash_):
    look = {"viewport": PHONE} if hash_ == "phone" else {}
    page = opened(
        f"{made_up}/{hash_ if hash_[0] == '#' else '#case=0'}",
        refused=True,
        color_scheme=scheme,
        bypass_csp=True,
        **look,
    )
    if hash_ == "keys":
        page.keyboard.press("?")
    elif "17" not in hash_:
        page.get_by_role("button", name="Remove the top 10 %").click()
        page.wait_for_selector(".moves")
        page.locator("#deletion").scroll_into_view_if_needed()
        page.wait_for_selector("#deletion svg")
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    serious = [
        f"{one['id']}: {node['html'][:160]} {node['failureSummary']}"
        for one in found
        for node in one["nodes"]
        if one["impact"] in ("serious", "critical")
    ]
    assert not serious, "\n".join(serious)


@contextmanager
def viewing(app):
    """The address of the viewer itself."""
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listening.close()


def test_on_a_trained_run_everything_holds_together(opened, answers, run, number_of):
    """Open, step, switch maps and classes, zoom, split, remove a region and see what Python computes; deep link and back."""
    app = guarded_app(answers, is_known=known_hosts([], any_address=False))
    number = number_of["s1"]
    with viewing(app) as address:
        page = opened(f"{address}/#case={number}&class=1")
        everything = answers.whatif.answer(number, [])
        assert chances(page) == [percent(p) for p in everything.factual]
        assert chances(page, 1) == [percent(p) for p in everything.counterfactual]
        assert page.locator("#count").inner_text() == "9"
        until(page, "document.querySelector('.ruler').textContent !== ''")
        page.wait_for_timeout(300)

        corners = [(4, 4), (320, 4), (320, 128), (4, 128)]
        lasso(page, corners, size=(1000, 700))
        inside = tiles_within(corners, answers.pictures.places(number).centres.tolist())
        assert 0 in inside and 5 <= len(inside) < 31
        page.get_by_role("button", name=f"Remove {len(inside)} tiles").click()
        shows(page, everything.factual, answers.whatif.answer(number, inside).factual, run.classes)

        for name in ("factual", "counterfactual", "difference", "evidence"):
            page.locator("#map").select_option(name)
            settled(page)
        page.locator("#class").select_option("a")
        page.locator("#split").select_option("factual")
        settled(page)
        assert page.locator(".pane").count() == 2 and "supports “a”" in page.locator("figcaption").nth(0).inner_text()
        page.locator("#deletion").scroll_into_view_if_needed()
        page.wait_for_selector("#deletion svg")
        page.get_by_role("button", name="Zoom in").click()
        until(page, "location.hash.includes('view=')")

        page.keyboard.press("j")
        other = answers.run.cases[number + 1].slide
        until(page, f"document.getElementById('slide').textContent === {json.dumps(other)}")
        settled(page)
        page.go_back()
        until(page, "document.getElementById('slide').textContent === 's1'")
        again = opened(f"{address}/{page.evaluate('location.hash')}")
        assert again.locator("#slide").inner_text() == "s1" and again.locator("#class").input_value() == "0"
        for context in (page.context, again.context):
            context.close()
