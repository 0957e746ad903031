"""Annotations of other programs are read, hostile files rejected, and tiles labelled by a named rule."""

import json

import numpy as np
import pytest
import shapely
import tifffile
from PIL import Image

from carmil.errors import CarmilError
from carmil.maps import annotations, tile_labels
from carmil.maps import regions as region_shapes
from carmil.maps.annotations import read_annotations
from carmil.maps.regions import Region
from carmil.maps.tile_labels import label_tiles, positive_names
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


def test_same_polygon_is_read_from_every_format(tmp_path):
    texts = {
        "a.geojson": json.dumps({"type": "FeatureCollection", "features": [feature([*SQUARE, SQUARE[0]])]}),
        "b.json": json.dumps([feature(SQUARE)]),
        "c.json": json.dumps(feature([[[*corner, 0] for corner in SQUARE]], kind="MultiPolygon")),
        "d.xml": asap(asap_polygon(SQUARE, "tumour")),
        "e.xml": "﻿" + aperio(aperio_region(SQUARE)),
    }
    for name, text in texts.items():
        (result,) = read(tmp_path, text, name)
        assert (result.name, result.cut) == ("tumour", False)
        np.testing.assert_array_equal(result.rings[0], [*SQUARE, SQUARE[0]])
        assert result.shape.area == 200 * 300


def test_region_name_is_the_classification_or_else_the_name(tmp_path):
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


def test_points_and_lines_are_ignored(tmp_path):
    point = {"type": "Feature", "geometry": {"type": "Point", "coordinates": [1, 2]}, "properties": {}}
    assert len(read(tmp_path, json.dumps([point, feature(SQUARE)]))) == 1
    assert len(read(tmp_path, asap(asap_polygon([[1, 2]], kind="Dot"), asap_polygon(SQUARE)), "a.xml")) == 1
    assert len(read(tmp_path, aperio(aperio_region(SQUARE[:2], kind=3), aperio_region(SQUARE)), "b.xml")) == 1


def test_aperio_ellipse_has_the_area_of_an_ellipse(tmp_path):
    (result,) = read(tmp_path, aperio(aperio_region([[100, 100], [300, 200]], kind=2)), "a.xml")
    assert result.shape.area == pytest.approx(np.pi * 100 * 50, rel=0.01)


def test_mask_gives_one_region_with_holes_per_value(tmp_path):
    mask = np.zeros((400, 500), np.uint8)
    mask[100:250, 50:150] = 1
    mask[125:150, 75:100] = 0
    mask[300:400, 400:500] = 7
    path = tmp_path / "mask.tif"
    tifffile.imwrite(path, mask, tile=(64, 64), metadata=None)
    first, second = read_annotations(path, width=1000, height=800)
    assert (first.name, len(first.rings), second.name) == ("1", 2, "7")
    assert second.rings[0].max(0).tolist() == [1000, 800]
    assert first.shape.area == pytest.approx(4 * (mask == 1).sum(), rel=0.001)


@pytest.mark.finding(n=14)
@pytest.mark.parametrize(
    ("names", "name"), [(3, "annotation"), (["a", 2], "a: 2"), ({"a": 1}, "annotation"), (None, "annotation")]
)
def test_region_with_an_odd_classification_is_still_read(tmp_path, names, name):
    one = feature([[1, 1], [9, 1], [9, 9]]) | {"properties": {"classification": {"names": names}}}
    assert [region.name for region in read(tmp_path, json.dumps([one]), "a.geojson")] == [name]


@pytest.mark.finding(n=16)
def test_mask_with_too_many_values_raises_an_error(tmp_path):
    path = tmp_path / "mask.tif"
    tifffile.imwrite(path, np.arange(60_000, dtype=np.uint16).reshape(200, 300), metadata=None)
    with pytest.raises(CarmilError, match="more than 256 different values: expected a mask with one number per class"):
        read_annotations(path, width=300, height=200)


@pytest.mark.finding(n=16)
def test_picture_given_as_a_mask_raises_an_error(tmp_path):
    path = tmp_path / "mask.tif"
    tifffile.imwrite(path, np.random.default_rng(0).integers(0, 9, (1800, 1800), np.uint8), metadata=None)
    with pytest.raises(CarmilError, match="expected a mask of regions, not a picture"):
        read_annotations(path, width=1800, height=1800)


