"""Annotations of other programs are read, hostile ones refused, and tiles get labels by a rule that has a name."""

import json
from itertools import pairwise

import numpy as np
import pytest
import tifffile

from carmil.errors import CarmilError
from carmil.maps import masks, tile_labels
from carmil.maps.annotations import read_annotations
from carmil.maps.regions import Region
from carmil.maps.tile_labels import label_tiles, paint, positive_names
from carmil.slides.slide import Tiles
from carmil.truth import UNKNOWN

SQUARE = [[100, 200], [300, 200], [300, 500], [100, 500]]
HOLE = [[150, 250], [200, 250], [200, 300], [150, 300]]


def read(tmp_path, text, name="a.geojson"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return read_annotations(path, width=1000, height=800)


def feature(*rings, name="tumour", kind="Polygon", **properties):
    properties |= {"objectType": "annotation", "classification": {"name": name, "color": [200, 0, 0]}}
    return {"type": "Feature", "geometry": {"type": kind, "coordinates": rings}, "properties": properties}


def asap(*annotations):
    return (
        f'<?xml version="1.0"?>\n<ASAP_Annotations><Annotations>{"".join(annotations)}</Annotations></ASAP_Annotations>'
    )


def asap_polygon(ring, group="_0", kind="Polygon"):
    corners = "".join(f'<Coordinate Order="{i}" X="{x}" Y="{y}"/>' for i, (x, y) in reversed(list(enumerate(ring))))
    return (
        f'<Annotation Name="A 0" Type="{kind}" PartOfGroup="{group}"><Coordinates>{corners}</Coordinates></Annotation>'
    )


def aperio(*regions, name="tumour"):
    return f'<Annotations><Annotation Id="1" Name="{name}"><Regions>{"".join(regions)}</Regions></Annotation></Annotations>'


def aperio_region(ring, kind=0, negative=0):
    corners = "".join(f'<Vertex X="{x}" Y="{y}" Z="0"/>' for x, y in ring)
    return f'<Region Id="1" Type="{kind}" NegativeROA="{negative}"><Vertices>{corners}</Vertices></Region>'


def test_the_same_polygon_is_read_from_every_format(tmp_path):
    texts = {
        "a.geojson": json.dumps({"type": "FeatureCollection", "features": [feature([*SQUARE, SQUARE[0]])]}),
        "b.json": json.dumps([feature(SQUARE)]),
        "c.json": json.dumps(feature([[[*corner, 0] for corner in SQUARE]], kind="MultiPolygon")),
        "d.xml": asap(asap_polygon(SQUARE, "tumour")),
        "e.xml": "﻿" + aperio(aperio_region(SQUARE)),
    }
    for name, text in texts.items():
        (found,) = read(tmp_path, text, name)
        assert (found.name, found.cut) == ("tumour", False)
        np.testing.assert_array_equal(found.rings[0], SQUARE)
        assert found.area == 200 * 300


def test_names_come_from_the_classification_then_the_name(tmp_path):
    features = [
        {**feature(SQUARE), "properties": {"name": "Layer1"}},
        {**feature(SQUARE), "properties": {"classification": "stroma"}},
        {**feature(SQUARE), "properties": None},
        {"type": "Polygon", "coordinates": [SQUARE]},
    ]
    assert [one.name for one in read(tmp_path, json.dumps(features))] == [
        "Layer1",
        "stroma",
        "annotation",
        "annotation",
    ]


def test_points_and_lines_are_passed_over(tmp_path):
    point = {"type": "Feature", "geometry": {"type": "Point", "coordinates": [1, 2]}, "properties": {}}
    assert len(read(tmp_path, json.dumps([point, feature(SQUARE)]))) == 1
    assert len(read(tmp_path, asap(asap_polygon([[1, 2]], kind="Dot"), asap_polygon(SQUARE)), "a.xml")) == 1
    assert len(read(tmp_path, aperio(aperio_region(SQUARE[:2], kind=3), aperio_region(SQUARE)), "b.xml")) == 1


def test_an_ellipse_of_aperio_has_the_area_of_one(tmp_path):
    (found,) = read(tmp_path, aperio(aperio_region([[100, 100], [300, 200]], kind=2)), "a.xml")
    assert found.area == pytest.approx(np.pi * 100 * 50, rel=0.01)


def test_a_mask_becomes_a_region_a_value_with_its_holes(tmp_path):
    mask = np.zeros((400, 500), np.uint8)
    mask[100:250, 50:150] = 1
    mask[125:150, 75:100] = 0
    mask[300:400, 400:500] = 7
    path = tmp_path / "mask.tif"
    tifffile.imwrite(path, mask, tile=(64, 64), metadata=None)
    first, second = read_annotations(path, width=1000, height=800)
    assert (first.name, len(first.rings), second.name) == ("1", 2, "7")
    assert second.rings[0].max(0).tolist() == [1000, 800]
    cells = np.zeros((800, 1000), np.uint8)
    paint(cells, first.rings, 1)
    assert cells.sum() == pytest.approx(4 * (mask == 1).sum(), rel=0.001)


@pytest.mark.finding(n=14)
@pytest.mark.parametrize(
    ("names", "name"), [(3, "annotation"), (["a", 2], "a: 2"), ({"a": 1}, "annotation"), (None, "annotation")]
)
def test_a_classification_with_odd_names_is_still_a_region(tmp_path, names, name):
    one = feature([[1, 1], [9, 1], [9, 9]]) | {"properties": {"classification": {"names": names}}}
    assert [region.name for region in read(tmp_path, json.dumps([one]), "a.geojson")] == [name]


@pytest.mark.finding(n=16)
def test_a_mask_with_60_000_values_is_refused_in_one_line(tmp_path):
    path = tmp_path / "mask.tif"
    tifffile.imwrite(path, np.arange(60_000, dtype=np.uint16).reshape(200, 300), metadata=None)
    with pytest.raises(CarmilError, match="more than 256 different values: expected a mask with one number per class"):
        read_annotations(path, width=300, height=200)


@pytest.mark.finding(n=16)
def test_a_picture_given_as_a_mask_is_refused(tmp_path):
    path = tmp_path / "mask.tif"
    tifffile.imwrite(path, np.random.default_rng(0).integers(0, 9, (1800, 1800), np.uint8), metadata=None)
    with pytest.raises(CarmilError, match="expected a mask of regions, not a picture"):
        read_annotations(path, width=1800, height=1800)


@pytest.mark.finding(n=16)
def test_a_mask_with_255_classes_is_read_whole(tmp_path):
    mask = np.repeat(np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16), 20, 0), 20, 1)
    path = tmp_path / "mask.tif"
    tifffile.imwrite(path, mask, metadata=None)
    regions = read_annotations(path, width=320, height=320)
    assert [one.name for one in regions] == [str(value) for value in range(1, 256)]
    assert [one.area for one in regions] == pytest.approx([20 * 20 - 0.5] * 255)
    corners = np.array([one.rings[0].min(0) for one in regions])
    assert corners.tolist() == [[value % 16 * 20, value // 16 * 20] for value in range(1, 256)]


@pytest.mark.finding(n=16)
def test_a_mask_with_many_wide_classes_is_looked_at_more_coarsely(tmp_path, monkeypatch):
    mask = np.zeros((64, 64), np.uint8)
    for value in range(1, 9):
        mask[value * 4 : value * 4 + 4, value * 4 :] = value
    path = tmp_path / "mask.tif"
    tifffile.imwrite(path, mask, metadata=None)
    fine = read_annotations(path, width=640, height=640)
    monkeypatch.setattr("carmil.maps.masks.MOST_TRACED", 500)
    coarse = read_annotations(path, width=640, height=640)
    assert [one.name for one in coarse] == [one.name for one in fine] == list("12345678")
    for one, other in zip(fine, coarse, strict=True):
        assert other.area == pytest.approx(one.area, rel=0.1)


def test_a_mask_of_another_slide_or_of_fractions_is_refused(tmp_path):
    for i, (mask, words) in enumerate(
        [
            (np.zeros((800, 400), np.uint8), "expected a mask of this slide"),
            (np.zeros((80, 100), np.float32), "float32"),
        ]
    ):
        path = tmp_path / f"{i}.tif"
        tifffile.imwrite(path, mask, metadata=None)
        with pytest.raises(CarmilError, match=words):
            read_annotations(path, width=1000, height=800)


BOMB = (
    '<!DOCTYPE a [<!ENTITY a "ha"><!ENTITY b "'
    + "&a;" * 10
    + '"><!ENTITY c "'
    + "&b;" * 10
    + '">]><ASAP_Annotations>&c;</ASAP_Annotations>'
)


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        '<?xml version="1.0"?><!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/hostname">]><Annotations>&x;</Annotations>',
        '<!DOCTYPE a SYSTEM "http://localhost/evil.dtd"><Annotations/>',
        '<!DOCTYPE a [<!ENTITY % p SYSTEM "file:///etc/hostname"> %p;]><Annotations/>',
    ],
)
def test_an_xml_that_could_hold_entities_is_refused_before_any_is_expanded(tmp_path, text):
    with pytest.raises(CarmilError, match="document type"):
        read(tmp_path, text, "evil.xml")


