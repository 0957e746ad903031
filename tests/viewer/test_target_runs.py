"""The viewer shows runs of every kind of target with the numbers of the run and in the words of the target."""

import json

import numpy as np
import pytest
import torch

from carmil.maps.overlays import write_geojson
from carmil.runs.run import read_run
from carmil.studies.subjects import open_run_store
from carmil.viewer.app import guarded_app
from carmil.viewer.cases import read_cases
from carmil.viewer.guard import known_hosts
from carmil.viewer.maps import CaseMaps
from carmil.viewer.responses import Responses
from carmil.viewer.slide_files import SlideFiles

from .target_studies import OPTIONS, SLIDES, TILES

# The rows of an answer, and what they are: the predicted columns of the run, then quantities of the outputs.
ROWS = {
    "survival": ["risk"],
    "value": ["age"],
    "ordinal": ["1", "2", "3", "mean grade"],
    "labels": ["node", "her2"],
}
SIDES = {
    "survival": ("raises the risk", "lowers the risk"),
    "value": ("raises the age", "lowers the age"),
    "ordinal": ("raises the grade", "lowers the grade"),
    "labels": ("supports “node”", "refutes “node”"),
}
UNITS = {
    "survival": "contribution to the log hazard",
    "value": "contribution to the age in standard deviations",
    "ordinal": "contribution to the logit of a higher grade",
}
LABELS = {"survival": "34.1 months, recurrence", "value": "54.1", "ordinal": "1", "labels": "node 0, her2 1"}  # of s1


@pytest.fixture(params=OPTIONS)
def kind(request):
    return request.param


@pytest.fixture
def run(kind, run_of_kind):
    return read_run(run_of_kind(kind))


@pytest.fixture
def responses(run):
    return Responses(read_cases(run.folder), SlideFiles(None, []))


@pytest.fixture
def ask(responses, asking):
    return asking(guarded_app(responses, is_known=known_hosts([], any_address=False)))


def rows_of(target, predicted):
    """Return the numbers of an answer: predictions, and the mean grade of ordered grades."""
    p = np.asarray(predicted)
    return [*p, p @ [1, 2, 3]] if target.kind == "ordinal" else list(p)


def predict(run, slide, kept):
    """Return the mean predictions, factual and counterfactual, of the models that were tested on a slide, for some tiles."""
    store, population = open_run_store(run), run.population()
    fold = run.predictions().query("slide == @slide")["fold"].iloc[0]
    features = store.bags()[store.ids.index(slide)].features[kept]
    factual, counterfactual = [], []
    for row, model in enumerate(population.member(i) for i in range(len(run.models))):
        if run.tested_folds[row] == fold:
            with torch.no_grad():
                one = model(features, torch.tensor([0, len(features)]))
                factual.append(model.link.predictions(one.logits)[0].double().numpy())
                counterfactual.append(model.link.predictions(one.counterfactual.logits[:, 0])[0].double().numpy())
    assert len(factual) == 2
    return np.mean(factual, axis=0), np.mean(counterfactual, axis=0)


def test_list_has_the_predictions_of_the_run_and_the_terms_of_the_target(ask, run, kind):
    response, frame = ask("/api/cohort").json, run.predictions().groupby("slide")
    target = response["target"]
    assert [row["name"] for row in target["rows"]] == ROWS[kind]
    assert [one["name"] for one in target["outputs"]] == list(run.outputs)
    assert (target["outputs"][0]["positive"], target["outputs"][0]["negative"]) == SIDES[kind]
    assert target["judged"] == (kind == "ordinal") and target["answers"] == (kind != "value")
    columns, others = run.target.prediction_columns(), run.target.prediction_columns("cf")
    for case in response["cases"]:
        own = frame.get_group(case["slide"])
        p, rows = own[columns].mean().to_numpy(), rows_of(run.target, own[columns].mean())
        rule = run.decision([i for i, fold in enumerate(run.tested_folds) if fold == case["fold"]])
        assert case["predicted"] == pytest.approx(rows, rel=1e-6)
        assert case["prediction"] == rule.answer(p) and case["rule"] == rule.rule
        assert case["counterfactual"] == rule.answer(own[others].mean())
        assert case["value"] == pytest.approx(rows[-1] if kind == "ordinal" else max(p), rel=1e-3)
        assert case["right"] == (case["label"] == case["prediction"] if kind == "ordinal" else None)
    assert next(case["label"] for case in response["cases"] if case["slide"] == "s1") == LABELS[kind]
    assert len(response["cases"]) == SLIDES


def test_scale_of_numbers_spans_the_slides_of_the_run(ask, run, kind):
    target = ask("/api/cohort").json["target"]
    frame, form = run.predictions(), target["format"]
    if kind == "labels":
        assert form == {"share": True, "signed": False, "decimals": 2, "low": 0, "high": 1}
        return
    seen = [frame[run.target.prediction_columns(prefix)].groupby(frame["slide"]).mean() for prefix in ("p", "cf")]
    numbers = [rows_of(run.target, row)[-1] for table in seen for row in table.to_numpy()]
    assert (form["low"], form["high"]) == pytest.approx((min(numbers), max(numbers)))
    assert not form["share"] and form["signed"] == (kind == "survival")
    digits = len(f"{max(abs(form['low']), abs(form['high'])):.{form['decimals']}f}".replace(".", "").lstrip("0"))
    assert digits == (4 if kind == "value" else 3)


