import json

import pytest

from carmil.datasets.digit_data import load_digits
from carmil.errors import CarmilError
from carmil.reproduce.table1 import PAPER, Settings, figure, markdown, run_table1, shown
from carmil.training.recipe import Recipe


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    out = tmp_path_factory.mktemp("table1")
    settings = Settings(models=("abmil", "car/abmil", "targeted/abmil"), repetitions=2, epochs=3)
    data = load_digits(["adjacent_pairs", "four_bags"], sizes=(60, 30, 40))
    rows, _ = run_table1(data.studies, settings, data.about, out, device="cpu")
    return out, settings, data, rows


def test_every_row_names_its_rule_and_controls_stand_beside(table):
    _, _, _, rows = table
    kinds = {(r.task, r.model, r.evidence, r.negative) for r in rows}
    for task in ("adjacent_pairs", "four_bags"):
        assert (task, "abmil", "attention", "mirror") in kinds
        assert (task, "abmil", "attention", "self") in kinds
        assert (task, "car/abmil", "attention", "counterfactual") in kinds
        assert (task, "car/abmil", "path", "mirror") in kinds
        assert (task, "targeted/abmil", "targeted", "mirror") in kinds
        assert (task, "transmil", "rollout", "mirror") in kinds
        assert (task, "abmil", "single", "mirror") in kinds
        assert (task, "abmil", "random", "mirror") in kinds
    assert all(r.note == "control" for r in rows if r.negative == "self")


def test_rows_of_the_paper_that_were_not_asked_for_are_said_to_be_missing(table):
    _, _, _, rows = table
    missing = [r for r in rows if not r.ours]
    assert missing
    assert all(r.note == "not asked for" for r in missing)
    assert all(r.paper == PAPER[r.model, r.evidence, r.negative][r.task] for r in missing)


def test_what_is_printed_is_what_the_runs_measured(table):
    out, _, _, rows = table
    row = next(r for r in rows if (r.task, r.model, r.evidence) == ("four_bags", "car/abmil", "path"))
    metrics = json.loads((out / "runs" / "four_bags" / "car-abmil" / "metrics.json").read_text())
    assert row.ours["auprc_both"] == pytest.approx(figure(metrics["path.mirror.auprc_both"]))
    written = json.loads((out / "table1.json").read_text())["rows"]
    assert len(written) == len(rows)
    assert shown(row.ours["auc"]) in (out / "table1.md").read_text()


def test_a_grid_of_weights_is_its_points_trained_one_by_one(table, tmp_path):
    _, _, data, _ = table
    request = {"models": ("car/abmil",), "repetitions": 2, "epochs": 3}
    one = {"four_bags": data.studies["four_bags"]}
    grid = Settings(**request, alpha=(0.0, 0.8), lambda_=(0.2, 1.0))
    rows, _ = run_table1(one, grid, data.about, tmp_path / "grid", device="cpu")
    ours = [row for row in rows if row.ours]
    assert {row.weights for row in ours} == {f"alpha {a}, lambda {b}" for a in ("0", "0.8") for b in ("0.2", "1")}
    assert not any(row.paper for row in ours)
    alone = Settings(**request, alpha=(0.8,), lambda_=(0.2,))
    for row in run_table1(one, alone, data.about, tmp_path / "one", device="cpu")[0]:
        if row.ours:
            (same,) = [
                r
                for r in ours
                if (r.evidence, r.negative, r.weights) == (row.evidence, row.negative, "alpha 0.8, lambda 0.2")
            ]
            assert same.ours["auc"] == pytest.approx(row.ours["auc"], abs=1e-4)
            assert same.ours["auprc_both"] == pytest.approx(row.ours["auprc_both"], abs=0.1)
    assert "| car/abmil | alpha 0.8, lambda 0.2 |" in (tmp_path / "grid" / "table1.md").read_text()


def test_started_again_it_reads_what_is_finished(table, monkeypatch):
    out, settings, data, rows = table
    monkeypatch.setattr("carmil.reproduce.digit_runs.fit", None)
    assert run_table1(data.studies, settings, data.about, out, device="cpu")[0] == rows


def test_a_model_that_cannot_be_built_is_named_before_anything_is_trained(table, tmp_path):
    _, _, data, _ = table
    with pytest.raises(CarmilError, match="weno tells positive bags from negative ones"):
        run_table1(data.studies, Settings(models=("weno",), epochs=1), data.about, tmp_path, device="cpu")
    assert not list(tmp_path.iterdir())


def test_figures_are_means_with_their_spread():
    assert shown(figure([0.9, 0.8])) == "85.0 ± 7.1"
    assert shown(figure([0.9])) == "90.0"
    assert shown(None) == "–"


def test_the_papers_figures_stay_in_their_own_columns(table):
    _, _, _, rows = table
    text = markdown("", rows, [])
    assert "AUC ours | AUC paper" in text
    assert all(row.paper == {} for row in rows if row.evidence == "path")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Settings(models=("abmil", "nomil")), "unknown model 'nomil'"),
        (lambda: Settings(repetitions=0), "0 repetitions: expected at least 1"),
        (lambda: Settings(alpha=(-1.0,)), "alpha is -1.0"),
        (lambda: Settings(lambda_=(-1.0,)), "lambda is -1.0"),
        (lambda: Settings(lr=-1.0), "a learning rate of -1.0"),
        (lambda: Settings(epochs=0), "epochs is 0"),
        (lambda: load_digits(["four_bags"], encoder="vit"), "unknown encoder 'vit'"),
        (lambda: load_digits(["four_bags"], pool="both"), "unknown pool 'both'"),
    ],
)
def test_settings_that_make_no_sense_are_named(make, words):
    with pytest.raises(CarmilError) as raised:
        make()
    assert words in str(raised.value)


@pytest.mark.slow
def test_path_evidence_finds_the_digits_that_matter(tmp_path, shared_data):
    """A short version of the table: one CAR model on Four Bags reaches what the full run reports, within a margin."""
    data = load_digits(
        ["four_bags"],
        mnist=str(shared_data / "mnist"),
        features=shared_data / "mnist" / "resnet50_pca256.npy",
        pool="shared",
    )
    settings = Settings(models=("car/abmil",), repetitions=1, epochs=60)
    rows, _ = run_table1(data.studies, settings, data.about, tmp_path, device="cpu")
    ours = {(r.evidence, r.negative): r.ours for r in rows if r.ours}
    assert ours["path", "mirror"]["auc"][0] > 99
    assert ours["path", "mirror"]["auprc_both"][0] > 95
    assert ours["attention", "mirror"]["auprc_both"][0] < 60
    assert Recipe().patience == 100
