"""The page in a real browser, on made-up cases and on a trained run."""

import base64
import io
import json
import shutil
import socket
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, from the dev group")

from carmil.maps.annotations import read_annotations  # noqa: E402
from carmil.maps.colours import NOTHING, colour_table  # noqa: E402
from carmil.viewer.app import PAGE, guarded_app  # noqa: E402
from carmil.viewer.guard import known_hosts  # noqa: E402
from carmil.viewer.responses import Responses  # noqa: E402
from carmil.words import probability_text  # noqa: E402

from . import fake_server  # noqa: E402
from .fake_server import BROKEN, CASES, CLASSES, answer, deletion, evidence, link, places, row, serving, top, whatif  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
AXE = "axe-core@4.14.0"
SLIDE, BARE, DIGITS, BARS = 0, 1, 2, 3  # cases of the made-up run, one of each kind
SVG, HREF = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
WIDE, PHONE = {"width": 1400, "height": 900}, {"width": 390, "height": 844}

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)"),
    pytest.mark.skipif(
        not (PAGE / "openseadragon.min.js").is_file(),
        reason="needs OpenSeadragon (python tools/fetch_openseadragon.py)",
    ),
]


CONTEXTS = []  # of the browser, one per open page


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
    """Yield a function that opens an address; the page must log no errors. With `refused`, failed requests are allowed."""
    troubles = []

    def go(address, *, refused=False, **look):
        context = browser.new_context(**{"viewport": WIDE, "reduced_motion": "reduce", **look})
        CONTEXTS.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on(
            "console",
            lambda message: (
                troubles.append(message.text)
                if message.type in ("error", "warning") and not (refused and "Failed to load resource" in message.text)
                else None
            ),
        )
        page.goto(address)
        settled(page)
        return page

    yield go
    close_pages()
    assert not troubles


def close_pages():
    """Close all pages, so that none asks a server that is about to stop."""
    while CONTEXTS:
        CONTEXTS.pop().close()


def until(page, expression):
    """Poll from Python: waiting inside the page needs eval, which its security policy forbids."""
    for _ in range(300):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never came true: {expression}")


def settled(page):
    page.wait_for_selector("#panes[aria-busy=false]")
    until(page, "!document.querySelector('.waits')")


def wait_until_loaded(page):
    """Wait until no resource has arrived for a second; pictures of slides load tile by tile."""
    before = -1
    while (come := page.evaluate("performance.getEntriesByType('resource').length")) != before:
        before = come
        page.wait_for_timeout(1000)


def probabilities(page, column=0):
    """Return the probabilities shown on the page, by class."""
    return page.locator(f".chances tbody tr td:nth-of-type({column + 1}) .figure").all_inner_texts()


def whatif_changes(page):
    """Return the text of the what-if for every class: before, after and percentage points."""
    page.wait_for_selector(".moves")
    lines = [line.inner_text().split() for line in page.locator(".moves tbody tr").all()]
    return {line[0]: " ".join(line[1:]) for line in lines}


def points(change):
    size = abs(100 * change)
    return "±0" if size < 0.05 else f"{'+' if change > 0 else '−'}{size:.{1 if size < 9.95 else 0}f}"


def assert_shows(page, before, after, classes):
    """Assert that the page shows these probabilities before and after for every class."""
    changes = whatif_changes(page)
    for name, was, now in zip(classes, before, after, strict=True):
        assert changes[name].startswith(f"{probability_text(was)} → {probability_text(now)} {points(now - was)}"), (
            name,
            was,
            now,
        )


def on_screen(page, x, y, *, size):
    """Return the window position of a slide position when the whole slide is shown."""
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
    """Return the tiles inside the polygon by the textbook even-odd rule."""
    inside = []
    for i, (x, y) in enumerate(middles):
        odd = False
        for (xa, ya), (xb, yb) in zip(corners, corners[1:] + corners[:1], strict=True):
            if (ya > y) != (yb > y) and x < (xb - xa) * (y - ya) / (yb - ya) + xa:
                odd = not odd
        if odd:
            inside.append(i)
    return inside


def test_page_opens_with_the_cohort(opened, made_up):
    page = opened(f"{made_up}/")
    assert page.locator("#count").inner_text() == f"{CASES:,}"
    assert page.locator("#grid").get_attribute("aria-rowcount") == str(CASES + 1)
    assert page.locator(".rows .row").count() < 60  # only visible rows exist
    assert page.get_by_text("RESEARCH USE ONLY").is_visible()
    assert page.title().endswith("(research use only)")


