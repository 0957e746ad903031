import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from carmil.errors import CarmilError
from carmil.evidence.branch_outputs import BranchOutputs
from carmil.models.pooling import Offsets
from carmil.reproduce import digits, shift, slide_cohorts
from carmil.reproduce.digits import Point
from carmil.reproduce.method_runs import runs_folder
from carmil.reproduce.recipes import Request
from carmil.reproduce.shift import READINGS, Shift, shift_of, shift_of_run
from carmil.reproduce.slide_cohorts import several_classes
from carmil.studies import cautions

from .small_cohorts import make_cohort


def branch_outputs(before, after):
    before, after = torch.tensor(before), torch.tensor(after)
    offsets = Offsets(torch.arange(len(before) + 1))
    return BranchOutputs(torch.zeros(len(before)), before, torch.zeros(len(before)), after, offsets)


def test_class_shift_over_correct_bags_equals_values_counted_by_hand():
    before = [[0.0, 3.0, 0.0, 2.0], [0.0, 3.0, 0.0, 2.0], [5.0, 3.0, 0.0, 2.0]]
    after = [[1.0, 2.0, 0.5, 1.5], [0.0, 2.0, -0.5, 4.0], [0.0, 0.0, 9.0, 0.0]]
    result = shift_of([(torch.tensor(before), torch.tensor(after), torch.tensor([1, 1, 1]))])
    assert result.right.tolist() == [[0, 2, 0, 0]]  # the third bag is predicted wrongly
    assert result.shares()[0, 1].tolist() == [0.5, 0, 0, 0.5]
    assert result.shares("is answered")[0, 1].tolist() == [0, 0.5, 0, 0.5]
    assert result.shares("strongest other")[0, 1].tolist() == [0, 0, 0, 1]
    assert result.shares("falls most beside")[0, 1].tolist() == [0, 0, 0.5, 0.5]
    assert result.shares("runner-up")[0, 1].tolist() == [0, 0, 0, 1]
    assert result.change[0, 1].tolist() == pytest.approx([0.5, -1.0, 0.0, 0.75])
    assert np.isnan(result.shares()[0, 0]).all()


def test_class_shift_counts_folds_of_a_seed_together(monkeypatch):
    folds = [
        SimpleNamespace(
            seed=7, model=branch_outputs([[2.0, 0.0]], [[0.0, 1.0]]), places=None, labels=torch.tensor([0])
        ),
        SimpleNamespace(
            seed=7, model=branch_outputs([[2.0, 0.0]] * 3, [[3.0, 0.0]] * 3), places=None, labels=torch.zeros(3).long()
        ),
    ]
    monkeypatch.setattr(shift, "models_of_run", lambda run, device: (None, iter(folds)))
    monkeypatch.setattr(shift, "predict_branches", lambda model, bags, places: model)
    result = shift_of_run(None, "cpu")
    assert result.shares()[0, 0].tolist() == [0.75, 0.25]
    assert result.change[0, 0].tolist() == pytest.approx([(-2 + 3 * 1) / 4, 1 / 4])


def test_mean_counts_of_slides_have_a_decimal_place():
    counts = np.array([[[1.0, 0.0], [4.0, 20.0]], [[0.0, 0.0], [4.0, 20.0]]])
    table = shift._count_table("t", "ab", Shift(dict.fromkeys(READINGS, counts), counts))
    assert [line[-1] for line in table.lines] == ["0.5", "24"]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(digits, "FAST_SIZES", (60, 20, 40))
    monkeypatch.setattr(digits, "FAST", replace(digits.FAST, fast_epochs=4))


def test_shift_recipe_counts_digits_and_slides_and_writes_its_finding(small, tmp_path, monkeypatch):
    home = tmp_path / "four"
    home.mkdir()
    cohort = make_cohort(home, classes=3, slides=27)
    monkeypatch.setattr(slide_cohorts, "find_cohorts", lambda request: slide_cohorts.CohortSet((cohort,), ()))
    monkeypatch.setattr(cautions, "LITTLE", 1.0)  # so that no run is below it
    request = Request(out=tmp_path / "out", shared=tmp_path / "shared", fast=True)
    result = shift.reproduce(request, points=(Point(), Point(1.0, 0.2)))
    assert any(
        line.startswith("made, 3 classes, CAR-MIL (L1): the model is no better than class") for line in result.lines
    )
    facts = json.loads((request.out / "shift.json").read_text())
    counts = np.array(facts["four_bags"]["counts"]["grows most"])
    assert counts.shape == (2, 4, 4)
    matrix = next(table for table in result.tables if table.title.startswith("Four Bags (l1"))
    for y, line in enumerate(matrix.lines):
        shares = [100 * one[y, 0] / one[y].sum() for one in counts if one[y].any()]
        assert line[1].split(" ")[0] == (f"{np.mean(shares):.1f}" if shares else "–")
    slides = next(table for table in result.tables if table.title.startswith("made, 3 classes"))
    assert [len(line) for line in slides.lines] == [5, 5, 5]
    assert np.array(facts["slides"]["counts"]["grows most"]).shape == (2, 3, 3)  # one matrix per seed
    ways = next(table for table in result.tables if table.title.startswith("Ways to count"))
    assert [line[0] for line in ways.lines] == [*READINGS, "the paper"] and ways.lines[-1][2:] == ("100", "62")
    shares = [100 * one[1, 3] / one[1].sum() for one in counts if one[1].any()]
    assert ways.lines[0][2].split(" ")[0] == (f"{np.mean(shares):.1f}" if shares else "–")
    points = next(table for table in result.tables if "other weights" in table.title)
    assert [line[:3] for line in points.lines] == [("l1", "0.2", "1"), ("l1", "1", "0.2")]
    (four,) = digits.digit_cohorts(request, ["four_bags"])
    assert (runs_folder(four, request) / "car-abmil").is_dir()  # the folder of Table 1
    assert all(picture.path.is_file() for picture in result.pictures)
    text = (request.out / "shift.md").read_text()
    assert all(line in text for line in (*result.lines, *result.conditions)) and "the figures are meaningless" in text


def test_missing_slides_are_reported_with_the_reason(tmp_path, monkeypatch):
    def none(request):
        raise CarmilError("slides are needed")

    request = Request(out=tmp_path, shared=tmp_path)
    monkeypatch.setattr(slide_cohorts, "find_cohorts", none)
    assert several_classes(request) == (None, ["not on slides: slides are needed"])
    monkeypatch.setattr(
        slide_cohorts, "find_cohorts", lambda request: slide_cohorts.CohortSet((), ("BRACS is not there",))
    )
    cohort, lines = several_classes(request)
    assert cohort is None and lines[-1] == "BRACS is not there"


def test_unknown_distance_exits_with_an_error_before_training(run_cli, tmp_path):
    status, _, error = run_cli("reproduce", "shift", "--distance", "l7", "--out", str(tmp_path / "x"))
    assert status == 2 and "unknown distance 'l7'" in error
    assert not (tmp_path / "x").exists()
