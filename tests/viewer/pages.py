"""What tests of the page in a real browser share: waiting for it, reading it, drawing on it.

Every wait is for a state of the page, never for an amount of time, so that a slow machine makes a test slow and not red.
"""

import time
from pathlib import Path

import pytest

from carmil.words import probability_text

from .fake_server import HEIGHT, WIDTH, row

expect = pytest.importorskip("playwright.sync_api", reason="needs playwright, from the dev group").expect

PATIENCE = 60  # seconds until a wait fails
expect.set_options(timeout=1000 * PATIENCE)

SLIDE, BARE, DIGITS, BARS = 0, 1, 2, 3  # cases of the made-up run, one of each kind
WHOLE = (WIDTH, HEIGHT)  # of the made-up slides, in level-0 pixels
DESK, TABLET, PHONE = ({"width": w, "height": h} for w, h in ((1440, 900), (1024, 768), (390, 844)))
SVG, HREF = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"


# Waiting.


def until(page, condition):
    """Poll a function, or an expression in JavaScript; the page's security policy forbids to do it there."""
    end = time.monotonic() + PATIENCE
    while not (condition() if callable(condition) else page.evaluate(condition)):
        assert time.monotonic() < end, f"never came true: {condition}"
        page.wait_for_timeout(50)


def until_equal(page, read, expected):
    """Poll until `read()` equals what is expected, and return it."""
    end = time.monotonic() + PATIENCE
    while (value := read()) != expected and time.monotonic() < end:
        page.wait_for_timeout(50)
    assert value == expected
    return value


def settled(page):
    """Wait until a case is loaded, or refused, and drawn."""
    page.wait_for_selector("#panes[aria-busy=false]")
    until(page, "!document.querySelector('.waits')")
    until(page, "document.querySelector('main.failed, #annotations > *') !== null")
    drawn(page)


def shows(page, slide):
    """Wait until the page shows a slide, given by its name or by the number of its made-up case."""
    expect(page.locator("#slide")).to_have_text(slide if isinstance(slide, str) else row(slide)["slide"])
    settled(page)


def drawn(page):
    """Wait until all panes are drawn, and nothing has moved for some frames."""
    until(
        page,
        "[...document.querySelectorAll('.scale-bar, #magnification')].every(one => one.hidden || one.textContent"
        " || !document.querySelector('canvas.map'))",
    )
    frames(page, steady=True)


def frames(page, *, steady=False):
    """Let the page draw five frames; with `steady`, until five have the same layout and the same views of the slide."""
    page.evaluate(
        """async steady => {
            const frame = () => new Promise(done => {
                requestAnimationFrame(done);
                setTimeout(done, 1000); // a page in the background draws no frames
            });
            const places = () => JSON.stringify([...document.querySelectorAll(".stage")].map(stage => {
                const { x, y, width, height } = stage.getBoundingClientRect(), map = stage.querySelector("canvas.map");
                const views = [...stage.querySelectorAll(".scale-bar, .displayregion")].map(one => one.style.cssText);
                return [x, y, width, height, map?.width, map?.height, ...views];
            }));
            for (let same = 0, before = null; same < 5; ) {
                await frame();
                const now = places();
                same = !steady || now === before ? same + 1 : 0;
                before = now;
            }
        }""",
        steady,
    )


# Reading.


def troubles_of(page, *, refused=False):
    """Return the list in which the page's errors and warnings are collected. refused: failed requests are expected."""
    troubles = []

    def log(message):
        if message.type in ("error", "warning") and not (refused and "Failed to load resource" in message.text):
            troubles.append(message.text)

    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", log)
    return troubles


def hash_of(page):
    return page.evaluate("location.hash")


def view_of(page):
    """Return centre and width of the view in the link, in level-0 pixels; None if it is the whole slide."""
    words = hash_of(page).split("view=")
    return None if len(words) == 1 else tuple(float(part) for part in words[1].split("&")[0].split(","))


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