def test_page_writes_probabilities_as_reports_do(opened, made_up):
    page = opened(f"{made_up}/")
    chances = [*np.linspace(0, 1, 1001).tolist(), 0.0625, 0.9994, 0.9995, 1e-9]
    texts = page.evaluate(
        "async chances => { const words = await import('/page/words.js'); return chances.map(words.probability); }",
        chances,
    )
    assert texts == [probability_text(p) for p in chances]


def test_cohort_can_be_sorted_filtered_and_searched(opened, made_up):
    page = opened(f"{made_up}/")
    first = page.locator(".rows .row").first
    page.get_by_role("button", name="probability").click()
    lowest = min(range(CASES), key=lambda i: (row(i)["value"], i))
    assert first.locator(".slide").inner_text() == row(lowest)["slide"]
    assert page.locator("[role=columnheader].value").get_attribute("aria-sort") == "ascending"
    page.get_by_role("button", name="probability").click()
    assert first.locator(".value").inner_text() == probability_text(max(row(i)["value"] for i in range(CASES)))
    page.get_by_label("errors only").check()
    wrong = sum(row(i)["right"] is False for i in range(CASES))
    assert page.locator("#count").inner_text() == f"{wrong} of {CASES:,}"
    assert page.locator(".rows .row:not(:has(.wrong))").count() == 0
    page.get_by_role("searchbox").fill("patient_007 node_2")
    assert page.locator(".rows .slide").all_inner_texts() == ["patient_007_node_2"]
    page.get_by_role("searchbox").fill("nobody")
    assert page.get_by_text("No slide matches.").is_visible()


def test_keys_step_through_the_cases(opened, made_up):
    page = opened(f"{made_up}/{link(0)}")
    for number in (1, 2, 3):
        page.keyboard.press("j")
        until(page, f"document.getElementById('slide').textContent === '{row(number)['slide']}'")
        settled(page)
        assert probabilities(page) == [probability_text(p) for p in answer(number, np.arange(len(evidence(number))))]
    page.keyboard.press("k")
    until(page, f"document.getElementById('slide').textContent === '{row(2)['slide']}'")
    page.locator("#grid").focus()
    page.keyboard.press("End")
    assert page.locator("#grid").get_attribute("aria-activedescendant") == f"case-{CASES - 1}"
    assert page.locator(f"#case-{CASES - 1}").is_visible()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("location.hash").startswith(link(1))


def test_page_shows_the_numbers_of_the_server(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}&class=1")
    everything = np.arange(len(evidence(SLIDE)))
    assert probabilities(page) == [probability_text(p) for p in answer(SLIDE, everything)]
    assert probabilities(page, 1) == [probability_text(p) for p in answer(SLIDE, everything, counterfactual=True)]
    best = top(SLIDE, 1, 8)["supporting"][0]
    assert page.locator(".tile.for").first.get_attribute("aria-label").startswith(f"tile {best['instance']}, +")
    page.locator("#deletion").scroll_into_view_if_needed()
    page.wait_for_selector("#deletion svg")
    curve = deletion(SLIDE, 1)
    half = next(s for s, p in zip(curve["share"], curve["most"], strict=True) if p < curve["most"][0] / 2)
    assert f"loses half of its probability after {100 * half:.0f} %" in page.locator("#deletion").inner_text()


@pytest.mark.finding(n=1)
def test_header_shows_pixels_and_micrometres_per_pixel_of_tiles(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}")
    assert "tiles of 256 px at 1 µm/px · slide 0.5 µm/px" in page.locator("#facts").inner_text()
    page = opened(f"{made_up}/{link(DIGITS)}")
    assert "px" not in page.locator("#facts").inner_text()


def test_legend_follows_the_selected_map_and_class(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}")
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


def test_overlay_is_blue_for_supporting_and_orange_for_refuting_tissue(opened, made_up):
    page = opened(f"{made_up}/{link(BARE)}", device_scale_factor=1)
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
def test_negligible_map_is_drawn_as_zero_with_an_explanation(opened, made_up):
    page = opened(f"{made_up}/{link(fake_server.TINY)}")
    assert f"Negligible, drawn as 0: {fake_server.NEGLIGIBLE}." in page.locator("figcaption").inner_text()
    assert page.locator("#tiles .tile").count() == 0
    assert "the evidence is negligible" in page.locator("#tiles").inner_text()
    page.get_by_text("More", exact=True).click()
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


