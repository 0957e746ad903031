"""The view of the page saved as a picture."""

import base64
import io
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from carmil.words import probability_text

from .fake_server import CLASSES, link, row, whatif
from .pages import BARS, DIGITS, HREF, SLIDE, SVG, assert_shows, downloaded, until


def colours_of_slides(page):
    """Return, for every pane, how far the most colourful pixel of the slide is from grey; slides come tile by tile."""
    return page.evaluate(
        """() => [...document.querySelectorAll(".stage canvas:not(.map, .overview *)")].map(slide => {
            const pen = new OffscreenCanvas(64, 64).getContext("2d");
            pen.drawImage(slide, 0, 0, 64, 64);
            const { data } = pen.getImageData(0, 0, 64, 64), pixels = Array.from({ length: 64 * 64 }, (_, i) => i);
            return Math.max(...pixels.map(i => data.slice(4 * i, 4 * i + 3)).map(p => Math.max(...p) - Math.min(...p)));
        })"""
    )


def test_view_is_saved_as_svg_and_png_with_legend_answer_and_slide(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}&split=factual")
    until(page, lambda: len(tissue := colours_of_slides(page)) == 2 and min(tissue) > 30)
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
def test_view_of_instances_without_coordinates_is_saved(opened, made_up, number):
    page = opened(f"{made_up}/{link(number)}")
    drawing = ElementTree.fromstring(downloaded(page, "Picture (SVG)")[1])
    (image,) = drawing.iter(f"{SVG}image")
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(image.get(HREF).partition(",")[2]))).convert("RGBA"))
    assert np.ptp(shown[..., :3].reshape(-1, 3), axis=1).max() > 100
