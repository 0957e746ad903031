"""Prediction sets of runs: who calibrates them, what they contain, where they appear, and what is refused."""

import json
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from carmil.bags.splits import CALIBRATION, TEST, TRAIN, VALIDATION
from carmil.errors import CarmilError
from carmil.report.run import write_report
from carmil.runs.calibration_slides import read_calibration
from carmil.runs.run import Run, read_run
from carmil.runs.writing import write_table
from carmil.studies.cohort import open_cohort, split_cohort
from carmil.studies.evaluate import evaluate_run, predict_bags
from carmil.studies.train import run_study
from carmil.targets.ordinal import Ordinal

from .conftest import Files, make_files

LEVEL = 0.8
COLUMNS = {"slide": None, "patient": None, "label": None}
QUICK = {"model": "abmil", "seeds": 2, "epochs": 3, "batch": 16, "lr": 2e-2}
QUIET = {"device": "cpu", "log": lambda line: None}


@dataclass
class Trained:
    files: Files
    other: Files
    run: Run


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    """Two slides per patient, two seeds; a second cohort with one slide per patient and other names."""
    folder = tmp_path_factory.mktemp("conformal")
    files = make_files(folder / "own", patients=60)
    other = make_files(folder / "other", patients=40, seed=5, slides=1)
    for path in sorted(other.features.iterdir()):
        path.rename(path.with_name(f"new-{path.name}"))
    other.labels.write_text(other.labels.read_text().replace("\n", "\nnew-").removesuffix("new-"))
    run = run_study(files.settings(folder / "run", conformal=LEVEL, **QUICK))
    return Trained(files, other, run)


def patients_by_role(run: Run) -> list[dict[int, set[str]]]:
    table = pd.read_csv(run.folder / "splits.tsv", sep="\t", dtype=str, keep_default_na=False)
    return [
        {role: set(table["patient"][np.array(fold) == role]) for role in (TRAIN, VALIDATION, TEST, CALIBRATION)}
        for fold in run.data.splits[0]
    ]


def test_calibration_patients_are_the_same_in_every_fold_and_not_used_otherwise(trained):
    folds = patients_by_role(trained.run)
    calibration = read_calibration(trained.run)
    for fold in folds:
        assert fold[CALIBRATION] == set(calibration.patients)
        assert not fold[CALIBRATION] & (fold[TRAIN] | fold[VALIDATION] | fold[TEST])
    assert set().union(*(fold[TEST] for fold in folds)) == {f"P{p:03d}" for p in range(60)} - set(calibration.patients)
    assert not set(calibration.slides) & set(trained.run.data.trained_on)
    assert np.bincount(calibration.labels).tolist() == [12, 12]  # slides of 6 patients: a fifth of each class


def sites_of(trained, tmp_path, site_of):
    """Return the settings of a study whose table names the site of every patient."""
    table = pd.read_csv(trained.files.labels)
    table["site"] = [site_of(int(patient[1:])) for patient in table["case_id"]]
    table.to_csv(tmp_path / "labels.csv", index=False)
    return Files(trained.files.features, tmp_path / "labels.csv").settings(
        tmp_path / "run", conformal=LEVEL, site="site", **QUICK
    )