def test_faint_map_does_not_fill_the_colours_and_says_why(opened, made_up):
    page = opened(f"{made_up}/{link(fake_server.FAINT)}")
    assert f"Drawn faint: {fake_server.WHY_FAINT}." in page.locator("figcaption").inner_text()
    assert page.locator("#tiles .tile").count() > 0
    for by_rank in (False, True):
        most = page.evaluate(
            """async ({ FAINT, byRank }) => {
                const map = await (await fetch(`/api/case/${FAINT}/map/evidence?class=2`)).json();
                const { paint } = await import("/page/colours.js");
                return Math.max(...paint(map, { byRank, dark: false }).strength.map(Math.abs));
            }""",
            {"FAINT": fake_server.FAINT, "byRank": by_rank},
        )
        assert most == pytest.approx(fake_server.FILL, abs=0.01)


def test_colours_are_distinguishable_with_red_green_colour_blindness(opened, made_up):
    """For and against are distinct for protanopes and deuteranopes (Machado 2009); lightness changes monotonically."""
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
        recorded = np.where(
            linear <= 0.0031308, linear * 12.92, 1.055 * linear.clip(0.0031308, None) ** (1 / 2.4) - 0.055
        )
        return rgb2lab(recorded.clip(0, 1))

    page = opened(f"{made_up}/{link(BARE)}")
    for dark in (False, True):
        sequence, diverging = page.evaluate(
            "dark => import('/page/colours.js').then(({ palette }) => [palette(false, dark), palette(true, dark)])",
            dark,
        )
        for who, matrix in blind.items():
            recorded, middle = lab(diverging, matrix), len(diverging) // 2
            for step in range(middle // 4, middle + 1):  # from a quarter of the scale on
                apart = np.linalg.norm(recorded[middle + step] - recorded[middle - step])
                assert apart > 20, (who, dark, step, apart)
            for lightness in (lab(sequence, matrix)[:, 0], recorded[middle:, 0], recorded[middle::-1, 0]):
                change = np.diff(lightness) * (1 if dark else -1)
                assert change.min() > -0.5 and change.sum() > 40, (who, dark, change.min(), change.sum())


def test_page_interpolates_colours_like_drawn_maps(opened, made_up):
    page = opened(f"{made_up}/{link(BARE)}")
    for signed in (False, True):
        palette = page.evaluate(
            "signed => import('/page/colours.js').then(found => found.palette(signed, false))", signed
        )
        at = np.linspace(-1 if signed else 0, 1, len(palette))
        drawn = colour_table(signed=signed)[:NOTHING, :3].astype(float)
        scale = np.linspace(-1 if signed else 0, 1, NOTHING)
        expected = np.stack([np.interp(at, scale, drawn[:, c]) for c in range(3)], axis=1)
        np.testing.assert_allclose(np.array(palette)[:, :3], expected, atol=1.1)


def test_changing_opacity_and_scale_sends_no_requests(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}")
    wait_until_loaded(page)
    requested = []
    page.on("request", lambda request: requested.append(request.url) if "/api/" in request.url else None)
    page.get_by_text("More", exact=True).click()
    page.locator("#opacity").fill("0.2")
    page.locator("#scale").select_option("rank")
    assert "rank" in page.locator("figcaption").inner_text()
    until(page, "location.hash.includes('scale=rank') && location.hash.includes('opacity=0.2')")
    assert not requested


def test_slide_keeps_its_colours_unless_grey_is_selected(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}")
    until(page, "document.querySelector('.openseadragon-canvas canvas')")
    look = "getComputedStyle(document.querySelector('.openseadragon-canvas canvas')).filter"
    assert page.evaluate(look) == "none"
    page.get_by_text("More", exact=True).click()
    page.get_by_label("slide in grey").check()
    assert page.evaluate(look).startswith("grayscale(1)")
    until(page, "location.hash.includes('grey=1')")
    bare = opened(f"{made_up}/{link(BARE)}")
    bare.get_by_text("More", exact=True).click()
    assert bare.get_by_label("slide in grey").is_hidden()


def test_link_contains_the_zoom_and_split_views_move_together(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}&split=factual")
    assert page.locator(".pane").count() == 2
    assert "Evidence: macro" in page.locator("figcaption").nth(0).inner_text()
    assert "attention weight" in page.locator("figcaption").nth(1).inner_text()
    page.locator(".tile.for").first.click()
    until(page, "location.hash.includes('view=')")
    best = top(SLIDE, 2, 8)["supporting"][0]
    x, y, width = (float(part) for part in page.evaluate("location.hash").split("view=")[1].split(","))
    assert (x, y) == pytest.approx((best["x"] + 256, best["y"] + 256), abs=2) and width == pytest.approx(
        8 * 512, rel=0.01
    )
    bars = page.locator(".scale-bar")
    assert bars.nth(0).inner_text() == bars.nth(1).inner_text()
    assert bars.nth(0).bounding_box()["width"] == pytest.approx(bars.nth(1).bounding_box()["width"], rel=0.01)
    page.get_by_role("button", name="Zoom in").click()
    until(page, f"Number(location.hash.split(',')[2]) < {width * 0.8}")
    again = opened(f"{made_up}/{page.evaluate('location.hash')}")
    until(again, "document.querySelector('.scale-bar').textContent !== ''")
    again.wait_for_timeout(300)
    assert again.locator(".scale-bar").nth(1).inner_text() == page.locator(".scale-bar").nth(1).inner_text()
    page.keyboard.press("0")
    until(page, "!location.hash.includes('view=')")
    page.keyboard.press("s")
    settled(page)
    assert page.locator(".pane").count() == 1


def test_drawn_region_can_be_removed_and_restored(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}")
    page.wait_for_timeout(300)
    corners = [(5120, 4096), (9216, 4096), (9216, 7680), (5120, 7680)]  # edges of tiles
    lasso(page, corners, size=(20480, 14336))
    inside = tiles_within(corners, places(SLIDE) + 256)
    assert len(inside) > 20
    page.get_by_role("button", name=f"Remove {len(inside)} tiles").click()
    expected = whatif(SLIDE, {"remove": inside})
    assert_shows(page, expected["before"], expected["after"], CLASSES)
    assert f"{len(inside)} tiles removed" in page.locator("#said").inner_text()
    page.get_by_role("button", name="Remove the top 10 %").click()  # in addition
    both = sorted({*inside, *whatif(SLIDE, {"top": 0.1, "map": "evidence", "class": 2})["removed"]})
    page.get_by_text(f"{len(both)} tiles").first.wait_for()
    assert_shows(page, expected["before"], whatif(SLIDE, {"remove": both})["after"], CLASSES)
    page.get_by_role("button", name="Undo").click()
    assert_shows(page, expected["before"], expected["after"], CLASSES)
    page.keyboard.press("u")
    assert page.locator(".moves").count() == 0


def test_removals_can_be_compared_undone_and_redone(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}")
    page.get_by_role("button", name="Remove the top 10 %").click()
    highest = whatif(SLIDE, {"top": 0.1, "map": "evidence", "class": 2})
    assert_shows(page, highest["before"], highest["after"], CLASSES)
    listed = page.locator("#tiles .tile")
    gone = [j for j in listed.evaluate_all("all => all.map(tile => +tile.dataset.instance)") if j in highest["removed"]]
    assert page.locator("#tiles .tile.gone").count() == len(gone) >= 8
    assert listed.first.get_attribute("aria-label").endswith(", removed: go there")
    assert f"{len(gone)} of these {listed.count()} tiles are removed" in page.locator("#tiles").inner_text()
    words = "Map of the whole slide, before the removal: the 50 removed tiles are hatched."
    assert words in page.locator("figcaption").inner_text()

    page.keyboard.press("u")
    assert page.locator(".moves, #tiles .tile.gone").count() == 0
    assert words not in page.locator("figcaption").inner_text()
    corners = [(5120, 4096), (9216, 4096), (9216, 7680), (5120, 7680)]
    lasso(page, corners, size=(20480, 14336))
    page.get_by_role("button", name="Keep only these").click()
    inside = tiles_within(corners, places(SLIDE) + 256)
    only = whatif(SLIDE, {"keep": inside})
    assert len(only["removed"]) == len(places(SLIDE)) - len(inside)
    assert_shows(page, only["before"], only["after"], CLASSES)

    def compared():
        return [row.locator("th, td").all_inner_texts() for row in page.locator(".trials tbody tr").all()]

    n = len(places(SLIDE))
    expected = [
        [name, f"{len(one['removed'])} ({100 * len(one['removed']) / n:.0f} %)", one["answer_after"],
         points(one["after"][2] - one["before"][2])]
        for name, one in (("top 10 % of evidence for macro", highest), ("all but region 1", only))
    ]  # fmt: skip
    assert compared() == expected
    page.get_by_role("button", name="top 10 % of evidence for macro").click()
    assert_shows(page, highest["before"], highest["after"], CLASSES)
    page.get_by_role("button", name="Undo").click()
    assert_shows(page, only["before"], only["after"], CLASSES)
    page.get_by_role("button", name="Redo").click()
    assert_shows(page, highest["before"], highest["after"], CLASSES)
    page.get_by_role("button", name="Put all back").click()
    assert page.locator(".moves").count() == 0 and compared() == expected
    page.keyboard.press("u")
    assert_shows(page, highest["before"], highest["after"], CLASSES)


def test_region_can_be_drawn_corner_by_corner_and_cancelled(opened, made_up):
    page = opened(f"{made_up}/{link(BARE)}")
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


def test_tissue_can_be_removed_with_the_keyboard_only(opened, made_up):
    page = opened(f"{made_up}/{link(BARE)}")
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
    expected = whatif(BARE, {"top": 0.15, "map": "evidence", "class": CLASSES.index(row(BARE)["prediction"])})
    assert_shows(page, expected["before"], expected["after"], CLASSES)


@pytest.mark.finding(n=3)
def test_removing_the_top_share_uses_the_shown_map_and_has_no_repeated_effect(opened, made_up):
    page = opened(f"{made_up}/{link(BARE)}&map=counterfactual")
    of_class = CLASSES.index(row(BARE)["prediction"])
    button = page.get_by_role("button", name="Remove the top 10 % of counterfactual attention weight")
    assert "with the highest counterfactual attention weight" in button.get_attribute("title")
    button.click()
    expected = whatif(BARE, {"top": 0.1, "map": "counterfactual", "class": of_class})
    assert expected["removed"] != whatif(BARE, {"top": 0.1, "map": "evidence", "class": of_class})["removed"]
    assert_shows(page, expected["before"], expected["after"], CLASSES)
    button.click()
    until(page, "document.getElementById('said').textContent === 'no more tiles removed'")
    page.keyboard.press("u")
    assert page.locator(".moves").count() == 0
    page.locator("#map").select_option("evidence")
    assert "that support" in page.get_by_role("button", name="Remove the top 10 % of evidence").get_attribute("title")


def test_digits_are_shown_as_pictures_and_plain_features_as_a_strip(opened, made_up):
    page = opened(f"{made_up}/{link(DIGITS)}")
    order = np.argsort(-evidence(DIGITS)[:, CLASSES.index(row(DIGITS)["prediction"])], kind="stable").tolist()
    shown = page.locator(".instance").evaluate_all("all => all.map(one => Number(one.dataset.instance))")
    assert shown == order
    page.locator(".instance").nth(0).click()
    page.locator(".instance").nth(0).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    page.keyboard.press("x")
    expected = whatif(DIGITS, {"remove": order[:2]})
    assert_shows(page, expected["before"], expected["after"], CLASSES)
    assert page.locator(".instance.gone").count() == 2

    page = opened(f"{made_up}/{link(BARS)}")
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
    expected = whatif(BARS, {"remove": order[first : first + count]})
    assert_shows(page, expected["before"], expected["after"], CLASSES)


def test_link_restores_the_view_and_browser_history_works(opened, made_up):
    page = opened(f"{made_up}/{link(4)}&map=difference&class=1&split=evidence&split_class=0&opacity=0.4")
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


@pytest.mark.parametrize("hash_", ["#slide=99999999", "#map=none&class=77&split=x&opacity=9&view=a,b", "#%E0%A4%A"])
def test_invalid_link_does_not_break_the_page(opened, made_up, hash_):
    page = opened(f"{made_up}/{hash_}")
    shown = page.locator("#panes").inner_text()
    assert "There is no slide “99999999” in this run" in shown if "9999" in hash_ else "Evidence" in shown


def test_unreadable_case_shows_an_error_and_the_next_case_opens(opened, made_up):
    page = opened(f"{made_up}/{link(BROKEN)}", refused=True)
    assert "its features are not where the run says" in page.get_by_role("alert").first.inner_text()
    page.keyboard.press("j")
    until(page, f"document.getElementById('slide').textContent === '{row(BROKEN + 1)['slide']}'")
    settled(page)
    assert page.locator(".chances").is_visible()


def test_page_reports_that_the_server_has_stopped(opened, made_up):
    page = opened(f"{made_up}/{link(BARE)}", refused=True)
    page.route("**/api/**", lambda route: route.abort())
    page.get_by_role("button", name="Remove the top 10 %").click()
    message = page.get_by_text("Is “carmil view” still running?")
    message.wait_for()
    assert message.is_visible()


def test_keyboard_shortcuts_are_listed_and_can_be_disabled(opened, made_up):
    page = opened(f"{made_up}/{link(0)}")
    page.keyboard.press("?")
    assert page.get_by_role("dialog", name="Keys").is_visible()
    page.get_by_label("single-key shortcuts are on").uncheck()
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.wait_for_timeout(200)
    assert page.locator("#slide").inner_text() == row(0)["slide"]


def test_theme_follows_the_system_until_the_user_selects_one(opened, made_up):
    page = opened(f"{made_up}/{link(1)}", color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(ground) == "rgb(18, 22, 29)"
    page.get_by_role("button", name="Theme: system").click()
    assert page.evaluate(ground) == "rgb(246, 247, 249)"
    page.reload()
    settled(page)
    assert page.evaluate(ground) == "rgb(246, 247, 249)"


def test_phone_shows_tissue_before_controls_and_answer_without_overflow(opened, made_up):
    for number in (SLIDE, DIGITS, BARS):
        page = opened(f"{made_up}/{link(number)}&split=factual", viewport=PHONE)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        tops = [page.locator(name).first.bounding_box()["y"] for name in (".stage", ".controls", "#why")]
        assert tops == sorted(tops) and tops[0] < 200 and page.locator("#cohort").is_hidden()
        page.get_by_role("button", name="Slides").click()
        assert page.locator("#cohort").bounding_box()["y"] < page.locator(".stage").first.bounding_box()["y"]


@pytest.fixture(scope="session")
def axe(pytestconfig):
    """Return the script of axe-core, downloaded once into the cache of pytest."""
    if not pytestconfig.pluginmanager.hasplugin("cacheprovider"):
        pytest.skip("needs the cache of pytest")
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
    elif hash_ != link(BROKEN):
        page.get_by_role("button", name="Remove the top 10 %").click()
        page.wait_for_selector(".moves")
        page.locator("#deletion").scroll_into_view_if_needed()
        page.wait_for_selector("#deletion svg")
        if page.locator("#zooms").is_visible():
            page.get_by_role("button", name="Ruler").click()
        page.get_by_text("More", exact=True).click()
    assert_accessible(page, axe)


def assert_accessible(page, axe):
    """Assert that axe-core finds nothing; the page must have been opened with `bypass_csp`."""
    page.evaluate(axe)
    result = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    found = [f"{one['id']}: {node['html'][:160]} {node['failureSummary']}" for one in result for node in one["nodes"]]
    assert not found, "\n".join(found)


@contextmanager
def viewing(app):
    """Yield the address of a running viewer."""
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        close_pages()
        server.should_exit = True
        thread.join(timeout=10)
        listening.close()


def test_drawn_region_is_named_saved_used_exported_and_deleted(opened, run, files, tmp_path, number_of):
    answers = Responses(run, files, annotations=tmp_path / "drawn")
    number, saved = number_of["s1"], tmp_path / "drawn" / "s1.geojson"
    corners = [(4, 4), (320, 4), (320, 128), (4, 128)]
    with viewing(guarded_app(answers, is_known=known_hosts([], any_address=False))) as address:
        page = opened(f"{address}/#slide=s1")
        panel = page.locator("#annotations")
        assert "Draw a region above, then give it a name to save it." in panel.inner_text()
        until(page, "document.querySelector('.scale-bar').textContent !== ''")
        page.wait_for_timeout(300)
        lasso(page, corners, size=(1000, 700))
        page.get_by_label("Name of the drawn region").fill("tumour bed")
        page.keyboard.press("Enter")
        page.get_by_label("Name of tumour bed").wait_for()
        (region,) = read_annotations(saved, width=1000, height=700)
        assert region.name == "tumour bed"
        assert region.shape.bounds == pytest.approx((4, 4, 320, 128), abs=2)
        assert "1 region in drawn/s1.geojson" in panel.inner_text()

        page.keyboard.press("Escape")
        page.get_by_role("button", name="Mark its tiles: tumour bed").click()
        inside = tiles_within(corners, answers.pictures.places(number).centres.tolist())
        page.get_by_role("button", name="Keep only these").click()
        rest = [j for j in range(run.size(number)) if j not in inside]
        assert_shows(
            page,
            answers.whatif.answer(number, []).factual,
            answers.whatif.answer(number, rest).factual,
            run.outputs,
        )
        page.get_by_role("button", name="Put all back").click()
        assert page.locator(".trials tbody th").all_inner_texts() == ["all but tumour bed"]

        page.get_by_label("Name of tumour bed").fill("stroma")
        page.keyboard.press("Enter")
        page.get_by_label("Name of stroma").wait_for()
        with page.expect_download() as download:
            page.get_by_role("link", name="Download GeoJSON for QuPath").click()
        assert download.value.suggested_filename == "s1.geojson"
        (exported,) = json.loads(Path(download.value.path()).read_text())["features"]
        assert exported["properties"] == {"objectType": "annotation", "name": "stroma"}
        page.reload()
        settled(page)
        page.get_by_label("Name of stroma").wait_for()
        page.get_by_role("button", name="Delete: stroma", exact=True).click()
        assert read_annotations(saved, width=1000, height=700)
        page.get_by_role("button", name="Really delete?: stroma").click()
        page.get_by_text("Draw a region above").wait_for()
        assert json.loads(saved.read_text())["features"] == []
        page.context.close()


def downloaded(page, button):
    with page.expect_download() as download:
        page.get_by_role("button", name=button).click()
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def test_view_is_saved_as_svg_and_png_with_legend_answer_and_slide(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}&split=factual")
    page.get_by_role("button", name="Remove the top 10 %").click()
    expected = whatif(SLIDE, {"top": 0.1, "map": "evidence", "class": 2})
    assert_shows(page, expected["before"], expected["after"], CLASSES)
    name, content = downloaded(page, "Picture (SVG)")
    assert name == f"{row(SLIDE)['slide']}.svg"
    drawing = ElementTree.fromstring(content)
    words = " ".join("".join(text.itertext()) for text in drawing.iter(f"{SVG}text"))
    before, after = (probability_text(p[2]) for p in (expected["before"], expected["after"]))
    for text in (
        row(SLIDE)["slide"],
        f"Run a made-up run. Answer: macro, probability {before}. Label: macro.",
        "Decision rule: the most probable class.",
        f"Without top 10 % of evidence for macro (50 tiles, 10 %): macro {before} → {after}; the answer changes to",
        "RESEARCH USE ONLY",
        "Evidence: macro",
        "supports “macro”",
        "Attention weight",
        "the 50 removed tiles are hatched.",
        "2 mm",
    ):
        assert text in words
    images = [
        Image.open(io.BytesIO(base64.b64decode(one.get(HREF).partition(",")[2]))) for one in drawing.iter(f"{SVG}image")
    ]
    assert [image.format for image in images] == ["JPEG", "PNG"] * 2  # tissue and map of each pane
    stages = [box["width"] for box in (stage.bounding_box() for stage in page.locator(".stage").all())]
    assert [image.width for image in images] == pytest.approx(np.repeat(stages, 2), abs=3)
    pink = np.asarray(images[0].convert("RGB")).reshape(-1, 3)
    assert np.ptp(pink, axis=1).max() > 30  # the tissue is there, in its colours
    name, content = downloaded(page, "Picture (PNG)")
    picture = Image.open(io.BytesIO(content)).convert("RGB")
    assert name == f"{row(SLIDE)['slide']}.png"
    assert picture.size == (2 * int(drawing.get("width")), 2 * int(drawing.get("height")))
    assert np.ptp(np.asarray(picture).reshape(-1, 3), axis=1).max() > 100  # the colours of the legend


@pytest.mark.parametrize("number", [DIGITS, BARS])
def test_view_of_instances_without_places_is_saved(opened, made_up, number):
    page = opened(f"{made_up}/{link(number)}")
    drawing = ElementTree.fromstring(downloaded(page, "Picture (SVG)")[1])
    (image,) = drawing.iter(f"{SVG}image")
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(image.get(HREF).partition(",")[2]))).convert("RGBA"))
    assert np.ptp(shown[..., :3].reshape(-1, 3), axis=1).max() > 100


