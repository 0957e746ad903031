"""Files written for QuPath and other viewers have the structure that these read."""

import json
import math
import uuid

import numpy as np
import pytest
import shapely
import tifffile

from carmil.maps import overlays
from carmil.maps.overlays import write_geojson, write_ome_tiff
from carmil.maps.painting import Painter
from carmil.maps.regions import Region, signed_top_regions, top_regions
from carmil.maps.tile_labels import label_tiles
from carmil.maps.tile_maps import tile_maps

KNOWN_TYPES = {"annotation", "detection", "tile", "cell", "tmaCore", "root"}


def read(path):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def check_feature(feature):
    """Check a feature as QuPath's PathObjectTypeAdapter does, version 0.4 and later."""
    assert feature["type"] == "Feature"
    uuid.UUID(feature["id"])
    assert feature["geometry"]["type"] == "Polygon"
    for ring in feature["geometry"]["coordinates"]:
        assert len(ring) >= 4 and ring[0] == ring[-1]
        assert all(len(corner) == 2 and all(map(math.isfinite, corner)) for corner in ring)
    properties = feature["properties"]
    assert properties["objectType"] in KNOWN_TYPES
    assert all(isinstance(value, int | float) for value in properties["measurements"].values())
    for colour in (properties.get("color"), properties.get("classification", {}).get("color")):
        assert colour is None or (len(colour) == 3 and all(0 <= part <= 255 for part in colour))
    if "classification" in properties:
        assert properties["classification"]["name"] and ":" not in properties["classification"]["name"]


def test_geojson_tiles_have_measurements_and_colours(tmp_path, plain_slide, grid_of_tiles):
    slide = plain_slide(1000, 600)
    tiles = grid_of_tiles(slide, 100)
    evidence = np.linspace(-1, 2, len(tiles))
    evidence[3] = np.nan
    maps = tile_maps({"factual": np.arange(60.0), 'in situ: "DCIS"': evidence})
    result = read(write_geojson(tiles, maps, tmp_path / "s.geojson"))
    assert result["type"] == "FeatureCollection"
    assert result["carmil"]["note"] == "research use only"
    for feature in result["features"]:
        check_feature(feature)
    squares = [one for one in result["features"] if one["properties"]["objectType"] == "tile"]
    assert len(squares) == 60 and len({one["id"] for one in result["features"]}) == len(result["features"])
    first, without, last = squares[0], squares[3], squares[-1]
    assert first["geometry"]["coordinates"] == [[[0, 0], [100, 0], [100, 100], [0, 100], [0, 0]]]
    assert first["properties"]["measurements"] == {"attention weight": 0, 'evidence for in situ: "DCIS"': -1}
    assert first["properties"]["classification"]["name"] == 'against in situ  "DCIS"'
    assert last["properties"]["classification"]["name"] == 'for in situ  "DCIS"'
    assert last["properties"]["color"][2] > last["properties"]["color"][0]
    assert first["properties"]["color"][0] > first["properties"]["color"][2]
    assert without["properties"] == {"objectType": "tile", "measurements": {"attention weight": 3}}


def test_geojson_tile_with_a_fractional_side_keeps_its_exact_size(tmp_path, plain_slide, grid_of_tiles):
    slide = plain_slide(300, 300)
    tiles = grid_of_tiles(slide, 274.285)
    result = read(write_geojson(tiles, tile_maps({"factual": [1.0]}), tmp_path / "s.geojson"))
    assert result["features"][-1]["geometry"]["coordinates"][0][2] == [274.285, 274.285]


@pytest.mark.finding(n=3)
def test_geojson_regions_cover_the_strongest_tiles_for_and_against(tmp_path, plain_slide, grid_of_tiles):
    slide = plain_slide(2000, 2000)
    tiles = grid_of_tiles(slide, 100)
    values = np.random.default_rng(0).normal(size=len(tiles))
    noise = 1e-5 * np.random.default_rng(1).normal(size=len(tiles))
    path = write_geojson(tiles, tile_maps({"difference": noise, "DCIS": values}), tmp_path / "s.geojson")
    result = read(path)
    assert result["carmil"]["coloured_by"] == "evidence for DCIS"
    regions = {"for DCIS": [], "against DCIS": []}
    for one in result["features"]:
        if one["properties"]["objectType"] == "annotation":
            shape = shapely.from_geojson(json.dumps(one["geometry"]))
            regions[one["properties"]["classification"]["name"]].append(Region("region", shape))
            assert np.sign(one["properties"]["measurements"]["mean evidence for DCIS"]) == (
                1 if one["properties"]["name"].startswith("for DCIS, region ") else -1
            )
    count = round(0.05 * len(tiles))
    for name, order in (("for DCIS", np.argsort(-values)), ("against DCIS", np.argsort(values))):
        labels = label_tiles(tiles, regions[name], complete=True).labels
        assert set(np.flatnonzero(labels)) == set(order[:count])