def test_whatif_equals_the_prediction_of_the_models_for_the_reduced_bag(ask, run, kind):
    slides = [case["slide"] for case in ask("/api/cohort").json["cases"]]
    number, removed = slides.index("s5"), [0, 3, 17]
    kept = [j for j in range(TILES) if j not in removed]
    response = ask.post(f"/api/case/{number}/whatif", {"remove": removed}).json
    before, _ = predict(run, "s5", list(range(TILES)))
    after, counterfactual = predict(run, "s5", kept)
    assert response["before"] == pytest.approx(rows_of(run.target, before), rel=1e-4, abs=1e-5)
    assert response["after"] == pytest.approx(rows_of(run.target, after), rel=1e-4, abs=1e-5)
    assert response["counterfactual_after"] == pytest.approx(rows_of(run.target, counterfactual), rel=1e-4, abs=1e-5)
    assert response["after"] != pytest.approx(response["before"], abs=1e-4)
    rule = run.decision(
        [i for i, fold in enumerate(run.tested_folds) if fold == ask(f"/api/case/{number}").json["fold"]]
    )
    assert response["answer_after"] == rule.answer(after)


def test_map_and_lists_show_tiles_that_raise_and_lower_the_output(ask, run, kind):
    shown = ask("/api/case/3/map/evidence").json
    values, top = np.array(shown["values"]), ask("/api/case/3/top?count=4").json
    assert shown["diverging"] and not shown["negligible"]
    unit = "logit" if kind == "labels" else UNITS[kind].removeprefix("contribution to the ")
    of_what = f"logit of {run.target.outputs[ask('/api/case/3').json['class']]}" if kind == "labels" else unit
    assert shown["unit"] == unit
    assert f"0 neither: contribution to the {of_what}; all add up to its change" in shown["of"]
    assert [one["instance"] for one in top["supporting"]] == [j for j in np.argsort(-values)[:4] if values[j] > 0]
    assert all(one["value"] < 0 for one in top["refuting"])


def test_deletion_curve_shows_the_prediction_of_the_target(ask, run, responses, kind):
    slide, of = responses.run.cases[4].slide, responses.run.leading(4)
    curve = ask("/api/case/4/deletion").json
    order = np.argsort(-CaseMaps(responses.run).evidence(4, of).numpy(), kind="stable")
    for step, gone in ((0, 0), (25, 5), (50, 10)):  # per cent, and tiles
        p, _ = predict(run, slide, np.sort(order[gone:]))
        expected = rows_of(run.target, p)[-1] if kind == "ordinal" else p[of]
        assert curve["most"][step] == pytest.approx(expected, rel=2e-3, abs=2e-4)
    if kind in ("survival", "value", "ordinal"):
        assert curve["most"][50] < curve["most"][0] < curve["least"][50]


def test_drawn_maps_and_geojson_use_the_terms_of_the_target(tmp_path, responses, kind, plain_slide, grid_of_tiles):
    tiles = grid_of_tiles(plain_slide(500, 400), 100)
    of = responses.run.leading(4)
    one = CaseMaps(responses.run)._tile_map(4, "evidence", of)
    name = responses.run.outputs[of]
    assert one.title == (f"evidence for {name}" if kind == "labels" else UNITS[kind])
    negative, positive = (f"against {name}", f"for {name}") if kind == "labels" else SIDES[kind][::-1]
    assert one.ends == (negative, positive)
    features = json.loads(write_geojson(tiles, [one], tmp_path / "s.geojson").read_text())["features"]
    by_sign = {
        np.sign(cell["measurements"][one.title]): cell["classification"]["name"]
        for feature in features
        if (cell := feature["properties"])["objectType"] == "tile" and "classification" in cell
    }
    assert by_sign == {1: positive, -1: negative}
    regions = [cell["properties"] for cell in features if cell["properties"]["objectType"] == "annotation"]
    assert regions and {region["classification"]["name"] for region in regions} <= {positive, negative}


def test_negligibility_is_decided_for_each_label_separately(run_of_kind):
    """Two labels may have the same evidence and do not exclude one another, unlike two classes."""
    maps = CaseMaps(read_cases(run_of_kind("labels")))
    found = maps.evidence_of(0)
    found.columns["evidence_her2"] = found.columns["evidence_node"] + 1e-6
    assert maps.negligible(0, 0) == ""
    found.columns["evidence_her2"] = torch.full((TILES,), 1e-5)
    assert maps.negligible(0, 1) == "all tiles together change the logit of her2 by less than 0.01"
    assert maps.negligible(0, 0) == ""
