"""The folder of `carmil slides run` in the viewer: new slides, answered by all models of a run."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch

from carmil.errors import CarmilError
from carmil.models.pooling import Offsets
from carmil.runs.answers import is_answers, read_answers
from carmil.runs.run import read_run
from carmil.viewer.app import guarded_app
from carmil.viewer.cases import read_answer_cases
from carmil.viewer.guard import known_hosts
from carmil.viewer.responses import Responses
from carmil.viewer.slide_files import SlideFiles

from .answered import train_tiny_study, write_tissue


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return train_tiny_study(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def folder(study):
    """Return the answers for a wide and a tall slide."""
    slides = [write_tissue(study.folder / "wide.tif"), write_tissue(study.folder / "tall.tif", 1800, 1400)]
    return study.answer(slides, study.folder / "answers")


@pytest.fixture(scope="module")
def responses(folder):
    answers = read_answers(folder)
    files = SlideFiles(None, [], recorded=answers.slides)
    yield Responses(read_answer_cases(answers), files)
    files.close()


@pytest.fixture
def copied(study, folder, tmp_path):
    """Return a copy of the answers beside a copy of the run."""
    for source in (folder, study.run):
        shutil.copytree(source, tmp_path / source.name)
    return tmp_path / folder.name


def test_answers_of_slides_run_open_like_a_run(asking, responses, folder):
    """List, answers and maps come from the folder, and the tissue from the recorded slide files."""
    ask = asking(guarded_app(responses, is_known=known_hosts([], any_address=False)))
    cohort = ask("/api/cohort").json
    table = pd.read_csv(folder / "predictions.csv").set_index("slide")
    assert cohort["run"] == "answers (answers of run)" and [case["slide"] for case in cohort["cases"]] == list(
        table.index
    )
    for case in cohort["cases"]:
        row = table.loc[case["slide"]]
        assert case["predicted"] == pytest.approx(row[["p_calm", "p_crowded"]].astype(float), abs=1e-6)
        assert (case["prediction"], case["rule"], case["label"]) == (row["answer"], row["answer_rule"], None)
        evidence = pd.read_parquet(folder / "evidence" / f"{case['slide']}.parquet")
        shown = ask(f"/api/case/{case['number']}/map/evidence?class=1").json["values"]
        assert shown == pytest.approx(evidence["evidence_crowded"], rel=1e-3)
        places = ask(f"/api/case/{case['number']}/places").json
        assert np.array_equal([places["x"], places["y"]], evidence[["x", "y"]].to_numpy().T)
        picture = ask(f"/api/case/{case['number']}").json["picture"]
        assert (picture["width"], picture["height"]) == {"wide": (1800, 1400), "tall": (1400, 1800)}[case["slide"]]
        assert ask(f"/api/case/{case['number']}/zoom/9/0_0.jpeg").body[:2] == b"\xff\xd8"


def test_whatif_on_a_new_slide_uses_all_models(asking, responses, study):
    run = read_run(study.run)
    population = run.population()
    members = [population.member(row) for row in range(len(run.models))]
    bag = responses.run.bag(0)
    gone = list(range(0, responses.run.size(0), 2))
    rest = bag.features.float()[[i for i in range(responses.run.size(0)) if i not in gone]]
    offsets = Offsets(torch.tensor([0, len(rest)]))
    expected = np.mean([model(rest, offsets).logits.softmax(-1)[0].tolist() for model in members], axis=0)
    ask = asking(guarded_app(responses, is_known=known_hosts([], any_address=False)))
    assert ask.post("/api/case/0/whatif", {"remove": gone}).json["after"] == pytest.approx(expected, abs=1e-6)
    assert len(members) == 2


def test_answers_find_a_run_that_was_moved_with_them(copied, study):
    answers = read_answers(copied)
    assert is_answers(copied) and not is_answers(study.run)
    assert answers.read_run().folder == copied.parent / "run"
    assert set(answers.slides) == {"wide", "tall"}


def test_error_about_a_missing_run_asks_for_it_in_one_line(copied, study):
    shutil.rmtree(copied.parent / "run")
    with pytest.raises(CarmilError, match=r"is no longer at .*run: give it with --model"):
        read_answer_cases(read_answers(copied))
    assert len(read_answer_cases(read_answers(copied), model=study.run)) == 2
    (copied / "answers.json").unlink()  # as version 0.1.0 wrote it
    with pytest.raises(CarmilError, match="does not record the run that answered: give it with --model"):
        read_answer_cases(read_answers(copied))
    assert len(read_answer_cases(read_answers(copied), model=study.run)) == 2


def test_run_that_did_not_write_the_answers_is_refused(copied, tmp_path):
    models = tmp_path / "run" / "models.json"
    models.write_text(json.dumps([model | {"threshold": 0.9} for model in json.loads(models.read_text())]))
    for model in (None, tmp_path / "run"):
        with pytest.raises(
            CarmilError, match=r"answers of another run than .*: give the run that answered with --model"
        ):
            read_answer_cases(read_answers(copied), model=model)


def test_slide_file_replaced_by_a_symlink_is_not_shown(responses, folder, tmp_path, study):
    recorded = read_answers(folder).slides
    link = tmp_path / "wide.tif"
    link.symlink_to(study.folder / "wide.tif")
    moved = {"wide": type(recorded["wide"])(str(link), 0.5), "tall": type(recorded["tall"])("../tall.tif", 0.5)}
    assert not any(name in SlideFiles(None, [], recorded=moved) for name in moved)
    assert all(name in SlideFiles(None, [], recorded=recorded) for name in recorded)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"run": 1}', '{"carmil": "", "run": "", "folder": "", "slides": {"a": 1}}']
)
def test_damaged_answers_file_is_refused_in_one_line(copied, text):
    (copied / "answers.json").write_text(text)
    with pytest.raises(CarmilError, match=r"answers\.json"):
        read_answers(copied)