@pytest.mark.finding(n=16)
def test_mask_with_255_classes_is_read(tmp_path):
    mask = np.repeat(np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16), 20, 0), 20, 1)
    path = tmp_path / "mask.tif"
    tifffile.imwrite(path, mask, metadata=None)
    regions = read_annotations(path, width=320, height=320)
    assert [one.name for one in regions] == [str(value) for value in range(1, 256)]
    assert [one.shape.area for one in regions] == pytest.approx([20 * 20 - 0.5] * 255)
    corners = np.array([one.rings[0].min(0) for one in regions])
    assert corners.tolist() == [[value % 16 * 20, value // 16 * 20] for value in range(1, 256)]


@pytest.mark.finding(n=16)
def test_mask_with_many_large_classes_is_traced_more_coarsely(tmp_path, monkeypatch):
    mask = np.zeros((64, 64), np.uint8)
    for value in range(1, 9):
        mask[value * 4 : value * 4 + 4, value * 4 :] = value
    path = tmp_path / "mask.tif"
    tifffile.imwrite(path, mask, metadata=None)
    fine = read_annotations(path, width=640, height=640)
    monkeypatch.setattr("carmil.maps.annotations.MOST_TRACED", 500)
    coarse = read_annotations(path, width=640, height=640)
    assert [one.name for one in coarse] == [one.name for one in fine] == list("12345678")
    for one, other in zip(fine, coarse, strict=True):
        assert other.shape.area == pytest.approx(one.shape.area, rel=0.1)


def test_mask_of_the_wrong_shape_or_type_raises_an_error(tmp_path):
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
def test_xml_with_a_document_type_raises_an_error_before_expanding_entities(tmp_path, text):
    with pytest.raises(CarmilError, match="document type"):
        read(tmp_path, text, "evil.xml")


@pytest.mark.finding(n=14)
@pytest.mark.parametrize("far", [1e300, -1e9])
def test_corners_outside_the_coordinate_limit_raise_an_error(far, tmp_path):
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
        ("slide,x,y", "unknown format of annotations"),
        ("", "unknown format of annotations"),
    ],
)
def test_broken_annotations_raise_an_error_of_one_line(tmp_path, text, words):
    with pytest.raises(CarmilError, match=words) as error:
        read(tmp_path, text, "a.txt")
    assert "\n" not in str(error.value)


def tiles_of(corners, size=100.0):
    return Tiles("s", np.array(corners, dtype=np.int64), size, 256, 0.5, 1000, 800, 0.5)


def region(name, left, top, right, bottom, **more):
    return Region(name, shapely.box(left, top, right, bottom), **more)


def test_rule_sets_the_overlap_that_makes_a_tile_positive():
    tiles = tiles_of([(0, 0), (100, 0), (200, 0), (300, 0)])
    tumour = [region("tumour", 30, 0, 240, 100)]  # 70 %, 100 %, 40 %, 0 %
    result = {
        rule: label_tiles(tiles, tumour, rule=rule, complete=True) for rule in ("any", "half", "centre", "0.8", "1")
    }
    np.testing.assert_allclose(result["half"].positive, [0.7, 1, 0.4, 0], atol=1e-9)
    assert {rule: one.labels.tolist() for rule, one in result.items()} == {
        "any": [1, 1, 1, 0],
        "half": [1, 1, 0, 0],
        "centre": [1, 1, 0, 0],
        "0.8": [0, 1, 0, 0],
        "1": [0, 1, 0, 0],
    }


@pytest.mark.parametrize("rule", ["most", "1.5", "-0.1", "nan"])
def test_unknown_label_rule_raises_an_error(rule):
    with pytest.raises(CarmilError, match="expected any, centre, half"):
        label_tiles(tiles_of([(0, 0)]), [region("tumour", 0, 0, 10, 10)], rule=rule)


def test_unannotated_tiles_are_unknown_unless_annotation_is_complete():
    tiles = tiles_of([(0, 0), (200, 0), (400, 0)])
    regions = [region("DCIS", 0, 0, 100, 100), region("benign", 200, 0, 300, 100)]
    assert label_tiles(tiles, regions, positive=["DCIS"]).labels.tolist() == [1, 0, UNKNOWN]
    assert label_tiles(tiles, regions, positive=["DCIS"], complete=True).labels.tolist() == [1, 0, 0]
    assert label_tiles(tiles, regions).labels.tolist() == [1, 1, UNKNOWN]


