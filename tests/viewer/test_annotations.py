"""Regions drawn in the viewer are saved in one folder, and the truth is shown beside them."""

import io
import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from carmil.bags.bags import Bags
from carmil.bags.sources import SlideFile
from carmil.counterfactual import create_model
from carmil.errors import CarmilError
from carmil.maps.annotations import read_annotations
from carmil.targets import Classes
from carmil.training.population import Member, Population
from carmil.truth import UNKNOWN
from carmil.viewer.annotations import Annotations
from carmil.viewer.app import guarded_app
from carmil.viewer.cases import Case, RunCases
from carmil.viewer.guard import known_hosts
from carmil.viewer.opening import annotations_folder
from carmil.viewer.pictures import Pictures
from carmil.viewer.responses import Responses
from carmil.viewer.slide_files import SlideFiles

SQUARE = [[64, 0], [192, 0], [192, 64], [64, 64]]
ASAP = """<ASAP_Annotations><Annotations><Annotation Name="T" Type="Polygon" PartOfGroup="tumour"><Coordinates>
<Coordinate Order="0" X="0" Y="0"/><Coordinate Order="1" X="50" Y="0"/><Coordinate Order="2" X="50" Y="50"/>
</Coordinates></Annotation></Annotations></ASAP_Annotations>"""


def made_up_run(*slides, unit="level0_px", truth=None, classes=("a", "b")):
    """Return a run with four tiles of 64 pixels in a row on every slide."""
    corners = torch.tensor([[0.0, 0], [64, 0], [128, 0], [192, 0]])
    bags = Bags.from_list(
        [torch.zeros(4, 2)] * len(slides),
        coordinates=[corners] * len(slides),
        coordinate_unit=unit,
        instance_labels=None if truth is None else [torch.tensor(truth)] * len(slides),
    )
    target = Classes(names=classes)
    p = np.full(len(classes), 1 / len(classes))
    cases = tuple(Case(slide, i, (0,), target.decision(), p, tile_size=64.0) for i, slide in enumerate(slides))
    return RunCases("made", target, bags, cases, Population(lambda: create_model("abmil", 2, len(classes)), [Member()]))


def annotations(run, folder):
    return Annotations(run, Pictures(run, SlideFiles(None, [])), folder)


@pytest.fixture
def asked(run, tmp_path, asking):
    """Return a client of the trained run, and the folder of its annotations."""
    responses = Responses(run, SlideFiles(None, []), annotations=tmp_path / "drawn")
    return asking(guarded_app(responses, is_known=known_hosts([], any_address=False))), tmp_path / "drawn"


def test_region_is_saved_renamed_exported_and_deleted(asked, number_of):
    ask, folder = asked
    address = f"/api/case/{number_of['s3']}/annotations"
    nothing = ask(address).json
    assert nothing == {"drawn": [], "truth": [], "file": "drawn/s3.geojson", "refusal": "", "problem": ""}
    assert not folder.exists()
    (one,) = ask.post(address, {"add": {"name": "tumour", "outline": SQUARE}}).json["drawn"]
    assert one["name"] == "tumour" and sorted(map(tuple, one["rings"][0][:4])) == sorted(map(tuple, SQUARE))
    assert [path.name for path in folder.iterdir()] == ["s3.geojson"]
    renamed = ask.post(address, {"rename": {"region": one["id"], "name": "stroma"}}).json["drawn"]
    assert [(region["id"], region["name"]) for region in renamed] == [(one["id"], "stroma")]
    exported = ask(f"{address}.geojson")
    assert exported.headers["content-disposition"] == "attachment; filename*=UTF-8''s3.geojson"
    assert exported.body == (folder / "s3.geojson").read_bytes()
    (region,) = read_annotations(folder / "s3.geojson", width=1000, height=700)
    assert region.name == "stroma" and region.shape.bounds == (64, 0, 192, 64)
    assert ask(f"/api/case/{number_of['s4']}/annotations").json["drawn"] == []
    assert ask.post(address, {"delete": {"region": one["id"]}}).json["drawn"] == []
    assert json.loads(ask(f"{address}.geojson").body)["features"] == []