@pytest.mark.finding(n=14)
@pytest.mark.parametrize("far", [1e300, -1e9])
def test_corners_are_no_farther_away_than_tiles_may_be(far, tmp_path):
    corners = [[1, 2], [3, far], [3, 1]]
    for text in (json.dumps([feature(corners)]), asap(asap_polygon(corners))):
        with pytest.raises(CarmilError, match=r"has a corner at \(3, .*\): expected level-0 pixels below 1e\+09"):
            read(tmp_path, text)
    assert len(read(tmp_path, json.dumps([feature([[1, 2], [3, 9e8], [3, 1]])]))) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<Annotations><Annotation>", "not XML"),
        ("<Annotations>&undefined;</Annotations>", "not XML"),
        ("<html></html>", "begins with <html>"),
        ("<Annotations></Annotations>", "no polygon"),
        (aperio('<Region><Vertices><Vertex X="1" Y="here"/></Vertices></Region>'), "expected a number"),
        (asap(asap_polygon([["nan", 1], [2, 2], [3, 1]])), "not finite numbers"),
        ("[" * 100_000, "nested too deeply"),
        ('{"type": "FeatureCollection", "features": 3}', "not GeoJSON"),
        (json.dumps([feature([["a", "b"], [1, 2], [3, 4]])]), "not pairs of numbers"),
        (json.dumps([feature([[1], [2], [3]])]), "not finite numbers"),
        (json.dumps([feature([[10**400, 1], [2, 2], [3, 1]])]), "a whole number of too many digits"),
        (json.dumps([{"geometry": {"type": "MultiPolygon", "coordinates": [3]}}]), "without coordinates"),
        (json.dumps([{"type": "Feature", "geometry": {"type": "Polygon"}}]), "without coordinates"),
        ("slide,x,y", "not a known kind of annotation"),
        ("", "not a known kind of annotation"),
    ],
)
def test_broken_annotations_are_one_line(tmp_path, text, words):
    with pytest.raises(CarmilError, match=words) as said:
        read(tmp_path, text, "a.txt")
    assert "\n" not in str(said.value)


