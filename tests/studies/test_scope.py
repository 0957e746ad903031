"""Slides outside the training cohort: in predictions, messages, report and viewer; runs without scopes work as before."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from carmil.errors import CarmilError
from carmil.report.run import write_report
from carmil.runs.run import Run, read_run
from carmil.runs.scopes import read_scopes
from carmil.studies.evaluate import predict_bags
from carmil.studies.train import run_study
from carmil.viewer.cases import read_cases

from .conftest import Files, make_files


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    """36 ordinary slides and one whose features are shifted."""
    made = make_files(tmp_path_factory.mktemp("scope"), patients=37, slides=1)
    path = made.features / "036-0.npy"
    np.save(path, np.load(path) + 6)
    return made


@pytest.fixture(scope="module")
def run(files) -> Run:
    settings = files.settings(files.labels.parent / "run", model="abmil", epochs=1, batch=16, seeds=2)
    return run_study(settings)


def test_shifted_test_slide_and_few_others_are_far(run):
    distances = run.predictions().groupby("slide")["cohort_distance"].mean()
    assert distances["036-0"] == distances.max() > 2
    assert (distances.drop("036-0") > 1).mean() < 0.15


def test_every_model_has_the_scope_of_its_own_training_slides(run):
    scopes = read_scopes(run)
    features = {model.fold: scope.centre for model, scope in zip(run.models, scopes, strict=True)}
    assert len(scopes) == 6
    assert not np.allclose(features[0], features[1])
    for row, model in enumerate(run.models):  # seeds of a fold have the same training slides
        assert np.array_equal(scopes[row].centre, features[model.fold])


def test_new_slides_unlike_the_training_cohort_are_listed_with_their_distance(run, files, tmp_path):
    for name, shift in (("near", 0), ("far", 5)):
        (tmp_path / "new").mkdir(exist_ok=True)
        np.save(tmp_path / "new" / f"{name}.npy", np.load(files.features / "004-0.npy") + shift)
    lines = []
    frame = predict_bags(run.folder, tmp_path / "new", tmp_path / "p", device="cpu", log=lines.append).set_index(
        "slide"
    )
    assert frame.loc["far", "cohort_distance"] > 1 > frame.loc["near", "cohort_distance"]
    (line,) = [line for line in lines if line.startswith("outside")]
    assert "1 of 2 slides, whose answers may not hold ('far' " in line
    assert "1 is the distance that 5 % of the training cohort's own slides exceed" in line


def test_slides_of_the_run_keep_the_distance_measured_when_they_were_tested(run, files, tmp_path):
    frame = predict_bags(run.folder, files.features, tmp_path / "p", device="cpu", log=lambda line: None)
    own = run.predictions().groupby("slide")["cohort_distance"].mean()
    assert np.allclose(frame["cohort_distance"], own[frame["slide"]])


def test_report_and_viewer_show_the_distance(run, tmp_path):
    write_report(run, tmp_path / "report.html")
    assert "distance from the training cohort" in (tmp_path / "report.html").read_text()
    outside = {case.slide: case.outside for case in read_cases(run.folder).cases}
    assert outside["036-0"].startswith("outside the training cohort: distance ")
    assert sum(words is not None for words in outside.values()) < 6


def test_run_without_scopes_predicts_as_before_and_damaged_scopes_are_refused(run, files, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder, ignore=shutil.ignore_patterns("cohort"))
    path = folder / "scope.safetensors"
    tensors = load_file(path)
    unknown = np.full_like(tensors["between"], np.nan)
    for name, value in (("limit", tensors["limit"] * 0), ("centre", tensors["centre"][:2]), ("between", unknown)):
        save_file({**tensors, name: value}, path)
        with pytest.raises(CarmilError, match=r"scope\.safetensors does not fit the models of the run"):
            read_scopes(read_run(folder))
    path.unlink()
    frame = predict_bags(folder, files.features, tmp_path / "p", device="cpu", log=lambda line: None)
    assert "cohort_distance" not in frame
    assert len(frame) == 37
