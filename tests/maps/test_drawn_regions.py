"""Regions drawn in the viewer are saved as QuPath writes them, and what QuPath wrote stays in the file."""

import json

import numpy as np
import pytest
import shapely

from carmil.errors import CarmilError
from carmil.maps import drawn_regions
from carmil.maps.annotations import read_annotations
from carmil.maps.drawn_regions import MOST_CORNERS, DrawnRegions

from .test_overlays import check_feature

SQUARE = [[100, 200], [300, 200], [300, 500], [100, 500]]
BOW = [[0, 0], [10, 10], [10, 0], [0, 10]]  # crosses itself


def feature(name=None, of_class=None, *, kind="annotation", number=None, geometry=None, **more):
    """Return a feature as QuPath 0.5 exports it."""
    properties = {"objectType": kind, **more}
    properties |= {"name": name} if name else {}
    properties |= {"classification": {"name": of_class, "color": [200, 0, 0]}} if of_class else {}
    ring = [*SQUARE, SQUARE[0]]
    made = {
        "type": "Feature",
        "geometry": geometry or {"type": "Polygon", "coordinates": [ring]},
        "properties": properties,
    }
    return {"type": "Feature", "id": number, **made} if number else made


@pytest.fixture
def regions(tmp_path):
    return DrawnRegions(tmp_path / "s.geojson", "s")


def saved(regions):
    return json.loads(regions.path.read_text(encoding="utf-8"))


def test_drawn_region_is_saved_as_qupath_imports_it(regions):
    assert regions.read() == [] and not regions.path.exists()
    (one,) = regions.add("  tumour  bed ", SQUARE)
    assert one.name == "tumour bed" and [ring.tolist() for ring in one.rings] == [[*SQUARE, SQUARE[0]]]
    content = saved(regions)
    assert content["type"] == "FeatureCollection"
    assert content["carmil"] == {"slide": "s", "note": "research use only"}
    (written,) = content["features"]
    check_feature({**written, "properties": {**written["properties"], "measurements": {}}})
    assert written["id"] == one.number and written["properties"] == {
        "objectType": "annotation",
        "name": "tumour bed",
        "classification": {"name": "tumour bed", "color": list(one.colour)},
    }
    (read,) = read_annotations(regions.path, width=1000, height=1000)
    assert read.name == "tumour bed" and read.shape.area == 200 * 300


def test_outline_that_crosses_itself_becomes_valid_parts(regions):
    (one,) = regions.add("bow", BOW)
    (written,) = saved(regions)["features"]
    shape = shapely.from_geojson(json.dumps(written["geometry"]))
    assert shape.is_valid and shape.geom_type == "MultiPolygon" and len(one.rings) == 2
    assert shape.area == pytest.approx(50)


def test_regions_are_renamed_and_deleted_by_their_id(regions):
    regions.add("a", SQUARE)
    first, second = regions.add("b", BOW)
    assert [one.name for one in regions.rename(first.number, "c")] == ["c", "b"]
    assert [one.name for one in regions.delete(first.number)] == ["b"]
    assert [one.number for one in regions.read()] == [second.number]
    with pytest.raises(CarmilError, match="there is no such region any more"):
        regions.rename(first.number, "d")


@pytest.mark.parametrize("kind", ["collection", "list", "single"])
def test_content_of_a_qupath_file_survives_a_change_in_the_viewer(regions, kind):
    hole = [[150, 250], [200, 250], [200, 300], [150, 300], [150, 250]]
    with_hole = {"type": "Polygon", "coordinates": [[*SQUARE, SQUARE[0]], hole]}
    features = [feature("A", "Tumor", number="12-34", geometry=with_hole, isLocked=True, measurements={"Area": 1.25})]
    if kind != "single":
        features += [
            feature(of_class="Stroma"),
            feature("points", geometry={"type": "MultiPoint", "coordinates": [[1, 2]]}),
            feature(kind="detection", number="cell"),
        ]
    content = {"collection": {"type": "FeatureCollection", "crs": "own", "features": features}, "list": features}
    regions.path.write_text(json.dumps(content.get(kind, features[0])))
    shown = regions.read()
    assert [one.name for one in shown] == ["A", "Stroma"][: len(features)] and shown[0].colour == (200, 0, 0)
    assert shown[0].number == "12-34" and [len(ring) for ring in shown[0].rings] == [5, 5]
    regions.rename(shown[0].number, "B")
    regions.add("own", SQUARE)
    after = saved(regions)["features"]
    renamed = {**features[0], "properties": {**features[0]["properties"], "name": "B"}}
    assert after[:-1] == [renamed, *features[1:]] and after[-1]["properties"]["name"] == "own"
    assert kind != "collection" or saved(regions)["crs"] == "own"
    if kind != "single":
        assert [one.name for one in regions.delete(regions.read()[1].number)] == ["B", "own"]
        assert saved(regions)["features"][1:3] == features[2:]


@pytest.mark.parametrize(
    ("name", "outline", "message"),
    [
        ("", SQUARE, "name: expected 1 to 100 printable characters"),
        ("x" * 101, SQUARE, "name: expected 1 to 100 printable characters"),
        ("a\x00b", SQUARE, "name: expected 1 to 100 printable characters"),
        ("\ud800", SQUARE, "name: expected 1 to 100 printable characters"),
        ("a", SQUARE[:2], "a region has 2 corners: expected 3 to 5,000"),
        ("a", [[0, 0]] * (MOST_CORNERS + 1), "a region has 5,001 corners: expected 3 to 5,000"),
        ("a", [[0, 0], [5, 5], [9, 9]], "the region has no area"),
    ],
)
def test_invalid_regions_are_refused_and_nothing_is_written(regions, name, outline, message):
    with pytest.raises(CarmilError, match=message):
        regions.add(name, outline)
    assert not regions.path.exists()


def test_file_that_is_not_geojson_is_refused_and_left_unchanged(regions):
    regions.path.write_text("hello")
    with pytest.raises(CarmilError, match=r"s\.geojson"):
        regions.add("a", SQUARE)
    assert regions.path.read_text() == "hello"


def test_symlink_is_neither_read_nor_replaced(regions, tmp_path):
    (tmp_path / "other.json").write_text('{"features": []}')
    regions.path.symlink_to(tmp_path / "other.json")
    for change in (regions.read, lambda: regions.add("a", SQUARE)):
        with pytest.raises(CarmilError, match=r"s\.geojson is a link"):
            change()
    assert (tmp_path / "other.json").read_text() == '{"features": []}'


def test_number_of_regions_and_size_of_the_file_are_bounded(regions, monkeypatch):
    monkeypatch.setattr(drawn_regions, "MOST_REGIONS", 2)
    regions.add("a", SQUARE)
    regions.add("b", SQUARE)
    with pytest.raises(CarmilError, match="this slide has 2 regions already"):
        regions.add("c", SQUARE)
    monkeypatch.setattr(drawn_regions, "MOST_REGIONS", 1000)
    monkeypatch.setattr(drawn_regions, "LARGEST", 1500)
    circle = np.stack([np.cos(np.linspace(0, 6, 99)), np.sin(np.linspace(0, 6, 99))], 1) * 1000
    with pytest.raises(CarmilError, match="would be larger than 1,500 bytes"):
        regions.add("c", circle.tolist())
    assert [one.name for one in regions.read()] == ["a", "b"]