def tiles_of(corners, size=100.0):
    return Tiles("s", np.array(corners, dtype=np.int64), size, 256, 0.5, 1000, 800, 0.5)


def region(name, left, top, right, bottom, **more):
    return Region(name, (np.array([[left, top], [right, top], [right, bottom], [left, bottom]], float),), **more)


def test_the_rule_says_how_much_overlap_makes_a_tile_positive():
    tiles = tiles_of([(0, 0), (100, 0), (200, 0), (300, 0)])
    tumour = [region("tumour", 30, 0, 240, 100)]  # 70 %, 100 %, 40 %, 0 %
    found = {
        rule: label_tiles(tiles, tumour, rule=rule, complete=True) for rule in ("any", "half", "centre", "0.8", "1")
    }
    np.testing.assert_allclose(found["half"].positive, [0.7, 1, 0.4, 0], atol=0.04)
    assert {rule: one.labels.tolist() for rule, one in found.items()} == {
        "any": [1, 1, 1, 0],
        "half": [1, 1, 0, 0],
        "centre": [1, 1, 0, 0],
        "0.8": [0, 1, 0, 0],
        "1": [0, 1, 0, 0],
    }


@pytest.mark.parametrize("rule", ["most", "1.5", "-0.1", "nan"])
def test_a_rule_that_is_none_is_refused(rule):
    with pytest.raises(CarmilError, match="expected any, centre, half"):
        label_tiles(tiles_of([(0, 0)]), [region("tumour", 0, 0, 10, 10)], rule=rule)


