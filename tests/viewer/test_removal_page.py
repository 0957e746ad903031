"""Tissue is marked, drawn around, removed, compared, and saved as a named region."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from carmil.maps.annotations import read_annotations
from carmil.viewer.app import guarded_app
from carmil.viewer.guard import known_hosts
from carmil.viewer.responses import Responses

from .fake_server import CLASSES, evidence, link, places, row, whatif
from .pages import (
    BARE,
    BARS,
    DIGITS,
    SLIDE,
    assert_shows,
    drag,
    drawn,
    expect,
    lasso,
    on_screen,
    points,
    removals_compared,
    settled,
    tiles_within,
    until,
    until_equal,
)

CORNERS = [(5120, 4096), (9216, 4096), (9216, 7680), (5120, 7680)]  # edges of tiles


def test_drawn_region_can_be_removed_and_restored(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}")
    lasso(page, CORNERS)
    inside = tiles_within(CORNERS, places(SLIDE) + 256)
    assert len(inside) > 20
    page.get_by_role("button", name=f"Remove {len(inside)} tiles").click()
    expected = whatif(SLIDE, {"remove": inside})
    assert_shows(page, expected["before"], expected["after"], CLASSES)
    expect(page.locator("#said")).to_contain_text(f"{len(inside)} tiles removed")
    page.get_by_role("button", name="Remove the top 10 %").click()  # in addition
    both = sorted({*inside, *whatif(SLIDE, {"top": 0.1, "map": "evidence", "class": 2})["removed"]})
    assert_shows(page, expected["before"], whatif(SLIDE, {"remove": both})["after"], CLASSES)
    page.get_by_role("button", name="Undo").click()
    assert_shows(page, expected["before"], expected["after"], CLASSES)
    page.keyboard.press("u")
    expect(page.locator(".moves")).to_have_count(0)


def test_removals_can_be_compared_undone_and_redone(opened, made_up):
    page = opened(f"{made_up}/{link(SLIDE)}")
    page.get_by_role("button", name="Remove the top 10 %").click()
    highest = whatif(SLIDE, {"top": 0.1, "map": "evidence", "class": 2})
    assert_shows(page, highest["before"], highest["after"], CLASSES)
    listed = page.locator("#tiles .tile")
    gone = [j for j in listed.evaluate_all("all => all.map(tile => +tile.dataset.instance)") if j in highest["removed"]]
    assert len(gone) >= 8
    expect(page.locator("#tiles .tile.gone")).to_have_count(len(gone))
    expect(listed.first).to_have_attribute("aria-label", re.compile(", removed: go there$"))
    expect(page.locator("#tiles")).to_contain_text(f"{len(gone)} of these {listed.count()} tiles are removed")
    words = page.locator("figcaption").get_by_text(
        "Map of the whole slide, before the removal: the 50 removed tiles are hatched."
    )
    expect(words).to_be_visible()

    page.keyboard.press("u")
    expect(page.locator(".moves, #tiles .tile.gone")).to_have_count(0)
    expect(words).to_be_hidden()
    lasso(page, CORNERS)
    page.get_by_role("button", name="Keep only these").click()
    inside = tiles_within(CORNERS, places(SLIDE) + 256)
    only = whatif(SLIDE, {"keep": inside})
    assert len(only["removed"]) == len(places(SLIDE)) - len(inside)
    assert_shows(page, only["before"], only["after"], CLASSES)

    n = len(places(SLIDE))
    expected = [
        [name, f"{len(one['removed'])} ({100 * len(one['removed']) / n:.0f} %)", one["answer_after"],
         points(one["after"][2] - one["before"][2])]
        for name, one in (("top 10 % of evidence for macro", highest), ("all but region 1", only))
    ]  # fmt: skip
    until_equal(page, lambda: removals_compared(page), expected)
    page.get_by_role("button", name="top 10 % of evidence for macro").click()
    assert_shows(page, highest["before"], highest["after"], CLASSES)
    page.get_by_role("button", name="Undo").click()
    assert_shows(page, only["before"], only["after"], CLASSES)
    page.get_by_role("button", name="Redo").click()
    assert_shows(page, highest["before"], highest["after"], CLASSES)
    page.get_by_role("button", name="Put all back").click()
    expect(page.locator(".moves")).to_have_count(0)
    until_equal(page, lambda: removals_compared(page), expected)
    page.keyboard.press("u")
    assert_shows(page, highest["before"], highest["after"], CLASSES)


def test_region_can_be_drawn_corner_by_corner_and_cancelled(opened, made_up):
    page = opened(f"{made_up}/{link(BARE)}")
    corners = [(5120, 4096), (10240, 4096), (10240, 8192), (5120, 8192)]
    page.keyboard.press("l")
    expect(page.locator("#drawing")).to_be_visible()
    drawn(page)
    for x, y in corners:
        page.mouse.click(*on_screen(page, x, y), delay=20)
    page.keyboard.press("Enter")
    inside = tiles_within(corners, places(BARE) + 256)
    expect(page.get_by_role("button", name=f"Remove {len(inside)} tiles")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".line:has-text('Clear marks')")).to_be_hidden()
    page.keyboard.press("l")
    expect(page.get_by_role("button", name="Stop drawing")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Draw a region")).to_be_visible()


def test_tissue_can_be_removed_with_the_keyboard_only(opened, made_up):
    page = opened(f"{made_up}/{link(BARE)}")
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('#whatif input[type=range]')"):
            break
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_text("Remove the top 15 % of evidence")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expected = whatif(BARE, {"top": 0.15, "map": "evidence", "class": CLASSES.index(row(BARE)["prediction"])})
    assert_shows(page, expected["before"], expected["after"], CLASSES)


@pytest.mark.finding(n=3)
def test_removing_the_top_share_uses_the_shown_map_and_repeating_it_has_no_effect(opened, made_up):
    page = opened(f"{made_up}/{link(BARE)}&map=counterfactual")
    of_class = CLASSES.index(row(BARE)["prediction"])
    button = page.get_by_role("button", name="Remove the top 10 % of counterfactual attention weight")
    expect(button).to_have_attribute("title", re.compile("with the highest counterfactual attention weight"))
    button.click()
    expected = whatif(BARE, {"top": 0.1, "map": "counterfactual", "class": of_class})
    assert expected["removed"] != whatif(BARE, {"top": 0.1, "map": "evidence", "class": of_class})["removed"]
    assert_shows(page, expected["before"], expected["after"], CLASSES)
    button.click()
    until(page, "document.getElementById('said').textContent === 'no more tiles removed'")
    page.keyboard.press("u")
    expect(page.locator(".moves")).to_have_count(0)
    page.locator("#map").select_option("evidence")
    button = page.get_by_role("button", name="Remove the top 10 % of evidence")
    expect(button).to_have_attribute("title", re.compile("that support"))


def test_digits_are_shown_as_pictures_and_plain_features_as_a_strip(opened, made_up):
    page = opened(f"{made_up}/{link(DIGITS)}")
    order = np.argsort(-evidence(DIGITS)[:, CLASSES.index(row(DIGITS)["prediction"])], kind="stable").tolist()
    shown = page.locator(".instance").evaluate_all("all => all.map(one => Number(one.dataset.instance))")
    assert shown == order
    page.locator(".instance").nth(0).click()
    page.locator(".instance").nth(0).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Remove 2 instances")).to_be_visible()
    page.keyboard.press("x")
    expected = whatif(DIGITS, {"remove": order[:2]})
    assert_shows(page, expected["before"], expected["after"], CLASSES)
    expect(page.locator(".instance.gone")).to_have_count(2)

    page = opened(f"{made_up}/{link(BARS)}")
    strip = page.locator("canvas.bars").bounding_box()
    drag(page, *((strip["x"] + across, strip["y"] + 50) for across in (2, 100)))
    count = int(page.get_by_role("button", name=re.compile("Remove .* instances")).inner_text().split()[1])
    assert 100 < count < 400
    page.keyboard.press("x")
    order = np.argsort(-evidence(BARS)[:, CLASSES.index(row(BARS)["prediction"])], kind="stable").tolist()
    first = round(2 / strip["width"] * len(order) - 0.5)
    expected = whatif(BARS, {"remove": order[first : first + count]})
    assert_shows(page, expected["before"], expected["after"], CLASSES)


def test_drawn_region_is_named_saved_used_exported_and_deleted(opened, serve, run, files, tmp_path, number_of):
    answers = Responses(run, files, annotations=tmp_path / "drawn")
    number, saved = number_of["s1"], tmp_path / "drawn" / "s1.geojson"
    corners = [(4, 4), (320, 4), (320, 128), (4, 128)]
    address = serve(guarded_app(answers, is_known=known_hosts([], any_address=False)))
    page = opened(f"{address}/#slide=s1")
    panel = page.locator("#annotations")
    expect(panel).to_contain_text("Draw a region above, then give it a name to save it.")
    lasso(page, corners, size=(1000, 700))
    page.get_by_label("Name of the drawn region").fill("tumour bed")
    page.keyboard.press("Enter")
    page.get_by_label("Name of tumour bed").wait_for()
    (region,) = read_annotations(saved, width=1000, height=700)
    assert region.name == "tumour bed"
    assert region.shape.bounds == pytest.approx((4, 4, 320, 128), abs=2)
    expect(panel).to_contain_text("1 region in drawn/s1.geojson")

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
    expect(page.locator(".trials tbody th")).to_have_text(["all but tumour bed"])

    page.get_by_label("Name of tumour bed").fill("stroma")
    page.keyboard.press("Enter")
    page.get_by_label("Name of stroma").wait_for()
    with page.expect_download() as download:
        page.get_by_role("link", name="Download GeoJSON for QuPath").click()
    assert download.value.suggested_filename == "s1.geojson"
    (exported,) = json.loads(Path(download.value.path()).read_text())["features"]
    assert exported["properties"]["name"] == exported["properties"]["classification"]["name"] == "stroma"
    page.reload()
    settled(page)
    page.get_by_role("button", name="Delete: stroma", exact=True).click()
    really = page.get_by_role("button", name="Really delete?: stroma")
    expect(really).to_be_visible()
    assert read_annotations(saved, width=1000, height=700)
    really.click()
    expect(panel).to_contain_text("Draw a region above")
    assert json.loads(saved.read_text())["features"] == []