def test_smallest_of_nested_regions_labels_a_tile():
    tiles = tiles_of([(100, 100), (300, 300), (500, 500)])
    inside = [region("_2", 300, 300, 400, 400), region("tissue", 0, 0, 1000, 800), region("_0", 50, 50, 450, 450)]
    assert label_tiles(tiles, inside, positive=["_0"]).labels.tolist() == [1, 0, 0]
    assert positive_names(inside) == ["tissue", "_0"]  # in CAMELYON16, _2 marks normal tissue inside a tumour
    cut = [region("tumour", 50, 50, 450, 450), region("tumour", 300, 300, 400, 400, cut=True)]
    assert label_tiles(tiles, cut).labels.tolist() == [1, UNKNOWN, UNKNOWN]


def test_holes_are_outside_their_region():
    tiles = tiles_of([(150, 250), (210, 250)], 50.0)
    labels = label_tiles(tiles, [Region("t", shapely.Polygon(SQUARE, [HOLE]))], complete=True)
    assert labels.labels.tolist() == [0, 1]


def test_tiny_region_still_labels_its_tile():
    result = label_tiles(
        tiles_of([(0, 0), (100, 0)]), [region("t", 150.1, 50.1, 150.3, 50.3)], rule="any", complete=True
    )
    assert result.labels.tolist() == [0, 1]


def test_regions_are_clipped_to_the_slide():
    tiles = tiles_of([(0, 0), (900, 700)])
    regions = [region("t", -500, -500, 100, 100), region("t", 5000, 5000, 6000, 6000)]
    assert label_tiles(tiles, regions, complete=True).labels.tolist() == [1, 0]


def test_tile_shares_agree_with_counting_points():
    rng = np.random.default_rng(0)
    x, y = np.meshgrid(np.arange(0, 1000, 100), np.arange(0, 800, 100))
    tiles = tiles_of(np.stack([x.ravel(), y.ravel()], axis=1))
    grid = (np.mgrid[:100, :100].reshape(2, -1).T + 0.5)[None] + tiles.corners[:, None]
    turn = np.linspace(0, 2 * np.pi, 5000, endpoint=False)
    for _ in range(5):
        radius = 350 + 60 * np.sin(rng.integers(3, 40) * turn) + rng.uniform(-8, 8, len(turn))
        outline = np.array([500, 400]) + radius[:, None] * np.stack([np.cos(turn), np.sin(turn)], axis=1)
        star = region_shapes.polygon([outline, outline[::-1] * 0.3 + (350, 280)], "a star")
        labels = label_tiles(tiles, [Region("t", star)], complete=True)
        counted = shapely.contains_xy(star, grid[..., 0], grid[..., 1]).mean(axis=1)
        np.testing.assert_allclose(labels.positive, counted, atol=0.02)
        assert labels.positive.sum() * 100**2 == pytest.approx(star.intersection(shapely.box(0, 0, 1000, 800)).area)


def test_self_intersecting_outline_contains_every_area_it_encloses(tmp_path):
    (bow,) = read(tmp_path, json.dumps([feature([[0, 0], [100, 100], [100, 0], [0, 100]])]))
    assert bow.shape.is_valid and bow.shape.area == 2 * 2500
    star = [[np.cos(turn), np.sin(turn)] for turn in np.array([0, 2, 4, 1, 3]) * 2 * np.pi / 5]
    (pentagram,) = read(tmp_path, json.dumps([feature(star)]))
    assert pentagram.shape.is_valid and shapely.contains_xy(pentagram.shape, 0, 0)


def test_outline_with_too_many_crossings_raises_an_error(tmp_path):
    corners = np.random.default_rng(0).uniform(0, 1000, (3000, 2)).tolist()
    with pytest.raises(CarmilError, match="feature 0 has an outline that crosses itself too often"):
        read(tmp_path, json.dumps([feature(corners)]))


def test_region_without_area_is_ignored(tmp_path):
    assert len(read(tmp_path, json.dumps([feature([[1, 1], [2, 2], [3, 3]]), feature(SQUARE)]))) == 1


def test_kidney_xml_json_and_geojson_give_the_same_labels(shared_data):
    folder = shared_data / "slides" / "kidney_annotated"
    regions = read_annotations(folder / "histology_annotations.xml", width=2930, height=3675)
    histomics = read_annotations(folder / "histology_annotations.json", width=2930, height=3675)
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
        theirs = [one for one in histomics if one.name == f"Layer{number}"]
        np.testing.assert_array_equal(label_tiles(tiles, theirs).labels, label_tiles(tiles, other).labels)
        assert sum(one.shape.area for one in ours) == pytest.approx(sum(one.shape.area for one in other), rel=0.001)