@pytest.mark.finding(n=3)
def test_negligible_evidence_gives_no_regions_or_tile_classes(tmp_path, plain_slide, grid_of_tiles):
    slide = plain_slide(1000, 1000)
    tiles = grid_of_tiles(slide, 100)
    noise = 1e-5 * np.random.default_rng(0).normal(size=len(tiles))
    result = read(write_geojson(tiles, tile_maps({"DCIS": noise}), tmp_path / "s.geojson"))
    assert {one["properties"]["objectType"] for one in result["features"]} == {"tile"}
    assert not any("classification" in one["properties"] for one in result["features"])
    assert len({tuple(one["properties"]["color"]) for one in result["features"]}) == 1
    assert result["carmil"]["scale"].startswith("negligible")
    assert signed_top_regions(tiles, tile_maps({"DCIS": np.full(100, 0.3)})[0]) == []
    small = np.where(np.arange(100) < 3, 1.0, -0.01)
    result = read(write_geojson(tiles, tile_maps({"DCIS": small}), tmp_path / "t.geojson"))
    names = [one["properties"].get("classification", {}).get("name") for one in result["features"]]
    assert names.count("for DCIS") == 1 + 3 and "against DCIS" not in names


def test_adjacent_top_tiles_are_merged_into_one_polygon_with_holes(plain_slide, grid_of_tiles):
    tiles = grid_of_tiles(plain_slide(1000, 1000), 100)
    values = np.zeros((10, 10))
    values[2:5, 2:5] = 1
    values[3, 3] = 0
    values[8, 7] = 1
    values[5, 5] = 1  # touches at a corner only
    ring, first, second = top_regions(tiles, tile_maps({"DCIS": values.ravel()})[0], top=0.1)
    expected = shapely.Polygon(shapely.box(200, 200, 500, 500).exterior, [shapely.box(300, 300, 400, 400).exterior])
    assert ring.shape.equals(expected) and shapely.get_num_coordinates(ring.shape) == 2 * 5
    assert ring.shape.area == 80_000 and ring.mean == 1
    assert {one.shape.bounds[:2] for one in (first, second)} == {(500, 500), (700, 800)}


def test_map_without_supporting_evidence_has_no_top_regions(plain_slide, grid_of_tiles):
    tiles = grid_of_tiles(plain_slide(500, 500), 100)
    assert top_regions(tiles, tile_maps({"DCIS": np.full(25, -1.0)})[0]) == []
    assert top_regions(tiles, tile_maps({"DCIS": np.full(25, np.nan)})[0]) == []
    (whole,) = top_regions(tiles, tile_maps({"factual": np.full(25, -1.0)})[0])
    assert whole.shape.area == 250_000


def test_top_regions_are_valid_and_cover_exactly_their_tiles(plain_slide, grid_of_tiles):
    tiles = grid_of_tiles(plain_slide(1100, 900), 100)
    rng = np.random.default_rng(0)
    for _ in range(20):
        high = rng.random(len(tiles)) < 0.55
        (one,) = tile_maps({"DCIS": high.astype(float)})
        regions = top_regions(tiles, one, top=high.mean(), most=99)
        for region in regions:
            assert region.shape.geom_type == "Polygon" and region.shape.is_valid
            for ring in shapely.get_rings(region.shape):
                steps = np.diff(shapely.get_coordinates(ring), axis=0)
                assert ((steps == 0).sum(1) == 1).all()  # along one axis
                assert (steps[:, 0] * np.roll(steps[:, 0], 1) == 0).all()  # every corner is a turn
        labels = label_tiles(tiles, [Region("region", region.shape) for region in regions], complete=True)
        np.testing.assert_array_equal(labels.positive, high)


def test_ome_tiff_has_levels_tiles_and_the_pixel_size_of_the_slide(tmp_path, plain_slide, grid_of_tiles, monkeypatch):
    monkeypatch.setattr(overlays, "SMALLEST", 256)
    slide = plain_slide(4000, 3000, 0.25)
    tiles = grid_of_tiles(slide, 250)
    maps = tile_maps({"DCIS": np.sin(np.arange(len(tiles))), "factual": np.arange(len(tiles), dtype=float)})
    painter = Painter(slide, tiles, maps)
    first, _ = write_ome_tiff(painter, [tmp_path / "a.ome.tiff", tmp_path / "b.ome.tiff"], longest=1000)
    with tifffile.TiffFile(first) as file:
        assert file.is_ome and file.is_bigtiff
        (series,) = file.series
        assert [level.shape for level in series.levels] == [(750, 1000, 3), (375, 500, 3), (187, 250, 3)]
        assert all(level.pages[0].is_tiled for level in series.levels)
        pixels = tifffile.xml2dict(file.ome_metadata)["OME"]["Image"]["Pixels"]
        assert pixels["PhysicalSizeX"] == pixels["PhysicalSizeY"] == 1.0  # micrometres: 4000 px of 0.25 in 1000
        assert pixels["PhysicalSizeXUnit"] == "µm"
        assert "research use only" in file.ome_metadata
        across, a_unit = file.pages[0].tags["XResolution"].value
        assert across / a_unit == pytest.approx(10_000, rel=1e-3)  # a centimetre
        (expected, _) = painter.paint((0, 0, 4000, 3000), (1000, 750))
        np.testing.assert_array_equal(series.asarray(), expected)


def test_ome_tiff_can_be_opened_as_a_slide(tmp_path, plain_slide, grid_of_tiles):
    from carmil.slides.opening import open_slide

    slide = plain_slide(4000, 3000, 0.25)
    tiles = grid_of_tiles(slide, 250)
    painter = Painter(slide, tiles, tile_maps({"factual": np.arange(len(tiles), dtype=float)}))
    (path,) = write_ome_tiff(painter, [tmp_path / "a.ome.tiff"], longest=2000)
    with open_slide(path) as result:
        assert (result.width, result.height, len(result.levels)) == (2000, 1500, 2)
        assert result.mpp == pytest.approx(0.5, rel=1e-4)
