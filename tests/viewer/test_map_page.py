"""Maps on the page: their colours, legends and strength, over the slide or over the plane of its tiles."""

import numpy as np
import pytest

from carmil.maps.colours import NOTHING, colour_table

from . import fake_server
from .fake_server import evidence, link, places
from .pages import (
    BARE,
    SLIDE,
    colour_at,
    expect,
    frames,
    hash_of,
    on_screen,
    settled,
    tiles_within,
    until,
    until_equal,
)


def test_legend_follows_the_selected_map_and_class(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}")
    legend = page.locator("figcaption")
    assert "refutes “macro”" in legend.inner_text() and "supports “macro”" in legend.inner_text()
    page.locator("#class").select_option("micro")
    settled(page)
    expect(legend).to_contain_text("supports “micro”")
    until(page, lambda: hash_of(page).endswith("class=1"))
    expect(page.get_by_role("heading", name="Most supporting “micro”")).to_be_visible()
    page.locator("#map").select_option("factual")
    settled(page)
    expect(legend).to_contain_text("Attention weight")
    until(page, lambda: "map=factual" in hash_of(page))
    page.keyboard.press("3")
    expect(page.get_by_role("heading", name="Most supporting “macro”")).to_be_visible()


def test_overlay_is_blue_for_supporting_and_orange_for_refuting_tissue(opened, made_up):
    page = opened(f"{made_up}/{link(BARE)}", device_scale_factor=1)
    strongest, weakest = evidence(BARE)[:, 2].argmax(), evidence(BARE)[:, 2].argmin()
    blue, orange = (colour_at(page, *(places(BARE)[i] + 256)) for i in (strongest, weakest))
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


def test_faint_map_uses_only_pale_colours_and_explains_why(opened, made_up):
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
    requested, waiting = [], set()
    page.on("request", lambda request: "/api/" in request.url and requested.append(request.url))
    page.on("request", lambda request: waiting.add(request))
    for event in ("requestfinished", "requestfailed"):
        page.on(event, lambda request: waiting.discard(request))
    page.reload()
    settled(page)

    def is_loaded():  # a slide comes tile by tile: finer ones are requested while the page draws
        before = len(requested)
        frames(page)
        return not waiting and len(requested) == before

    until(page, is_loaded)
    requested.clear()
    page.get_by_text("More", exact=True).click()
    page.locator("#opacity").fill("0.2")
    page.locator("#scale").select_option("rank")
    expect(page.locator("figcaption")).to_contain_text("rank")
    until(page, "location.hash.includes('scale=rank') && location.hash.includes('opacity=0.2')")
    frames(page)
    assert not requested


def test_slide_keeps_its_colours_unless_grey_is_selected(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}")
    until(page, "document.querySelector('.openseadragon-canvas canvas')")
    look = "getComputedStyle(document.querySelector('.openseadragon-canvas canvas')).filter"
    assert page.evaluate(look) == "none"
    page.get_by_text("More", exact=True).click()
    page.get_by_label("slide in grey").check()
    until(page, lambda: page.evaluate(look).startswith("grayscale(1)"))
    until(page, "location.hash.includes('grey=1')")
    bare = opened(f"{made_up}/{link(BARE)}")
    bare.get_by_text("More", exact=True).click()
    assert bare.get_by_label("slide in grey").is_hidden()


def test_truth_is_outlined_on_the_slide_unless_it_is_hidden(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}&opacity=0", device_scale_factor=1)
    edge = on_screen(page, 7168, 6000)
    box = page.locator("canvas.map").bounding_box()
    x, y = round(edge[0] - box["x"]), round(edge[1] - box["y"])
    opacity = f"""() => {{
        const pen = new OffscreenCanvas(1, 1).getContext("2d");
        pen.drawImage(document.querySelector("canvas.map"), {-x}, {-y});
        return pen.getImageData(0, 0, 1, 1).data[3];
    }}"""
    until_equal(page, lambda: page.evaluate(opacity), 255)
    page.get_by_label("show on the slide").uncheck()
    until_equal(page, lambda: page.evaluate(opacity), 0)
    page.get_by_role("button", name="Mark its tiles: labelled macro").click()
    inside = tiles_within([tuple(corner) for corner in fake_server.TRUTH[:4]], places(SLIDE) + 256)
    expect(page.get_by_role("button", name=f"Remove {len(inside)} tiles")).to_be_visible()