def test_tile_table_has_positions_maps_and_regions(asked, number_of, run):
    ask, _ = asked
    number = number_of["s3"]
    ask.post(f"/api/case/{number}/annotations", {"add": {"name": "=tumour", "outline": SQUARE}})
    response = ask(f"/api/case/{number}/tiles.csv")
    assert response.headers["content-disposition"] == "attachment; filename*=UTF-8''s3_tiles.csv"
    table = pd.read_csv(io.BytesIO(response.body))
    assert list(table)[:5] == ["slide", "tile", "x_level0_px", "y_level0_px", "size_level0_px"]
    assert len(table) == run.size(number) and set(table["slide"]) == {"s3"}
    places = ask(f"/api/case/{number}/places").json
    assert table["x_level0_px"].tolist() == places["x"] and table["y_level0_px"].tolist() == places["y"]
    for column, address in (
        ("attention weight", "factual"),
        ("evidence a", "evidence?class=0"),
        ("evidence b", "evidence?class=1"),
    ):
        values = ask(f"/api/case/{number}/map/{address}").json["values"]
        assert table[column].to_numpy() == pytest.approx(np.array(values), rel=1e-3, abs=1e-9)
    within = table[table["regions"].notna()]
    assert within["tile"].tolist() == [1, 2] and set(within["regions"]) == {"'=tumour"}  # no formula
    assert "regions" not in pd.read_csv(io.BytesIO(ask(f"/api/case/{number_of['s4']}/tiles.csv").body))


def test_regions_from_qupath_are_shown_and_exported_unchanged(asked, number_of):
    ask, folder = asked
    ring = [[0, 0], [640, 0], [640, 64], [0, 0]]
    feature = {
        "type": "Feature",
        "id": "8a5",
        "geometry": {"type": "Polygon", "coordinates": [ring]},
        "properties": {"objectType": "annotation", "classification": {"name": "Tumor", "color": [200, 0, 0]}},
    }
    folder.mkdir()
    (folder / "s3.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": [feature]}))
    address = f"/api/case/{number_of['s3']}/annotations"
    (one,) = ask(address).json["drawn"]
    assert (one["id"], one["name"], one["colour"]) == ("8a5", "Tumor", [200, 0, 0])
    ask.post(address, {"add": {"name": "own", "outline": SQUARE}})
    assert json.loads(ask(f"{address}.geojson").body)["features"][0] == feature


def test_slide_names_are_never_used_as_paths(tmp_path):
    folder = tmp_path / "a" / "b"
    one = annotations(made_up_run("../../x", "..", "/etc/passwd", "CON"), folder)
    for number in range(4):
        assert one.change(number, lambda regions: regions.add("r", SQUARE))[0].name == "r"
    assert sorted(path.parent for path in tmp_path.rglob("*.geojson")) == [folder] * 4
    assert len(one.of(0).drawn) == 1 and one.of(0).file.startswith("b/_.._x~")


def test_annotations_from_other_programs_are_shown_as_truth(tmp_path):
    run = made_up_run("s0", "s1")
    (tmp_path / "s0.xml").write_text(ASAP)
    found = annotations(run, tmp_path).of(0)
    assert found.problem == "s0.xml is not shown, as the size of the slide is unknown: give its file (--slides)"
    sized = replace(run.cases[0].slide_file, slide_width=1000, slide_height=700)
    run = replace(run, cases=tuple(replace(case, slide_file=sized) for case in run.cases))
    found = annotations(run, tmp_path).of(0)
    assert [(one.name, len(one.rings[0])) for one in found.truth] == [("s0.xml: tumour", 4)] and found.problem == ""
    (tmp_path / "s1.xml").write_text("<html/>")
    assert annotations(run, tmp_path).of(1).problem.startswith("s1.xml begins with <html>")
    (tmp_path / "s1.xml").unlink()
    outside = tmp_path.parent / "outside.xml"
    outside.write_text(ASAP)
    (tmp_path / "s1.xml").symlink_to(outside)
    assert annotations(run, tmp_path).of(1).problem == "s1.xml is a link out of the folder of annotations"