def test_link_restores_removals_and_the_list(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}")
    lasso(page, [(5120, 4096), (9216, 4096), (9216, 7680), (5120, 7680)], size=(20480, 14336))
    page.get_by_role("button", name="Keep only these").click()
    page.wait_for_selector(".moves")
    page.get_by_role("button", name="Remove the top 10 %").click()
    until(page, "document.querySelectorAll('.trials tbody tr').length === 2")
    page.get_by_role("button", name="all but region 1", exact=True).click()
    page.get_by_role("searchbox").fill("patient_00")
    page.get_by_role("button", name="probability").click()
    until(page, "location.hash.includes('removal=0') && location.hash.includes('sort=value')")
    compared, moved = page.locator(".trials").inner_text(), page.locator(".moves").inner_text()
    again = opened(f"{made_up}/{page.evaluate('location.hash')}")
    until(again, "document.querySelectorAll('.trials tbody tr').length === 2 && document.querySelector('.moves')")
    assert again.locator(".trials").inner_text() == compared and again.locator(".moves").inner_text() == moved
    assert again.locator(".trials tr.chosen th").inner_text() == "all but region 1"
    assert again.locator("#count").inner_text() == page.locator("#count").inner_text() == "30 of 3,000"
    assert again.locator("[role=columnheader].value").get_attribute("aria-sort") == "ascending"
    again.get_by_role("button", name="Undo").click()
    assert again.locator(".moves").count() == 0
    again.keyboard.press("j")
    until(again, "!location.hash.includes('removed=')")
    again.get_by_role("button", name="Copy link").click()
    field = again.locator("#link")
    copied = field.input_value() or again.evaluate("location.href")
    assert copied == again.evaluate("location.href")