def test_what_nobody_annotated_is_unknown_unless_annotation_is_complete():
    tiles = tiles_of([(0, 0), (200, 0), (400, 0)])
    regions = [region("DCIS", 0, 0, 100, 100), region("benign", 200, 0, 300, 100)]
    assert label_tiles(tiles, regions, positive=["DCIS"]).labels.tolist() == [1, 0, UNKNOWN]
    assert label_tiles(tiles, regions, positive=["DCIS"], complete=True).labels.tolist() == [1, 0, 0]
    assert label_tiles(tiles, regions).labels.tolist() == [1, 1, UNKNOWN]


def test_of_regions_in_each_other_the_smallest_counts():
    tiles = tiles_of([(100, 100), (300, 300), (500, 500)])
    inside = [region("_2", 300, 300, 400, 400), region("tissue", 0, 0, 1000, 800), region("_0", 50, 50, 450, 450)]
    assert label_tiles(tiles, inside, positive=["_0"]).labels.tolist() == [1, 0, 0]
    assert positive_names(inside) == ["tissue", "_0"]  # CAMELYON16's _2 is what is normal in a tumour
    cut = [region("tumour", 50, 50, 450, 450), region("tumour", 300, 300, 400, 400, cut=True)]
    assert label_tiles(tiles, cut).labels.tolist() == [1, UNKNOWN, UNKNOWN]


def test_holes_are_outside():
    ring = np.array(SQUARE, float)
    found = label_tiles(
        tiles_of([(150, 250), (210, 250)], 50.0), [Region("t", (ring, np.array(HOLE, float)))], complete=True
    )
    assert found.labels.tolist() == [0, 1]


def test_a_region_smaller_than_anything_still_marks_its_tile():
    found = label_tiles(
        tiles_of([(0, 0), (100, 0)]), [region("t", 150.1, 50.1, 150.3, 50.3)], rule="any", complete=True
    )
    assert found.labels.tolist() == [0, 1]


def test_regions_that_reach_out_of_the_slide_are_cut_off():
    tiles = tiles_of([(0, 0), (900, 700)])
    regions = [region("t", -500, -500, 100, 100), region("t", 5000, 5000, 6000, 6000)]
    assert label_tiles(tiles, regions, complete=True).labels.tolist() == [1, 0]


def test_painting_agrees_with_counting_crossings_point_by_point():
    rng = np.random.default_rng(0)
    for _ in range(20):
        ring = rng.uniform(-5, 45, (rng.integers(3, 12), 2))  # may cross itself, and leave the picture
        cells = np.zeros((40, 40), np.uint8)
        paint(cells, [ring], 1)
        y, x = np.mgrid[:40, :40] + 0.5
        crossings = np.zeros((40, 40), int)
        for (x0, y0), (x1, y1) in pairwise([*ring, ring[0]]):
            across = (y0 <= y) != (y1 <= y)
            crossings += across & (x0 + (y - y0) / (y1 - y0) * (x1 - x0) <= x)
        assert crossings.any()
        np.testing.assert_array_equal(cells, crossings % 2)


