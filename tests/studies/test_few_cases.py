"""Cohorts with very few cases: undefined metrics are omitted and trained models are not lost."""

import json
from math import isnan

import numpy as np
import pandas as pd
import pytest

from carmil.errors import CarmilError
from carmil.studies.compare import compare_runs
from carmil.studies.train import run_study


@pytest.fixture
def with_parts(files):
    """Return a function that adds an official split: patients 0 to 15 train, 16 to 19 validate, `test` are tested."""

    def write(test: list[int], validation: tuple[int, ...] = (16, 17, 18, 19)) -> None:
        table = pd.read_csv(files.labels, dtype=str)
        number = table["case_id"].str[1:].astype(int)
        parts = np.select([number < 16, number.isin(validation), number.isin(test)], ["train", "val", "test"], "")
        table.assign(split=parts).to_csv(files.labels, index=False)

    return write


@pytest.mark.parametrize(
    ("test", "auc"),
    [([20, 22, 23], True), ([21], False), ([20, 22], False)],
    ids=["one case of a class", "one patient", "one class"],
)
def test_study_with_very_few_test_cases_completes_and_is_reported(files, with_parts, tmp_path, run_cli, test, auc):
    with_parts(test)
    run = run_study(files.settings(tmp_path / "run", official=True, epochs=1))
    assert (not isnan(run.metrics.intervals["auc"].value)) is auc
    assert (not isnan(run.metrics.intervals["balanced_accuracy"].low)) is auc  # it needs both classes
    assert run.metrics.intervals["accuracy"].low < 1 < 2 - run.metrics.intervals["accuracy"].low
    assert run_cli("report", str(run.folder))[0] == 0
    words = ["--bags", str(files.features), "--labels", str(files.labels), "--out", str(tmp_path / "again")]
    assert run_cli("evaluate", str(run.folder), *words)[0] == 0


def test_runs_with_one_test_class_are_compared_without_delong_test(files, with_parts, tmp_path):
    with_parts([20, 22])
    runs = [
        run_study(files.settings(tmp_path / model, model=model, official=True, epochs=1))
        for model in ("abmil", "abmil.gated")
    ]
    (result,) = compare_runs(runs)
    assert np.isnan([result.p_delong, result.difference]).all()


def test_sensitivity_target_without_both_validation_classes_raises_an_error(files, with_parts, tmp_path):
    with_parts([20, 21], validation=(16, 18))
    settings = files.settings(tmp_path / "run", official=True, threshold="sensitivity=0.9")
    with pytest.raises(CarmilError, match="all validation slides of fold 0 are 'a', expected both classes"):
        run_study(settings)
    assert not (tmp_path / "run" / "weights.safetensors").exists()
    again = run_study(files.settings(tmp_path / "run2", official=True, threshold="balanced", epochs=1))
    assert again.models


def test_cohort_with_patients_of_two_labels_is_evaluated_by_slide(files, tmp_path, run_cli):
    run = run_study(files.settings(tmp_path / "run", epochs=1))
    assert run.metrics.level == "patient"
    table = pd.read_csv(files.labels, dtype=str)
    table.loc[0, "label"] = "b"  # the other slide of this patient stays 'a'
    table.to_csv(tmp_path / "other.csv", index=False)
    words = ["--bags", str(files.features), "--labels", str(tmp_path / "other.csv"), "--out", str(tmp_path / "out")]
    assert run_cli("evaluate", str(run.folder), *words)[0] == 0
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["level"] == "slide"