def test_link_in_the_same_tab_is_followed_even_while_another_is_waiting(opened, made_up):
    page = opened(f"{made_up}/{link(BARE)}")
    page.route("**/case/0/whatif", lambda route: None)  # never answered
    page.goto(f"{made_up}/{link(SLIDE)}&removed=0-9:edge&removal=0")
    settled(page)
    page.goto(f"{made_up}/{link(BARE)}")
    until(page, f"document.getElementById('slide').textContent === '{row(BARE)['slide']}'")
    settled(page)
    page.goto(f"{made_up}/{link(BARE)}&removed=0-9:edge&removal=0")
    until(page, "document.querySelector('.moves')")
    expected = whatif(BARE, {"remove": list(range(10))})
    assert_shows(page, expected["before"], expected["after"], CLASSES)


def test_numbers_of_a_link_are_read_back_or_refused(opened, made_up):
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
    assert "without 1 tile" in page.locator("#whatif .verdict").inner_text()
    page.keyboard.press("u")
    assert page.locator(".trials tbody th").all_inner_texts() == ["z"]


def test_truth_is_outlined_on_the_slide_unless_it_is_hidden(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}&opacity=0", device_scale_factor=1)
    page.get_by_text("labelled macro").wait_for()
    page.wait_for_timeout(300)
    edge = on_screen(page, 7168, 6000, size=(20480, 14336))
    box = page.locator("canvas.map").bounding_box()
    x, y = round(edge[0] - box["x"]), round(edge[1] - box["y"])
    opacity = f"""() => {{
        const pen = new OffscreenCanvas(1, 1).getContext("2d");
        pen.drawImage(document.querySelector("canvas.map"), {-x}, {-y});
        return pen.getImageData(0, 0, 1, 1).data[3];
    }}"""
    assert page.evaluate(opacity) == 255
    page.get_by_label("show on the slide").uncheck()
    page.wait_for_timeout(200)
    assert page.evaluate(opacity) == 0
    page.get_by_role("button", name="Mark its tiles: labelled macro").click()
    inside = tiles_within([tuple(corner) for corner in fake_server.TRUTH[:4]], places(SLIDE) + 256)
    assert page.get_by_role("button", name=f"Remove {len(inside)} tiles").is_visible()


def test_page_shows_the_results_of_a_trained_run(opened, answers, run, number_of):
    """Open, step, switch maps and classes, zoom, split, remove a region, compare with Python, and follow a deep link."""
    app = guarded_app(answers, is_known=known_hosts([], any_address=False))
    number = number_of["s1"]
    with viewing(app) as address:
        page = opened(f"{address}/#slide=s1&class=1")
        everything = answers.whatif.answer(number, [])
        assert probabilities(page) == [probability_text(p) for p in everything.factual]
        assert probabilities(page, 1) == [probability_text(p) for p in everything.counterfactual]
        assert page.locator("#count").inner_text() == "9"
        until(page, "document.querySelector('.scale-bar').textContent !== ''")
        page.wait_for_timeout(300)

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