def test_sets_calibrated_on_all_sites_warn_that_they_do_not_hold_for_other_sites(trained, tmp_path):
    settings = sites_of(trained, tmp_path, lambda patient: "ABC"[patient // 2 % 3])
    split = split_cohort(open_cohort(settings, log=lambda line: None), settings, log=lambda line: None)[0]
    assert split.notes[-1] == (
        "WARNING: prediction sets hold for new patients of the sites of the calibration patients ('A', 'B' and 1 more), in the "
        "same proportions, answered by all models; not for patients of another site, and not for the test patients of the folds, "
        "whose models have seen none of their site: the measured coverage shows how the sets transfer to another site, and may "
        "lie below the level"
    )


def test_split_file_may_reserve_whole_sites_for_calibration(trained, tmp_path):
    settings = sites_of(trained, tmp_path, lambda patient: "D" if patient < 20 else "ABC"[patient // 2 % 3])
    table = pd.read_csv(tmp_path / "labels.csv").sort_values("slide_id")
    parts = {"D": "cal", "A": "train", "B": "val", "C": "test"}
    table["fold_0"] = table["site"].map(parts)
    table[["slide_id", "fold_0"]].to_csv(tmp_path / "splits.csv", index=False)
    settings = replace(settings, splits=tmp_path / "splits.csv")
    split = split_cohort(open_cohort(settings, log=lambda line: None), settings, log=lambda line: None)[0]
    assert split.notes[-1] == (
        "prediction sets hold for new patients of the sites of the calibration patients ('D'), in the same proportions; no model "
        "was trained on these sites"
    )


def test_features_of_calibration_patients_change_no_weight(trained, tmp_path):
    features = tmp_path / "features"
    shutil.copytree(trained.files.features, features)
    for slide in read_calibration(trained.run).slides:
        np.save(features / f"{slide}.npy", np.load(features / f"{slide}.npy") + 100)
    again = run_study(Files(features, trained.files.labels).settings(tmp_path / "run", conformal=LEVEL, **QUICK))
    assert (again.folder / "weights.safetensors").read_bytes() == (
        trained.run.folder / "weights.safetensors"
    ).read_bytes()


def scores_by_class(calibration, models, rule) -> list[list[float]]:
    """Return 1 - p of the label of each calibration patient, by class: a plain re-statement."""
    joint = np.mean([calibration.predicted[row] for row in models], axis=0)
    of_patient: dict[tuple[str, int], list[np.ndarray]] = {}
    for patient, label, p in zip(calibration.patients, calibration.labels, joint, strict=True):
        of_patient.setdefault((patient, label), []).append(p)
    return [sorted(1 - rule(parts)[c] for (_, label), parts in of_patient.items() if label == c) for c in (0, 1)]


def test_sets_of_test_patients_equal_a_direct_computation(trained):
    run, frame = trained.run, trained.run.predictions()
    calibration, names = read_calibration(run), ["a", "b"]
    covered = []
    for (fold, patient, label), rows in frame.groupby(["fold", "patient", "label"]):
        models = [row for row, tested in enumerate(run.tested_folds) if tested == fold]
        ranked = scores_by_class(calibration, models, lambda parts: np.mean(parts, axis=0))
        p = rows[["p_a", "p_b"]].to_numpy().mean(0)
        limits = [scores[math.ceil((len(scores) + 1) * LEVEL) - 1] for scores in ranked]
        own = [name for name, value, limit in zip(names, 1 - p, limits, strict=True) if value <= limit + 1e-12]
        assert set(rows["patient_set"]) == {", ".join(own) or "none"}, patient
        covered.append(label in own)
    figures = run.metrics.prediction_sets
    assert figures.cases == len(covered) == 48
    assert figures.coverage.value == pytest.approx(np.mean(covered))
    assert figures.by_class["a"].calibrated == 6
    assert figures.by_class["a"].expected == pytest.approx(6 / 7)


def test_new_slides_get_sets_from_all_models_and_coverage_is_measured_on_other_cohorts(trained, tmp_path):
    lines = []
    frame = predict_bags(trained.run.folder, trained.other.features, tmp_path / "p", device="cpu", log=lines.append)
    calibration = read_calibration(trained.run)
    patients = pd.Series(calibration.patients, index=calibration.slides).sort_index()
    one_each = patients.sample(frac=1, random_state=0).drop_duplicates()
    keep = [calibration.slides.index(slide) for slide in one_each.index]
    joint = np.mean(calibration.predicted, axis=0)[keep]
    labels = np.array(calibration.labels)[keep]
    limits = [sorted(1 - joint[labels == c, c])[math.ceil(7 * LEVEL) - 1] for c in (0, 1)]
    expected = [
        ", ".join(name for name, q, limit in zip("ab", 1 - p, limits, strict=True) if q <= limit + 1e-12) or "none"
        for p in frame[["p_a", "p_b"]].to_numpy()
    ]
    assert frame["prediction_set"].tolist() == expected
    assert any("at least 80 % of the new patients" in line and "(6 a, 6 b)" in line for line in lines)
    found = evaluate_run(
        trained.run.folder, trained.other.features, trained.other.labels, tmp_path / "e", named=COLUMNS, **QUIET
    )
    assert found.sets.cases == 40
    assert json.loads((tmp_path / "e" / "evaluation.json").read_text())["prediction_sets"]["cases"] == 40


def test_another_cohort_calibrates_sets_at_another_level(trained, tmp_path):
    run, other = trained.run.folder, trained.other
    out = tmp_path / "e"
    found = evaluate_run(run, other.features, other.labels, out, named=COLUMNS, conformal=0.95, **QUIET)
    assert found.calibration.rule((0,), of_patients=True).calibrated.tolist() == [20, 20]
    frame = predict_bags(run, trained.files.features, tmp_path / "p", calibration=out, **QUIET)
    own = read_calibration(trained.run, out)
    joint, labels = np.mean(own.predicted, axis=0), np.array(own.labels)
    limit = sorted(1 - joint[labels == 0, 0])[math.ceil(21 * 0.95) - 1]
    new = frame["slide"].isin(read_calibration(trained.run).slides)  # the others were tested by some of the models
    has_a = frame["prediction_set"].str.split(", ").map(lambda names: "a" in names)
    assert (has_a[new] == (1 - frame["p_a"][new] <= limit)).all()


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        (
            {"conformal": 0.95},
            "--conformal 0.95: class 'a' has 30 patients.*19 are needed.*at least 38.*lower the level",
        ),
        ({"conformal": 90}, "conformal is 90.*between 0 and 1"),
        ({"conformal": 0.8, "splits": "splits.tsv"}, "class 'a' has 0 patients that are in no test part"),
    ],
)
def test_sets_that_cannot_be_calibrated_are_refused_in_one_line(trained, tmp_path, given, refused):
    if "splits" in given:
        table = pd.read_csv(trained.run.folder / "splits.tsv", sep="\t", dtype=str, keep_default_na=False)
        table.iloc[:, 2:] = table.iloc[:, 2:].replace("cal", "train")
        rows = table["fold_0"].eq("train") & table["fold_1"].eq("train") & table["fold_2"].eq("train")
        table.loc[rows, "fold_0"] = "test"
        table.to_csv(tmp_path / "splits.tsv", sep="\t", index=False)
        given = given | {"splits": tmp_path / "splits.tsv"}
    with pytest.raises(CarmilError, match=refused) as error:
        run_study(trained.files.settings(tmp_path / "run", **given))
    assert "\n" not in str(error.value)


def test_a_split_file_may_have_its_own_calibration_part(trained, tmp_path):
    run = run_study(
        trained.files.settings(tmp_path / "run", conformal=0.7, splits=trained.run.folder / "splits.tsv", **QUICK)
    )
    assert patients_by_role(run) == patients_by_role(trained.run)
    assert run.metrics.prediction_sets.level == 0.7


def test_targets_without_classes_and_patients_with_two_labels_are_refused(trained, tmp_path):
    table = pd.read_csv(trained.files.labels)
    table["months"] = np.arange(len(table)) + 1.0
    table.to_csv(tmp_path / "labels.csv", index=False)
    settings = Files(trained.files.features, tmp_path / "labels.csv").settings
    with pytest.raises(
        CarmilError, match="sets are for classes and grades; the target 'months' is of the kind 'value'"
    ):
        run_study(settings(tmp_path / "run", conformal=0.8, target="months", kind="value"))
    table["label"] = np.where(np.arange(len(table)) == 1, "b", table["label"])
    table.to_csv(tmp_path / "labels.csv", index=False)
    with pytest.raises(CarmilError, match="patient 'P000' has slides with different labels"):
        run_study(settings(tmp_path / "run2", conformal=0.8, target=None))


def test_training_slides_and_too_few_patients_are_refused_for_calibration(trained, tmp_path):
    run, own, other = trained.run.folder, trained.files, trained.other
    with pytest.raises(CarmilError, match="the run was trained on the features of"):
        evaluate_run(run, own.features, own.labels, tmp_path / "a", named=COLUMNS, conformal=0.8, **QUIET)
    with pytest.raises(
        CarmilError, match=r"class 'a' has 20 patients in the table of labels, 99 of every class are needed"
    ):
        evaluate_run(run, other.features, other.labels, tmp_path / "b", named=COLUMNS, conformal=0.99, **QUIET)
    with pytest.raises(CarmilError, match=r"calibration\.json does not exist: expected the output of `carmil evaluate"):
        predict_bags(run, other.features, tmp_path / "c", calibration=tmp_path, **QUIET)


def test_training_slides_of_a_run_with_one_bag_per_patient_are_refused_for_calibration(tmp_path):
    files = make_files(tmp_path)
    run = run_study(files.settings(tmp_path / "run", patients="one-bag", **QUICK))
    with pytest.raises(CarmilError, match="the run was trained on the features of"):
        evaluate_run(run.folder, files.features, files.labels, tmp_path / "e", named=COLUMNS, conformal=LEVEL, **QUIET)


def test_coverage_is_not_measured_on_the_calibration_slides(trained, tmp_path):
    calibrated, table = read_calibration(trained.run).slides, pd.read_csv(trained.files.labels, dtype=str)
    table[table["slide_id"].isin(calibrated)].to_csv(tmp_path / "labels.csv", index=False)
    lines = []
    found = evaluate_run(
        trained.run.folder,
        trained.files.features,
        tmp_path / "labels.csv",
        tmp_path / "e",
        named=COLUMNS,
        device="cpu",
        log=lines.append,
    )
    assert found.slides == len(calibrated)
    assert found.sets is None
    assert any("calibrated the prediction sets, whose coverage is not measured here" in line for line in lines)


def test_damaged_calibration_or_calibration_of_other_models_is_refused(trained, tmp_path):
    content = json.loads((trained.run.folder / "calibration.json").read_text())
    for change, refused in (
        ({"weights": "0" * 16}, "calibrated for other models"),
        ({"labels": [0] * len(content["labels"])}, "is not as carmil writes it"),
        ({"level": 0.9}, "is not as carmil writes it"),
        ({"predicted": content["predicted"][:1]}, "is not as carmil writes it"),
    ):
        (tmp_path / "calibration.json").write_text(json.dumps(content | change))
        with pytest.raises(CarmilError, match=refused):
            read_calibration(trained.run, tmp_path)


def test_report_and_card_show_the_sets(trained, tmp_path):
    write_report(trained.run, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Prediction sets at 80 %: coverage, per cent" in page
    assert "patient set" in page
    card = (trained.run.folder / "card.md").read_text()
    assert (
        "Prediction sets at 80 % are calibrated on patients set aside from all folds, at least 6 of each class" in card
    )
    assert "24 for calibration" in card
    assert "--conformal 0.8" in card


def test_a_run_with_sets_but_without_their_column_or_file_is_refused(trained, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained.run.folder, folder, ignore=shutil.ignore_patterns("cohort"))
    write_table(folder / "predictions.parquet", trained.run.predictions().drop(columns="prediction_set"))
    with pytest.raises(CarmilError, match="no column 'prediction_set'"):
        read_run(folder).predictions()
    (folder / "calibration.json").unlink()
    with pytest.raises(CarmilError, match=r"calibration\.json is missing"):
        read_calibration(read_run(folder))


def test_scores_of_grades_are_smallest_for_the_median_grade_and_increase_away_from_it():
    target = Ordinal(columns=("grade",), names=("1", "2", "3", "4"))
    scores = target.nonconformity(np.array([[0.1, 0.2, 0.6, 0.1], [0.7, 0.1, 0.1, 0.1]]))
    assert scores == pytest.approx(np.array([[0.9, 0.7, 0.3, 0.9], [0.3, 0.7, 0.8, 0.9]]))


def test_a_run_of_grades_has_contiguous_sets(tmp_path):
    files = make_files(tmp_path, patients=36, classes=3, slides=1)
    files.labels.write_text(files.labels.read_text().replace(",a", ",1").replace(",b", ",2").replace(",c", ",3"))
    run = run_study(files.settings(tmp_path / "run", target="label", kind="ordinal", conformal=0.8, **QUICK))
    sets = set(run.predictions()["prediction_set"])
    assert sets <= {"none", "1", "2", "3", "1, 2", "2, 3", "1, 2, 3"}
    assert run.metrics.prediction_sets.by_class["3"].calibrated == 4
    assert "patient_set" not in run.predictions()
    assert Path(run.folder / "calibration.json").is_file()