def colour_at(page, x, y, *, size=WHOLE):
    """Return the mean colour (red, green, blue, alpha) of 5 x 5 pixels of the map around a place of the slide."""
    box, (u, v) = page.locator("canvas.map").first.bounding_box(), on_screen(page, x, y, size=size)
    return page.evaluate(
        """([x, y]) => {
            const pen = new OffscreenCanvas(5, 5).getContext("2d");
            pen.drawImage(document.querySelector("canvas.map"), -x, -y);
            const { data } = pen.getImageData(0, 0, 5, 5);
            return [0, 1, 2, 3].map(c => data.filter((_, i) => i % 4 === c).reduce((sum, one) => sum + one, 0) / 25);
        }""",
        [round(u - box["x"]) - 2, round(v - box["y"]) - 2],
    )


def broken_words(page, names):
    """Return the words within elements that are broken over two lines."""
    return page.evaluate(
        """names => [...document.querySelectorAll(names)].flatMap(name => {
            const text = name.firstChild, range = document.createRange();
            return [...text.data.matchAll(/\\S+/g)].filter(word => {
                range.setStart(text, word.index);
                range.setEnd(text, word.index + word[0].length);
                return range.getClientRects().length > 1;
            }).map(word => word[0]);
        })""",
        names,
    )


def assert_probabilities(page, expected, column=0):
    """Assert that the page shows these probabilities of the classes."""
    figures = page.locator(f".chances tbody tr td:nth-of-type({column + 1}) .figure")
    expect(figures).to_have_text([probability_text(p) for p in expected])


def points(change):
    """Return the change of a probability as the page shows it."""
    size = abs(100 * change)
    return "±0" if size < 0.05 else f"{'+' if change > 0 else '−'}{size:.{1 if size < 9.95 else 0}f}"


def assert_shows(page, before, after, classes):
    """Assert that the page shows these probabilities before and after a removal for every class."""
    expected = [
        f"{name} {probability_text(was)} → {probability_text(now)} {points(now - was)}"
        for name, was, now in zip(classes, before, after, strict=True)
    ]

    def lines():
        texts = [" ".join(line.split()) for line in page.locator(".moves tbody tr").all_inner_texts()]
        return [text[: len(line)] for text, line in zip(texts, expected, strict=False)]

    until_equal(page, lines, expected)


def removals_compared(page):
    """Return the rows of the table of removals."""
    return page.locator(".trials tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.querySelectorAll('th, td')].map(cell => cell.innerText))"
    )


def downloaded(page, button):
    with page.expect_download() as download:
        page.get_by_role("button", name=button).click()
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def assert_accessible(page, axe):
    """Assert that axe-core finds nothing; the page must have been opened with `bypass_csp`."""
    page.evaluate(axe)
    result = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    found = [f"{one['id']}: {node['html'][:160]} {node['failureSummary']}" for one in result for node in one["nodes"]]
    assert not found, "\n".join(found)


# Drawing.


def on_screen(page, x, y, *, size=WHOLE):
    """Return the window position of a slide position when the whole slide is shown."""
    width, height = size
    box = page.locator("canvas.map").first.bounding_box()
    scale = min(box["width"] / width, box["height"] / height)
    left, upper = (box["width"] - scale * width) / 2, (box["height"] - scale * height) / 2
    return box["x"] + left + scale * x, box["y"] + upper + scale * y


def drag(page, here, *there, steps=4):
    """Drag the mouse from one place of the window over others."""
    page.mouse.move(*here)
    page.mouse.down()
    for spot in there:
        page.mouse.move(*spot, steps=steps)
    page.mouse.up()


def lasso(page, corners, *, size=WHOLE):
    """Draw a region by dragging around it."""
    page.get_by_role("button", name="Draw a region").click()
    drawn(page)
    first, *others = [on_screen(page, x, y, size=size) for x, y in corners]
    drag(page, first, *others, first, steps=8)


def click_overview(page, across, down):
    """Click a place of the overview until the view moves there; on a slow machine OpenSeadragon takes a click for a long press."""
    before, box = view_of(page), page.locator(".overview").bounding_box()
    spot = box["x"] + across * box["width"], box["y"] + down * box["height"]

    def moved():
        page.mouse.click(*spot)
        frames(page)
        return page.evaluate("document.querySelector('.displayregion').style.cssText") != region

    region = page.evaluate("document.querySelector('.displayregion').style.cssText")
    until(page, moved)
    until(page, lambda: view_of(page) != before)


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
