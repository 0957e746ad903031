"""carmil slides draw and carmil slides label, run from the command line."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from carmil.bags.building import build_store
from carmil.cli.slide_maps import _annotations
from carmil.files import safe_name
from carmil.slides.tiling import write_tiles
from carmil.truth import UNKNOWN

SIDE = 300


@pytest.fixture
def tiled(tmp_path, ellipse, plain_slide, grid_of_tiles):
    """Write the tiles of the ellipse slide as `carmil slides tile` does."""
    like = plain_slide(3000, 2400)
    like.path = ellipse
    tiles = grid_of_tiles(like, SIDE)
    write_tiles(tiles, tmp_path / "tiles")
    return tiles


def write_evidence(folder, tiles, *, unit="level0_px", order=None, **columns):
    """Write the evidence of one slide as `carmil explain` does."""
    rows = np.arange(len(tiles)) if order is None else order
    where = tiles.corners[rows] * (tiles.slide_mpp if unit == "um" else 1)
    line = {"slide": tiles.slide, "prediction": "DCIS", "p_benign": 0.2, "p_DCIS": 0.8}
    table = pa.table(
        {"instance": np.arange(len(rows)), "x": where[:, 0].astype(np.float32), "y": where[:, 1].astype(np.float32)}
        | {name: np.asarray(values, np.float32)[rows] for name, values in columns.items()}
    )
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {b"carmil": json.dumps({"line": line, "coordinate_unit": unit}).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), folder / f"{tiles.slide}.parquet")


def car(tiles):
    x = np.linspace(-1, 1, len(tiles))
    a = np.exp(x) / np.exp(x).sum()
    return {"u": x, "a": a, "u_cf": -x, "a_cf": a[::-1], "evidence_benign": -x, "evidence_DCIS": x}


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_draw_writes_maps_tiles_comparison_geojson_and_ome_tiff(tmp_path, run_cli, ellipse, tiled):
    write_evidence(tmp_path / "run" / "evidence", tiled, **car(tiled))
    words = [
        "--evidence",
        str(tmp_path / "run" / "evidence"),
        "--tiles",
        str(tmp_path / "tiles"),
        "--out",
        str(tmp_path / "maps"),
    ]
    status, out, _ = run_cli("slides", "draw", str(ellipse), *words, "--longest", "600", "--geojson", "--ome-tiff")
    assert status == 0, out
    maps = ["counterfactual", "evidence_DCIS", "factual"]
    expected = [f"{name}{end}" for name in maps for end in (".png", ".ome.tiff")] + [
        f"tiles_{name}.png" for name in maps
    ]
    assert names_in(tmp_path / "maps" / "ellipse") == sorted([*expected, "comparison.png", "ellipse.geojson"])
    features = json.loads((tmp_path / "maps" / "ellipse" / "ellipse.geojson").read_text())["features"]
    squares = [one for one in features if one["properties"]["objectType"] == "tile"]
    values = [one["properties"]["measurements"]["evidence for DCIS"] for one in squares]
    np.testing.assert_allclose(values, np.linspace(-1, 1, len(tiled)), atol=1e-6)
    weights = car(tiled)
    for title, name in (("attention weight", "a"), ("counterfactual attention weight", "a_cf")):
        result = [one["properties"]["measurements"][title] for one in squares]
        np.testing.assert_allclose(result, weights[name], atol=1e-6)


def test_evidence_is_matched_to_tiles_by_coordinates(tmp_path, run_cli, ellipse, tiled):
    order = np.random.default_rng(0).permutation(len(tiled))[:-7]
    write_evidence(tmp_path / "e", tiled, unit="um", order=order, **car(tiled))
    words = ["--evidence", str(tmp_path / "e"), "--tiles", str(tmp_path / "tiles"), "--out", str(tmp_path / "maps")]
    status, *_ = run_cli(
        "slides", "draw", str(ellipse), *words, "--longest", "200", "--map", "benign", "--top", "0", "--geojson"
    )
    assert status == 0
    assert names_in(tmp_path / "maps" / "ellipse") == ["comparison.png", "ellipse.geojson", "evidence_benign.png"]
    features = json.loads((tmp_path / "maps" / "ellipse" / "ellipse.geojson").read_text())["features"]
    squares = [one["properties"]["measurements"] for one in features if one["properties"]["objectType"] == "tile"]
    result = [one.get("evidence for benign", np.nan) for one in squares]
    expected = np.full(len(tiled), np.nan)
    expected[order] = -np.linspace(-1, 1, len(tiled))[order]
    np.testing.assert_allclose(result, expected, atol=1e-6)


def test_maps_of_several_runs_are_named_after_the_run(tmp_path, run_cli, ellipse, tiled):
    for run in ("abmil", "car"):
        write_evidence(tmp_path / run / "evidence", tiled, **car(tiled))
    words = [word for run in ("abmil", "car") for word in ("--evidence", str(tmp_path / run / "evidence"))]
    words += ["--tiles", str(tmp_path / "tiles"), "--out", str(tmp_path / "maps"), "--map", "factual", "--top", "0"]
    status, *_ = run_cli("slides", "draw", str(ellipse), *words, "--longest", "200", "--region", "0,0,600,600")
    assert status == 0
    assert names_in(tmp_path / "maps" / "ellipse") == ["abmil_factual.png", "car_factual.png", "comparison.png"]


@pytest.mark.finding(n=3)
def test_geojson_region_names_include_run_and_smoothing(tmp_path, run_cli, ellipse, tiled):
    for run in ("abmil", "car"):
        write_evidence(tmp_path / run / "evidence", tiled, **car(tiled))
    words = [word for run in ("abmil", "car") for word in ("--evidence", str(tmp_path / run / "evidence"))]
    words += ["--tiles", str(tmp_path / "tiles"), "--longest", "100", "--top", "0", "--geojson", "--map", "DCIS"]
    for more, expected in (
        (words, "for DCIS, run abmil, region 1"),
        ([*words, "--smooth", "2"], "for DCIS, run abmil, smoothed over 2 tiles, region 1"),
        ([*words[2:], "--smooth", "300um"], "for DCIS, smoothed over 300 µm, region 1"),
        (words[2:], "for DCIS, region 1"),
    ):
        assert run_cli("slides", "draw", str(ellipse), *more, "--out", str(tmp_path / "maps"))[0] == 0
        features = json.loads((tmp_path / "maps" / "ellipse" / "ellipse.geojson").read_text())["features"]
        regions = [one["properties"] for one in features if one["properties"]["objectType"] == "annotation"]
        assert regions[0]["name"] == expected and regions[0]["classification"]["name"] == "for DCIS"


@pytest.mark.finding(n=17)
def test_invalid_draw_options_or_evidence_exit_with_status_2(tmp_path, run_cli, ellipse, tiled):
    write_evidence(tmp_path / "e", tiled, **car(tiled))
    words = ["--evidence", str(tmp_path / "e"), "--tiles", str(tmp_path / "tiles"), "--out", str(tmp_path / "maps")]
    for more, expected in [
        (["--map", "DCSI"], "did you mean 'DCIS'?"),
        (["--region", "1,2,3"], "expected X,Y,WIDTH,HEIGHT"),
        (["--region", "9000,0,600,600"], "is not inside ellipse: expected X,Y,WIDTH,HEIGHT within its 3,000 x 2,400"),
        (["--annotations", str(tmp_path / "none.xml")], "none.xml cannot be read"),
    ]:
        status, _, error = run_cli("slides", "draw", str(ellipse), *words, *more)
        assert status == 2 and expected in error and "Traceback" not in error
    write_evidence(tmp_path / "e", tiled, order=np.arange(10), **car(tiled))
    path = tmp_path / "e" / "ellipse.parquet"
    table = pq.read_table(path)
    moved = table.set_column(1, "x", pa.array(table["x"].to_numpy() + 50)).replace_schema_metadata(
        table.schema.metadata
    )
    pq.write_table(moved, path)
    status, _, error = run_cli("slides", "draw", str(ellipse), *words)
    assert status == 2 and "10 of 10 rows match no tile" in error
    path.write_bytes(b"PAR1 not really")
    status, _, error = run_cli("slides", "draw", str(ellipse), *words)
    assert status == 2 and "run `carmil explain` again" in error


def test_wrong_map_is_reported_once_before_anything_is_drawn(tmp_path, run_cli, ellipse, tiled):
    write_evidence(tmp_path / "e", tiled, **car(tiled))
    other = tmp_path / "other.tif"  # without tiles and evidence
    other.symlink_to(ellipse)
    words = ["--evidence", str(tmp_path / "e"), "--tiles", str(tmp_path / "tiles"), "--out", str(tmp_path / "maps")]
    for slides in ([str(ellipse), str(other)], [str(other), str(ellipse)]):
        status, _, error = run_cli("slides", "draw", *slides, *words, "--map", "factual,DCSI")
        assert status == 2 and error.count("DCSI") == 1 and "did you mean 'DCIS'?" in error
        assert "skipped" not in error and not (tmp_path / "maps").exists()


@pytest.mark.finding(n=14)
@pytest.mark.parametrize("region", ["0,0,nan,1e300", "nan,0,9,9", "0,inf,9,9", "0,0,9,1e9", "0,0,9,-1"])
def test_impossible_region_is_rejected_before_drawing(region, tmp_path, run_cli):
    words = ["--evidence", str(tmp_path), "--tiles", str(tmp_path), "--out", str(tmp_path / "maps")]
    status, _, error = run_cli("slides", "draw", str(tmp_path / "a.tif"), *words, "--region", region)
    assert (
        status == 2 and f"--region {region}: expected X,Y,WIDTH,HEIGHT in level-0 pixels, numbers below 1e+09" in error
    )
    assert not (tmp_path / "maps").exists()


@pytest.mark.finding(n=17)
def test_help_of_map_option_states_the_default(run_cli):
    status, out, _ = run_cli("slides", "draw", "--help")
    assert status == 0 and "default: evidence of the answered class, factual, counterfactual" in " ".join(out.split())


def test_slide_that_cannot_be_drawn_is_skipped(tmp_path, run_cli, ellipse, tiled):
    (tmp_path / "other.tif").write_bytes(ellipse.read_bytes())
    write_evidence(tmp_path / "e", tiled, **car(tiled))
    words = ["--evidence", str(tmp_path / "e"), "--tiles", str(tmp_path / "tiles"), "--out", str(tmp_path / "maps")]
    paths = [str(tmp_path / "other.tif"), str(ellipse)]
    status, _, error = run_cli("slides", "draw", *paths, *words, "--longest", "100", "--map", "DCIS")
    assert status == 1
    assert "no tiles of other" in error and "1 slide drawn, 1 skipped: other" in error
    assert (tmp_path / "maps" / "ellipse" / "evidence_DCIS.png").is_file()


def polygon(left, top, right, bottom, name):
    ring = [[left, top], [right, top], [right, bottom], [left, bottom], [left, top]]
    geometry = {"type": "Polygon", "coordinates": [ring]}
    return {"type": "Feature", "geometry": geometry, "properties": {"classification": {"name": name}}}


def test_annotations_are_written_as_the_truth_of_a_cohort(tmp_path, run_cli, tiled):
    (tmp_path / "a.geojson").write_text(
        json.dumps([polygon(0, 0, 600, 600, "tumour"), polygon(900, 0, 1200, 300, "benign")])
    )
    words = ["--tiles", str(tmp_path / "tiles"), "--annotations", str(tmp_path / "a.geojson"), "--positive", "tumour"]
    status, out, _ = run_cli("slides", "label", "ellipse.tif", *words, "--complete", "--out", str(tmp_path / "cohort"))
    assert status == 0
    assert "4 tiles positive (tumour; rule half), 76 negative, 0 unknown" in out
    (tmp_path / "cohort" / "features").mkdir()
    np.save(tmp_path / "cohort" / "features" / "ellipse.npy", np.ones((len(tiled), 4), np.float32))
    bags = build_store(tmp_path / "cohort", tmp_path / "store", workers=1).bags()
    inside = (tiled.corners < 600).all(1)
    np.testing.assert_array_equal(bags.instance_labels.numpy(), inside.astype(int))
    matrix = tmp_path / "matrix"
    matrix.mkdir()
    np.save(matrix / "features.npy", np.ones((len(tiled), 4), np.float32))
    (matrix / "instances.csv").write_text((tmp_path / "cohort" / "instances.csv").read_text())
    again = build_store(matrix, tmp_path / "store2", truth="label", workers=1).bags()
    np.testing.assert_array_equal(again.instance_labels.numpy(), inside.astype(int))


def test_unknown_tiles_stay_unknown_in_the_cohort(tmp_path, run_cli, tiled):
    (tmp_path / "a.geojson").write_text(
        json.dumps([polygon(0, 0, 600, 600, "tumour"), polygon(900, 0, 1200, 300, "benign")])
    )
    words = [
        "--tiles",
        str(tmp_path / "tiles"),
        "--annotations",
        str(tmp_path / "a.geojson"),
        "--out",
        str(tmp_path / "l"),
    ]
    assert run_cli("slides", "label", "ellipse", *words, "--complete")[0] == 0
    assert (tmp_path / "l" / "patch_labels" / "ellipse.npy").is_file()
    status, out, _ = run_cli("slides", "label", "ellipse", *words, "--positive", "tumour")
    assert status == 0 and "4 tiles positive (tumour; rule half), 1 negative, 75 unknown" in out
    (tmp_path / "l" / "features").mkdir()
    np.save(tmp_path / "l" / "features" / "ellipse.npy", np.ones((len(tiled), 4), np.float32))
    truth = build_store(tmp_path / "l", tmp_path / "store", workers=1).bags().instance_labels
    assert [int((truth == value).sum()) for value in (1, 0, UNKNOWN)] == [4, 1, 75]
    (tmp_path / "l" / "instances.csv").rename(tmp_path / "instances.csv")
    np.save(tmp_path / "features.npy", np.ones((len(tiled), 4), np.float32))
    status, _, error = run_cli(
        "cohort", "build", str(tmp_path / "features.npy"), "--truth", "label", "--out", str(tmp_path / "s")
    )
    assert status == 2 and "expected whole numbers" in error
    status, _, error = run_cli("slides", "label", "ellipse", *words, "--positive", "tumor")
    assert status == 2 and "did you mean 'tumour'?" in error


def test_classes_of_a_mask_can_be_renamed_or_omitted(tmp_path, run_cli, ellipse, tiled):
    mask = np.full((240, 300, 3), 255, np.uint8)
    mask[:, :150] = (200, 0, 0)
    Image.fromarray(mask).save(tmp_path / "ellipse.png")
    words = ["slides", "label", str(ellipse), "--tiles", str(tmp_path / "tiles"), "--out", str(tmp_path / "labels")]
    words += ["--annotations", str(tmp_path / "ellipse.png"), "--class", "#c80000=tumour"]
    status, out, _ = run_cli(*words, "--class", "#ffffff=", "--positive", "tumour")
    assert status == 0 and "40 tiles positive (tumour; rule half), 0 negative, 40 unknown" in out
    for wrong, expected in (("#c80000", "expected VALUE=NAME"), ("#c80001=x", "did you mean '#c80000'?")):
        status, _, error = run_cli(*words, "--class", wrong)
        assert status == 2 and f"--class {wrong}: " in error and expected in error


def test_annotations_of_a_slide_are_searched_in_their_folder_only(tmp_path, plain_slide, grid_of_tiles):
    odd = replace(grid_of_tiles(plain_slide(600, 400), 100), slide="../S1")  # as a DICOM file may say
    square = {"type": "Polygon", "coordinates": [[[0, 0], [100, 0], [100, 100], [0, 0]]]}
    folder = tmp_path / "annotations"
    folder.mkdir()
    (tmp_path / "S1.geojson").write_text(json.dumps(square))
    assert _annotations(folder, odd) == []
    (folder / f"{safe_name('../S1')}.geojson").write_text(json.dumps(square))  # as the viewer saves it
    assert len(_annotations(folder, odd)) == 1