@pytest.mark.parametrize(
    ("truth", "classes", "expected"),
    [
        ([1, 1, 0, 1], ("a", "b"), {"labelled b": 2 * 64 * 64 + 64 * 64}),
        ([[1, 0], [-1, 1], [UNKNOWN, 1], [0, 0]], ("a", "b"), {"labelled a": 64 * 64, "labelled b": 2 * 64 * 64}),
        ([1, 0, 0, 0], ("a", "b", "c"), {"labelled": 64 * 64}),
        ([0, 0, 0, UNKNOWN], ("a", "b"), {}),
    ],
)
def test_labelled_tiles_are_shown_as_truth(tmp_path, truth, classes, expected):
    found = annotations(made_up_run("s0", truth=truth, classes=classes), tmp_path).of(0)

    def area(ring):
        x, y = ring.T
        return abs(np.dot(x[:-1], y[1:]) - np.dot(x[1:], y[:-1])) / 2

    assert {one.name: sum(map(area, one.rings)) for one in found.truth} == expected


def test_reason_is_given_where_no_region_can_be_drawn(tmp_path):
    add = lambda regions: regions.add("r", SQUARE)  # noqa: E731
    for one, reason in (
        (annotations(made_up_run("s0"), None), "no folder of annotations was given"),
        (annotations(made_up_run("s0", unit="um"), tmp_path), "positions are in micrometres: give the slide file"),
    ):
        assert one.of(0).refusal.startswith(reason)
        with pytest.raises(CarmilError, match=reason):
            one.change(0, add)
    run = made_up_run("s0")
    run = replace(run, bags=Bags.from_list([torch.zeros(4, 2)]))
    assert annotations(run, tmp_path).of(0).refusal == "the positions of this slide's tiles are unknown"
    (tmp_path / "s0.geojson").write_text("{")
    broken = annotations(made_up_run("s0"), tmp_path).of(0)
    assert broken.refusal.startswith("s0.geojson") and str(tmp_path) not in broken.refusal


def test_annotations_in_pixels_are_not_shown_if_positions_are_in_micrometres(tmp_path):
    run = made_up_run("s0", unit="um")
    sized = SlideFile(slide_width=1000, slide_height=700)
    run = replace(run, cases=tuple(replace(case, slide_file=sized) for case in run.cases))
    (tmp_path / "s0.xml").write_text(ASAP)
    found = annotations(run, tmp_path).of(0)
    assert found.truth == () and found.problem.startswith("s0.xml is not shown, as positions are in micrometres")


def test_annotations_file_that_is_a_symlink_is_not_exported(tmp_path):
    (tmp_path / "secret.geojson").write_text('{"type": "FeatureCollection", "features": []}')
    (tmp_path / "drawn").mkdir()
    (tmp_path / "drawn" / "s0.geojson").symlink_to(tmp_path / "secret.geojson")
    with pytest.raises(CarmilError, match=r"s0\.geojson is a link"):
        annotations(made_up_run("s0"), tmp_path / "drawn").geojson(0)


def test_regions_are_saved_next_to_the_run_unless_a_folder_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    assert annotations_folder(None, tmp_path / "run") == tmp_path / "run-annotations"
    monkeypatch.chdir(tmp_path / "run")
    assert annotations_folder(None, tmp_path.__class__(".")) == tmp_path / "run-annotations"
    assert annotations_folder(tmp_path / "x", tmp_path / "run") == tmp_path / "x"
    (tmp_path / "file").touch()
    with pytest.raises(CarmilError, match=r"--annotations .*file is a file: expected a folder"):
        annotations_folder(tmp_path / "file", tmp_path / "run")
