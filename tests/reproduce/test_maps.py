"""The benchmark of maps: figures, scores, what is left out, and explainers registered from outside."""

import json

import numpy as np
import pytest

from carmil.errors import CarmilError
from carmil.evidence import EXPLAINERS
from carmil.evidence.explainers import Explainer
from carmil.reproduce import maps as recipe
from carmil.reproduce.maps import Bench, classes_of, reproduce, run_maps
from carmil.reproduce.method_runs import Method, train_methods
from carmil.reproduce.recipes import Request
from carmil.studies.agreement import run_agreement

from .digit_tables import request_for, rows_of, small_cohorts
from .made_crc import made_crc

NAMES = ("path", "attention", "random", "patch_scores", "reversed")


def reversed_path(model, features, offsets):
    return -EXPLAINERS["path"].explain(model, features, offsets)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Yield the request, the cohort and the finding of two models, with an explainer registered from outside."""
    request = request_for(tmp_path_factory.mktemp("maps"))
    (cohort,) = small_cohorts(request.shared, ["adjacent_pairs"], seeds=1, epochs=8, lr=1e-2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "STEPS", 10)
        patch.setattr(recipe, "RANDOM_ORDERS", 2)
        outside = Explainer(
            reversed_path,
            "path, reversed",
            class_conditional=True,
            signed=True,
            cost="1",
            needs=EXPLAINERS["path"].needs,
        )
        patch.setitem(EXPLAINERS, "reversed", outside)
        finding = run_maps([Bench(cohort, classes_of(cohort))], ["abmil", "mean"], request, explainers=NAMES)
        yield request, cohort, finding


def facts_of(found):
    return json.loads((found[0].out / "maps.json").read_text())


def test_every_explainer_has_a_row_for_every_model_that_it_fits(found):
    rows = [(row["model"], row["map"]) for row in rows_of(found[2]) if row["task"] == "Adjacent Pairs"]
    assert sorted(rows) == [
        ("abmil", "attention"),
        ("abmil", "path (default)"),
        ("abmil", "random"),
        ("abmil", "reversed"),
        ("mean", "patch_scores (default)"),
        ("mean", "random"),
    ]


def test_agreement_equals_the_agreement_of_the_run(found):
    request, cohort, _ = found
    (one,) = train_methods([cohort], [Method("abmil", "abmil")], request)
    (path,) = (each for each in run_agreement(one.run, ["path"]) if each.rule == "mirror")
    expected = np.nanmean(path.measures["auprc_both"].nanmean(0).nanmean(-1).numpy())
    row = next(each for each in facts_of(found)["maps"] if (each["model"], each["explainer"]) == ("abmil", "path"))
    assert row["auprc_both"]["value"] == pytest.approx(expected)
    assert row["seconds"] > 0


def test_score_is_the_share_of_the_other_maps_that_a_map_beats(found):
    maps = [one for one in facts_of(found)["maps"] if one["model"] == "abmil"]
    for figure in ("auprc_both", "srg"):
        values = {one["explainer"]: one[figure]["value"] for one in maps}
        for one in maps:
            below = sum(values[one["explainer"]] > value for value in values.values())
            assert one["beaten"][figure] == pytest.approx(below / 3)
    by_name = {one["explainer"]: one for one in maps}
    assert by_name["path"]["srg"]["value"] > 0 > by_name["reversed"]["srg"]["value"]
    assert by_name["reversed"]["srg"]["value"] == pytest.approx(-by_name["path"]["srg"]["value"], abs=1e-6)


def test_tied_maps_count_half_and_maps_with_unknown_values_are_ignored():
    assert recipe._beaten([0.5, 0.2, 0.5, np.nan]) == pytest.approx([0.75, 0, 0.75, np.nan], nan_ok=True)
    assert np.isnan(recipe._beaten([0.5])[0])


def test_maps_are_sorted_and_the_rank_of_the_default_map_is_stated(found):
    summary = [row for row in rows_of(found[2]) if row["task"].startswith("All maps")]
    assert [row["place"] for row in summary] == [str(i) for i in range(1, len(NAMES) + 1)]
    names = [row["map"].removesuffix(" (default)") for row in summary]
    assert sorted(names) == sorted(NAMES)
    assert f"path, a default map of carmil, is number {names.index('path') + 1} of 5" in found[2].lines
    assert names.index("path") < names.index("reversed")


def test_page_has_the_tables_and_the_picture(found):
    page = (found[0].out / "maps.html").read_text()
    assert "<h1>A benchmark of maps</h1>" in page
    assert "data:image/png;base64," in page and "reversed" in page
    assert "The paper's tables" not in page


def test_second_call_trains_and_measures_nothing(found, monkeypatch):
    request, cohort, _ = found
    for name in ("studies.train.train_protocol", "explanations.faithfulness.probe", "evidence.map_agreement.explain"):
        monkeypatch.setattr(f"carmil.{name}", None)
    again = run_maps([Bench(cohort, classes_of(cohort))], ["abmil", "mean"], request, explainers=NAMES)
    assert again == found[2]


def test_risks_are_measured_on_planted_hazards_without_models_that_need_classes(tmp_path):
    made_crc(tmp_path / "data" / "crc", patients=12)
    request = Request(out=tmp_path / "out", shared=tmp_path / "out", data=tmp_path / "data", fast=True)
    finding = reproduce(
        request,
        cohorts=("planted-hazards",),
        models=("abmil.gated", "targeted/abmil"),
        explainers=("path", "attention"),
    )
    assert [line[:2] for line in finding.tables[1].lines] == [
        ("abmil.gated", "path (default)"),
        ("abmil.gated", "attention"),
    ]
    assert all(line[3] != "–" and line[4] != "–" for line in finding.tables[1].lines)
    assert any("without targeted/abmil" in line for line in finding.conditions)


def test_missing_data_and_unknown_names_raise_an_error_of_one_line(tmp_path):
    request = request_for(tmp_path)
    with pytest.raises(CarmilError, match="made of crc's nuclei, expected in DATA/crc"):
        reproduce(request, cohorts=("crc", "foci"))
    with pytest.raises(CarmilError, match="unknown cohort 'focy'"):
        reproduce(request, cohorts=("focy",))
    with pytest.raises(CarmilError, match="did you mean 'path'"):
        reproduce(request, cohorts=("four_bags",), explainers=("pathh",))
