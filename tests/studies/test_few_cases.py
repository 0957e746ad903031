"""Cohorts whose parts have next to nothing in them: what cannot be told is left out, and what was trained is not lost."""

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
    """The label table with an official split: patients 0 to 15 train, 16 to 19 validate, those of `test` are tested."""

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
def test_a_study_ends_and_is_reported_however_few_are_tested(files, with_parts, tmp_path, said, test, auc):
    with_parts(test)
    run = run_study(files.settings(tmp_path / "run", official=True, epochs=1))
    assert (not isnan(run.metrics.intervals["auc"].value)) is auc
    assert (not isnan(run.metrics.intervals["balanced_accuracy"].low)) is auc  # of two classes it needs both
    assert run.metrics.intervals["accuracy"].low < 1 < 2 - run.metrics.intervals["accuracy"].low
    assert said("report", str(run.folder))[0] == 0
    words = ["--bags", str(files.features), "--labels", str(files.labels), "--out", str(tmp_path / "again")]
    assert said("evaluate", str(run.folder), *words)[0] == 0


def test_runs_on_one_class_are_compared_without_delongs_test(files, with_parts, tmp_path):
    with_parts([20, 22])
    runs = [
        run_study(files.settings(tmp_path / model, model=model, official=True, epochs=1))
        for model in ("abmil", "abmil.gated")
    ]
    (found,) = compare_runs(runs)
    assert np.isnan([found.p_delong, found.difference]).all()


def test_a_rate_that_no_validation_part_can_set_is_refused_before_training(files, with_parts, tmp_path):
    with_parts([20, 21], validation=(16, 18))
    settings = files.settings(tmp_path / "run", official=True, threshold="sensitivity=0.9")
    with pytest.raises(CarmilError, match="all validation slides of fold 0 are 'a', expected both classes"):
        run_study(settings)
    assert not (tmp_path / "run" / "weights.safetensors").exists()
    again = run_study(files.settings(tmp_path / "run2", official=True, threshold="balanced", epochs=1))
    assert again.models


def test_patients_of_two_labels_are_judged_by_slide_in_another_cohort_too(files, tmp_path, said):
    run = run_study(files.settings(tmp_path / "run", epochs=1))
    assert run.metrics.level == "patient"
    table = pd.read_csv(files.labels, dtype=str)
    table.loc[0, "label"] = "b"  # the other slide of this patient stays 'a'
    table.to_csv(tmp_path / "other.csv", index=False)
    words = ["--bags", str(files.features), "--labels", str(tmp_path / "other.csv"), "--out", str(tmp_path / "out")]
    assert said("evaluate", str(run.folder), *words)[0] == 0
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["level"] == "slide"