def test_the_kidneys_xml_and_geojson_say_the_same(shared_data):
    folder = shared_data / "slides" / "kidney_annotated"
    regions = read_annotations(folder / "histology_annotations.xml", width=2930, height=3675)
    layers = {"layer 1": 1, "Layer 2": 2, "layer 3": 3}
    assert {name: sum(one.name == name for one in regions) for name in layers} == {
        "layer 1": 4,
        "Layer 2": 1,
        "layer 3": 6,
    }
    x, y = np.meshgrid(np.arange(0, 2900, 64), np.arange(0, 3600, 64))
    tiles = Tiles("s", np.stack([x.ravel(), y.ravel()], 1), 64.0, 64, 0.5, 2930, 3675, 0.466667)
    for name, number in layers.items():
        other = read_annotations(folder / f"histology_annotationsLayer{number}.geojson", width=2930, height=3675)
        ours = [one for one in regions if one.name == name]
        np.testing.assert_array_equal(label_tiles(tiles, ours).labels, label_tiles(tiles, other).labels)
        assert sum(one.area for one in ours) == pytest.approx(sum(one.area for one in other), rel=0.001)


@pytest.mark.finding(n=14)
@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((60, 90, 5), "has 5 numbers per pixel: expected a mask"),
        ((6000, 9000), "stores 6,000 x 9,000 numbers in one piece"),
    ],
)
def test_a_mask_that_is_far_larger_than_it_looks_is_refused_before_it_is_decoded(tmp_path, monkeypatch, shape, words):
    monkeypatch.setattr(masks, "LARGEST", 2**20)
    values = np.zeros(shape, np.uint8)
    values[10:20, 10:20] = 1
    tifffile.imwrite(
        tmp_path / "m.tif",
        values,
        compression="zlib",
        rowsperstrip=shape[0],
        metadata=None,
        photometric="minisblack",
        planarconfig="contig" if len(shape) == 3 else None,
    )
    with pytest.raises(CarmilError, match=words):
        read_annotations(tmp_path / "m.tif", width=900, height=600)


def full_slide(many):
    """Rings as large as a slide of 3000 x 2000 pixels, the later ones a little smaller."""
    corners = np.array([(0.0, 0.0), (3000.0, 0.0), (3000.0, 2000.0), (0.0, 2000.0)])
    return tuple(corners * (1 - i / 1e6) for i in range(many))


@pytest.mark.finding(n=14)
@pytest.mark.parametrize("regions", [[Region("t", full_slide(2000))], [Region("t", full_slide(1))] * 2000])
def test_thousands_of_regions_as_large_as_the_slide_are_refused_in_one_line(regions, monkeypatch):
    monkeypatch.setattr(tile_labels, "MOST_WORK", 10**5)
    tiles = Tiles("s", np.zeros((1, 2), np.int64), 256.0, 256, 0.5, 3000, 2000, 0.5)
    with pytest.raises(CarmilError, match="annotated regions cover the slide too many times over"):
        label_tiles(tiles, regions)
    assert label_tiles(tiles, [Region("t", full_slide(3))]).labels.tolist() == [1]


@pytest.mark.finding(n=14)
def test_outlines_painted_in_parts_are_those_painted_at_once(monkeypatch):
    rng = np.random.default_rng(0)
    rings = [rng.uniform(0, 60, (40, 2)) for _ in range(5)]
    whole, parts = np.zeros((50, 60), np.uint8), np.zeros((50, 60), np.uint8)
    paint(whole, rings, 1)
    monkeypatch.setattr(tile_labels, "AT_ONCE", 7)
    paint(parts, rings, 1)
    assert 0 < whole.sum() < whole.size and np.array_equal(whole, parts)
