import json

import pytest
import torch
from sklearn.metrics import roc_auc_score

from carmil.counterfactual import create_model
from carmil.datasets.digit_data import load_digits
from carmil.errors import CarmilError
from carmil.evidence import explainers_of
from carmil.reproduce import interpretability
from carmil.reproduce.interpretability import SLOW, agreement, run_interpretability, tables
from carmil.reproduce.paper import PAPER
from carmil.reproduce.table1 import Settings, figure, run_table1
from carmil.training.runs import read_run

SETTINGS = Settings(models=("abmil", "car/abmil"), repetitions=2, epochs=3)


@pytest.fixture(scope="module")
def data():
    return load_digits(["adjacent_pairs", "four_bags"], sizes=(60, 30, 40))


@pytest.fixture(scope="module")
def table(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("interpretability")
    rows, lines = run_interpretability(data.studies, SETTINGS, data.about, out, device="cpu")
    return out, rows, lines


def test_every_explainer_of_the_model_has_a_row_that_names_its_rule(table):
    _, rows, _ = table
    for task in ("adjacent_pairs", "four_bags"):
        for model in SETTINGS.models:
            kinds = [(r.evidence, r.negative) for r in rows if (r.task, r.model) == (task, model) and r.ours]
            expected = {(name, "mirror") for name in explainers_of(create_model(model, 64, 2))}
            expected |= {("attention", "self")} | ({("attention", "counterfactual")} if model == "car/abmil" else set())
            assert len(kinds) == len(expected)
            assert set(kinds) == expected
    assert all((row.note == "control") == (row.negative == "self") for row in rows if row.ours)


def test_figures_are_of_the_maps_that_the_run_holds(table, data):
    out, rows, _ = table
    run = read_run(out / "runs" / "four_bags" / "car-abmil")
    row = next(r for r in rows if (r.task, r.model, r.evidence) == ("four_bags", "car/abmil", "path"))
    assert row.ours["auprc_both"] == pytest.approx(figure(run.metrics["path.mirror.auprc_both"]))
    assert row.ours["auc"] == pytest.approx(figure(run.metrics["auc"]))
    bags = data.studies["four_bags"].test.bags
    by_model = []
    for evidence in run.maps["path"]:
        areas = []
        for i in range(len(bags)):
            part = slice(int(bags.offsets[i]), int(bags.offsets[i + 1]))
            for s, truth in zip(evidence[part].T, bags.instance_labels[part].T, strict=True):
                kinds = [(truth > 0, s), (truth < 0, -s)]
                own = [roc_auc_score(hit, score) for hit, score in kinds if 0 < hit.sum() < len(hit)]
                areas += [sum(own) / len(own)] if own else []
        by_model.append(sum(areas) / len(areas))
    assert row.ours["auroc_both"] == pytest.approx(figure(by_model), abs=1e-3)


def test_a_map_that_is_the_truth_is_perfect_by_the_mirror_rule_and_not_by_the_control(data):
    bags = data.studies["four_bags"].test.bags
    truth = bags.instance_labels.double()
    mirror, control = agreement({"attention": torch.stack([truth, truth])}, bags)
    assert mirror["negative"] == "mirror"
    assert all(values == pytest.approx([1.0, 1.0]) for values in mirror["measures"].values())
    assert mirror["intervals"] == [pytest.approx([1.0, 1.0])]
    assert control["negative"] == "self"
    assert control["measures"]["auprc_both"][0] < 0.9
    low, high = control["intervals"][0]
    assert low < control["measures"]["auprc_both"][0] < high
    assert high - low < 0.3


def test_the_papers_figures_stand_in_columns_of_their_own(table):
    out, rows, _ = table
    first = tables(rows)[0]
    assert "AUPRC± paper" in first.heads
    assert "AUROC± paper" not in first.heads
    assert all(len(line) == len(first.heads) for line in first.lines)
    row = next(r for r in rows if (r.task, r.model, r.evidence) == ("four_bags", "abmil", "single"))
    assert row.paper == PAPER["abmil", "single", "mirror"]["four_bags"]
    assert all(r.note == "not asked for" for r in rows if not r.ours)
    text = (out / "interpretability.md").read_text()
    assert "| abmil | lrp | mirror |" in text
    assert "bootstrap over test bags" in text
    written = json.loads((out / "interpretability.json").read_text())["rows"]
    assert written[0]["auprc_both_interval"] == pytest.approx(list(rows[0].interval))


def test_models_that_table1_has_trained_are_used_again(data, tmp_path, monkeypatch):
    shown, _ = run_table1(data.studies, SETTINGS, data.about, tmp_path, device="cpu")
    monkeypatch.setattr("carmil.reproduce.digit_runs.fit", None)
    rows, _ = run_interpretability(data.studies, SETTINGS, data.about, tmp_path, device="cpu")
    ours = {(r.task, r.model, r.evidence, r.negative): r.ours for r in rows}
    for row in shown:
        for name, value in row.ours.items():
            assert ours[row.task, row.model, row.evidence, row.negative][name] == pytest.approx(value, abs=1e-3)


def test_started_again_it_asks_for_nothing_that_is_there(table, data, monkeypatch):
    out, rows, lines = table
    monkeypatch.setattr(interpretability, "evidence_maps", None)
    assert run_interpretability(data.studies, SETTINGS, data.about, out, device="cpu") == (rows, lines)


def test_a_grid_has_a_row_a_point_and_leaves_out_what_takes_many_passes(data, tmp_path):
    settings = Settings(models=("car/abmil",), repetitions=2, epochs=2, alpha=(0.0, 0.8))
    one = {"adjacent_pairs": data.studies["adjacent_pairs"]}
    rows, lines = run_interpretability(one, settings, data.about, tmp_path, device="cpu")
    ours = [row for row in rows if row.ours]
    assert {row.weights for row in ours} == {"alpha 0", "alpha 0.8"}
    assert not {row.evidence for row in ours} & set(SLOW)
    assert not any(row.paper for row in ours)
    assert any("not asked in a grid: single, integrated_gradients" in line for line in lines)
    run = read_run(tmp_path / "runs" / "adjacent_pairs" / "car-abmil")
    second = next(r for r in ours if (r.evidence, r.weights) == ("path", "alpha 0.8"))
    assert second.ours["auprc_pos"] == pytest.approx(figure(run.metrics["path.auprc_pos"][2:]))
    assert second.interval[0] < second.ours["auprc_both"][0] < second.interval[1]


def test_a_model_that_cannot_be_built_is_named_before_anything_is_trained(data, tmp_path):
    with pytest.raises(CarmilError, match="weno tells positive bags from negative ones"):
        run_interpretability(data.studies, Settings(models=("weno",)), data.about, tmp_path, device="cpu")
    assert not list(tmp_path.iterdir())


def test_only_the_explainers_that_are_named_are_asked(data, tmp_path, monkeypatch):
    settings = Settings(models=("abmil",), repetitions=1, epochs=2)
    one = {"adjacent_pairs": data.studies["adjacent_pairs"]}

    def kinds(*explainers):
        rows, _ = run_interpretability(one, settings, data.about, tmp_path, explainers=explainers, device="cpu")
        return [row.evidence for row in rows if row.ours]

    assert kinds("lrp", "path") == ["path", "lrp"]
    request = []
    real = interpretability.evidence_maps
    monkeypatch.setattr(interpretability, "evidence_maps", lambda *words: request.append(words[2]) or real(*words))
    assert kinds("lrp", "path", "random") == ["path", "lrp", "random"]
    assert request == [["random"]]
    with pytest.raises(CarmilError, match="unknown explainer 'lpr'"):
        kinds("lpr")


def test_an_explainer_that_no_model_can_be_asked_for_is_refused_and_nothing_is_overwritten(
    data, tmp_path, said, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "interpretability.md").write_text("of another time")
    words = ("--models", "abmil,mean", "--tasks", "four_bags", "--explainers", "path,rollout", "--out", "out")
    status, out, err = said("reproduce", "interpretability", *words)
    assert (status, out) == (2, "")
    assert (
        err.strip()
        .splitlines()[-1]
        .startswith("carmil: --explainers rollout: none of abmil, mean can be asked for it;")
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["interpretability.md"]
    assert (tmp_path / "out" / "interpretability.md").read_text() == "of another time"


@pytest.mark.parametrize("command", ["table1", "interpretability", "faithfulness"])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--tasks", "five_bags"], "unknown task 'five_bags'"),
        (["--models", "nomil"], "unknown model 'nomil'"),
        (["--alpha", "much"], "--alpha much: expected numbers, separated by commas"),
    ],
)
def test_commands_share_their_options_and_name_what_is_wrong(said, tmp_path, monkeypatch, command, words, expected):
    monkeypatch.chdir(tmp_path)
    status, out, err = said("reproduce", command, *words)
    assert (status, out) == (2, "")
    assert expected in err
    assert len(err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())
