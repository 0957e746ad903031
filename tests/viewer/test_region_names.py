"""A region that was removed or kept has its own name in the table, in the link and in saved pictures, and its class in QuPath."""

import json
from xml.etree import ElementTree

import pytest

from carmil.maps.annotations import read_annotations
from carmil.viewer.app import guarded_app
from carmil.viewer.guard import known_hosts
from carmil.viewer.responses import Responses

from .pages import SVG, downloaded, expect, hash_of, lasso, settled, until

CORNERS = [(4, 4), (320, 4), (320, 128), (4, 128)]
SIZE = (1000, 700)


@pytest.fixture
def page(opened, serve, run, files, tmp_path):
    """Return the page of a slide whose regions are saved in a folder of their own."""
    responses = Responses(run, files, annotations=tmp_path / "drawn")
    return opened(f"{serve(guarded_app(responses, is_known=known_hosts([], any_address=False)))}/#slide=s1")


def save_as(page, name, kind=""):
    page.get_by_label("Name of the drawn region").fill(name)
    page.get_by_label("Class of the drawn region").fill(kind)
    page.get_by_role("button", name="Save region").click()
    page.get_by_label(f"Name of {name}").wait_for()


def words_of_picture(page):
    drawing = ElementTree.fromstring(downloaded(page, "Picture (SVG)")[1])
    return " ".join("".join(text.itertext()) for text in drawing.iter(f"{SVG}text"))


def test_removal_is_renamed_when_its_region_is_saved_under_a_name(page):
    lasso(page, CORNERS, size=SIZE)
    page.get_by_role("button", name="Remove", exact=False).filter(has_text="tiles").first.click()
    page.wait_for_selector(".moves")
    assert "Without region 1 (" in words_of_picture(page)
    save_as(page, "tumour bed")
    assert "Without tumour bed (" in words_of_picture(page) and "region 1" not in words_of_picture(page)
    until(page, "location.hash.includes('tumour+bed')")
    assert "region+1" not in hash_of(page)
    page.get_by_label("Name of tumour bed").fill("stroma")
    page.keyboard.press("Enter")
    page.get_by_label("Name of stroma").wait_for()
    assert "Without stroma (" in words_of_picture(page)


def test_second_region_does_not_replace_one_that_is_not_saved(page, tmp_path):
    below = [(4, 132), (320, 132), (320, 256), (4, 256)]
    lasso(page, CORNERS, size=SIZE)
    page.get_by_label("Name of the drawn region: region 1").fill("tumour bed")
    lasso(page, below, size=SIZE)
    names = page.get_by_label("Name of the drawn region")
    expect(names).to_have_count(2)
    expect(names.first).to_have_value("tumour bed")
    names.nth(1).press("Enter")
    page.get_by_label("Name of region 2").wait_for()
    names.first.press("Enter")
    page.get_by_label("Name of tumour bed").wait_for()
    expect(names).to_have_count(0)
    second, first = read_annotations(tmp_path / "drawn" / "s1.geojson", width=1000, height=700)
    assert (first.name, second.name) == ("tumour bed", "region 2")
    for region, corners in ((first, CORNERS), (second, below)):
        assert region.shape.bounds == pytest.approx((*corners[0], *corners[2]), abs=2)


def test_removal_of_tiles_without_a_region_states_their_number_once(page):
    for corners in (CORNERS, [(4, 132), (320, 132), (320, 256), (4, 256)]):
        lasso(page, corners, size=SIZE)
    remove = page.get_by_role("button", name="Remove", exact=False).filter(has_text="tiles").first
    count = remove.inner_text().split()[1]
    page.keyboard.press("x")
    page.wait_for_selector(".moves")
    words = words_of_picture(page)
    assert f"Without {count} tiles (" in words and f"({count} tiles" not in words


def test_name_of_a_region_that_is_kept_appears_in_the_picture(page):
    lasso(page, CORNERS, size=SIZE)
    save_as(page, "tumour bed")
    page.get_by_role("button", name="Keep only these").click()
    page.wait_for_selector(".moves")
    assert "With only tumour bed (removed:" in words_of_picture(page)
    page.get_by_role("button", name="Put all back").click()
    expect(page.locator(".trials tbody th")).to_have_text(["all but tumour bed"])


def test_class_of_a_region_is_typed_saved_and_read_back(page, tmp_path):
    lasso(page, CORNERS, size=SIZE)
    save_as(page, "tumour bed", "Tumor")
    field = page.get_by_label("Class of tumour bed")
    expect(field).to_have_value("Tumor")
    offered = page.locator("#region-classes option").evaluate_all("some => some.map(one => one.value)")
    assert offered == ["Tumor", "a", "b"]  # classes of regions and of the run
    field.fill("Stroma")
    page.keyboard.press("Enter")
    until(page, lambda: '"Stroma"' in (tmp_path / "drawn" / "s1.geojson").read_text())
    (feature,) = json.loads((tmp_path / "drawn" / "s1.geojson").read_text())["features"]
    assert feature["properties"]["name"] == "tumour bed"
    assert feature["properties"]["classification"]["name"] == "Stroma"
    page.reload()
    settled(page)
    expect(page.get_by_label("Class of tumour bed")).to_have_value("Stroma")
