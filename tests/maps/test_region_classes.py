"""Saved regions have a class, as QuPath reads it: the one that was chosen, or the name of the region."""

import json

import pytest

from carmil.errors import CarmilError
from carmil.maps.annotations import read_annotations
from carmil.maps.drawn_regions import DrawnRegions

SQUARE = [[100, 200], [300, 200], [300, 500], [100, 500]]


@pytest.fixture
def regions(tmp_path):
    return DrawnRegions(tmp_path / "s.geojson", "s")


def classifications(regions):
    features = json.loads(regions.path.read_text())["features"]
    return [feature["properties"].get("classification") for feature in features]


def test_class_of_a_region_is_its_name_unless_a_class_is_chosen(regions):
    regions.add("edge: left", SQUARE)
    shown = regions.add("bed", SQUARE, " Tumor ")
    assert [one.classification for one in shown] == ["edge left", "Tumor"]  # a colon means a subclass in QuPath
    assert classifications(regions) == [
        {"name": one.classification, "color": list(one.colour)} for one in DrawnRegions(regions.path, "s").read()
    ]
    assert [one.name for one in read_annotations(regions.path, width=1000, height=1000)] == ["edge left", "Tumor"]


def test_regions_of_a_class_have_its_colour(regions):
    regions.add("a", SQUARE, "Tumor")
    regions.add("b", SQUARE, "Stroma")
    one, other, again = (region.colour for region in regions.add("c", SQUARE, "Tumor"))
    assert one == again != other
    qupath = json.loads(regions.path.read_text())
    for feature in qupath["features"]:
        feature["properties"]["classification"]["color"] = [200, 0, 0]
    regions.path.write_text(json.dumps(qupath))
    assert regions.add("d", SQUARE, "Stroma")[-1].colour == (200, 0, 0)


def test_class_of_a_region_changes_with_its_name_until_a_class_is_chosen(regions):
    (one,) = regions.add("region 1", SQUARE)
    assert [region.classification for region in regions.rename(one.number, "Necrosis")] == ["Necrosis"]
    assert [region.classification for region in regions.classify(one.number, "Tumor: Positive")] == ["Tumor: Positive"]
    (renamed,) = regions.rename(one.number, "upper left")
    assert (renamed.name, renamed.classification) == ("upper left", "Tumor: Positive")
    assert [region.classification for region in regions.classify(one.number, "")] == ["upper left"]


def test_class_from_qupath_is_read_and_survives_renaming_the_region(regions):
    (one,) = regions.add("bed", SQUARE)
    written = json.loads(regions.path.read_text())
    written["features"][0]["properties"] |= {"classification": {"names": ["Tumor", "Positive"]}, "isLocked": True}
    regions.path.write_text(json.dumps(written))
    (renamed,) = regions.rename(one.number, "upper left")
    assert (renamed.name, renamed.classification) == ("upper left", "Tumor: Positive")
    assert json.loads(regions.path.read_text())["features"][0]["properties"]["isLocked"] is True


@pytest.mark.parametrize("name", ["a\0b", "x" * 101])
def test_invalid_class_is_refused(regions, name):
    (one,) = regions.add("bed", SQUARE)
    for change in (lambda: regions.add("b", SQUARE, name), lambda: regions.classify(one.number, name)):
        with pytest.raises(CarmilError, match="class: expected 1 to 100 printable characters"):
            change()
    assert [region.classification for region in regions.read()] == ["bed"]
