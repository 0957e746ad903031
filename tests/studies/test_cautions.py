"""A study warns in one line each, and only where it applies, of what invalidates its figures or maps."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from carmil.report.run import write_report
from carmil.statistics.calibration import cross_entropies
from carmil.studies.card import card
from carmil.studies.cautions import cautions, few_patients, never_answered
from carmil.studies.tables import figures_lines
from carmil.studies.train import run_study

from .conftest import make_files


@pytest.fixture(scope="module")
def idle(tmp_path_factory):
    """Return a run that has learned nothing: tiny features and one epoch at a tiny learning rate."""
    folder = tmp_path_factory.mktemp("idle")
    files = make_files(folder)
    for path in files.features.glob("*.npy"):
        np.save(path, 1e-3 * np.load(path))
    return run_study(files.settings(folder / "run", epochs=1, lr=1e-7, scale="none", init="own", distance="l1"))


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learned")
    return run_study(make_files(folder).settings(folder / "run", epochs=20, lr=2e-2, alpha=1.0, lambda_=0.0))


def lines_of(run, tmp_path):
    """Return the warnings of a run, after checking that terminal, card and report all contain them."""
    result = cautions(run)
    write_report(run, tmp_path / "report.html")
    page, text, terminal = (tmp_path / "report.html").read_text(), card(run), figures_lines(run)
    for line in result:
        assert line in terminal
        assert line in page
        assert f"- {line[0].upper()}{line[1:]}." in text
    return result


@pytest.mark.finding(n=18)
def test_warning_if_the_model_is_no_better_than_class_frequencies(idle, learned, tmp_path):
    (line,) = [
        line for line in lines_of(idle, tmp_path) if line.startswith("the model is no better than class frequencies")
    ]
    assert "0.693" in line  # two classes of the same size
    assert not any("class frequencies" in line for line in lines_of(learned, tmp_path))
    readings = learned.metrics.readings
    assert readings["cross_entropy"] < 0.6 < readings["cross_entropy_of_class_frequencies"]


@pytest.mark.finding(n=18)
def test_warning_if_the_auc_may_be_chance(idle, learned, tmp_path):
    interval = idle.metrics.intervals["auc"]
    assert interval.low <= 0.5
    (line,) = [line for line in lines_of(idle, tmp_path) if line.startswith("the AUC may be chance")]
    assert f"its 95 % interval, {100 * interval.low:.1f} to {100 * interval.high:.1f}, is not wholly above 50" in line
    assert learned.metrics.intervals["auc"].low > 0.5
    assert not any("may be chance" in line for line in lines_of(learned, tmp_path))


@pytest.mark.finding(n=18)
def test_warning_if_counterfactual_attention_did_not_move(idle, learned, tmp_path):
    assert idle.metrics.readings["attention_moved"] < 0.05 <= learned.metrics.readings["attention_moved"] <= 2
    (line,) = [
        line for line in lines_of(idle, tmp_path) if line.startswith("the counterfactual attention did not move")
    ]
    assert f"only {idle.metrics.readings['attention_moved']:.3f} of the attention differs" in line
    assert not any("did not move" in line for line in lines_of(learned, tmp_path))


@pytest.mark.finding(n=18)
def test_warning_if_attention_is_nearly_uniform(idle, learned, tmp_path):
    assert idle.metrics.readings["attention_spread"] >= 0.9 > learned.metrics.readings["attention_spread"]
    assert any(line.startswith("attention is nearly uniform") for line in lines_of(idle, tmp_path))
    assert not any("nearly uniform" in line for line in lines_of(learned, tmp_path))


@pytest.mark.finding(n=18)
def test_train_warns_of_a_class_with_fewer_than_five_patients(files, tmp_path, run_cli):
    table = pd.read_csv(files.labels, dtype=str)
    number = table["case_id"].str[1:].astype(int)
    table[(table["label"] == "a") | (number < 8)].to_csv(files.labels, index=False)  # patients 1, 3, 5, 7 are b
    words = [
        "--bags",
        str(files.features),
        "--labels",
        str(files.labels),
        "--folds",
        "2",
        "--epochs",
        "1",
        "--device",
        "cpu",
    ]
    status, _, err = run_cli("train", *words, "--model", "abmil", "--out", str(tmp_path / "run"))
    assert status == 0
    line = "class 'b' has 4 patients, fewer than five: figures of this class are mostly chance"
    assert line in err and "class 'a'" not in err
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert line in run["said"]
    for name in ("card.md", "report.html"):
        assert line in (tmp_path / "run" / name).read_text().replace("&#39;", "'")


def test_few_patients_counts_patients_instead_of_slides():
    assert few_patients(["a", "b"], [0] * 5 + [1] * 5, list("abcdefghij")) == []
    (line,) = few_patients(["a", "b"], [0] * 5 + [1] * 5, list("abcde") + ["f"] * 5)
    assert line.startswith("class 'b' has 1 patient, fewer than five")


def test_readings_of_attention_or_branch_are_omitted_for_models_without_them(files, tmp_path):
    run = run_study(files.settings(tmp_path / "run", model="mean", options={"hidden": 8}, epochs=1))
    assert set(run.metrics.readings) == {"cross_entropy", "cross_entropy_of_class_frequencies"}
    run = run_study(files.settings(tmp_path / "other", model="abmil", epochs=1))
    assert "attention_spread" in run.metrics.readings and "attention_moved" not in run.metrics.readings
    assert not {"attention_spread", "attention_moved"} & set(run.predictions())


def test_run_without_readings_has_no_warnings(idle):
    before = replace(idle, metrics=replace(idle.metrics, readings={}, intervals_of=None))
    assert cautions(before) == []


def test_cross_entropies_equal_values_computed_by_hand():
    result = cross_entropies([[0.8, 0.2], [0.5, 0.5], [0.1, 0.9]], [0, 0, 1])
    assert result[0] == pytest.approx(-np.log([0.8, 0.5, 0.9]).mean())
    assert result[1] == pytest.approx(-(2 * np.log(2 / 3) + np.log(1 / 3)) / 3)


@pytest.mark.finding(n=18)
def test_warning_if_a_class_is_never_predicted(learned):
    assert never_answered(learned) == []
    frame = learned.predictions().assign(answer="a")
    silent = SimpleNamespace(predictions=lambda: frame, target=learned.target, data=learned.data)
    assert never_answered(silent) == ["class 'b' is never answered, though 24 slides have that label"]


@pytest.mark.finding(n=18)
def test_explain_repeats_the_warning_about_counterfactual_attention(idle, learned, run_cli):
    for run, moved in ((idle, False), (learned, True)):
        status, out, _ = run_cli("explain", str(run.folder), "--device", "cpu")
        assert status == 0
        assert ("the counterfactual attention did not move" in out) is not moved
