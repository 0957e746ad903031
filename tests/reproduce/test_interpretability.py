import pytest

from carmil.counterfactual import create_model
from carmil.errors import CarmilError
from carmil.evidence import explainers_of
from carmil.reproduce.digits import digit_methods
from carmil.reproduce.interpretability import MODELS, SLOW, run_interpretability
from carmil.reproduce.table1 import run_table1

from .digit_tables import request_for, rows_of, small_cohorts


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    request = request_for(tmp_path_factory.mktemp("interpretability"))
    cohorts = small_cohorts(request.shared, ["four_bags"])
    return request, cohorts, run_interpretability(cohorts, digit_methods(MODELS), request)


def test_every_explainer_has_a_row_per_negative_rule(table):
    rows = rows_of(table[2])
    for model in MODELS:
        kinds = [
            (row["evidence"], row["negative rule"]) for row in rows if row["model"] == model and row["AUC ours"] != "–"
        ]
        expected = {(name, "mirror") for name in explainers_of(create_model(model, 64, 4))}
        expected -= {("counterfactual_attention", "mirror")}
        expected |= {("attention", "self")} | ({("attention", "counterfactual")} if model == "car/abmil" else set())
        assert len(kinds) == len(expected) and set(kinds) == expected


def test_table_has_paper_columns_and_intervals_that_contain_the_mean(table):
    request, _, result = table
    assert "AUPRC± paper" in result.tables[0].heads and "AUROC±" in result.tables[0].heads
    row = next(row for row in rows_of(result) if (row["model"], row["evidence"]) == ("abmil", "path"))
    low, high = map(float, row["AUPRC± interval"].split(" to "))
    assert low < float(row["AUPRC± ours"].split(" ")[0]) < high
    text = (request.out / "interpretability.md").read_text()
    assert "| abmil | lrp | mirror |" in text and "bootstrap over test bags" in text


def test_interpretability_and_table1_share_trained_models(table, monkeypatch):
    request, cohorts, result = table
    monkeypatch.setattr("carmil.studies.train.train_protocol", None)
    first = run_table1(cohorts, digit_methods(MODELS), request)
    ours = {(row["model"], row["evidence"], row["negative rule"]): row["AUPRC± ours"] for row in rows_of(result)}
    for row in rows_of(first):
        assert ours[row["model"], row["evidence"], row["negative rule"]] == row["AUPRC± ours"]


def test_slow_explainers_are_omitted_in_a_grid(tmp_path):
    cohorts = small_cohorts(tmp_path, ["adjacent_pairs"], epochs=2)
    result = run_interpretability(cohorts, digit_methods(["car/abmil"], alpha=(0.0, 0.8)), request_for(tmp_path))
    rows = [row for row in rows_of(result) if row["note"] != "not asked for"]
    assert {row["model"] for row in rows} == {"car/abmil (alpha 0)", "car/abmil (alpha 0.8)"}
    assert not {row["evidence"] for row in rows} & set(SLOW)
    assert any("not asked in a grid: single, integrated_gradients" in line for line in result.conditions)


def test_only_requested_explainers_are_computed(table):
    request, cohorts, _ = table
    result = run_interpretability(cohorts, digit_methods(["abmil"]), request, explainers=("lrp", "path"))
    assert [row["evidence"] for row in rows_of(result) if row["note"] != "not asked for"] == ["path", "lrp"]
    with pytest.raises(CarmilError, match="unknown explainer 'lpr'"):
        run_interpretability(cohorts, digit_methods(["abmil"]), request, explainers=("lpr",))


def test_explainer_that_fits_no_model_exits_with_an_error_and_overwrites_nothing(tmp_path, run_cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "interpretability.md").write_text("of another time")
    words = ("--models", "abmil,mean", "--tasks", "four_bags", "--explainers", "path,rollout", "--out", "out")
    status, out, err = run_cli("reproduce", "interpretability", *words)
    assert (status, out) == (2, "")
    assert err.strip().splitlines()[-1].startswith("carmil: --explainers rollout: fits none of abmil, mean;")
    assert not (tmp_path / "out" / "runs").exists()
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
def test_invalid_options_of_digit_recipes_exit_with_one_line(run_cli, tmp_path, command, words, expected):
    status, _, err = run_cli("reproduce", command, *words, "--out", str(tmp_path / "out"))
    assert status == 2 and err.count("\n") == 1 and expected in err
    assert not (tmp_path / "out").exists()
