import json

import pytest

from carmil.errors import CarmilError
from carmil.reproduce.digits import digit_methods
from carmil.reproduce.method_runs import runs_folder, train_methods
from carmil.reproduce.paper import PAPER, figure, figure_text
from carmil.reproduce.table1 import MEASURES, run_table1
from carmil.runs.run import read_run
from carmil.studies.agreement import run_agreement

from .digit_tables import request_for, rows_of, small_cohorts

MODELS = ("abmil", "car/abmil", "targeted/abmil")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    request = request_for(tmp_path_factory.mktemp("table1"))
    cohorts = small_cohorts(request.shared)
    return request, cohorts, run_table1(cohorts, digit_methods(MODELS), request)


def test_every_row_names_its_negative_rule_and_controls_are_marked(table):
    rows = rows_of(table[2])
    kinds = {(row["task"], row["model"], row["evidence"], row["negative rule"]) for row in rows}
    for task in ("Adjacent Pairs", "Four Bags"):
        assert {
            (task, "abmil", "attention", "mirror"),
            (task, "abmil", "attention", "self"),
            (task, "car/abmil", "attention", "counterfactual"),
            (task, "car/abmil", "path", "mirror"),
            (task, "targeted/abmil", "targeted", "mirror"),
            (task, "transmil", "rollout", "mirror"),
            (task, "abmil", "single", "mirror"),
            (task, "abmil", "random", "mirror"),
        } <= kinds
    assert all((row["note"] == "control") == (row["negative rule"] == "self") for row in rows)


def test_rows_of_the_paper_that_were_not_requested_are_noted(table):
    missing = [row for row in rows_of(table[2]) if row["AUC ours"] == "–"]
    assert {row["model"] for row in missing} == {"additive", "transmil"}
    assert all(row["note"] == "not asked for" for row in missing)
    rollout = next(row for row in missing if row["evidence"] == "rollout" and row["task"] == "Four Bags")
    assert rollout["AUC paper"] == figure_text(PAPER["transmil", "rollout", "mirror"]["four_bags"]["auc"])


def test_table1_shows_figures_measured_by_the_runs(table):
    request, cohorts, result = table
    run = read_run(runs_folder(cohorts[1], request) / "car-abmil")
    (path,) = run_agreement(run, ["path"])
    row = next(
        r for r in rows_of(result) if (r["task"], r["model"], r["evidence"]) == ("Four Bags", "car/abmil", "path")
    )
    assert row["AUC ours"] == figure_text(figure([line.figures["auc"] for line in run.metrics.by_fold]))
    for measure, head in (("auprc_plus", "AUPRC+ ours"), ("auprc_both", "AUPRC± ours")):
        assert row[head] == figure_text(figure(path.measures[measure].nanmean((1, 2)).tolist()))
    kept = json.loads((request.out / "table1.json").read_text())["rows"]
    assert len(kept) == len(rows_of(result)) and set(kept[0]["ours"]) >= set(MEASURES)
    assert row["AUC ours"] in (request.out / "table1.md").read_text()


def test_grid_of_loss_weights_equals_points_trained_separately(tmp_path):
    cohorts = small_cohorts(tmp_path, ["four_bags"])
    request = request_for(tmp_path / "grid")
    grid = digit_methods(["car/abmil"], alpha=(0.0, 0.8), lambda_=(0.2, 1.0))
    rows = [row for row in rows_of(run_table1(cohorts, grid, request)) if row["AUC ours"] != "–"]
    weights = [f"alpha {a}, lambda {b}" for a in ("0", "0.8") for b in ("0.2", "1")]
    assert {row["model"] for row in rows} == {f"car/abmil ({point})" for point in weights}
    (alone,) = train_methods(cohorts, grid[2:3], request_for(tmp_path / "one"))
    point = next(row for row in rows if row["model"] == "car/abmil (alpha 0.8, lambda 0.2)")
    assert point["AUC ours"] == figure_text(figure(alone.values("auc")))


def test_repeated_table1_reads_finished_runs(table, monkeypatch):
    request, cohorts, result = table
    monkeypatch.setattr("carmil.studies.train.train_protocol", None)
    monkeypatch.setattr("carmil.studies.agreement.agreement", None)
    assert run_table1(cohorts, digit_methods(MODELS), request) == result


def test_model_that_cannot_be_created_raises_an_error_before_training(tmp_path):
    cohorts = small_cohorts(tmp_path, ["four_bags"])
    with pytest.raises(CarmilError, match="weno separates positive from negative bags"):
        run_table1(cohorts, digit_methods(["abmil", "weno"]), request_for(tmp_path))
    assert not (tmp_path / "runs").exists()


def test_figure_text_is_mean_and_standard_deviation():
    assert figure_text(figure([0.9, 0.8])) == "85.0 ± 7.1"
    assert figure_text(figure([0.9])) == "90.0"
    assert figure_text(None) == "–"
