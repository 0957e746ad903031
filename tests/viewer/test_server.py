"""The viewer's responses about a run equal values computed in Python."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from carmil.bags.bags import Bags
from carmil.bags.sources import SlideFile
from carmil.bags.store import open_store
from carmil.counterfactual import create_model
from carmil.errors import CarmilError
from carmil.evidence import explain
from carmil.evidence.faithfulness import faithfulness_of
from carmil.maps.tile_maps import tile_maps
from carmil.runs.answers import RecordedSlide
from carmil.runs.run import read_run
from carmil.targets import Classes
from carmil.training.population import Member, Population
from carmil.viewer.app import guarded_app
from carmil.viewer.cases import Case, RunCases, read_cases
from carmil.viewer.guard import known_hosts
from carmil.viewer.limits import BoundedCache
from carmil.viewer.maps import CaseMaps
from carmil.viewer.pictures import Pictures
from carmil.viewer.responses import Responses
from carmil.viewer.slide_files import SlideFiles

from .conftest import write_slide

TWO = Classes(names=("a", "b"))
RULE = TWO.decision()


def picture(run_cli):
    assert run_cli.status == 200 and run_cli.headers["content-type"] == "image/jpeg"
    return np.asarray(Image.open(io.BytesIO(run_cli.body))).astype(int)


def models_of(study_folder, slide):
    """Return the models tested on a slide, found independently of the viewer."""
    run = read_run(study_folder / "run")
    folds = set(run.predictions().query("slide == @slide")["fold"])
    population = run.population()
    return [population.member(row) for row, model in enumerate(run.models) if model.fold in folds]


def test_cohort_lists_the_predictions_of_the_run(ask, study_folder):
    response = ask("/api/cohort").json
    frame = read_run(study_folder / "run").predictions()
    outputs = [one["name"] for one in response["target"]["outputs"]]
    assert outputs == ["a", "b"] and [kind["name"] for kind in response["maps"]] == [
        "factual",
        "counterfactual",
        "difference",
        "evidence",
    ]
    assert len(response["cases"]) == 9 and response["run"] == "run"
    for number, case in enumerate(response["cases"]):
        own = frame[frame["slide"] == case["slide"]]
        expected = own[["p_a", "p_b"]].mean().to_numpy()
        assert case["number"] == number
        assert case["predicted"] == pytest.approx(expected, abs=1e-6)
        models = [model for model in read_run(study_folder / "run").models if model.fold == case["fold"]]
        at = np.mean([model.threshold for model in models])
        assert case["prediction"] == "ab"[int(expected[1] >= at)] and case["class"] == int(expected[1] >= at)
        assert case["value"] == pytest.approx(expected[case["class"]], abs=1e-4)
        assert case["counterfactual"] == "ab"[int(own["cf_b"].mean() >= at)]
        assert case["rule"].startswith(f"b if p(b) >= {at:.4g}, else a (")
        assert case["label"] == own["label"].iloc[0] and case["right"] == (case["label"] == case["prediction"])
        assert case["patient"] == f"P{case['slide'][1:]}" and case["fold"] == own["fold"].iloc[0]
        assert case["instances"] == 30 + int(case["slide"][1:])


def test_evidence_map_is_the_mean_over_models_tested_on_the_slide(ask, study_folder, number_of):
    store = open_store(study_folder / "run" / "cohort")
    bag = store.bags()[store.ids.index("s4")]
    models = models_of(study_folder, "s4")
    assert len(models) == 2
    expected = torch.stack([explain(model, bag, "path") for model in models]).mean(0).double().numpy()
    for c in (0, 1):
        response = ask(f"/api/case/{number_of['s4']}/map/evidence?class={c}").json
        assert response["values"] == pytest.approx(expected[:, c], rel=1e-3, abs=1e-9)
        assert response["high"] == -response["low"] == pytest.approx(np.abs(expected[:, c]).max(), rel=1e-3)
        assert response["diverging"] and response["unit"] == "logit"
        assert response["of"].startswith(
            f"blue supports, orange refutes, 0 neither: contribution to the logit of {'ab'[c]};"
        )


@pytest.mark.finding(n=3)
def test_viewer_and_drawn_maps_agree_on_negligible_evidence(run, number_of):
    maps, number = CaseMaps(run), number_of["s4"]
    result = maps.evidence_of(number)
    assert maps.shown(number, "evidence", 0).negligible == "" and maps.top(number, 0, 3)[0]
    large, small = torch.linspace(-3, 3, run.size(number)), torch.full((run.size(number),), 1e-5)
    result.columns |= {
        "evidence_a": large,
        "evidence_b": large + small,
    }  # evidence shared by both classes affects no answer
    (drawn, _) = tile_maps({"a": large.numpy(), "b": (large + small).numpy()})
    shown = maps.shown(number, "evidence", 0)
    assert shown.negligible == drawn.why_negligible != "" and maps.top(number, 0, 3) == ([], [])
    result.columns |= {"a_cf": result.columns["a"] + 1e-5}
    assert maps.shown(number, "difference", 0).negligible.startswith("less than 0.05 of the attention moved")
    assert maps.shown(number, "factual", 0).negligible == ""
    result.columns |= {"a": torch.full((run.size(number),), 1 / run.size(number))}
    assert maps.shown(number, "factual", 0).even and not shown.even


def test_evidence_far_from_turning_the_answer_is_drawn_faint(run, number_of):
    """The tiles move the answer by a fiftieth of its distance from the threshold."""
    number = number_of["s4"]
    case = run.cases[number]
    run = replace(run, cases=tuple(replace(one, decision=replace(one.decision, threshold=1e-9)) for one in run.cases))
    maps, turning = CaseMaps(run), 9 * np.log(10) + np.log(case.predicted[1] / case.predicted[0])
    values = torch.linspace(-1, 1, run.size(number))
    values *= turning / 50 / (2 * values.abs().sum())
    maps.evidence_of(number).columns |= {"evidence_a": values, "evidence_b": -values}
    shown = maps.shown(number, "evidence", 1)
    assert shown.fill == pytest.approx(0.2, rel=1e-3) and shown.high == pytest.approx(5 * float(values.max()), rel=1e-3)
    assert f"another answer needs {turning:.2g}" in shown.faint and shown.negligible == ""
    assert maps.top(number, 1, 3)[0] and maps.shown(number, "factual", 0).fill == 1


@pytest.mark.finding(n=3)
def test_top_lists_exclude_tiles_with_little_evidence(run, number_of):
    maps, number = CaseMaps(run), number_of["s4"]
    values = torch.full((run.size(number),), -0.19)
    values[:5] = torch.tensor([4.0, 0.21, 0.19, 0.0, -0.21])
    maps.evidence_of(number).columns |= {"evidence_a": values, "evidence_b": -values}
    supporting, refuting = maps.top(number, 0, 5)
    assert [j for j, _ in supporting] == [0, 1] and [j for j, _ in refuting] == [4]


def test_difference_map_is_attention_minus_counterfactual_attention(ask, number_of):
    maps = {
        name: np.array(ask(f"/api/case/{number_of['s3']}/map/{name}").json["values"])
        for name in ("factual", "counterfactual", "difference")
    }
    assert maps["factual"].sum() == pytest.approx(1, abs=1e-3)
    assert maps["counterfactual"].sum() == pytest.approx(1, abs=1e-3)
    assert maps["difference"] == pytest.approx(maps["factual"] - maps["counterfactual"], abs=2e-5)


def test_top_lists_contain_the_largest_and_smallest_evidence(ask, number_of):
    values = np.array(ask(f"/api/case/{number_of['s1']}/map/evidence?class=1").json["values"])
    response = ask(f"/api/case/{number_of['s1']}/top?class=1&count=5").json
    places = ask(f"/api/case/{number_of['s1']}/places").json
    supporting, refuting = np.argsort(-values)[:5], np.argsort(values)[:5]
    least = 0.05 * np.abs(values).max()
    assert [one["instance"] for one in response["supporting"]] == [j for j in supporting if values[j] >= least]
    assert [one["instance"] for one in response["refuting"]] == [j for j in refuting if values[j] <= -least]
    for one in response["supporting"] + response["refuting"]:
        assert one["value"] == pytest.approx(values[one["instance"]])
        assert (one["x"], one["y"]) == (places["x"][one["instance"]], places["y"][one["instance"]])


def test_deletion_curve_is_the_mean_over_models(ask, study_folder, number_of):
    store = open_store(study_folder / "run" / "cohort")
    bag = store.bags()[store.ids.index("s2")]
    models = models_of(study_folder, "s2")
    evidence = torch.stack([explain(model, bag, "path") for model in models]).mean(0)[:, 1]
    result = [faithfulness_of(model, bag, evidence[None], torch.tensor([1]), random_orders=5) for model in models]
    response = ask(f"/api/case/{number_of['s2']}/deletion?class=1").json
    assert response["share"] == pytest.approx(np.linspace(0, 1, 101))
    for name, curves in (("most", "most_first"), ("least", "least_first"), ("random", "at_random")):
        expected = torch.stack([getattr(one, curves) for one in result]).flatten(0, -2).mean(0)
        assert response[name] == pytest.approx(expected.numpy(), rel=1e-3)


def test_case_describes_its_available_views(ask, number_of):
    with_slide, without = (ask(f"/api/case/{number_of[name]}").json for name in ("s0", "s5"))
    assert with_slide["picture"] == {
        "case": number_of["s0"],
        "width": 1000,
        "height": 700,
        "mpp": 0.5,
        "tile": 254,
        "overlap": 1,
        "levels": 11,
        "coarsest": 0,
    }
    assert with_slide["images"] and with_slide["places"] and with_slide["extent"] is None
    assert without["picture"] is None and not without["images"] and without["places"]
    assert without["tile_size"] == 64 and without["extent"] == [768, 192]
    assert (without["tile_pixels"], without["tile_mpp"]) == (64, 0.5)
    assert len(without["counterfactual_predicted"]) == 2


def test_zoom_tiles_follow_the_deep_zoom_format(ask, number_of):
    zoom = f"/api/case/{number_of['s0']}/zoom"
    inner = picture(ask(f"{zoom}/10/1_1.jpeg"))
    assert inner.shape == (256, 256, 3)  # 254 plus one on either side
    x, y = 253 + np.arange(256), 253 + np.arange(256)
    assert inner[..., 0].mean(0) == pytest.approx(x / 999 * 255, abs=3)
    assert inner[..., 1].mean(1) == pytest.approx(y / 699 * 255, abs=3)
    assert picture(ask(f"{zoom}/10/0_0.jpeg")).shape == (255, 255, 3)
    assert picture(ask(f"{zoom}/10/3_2.jpeg")).shape == (700 - 507, 1000 - 761, 3)
    assert picture(ask(f"{zoom}/9/0_0.jpeg")).shape == (255, 255, 3)
    assert picture(ask(f"{zoom}/7/0_0.jpeg")).shape == (88, 125, 3)
    assert picture(ask(f"{zoom}/0/0_0.jpeg")).shape == (1, 1, 3)
    for nothing in ("10/4_0", "10/0_3", "11/0_0", "0/1_0", "64/0_0", "65/0_0"):
        assert ask(f"{zoom}/{nothing}.jpeg").status == 404


def one_case(corners, unit, tile_size):
    """Return a run with a single case, s0, and instances at these corners."""
    places = torch.tensor(corners, dtype=torch.float32)
    bags = Bags.from_list([torch.zeros(len(places), 2)], coordinates=[places], coordinate_unit=unit)
    population = Population(lambda: create_model("abmil", 2, 2), [Member()])
    return RunCases("one", TWO, bags, (Case("s0", 0, (0,), RULE, np.ones(2) / 2, tile_size=tile_size),), population)


def test_micrometre_coordinates_are_converted_to_level_0_pixels(study_folder):
    run = one_case([[0, 0], [32, 16]], "um", 16.0)
    with_slide = Pictures(run, SlideFiles(study_folder / "slides", ["s0"]))
    places = with_slide.places(0)
    assert places.corners.tolist() == [[0, 0], [64, 32]] and places.tile_size == 32
    assert places.extent == (1000, 700) and places.centres[1].tolist() == [80, 48] and places.unit == "level0_px"
    with_slide.slides.close()
    bare = Pictures(run, SlideFiles(None, [])).places(0)
    assert bare.corners.tolist() == [[0, 0], [32, 16]] and bare.extent == (48, 32) and bare.unit == "um"


@pytest.mark.finding(n=6)
def test_only_cases_with_coordinates_have_tile_positions():
    places = [torch.tensor([[0.0, 0.0], [32.0, 16.0]]), torch.full((2, 2), torch.nan)]
    bags = Bags.from_list([torch.zeros(2, 2)] * 2, coordinates=places, coordinate_unit=("um", None))
    cases = tuple(Case(f"s{i}", i, (0,), RULE, np.ones(2) / 2, tile_size=16.0) for i in range(2))
    run = RunCases("two", TWO, bags, cases, Population(lambda: create_model("abmil", 2, 2), [Member()]))
    pictures = Pictures(run, SlideFiles(None, []))
    assert pictures.places(0).corners.tolist() == [[0, 0], [32, 16]]
    assert pictures.places(1) is None


def test_tiles_of_unknown_size_are_drawn_with_their_spacing():
    run = one_case([[0, 0], [224, 0], [448, 0], [0, 224], [1120, 224]], "level0_px", None)
    assert Pictures(run, SlideFiles(None, [])).places(0).tile_size == 224


def test_cached_tile_is_not_sent_again(ask, number_of):
    address = f"/api/case/{number_of['s0']}/zoom/9/0_0.jpeg"
    tag = ask(address).headers["etag"]
    again = ask(address, headers=[("if-none-match", tag)])
    assert (again.status, again.body) == (304, b"")
    assert ask(address, headers=[("if-none-match", '"another"')]).status == 200


def test_instance_picture_is_cropped_from_the_slide(ask, number_of):
    shown = picture(ask(f"/api/case/{number_of['s0']}/instance/14.jpeg"))  # third in the second row: x 128, y 64
    assert shown.shape == (64, 64, 3)
    assert shown[..., 0].mean() == pytest.approx((128 + 31.5) / 999 * 255, abs=2)
    assert shown[..., 1].mean() == pytest.approx((64 + 31.5) / 699 * 255, abs=2)
    assert ask(f"/api/case/{number_of['s0']}/instance/30.jpeg").status == 404
    assert ask(f"/api/case/{number_of['s5']}/instance/0.jpeg").status == 404


def test_unreadable_slide_is_reported_without_its_path(study_folder, run, runner, tmp_path, number_of):
    (tmp_path / "s3.svs").write_bytes(b"no slide at all")
    answers = Responses(run, SlideFiles(tmp_path, ["s3"]))
    response = answers.case(number_of["s3"]).decode()
    assert '"picture":null' in response and "s3.svs is not a slide" in response and str(tmp_path) not in response


@pytest.mark.finding(n=1)
@pytest.mark.parametrize(
    ("size", "recorded", "why"),
    [
        ((900, 600), (1000, 700), "s0.tif is 900 x 600 pixels and its tiles were cut from 1,000 x 700"),
        ((500, 600), (None, None), "s0.tif is 500 x 600 pixels, but a tile begins at 600, 300"),
    ],
)
def test_slide_whose_size_differs_from_the_tiled_slide_is_not_shown(tmp_path, size, recorded, why):
    """Otherwise the map would be drawn over the tissue of another slide."""
    write_slide(tmp_path / "s0.tif", width=size[0], height=size[1])
    run = one_case([[0, 0], [600, 300]], "level0_px", 64.0)
    tiled = SlideFile(slide_width=recorded[0], slide_height=recorded[1])
    run = replace(run, cases=(replace(run.cases[0], slide_file=tiled),))
    lines = []
    answers = Responses(run, SlideFiles(tmp_path, ["s0"]), log=lines.append)
    for _ in range(2):
        response = json.loads(answers.case(0))
        assert (
            response["picture"] is None
            and response["places"]
            and not response["images"]
            and response["remark"].startswith(why)
        )
    assert answers.pictures.tile(0, 9, 0, 0) is None and answers.pictures.instance(0, 0) is None
    assert len(lines) == 1 and lines[0].startswith(f"s0 is shown without its slide: {why}")
    assert json.loads(answers.places(0)) == {"x": [0, 600], "y": [0, 300]}
    answers.pictures.slides.close()


def test_error_while_reading_a_slide_is_reported_without_its_path(study_folder):
    files = SlideFiles(study_folder / "slides", ["s0"])
    with pytest.raises(CarmilError, match=r"^s0\.tif cannot be read"), files.opened("s0") as slide:
        raise CarmilError(f"{slide.path} cannot be read")
    files.close()


def test_slides_of_a_folder_have_the_recorded_pixel_size(study_folder):
    recorded = {"s0": RecordedSlide("elsewhere/s0.tif", 0.25)}  # its file says 0.5
    files = SlideFiles(study_folder / "slides", ["s0", "s1"], recorded=recorded)
    with files.opened("s0") as first, files.opened("s1") as second:
        assert (first.mpp, second.mpp) == (0.25, 0.5)
    files.close()


def test_slide_links_out_of_the_folder_are_ignored(study_folder, run):
    logged = []
    files = SlideFiles(study_folder / "slides", [case.slide for case in run.cases], log=logged.append)
    assert "s0" in files and "s2" not in files
    assert any("1 link to slides outside it" in line for line in logged)


def test_number_of_open_slides_is_limited_and_slides_in_use_stay_open(tmp_path, monkeypatch):
    from carmil.viewer import slide_files

    class Fake:
        def __init__(self, path):
            self.path, self.closed = path, False

        def close(self):
            self.closed = True

    opened = []

    def fake(path, mpp, missing_mpp):
        opened.append(Fake(path))
        return opened[-1]

    monkeypatch.setattr(slide_files, "open_slide", fake)
    names = [f"x{i}" for i in range(7)]
    for name in names:
        (tmp_path / f"{name}.svs").touch()
    files = SlideFiles(tmp_path, names)
    with files.opened("x0") as first:
        for name in names[1:]:
            with files.opened(name):
                pass
        assert not first.closed
    assert first.closed and sum(not one.closed for one in opened) == slide_files.OPEN
    files.close()
    assert all(one.closed for one in opened)


def test_bounded_cache_evicts_least_recently_used_items():
    kept = BoundedCache(10, len)
    kept.put("a", b"1234")
    kept.put("b", b"1234")
    kept.get("a")
    kept.put("c", b"123")
    assert (kept.get("a"), kept.get("b"), kept.get("c"), kept.weight) == (b"1234", None, b"123", 7)
    kept.put("a", b"1")
    kept.put("huge", b"12345678901")
    assert (kept.get("a"), kept.get("huge"), kept.weight) == (b"1", None, 4)


def test_viewer_shows_digit_bags_with_their_pictures(demo_folder, runner, asking):
    run = read_cases(demo_folder)
    assert run.name == "car-abmil" and len(run.outputs) == 4
    app = guarded_app(Responses(run, SlideFiles(None, [])), is_known=known_hosts([], any_address=False))
    ask = asking(app)
    case = ask("/api/case/3").json
    assert case["images"] and not case["places"] and case["instances"] == 30
    shown = picture(ask("/api/case/3/instance/7.jpeg"))
    assert shown.shape == (112, 112, 3) and shown[0, 0].min() > 200 and shown.min() < 100
    response = ask.post("/api/case/3/whatif", {"remove": [0]}).json
    assert response["before"] == pytest.approx(case["predicted"], abs=1e-5)


def test_thumbnail_is_the_tiled_part_of_the_slide(ask, number_of, answers):
    number = number_of["s1"]
    response = ask(f"/api/case/{number}/thumbnail.jpeg")
    picture = np.asarray(Image.open(io.BytesIO(response.body)).convert("RGB"))
    corners, side = answers.pictures.places(number).corners, answers.pictures.places(number).tile_size
    right, lower = corners.max(0) + 2 * side  # with a margin of a tile; red increases to the right, green downwards
    assert max(picture.shape) == 112 and picture.shape[0] / picture.shape[1] == pytest.approx(lower / right, rel=0.05)
    assert picture[5, -1, 0] == pytest.approx(255 * right / 1000, abs=12)
    assert picture[-1, 5, 1] == pytest.approx(255 * lower / 700, abs=12)
    rows = ask("/api/cohort").json["cases"]
    assert {row["slide"] for row in rows if row["thumbnail"]} == {"s0", "s1"}
    assert ask(f"/api/case/{number_of['s5']}/thumbnail.jpeg").status == 404