@pytest.mark.finding(n=14)
@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((60, 90, 5), "has 5 numbers per pixel: expected a mask"),
        ((6000, 9000), "stores 6,000 x 9,000 numbers in one piece"),
    ],
)
def test_mask_that_would_decode_to_a_huge_array_raises_an_error(tmp_path, monkeypatch, shape, words):
    monkeypatch.setattr(annotations, "LARGEST", 2**20)
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


@pytest.mark.finding(n=14)
def test_too_many_overlapping_regions_raise_an_error(monkeypatch):
    monkeypatch.setattr(tile_labels, "MOST_PAIRS", 1000)
    tiles = Tiles("s", np.zeros((1, 2), np.int64), 256.0, 256, 0.5, 3000, 2000, 0.5)
    whole = region("t", 0, 0, 3000, 2000)
    with pytest.raises(CarmilError, match="2,000 annotated regions overlap one another too many times"):
        label_tiles(tiles, [whole] * 2000)
    assert label_tiles(tiles, [whole] * 3).labels.tolist() == [1]


def save_png(path, pixels):
    Image.fromarray(pixels).save(path)
    return read_annotations(path, width=1000, height=800)


def test_png_masks_have_one_class_per_number_or_colour(tmp_path):
    mask = np.zeros((80, 100), np.uint8)
    mask[10:30, 20:60], mask[50:70, 10:20] = 1, 7
    numbered = save_png(tmp_path / "numbers.png", mask)
    assert {one.name: one.shape.bounds for one in numbered} == {"1": (200, 100, 600, 300), "7": (100, 500, 200, 700)}
    colours = np.zeros((80, 100, 4), np.uint8)
    colours[..., 3] = 255
    colours[mask == 1, 0], colours[mask == 7, 2] = 255, 128
    colours[70:, :, 1], colours[70:, :, 3] = 99, 0  # transparent
    coloured = save_png(tmp_path / "colours.png", colours)
    assert {one.name: one.shape.area for one in coloured} == {
        "#ff0000": numbered[0].shape.area,
        "#000080": numbered[1].shape.area,
    }
    with pytest.raises(CarmilError, match="more than 256 different values: expected a mask"):
        save_png(tmp_path / "photo.png", np.random.default_rng(0).integers(0, 255, (80, 100, 3)).astype(np.uint8))
    with pytest.raises(CarmilError, match=r"is 80 x 100, but the slide is 1\.250 times as wide as high"):
        save_png(tmp_path / "turned.png", mask.T.copy())


def test_histomics_json_gives_closed_shapes_with_group_label_or_name(tmp_path):
    points = [[x, y, 0] for x, y in SQUARE]
    box = {"center": [400, 300, 0], "width": 200, "height": 100, "rotation": 0}
    elements = [
        {"type": "polyline", "points": points, "closed": True, "group": "tumour", "holes": [HOLE]},
        {"type": "polyline", "points": points, "closed": False},
        {"type": "rectangle", **box, "group": "default", "label": {"value": "stroma"}},
        {"type": "rectangle", **box, "rotation": np.pi / 2},
        {"type": "ellipse", **box},
        {"type": "circle", "center": [400, 300, 0], "radius": 50},
        {"type": "point", "center": [1, 2, 0]},
    ]
    found = read(tmp_path, json.dumps([{"annotation": {"name": "layer", "elements": elements}}]), "a.json")
    assert [one.name for one in found] == ["tumour", "stroma", "layer", "layer", "layer"]
    assert found[0].shape.area == 200 * 300 - 50 * 50
    assert found[1].shape.bounds == (300, 250, 500, 350)
    assert found[2].shape.bounds == pytest.approx((350, 200, 450, 400))
    assert found[3].shape.area == pytest.approx(np.pi * 100 * 50, rel=0.01)
    assert found[4].shape.bounds == pytest.approx((350, 250, 450, 350), abs=0.2)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"elements": 3}, "annotation 0 has no list of elements"),
        ({"elements": [{"type": "polyline", "points": 3}]}, "element 0 has no list of points"),
        ({"elements": [{"type": "circle", "center": [1, 2, 0]}]}, "element 0 is a circle without centre and size"),
        ({"elements": [{"type": "polyline", "points": [[1, "x"]] * 3}]}, "corners that are not pairs of numbers"),
        ({"elements": []}, "holds no polygon"),
    ],
)
def test_damaged_histomics_json_is_refused(tmp_path, document, words):
    with pytest.raises(CarmilError, match=words):
        read(tmp_path, json.dumps(document), "a.json")
