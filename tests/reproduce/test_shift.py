import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from carmil.datasets.study_cohort import StudyCohort
from carmil.errors import CarmilError
from carmil.models.pooling import Offsets
from carmil.reproduce import digits, shift, slide_cohorts
from carmil.reproduce.branch_outputs import BranchOutputs
from carmil.reproduce.digits import Point
from carmil.reproduce.method_runs import runs_folder
from carmil.reproduce.recipes import Request
from carmil.reproduce.shift_reading import READINGS, Reasons, Shift, pooled, shift_of
from carmil.reproduce.shift_words import nearest_reading, reasons_lines, verdict
from carmil.reproduce.slide_cohorts import several_classes
from carmil.studies import cautions

from .small_cohorts import make_cohort

NAMES = ("neither 8 nor 9", "some 8, no 9", "some 9, no 8", "some of both")


def seen(before, after):
    before, after = torch.tensor(before), torch.tensor(after)
    offsets = Offsets(torch.arange(len(before) + 1))
    return BranchOutputs(torch.zeros(len(before)), before, torch.zeros(len(before)), after, offsets)


def shift_to(one_to_three, three_to_one, change=None):
    """A shift of 100 bags a class in which these go to 3 and to 1, and the others to 0, however it is counted."""
    counts = np.zeros((1, 4, 4))
    counts[0, 0, 1] = counts[0, 2, 1] = 100
    counts[0, 1] = [100 - one_to_three, 0, 0, one_to_three]
    counts[0, 3] = [100 - three_to_one, three_to_one, 0, 0]
    return Shift(dict.fromkeys(READINGS, counts), np.zeros((1, 4, 4)) if change is None else change)


def reasons(evidence_of_eight, moved=0.1):
    before = np.array([[[0, 0, 1], [0.5, 0, 0.5], [0, 0.5, 0.5], [0.4, 0.4, 0.2]]])
    after = before + np.array([[[0, 0, 0], [-moved, 0, moved], [0, -moved, moved], [-moved, 0, moved]]])
    evidence = np.array([[evidence_of_eight, [-2.0, -2.0, 2.0, 2.0], [0.0] * 4]])
    return Reasons(before, after, evidence)


def test_a_shift_is_counted_by_hand_over_rightly_answered_bags_alone():
    before = [[0.0, 3.0, 0.0, 2.0], [0.0, 3.0, 0.0, 2.0], [5.0, 3.0, 0.0, 2.0]]
    after = [[1.0, 2.0, 0.5, 1.5], [0.0, 2.0, -0.5, 4.0], [0.0, 0.0, 9.0, 0.0]]
    found = shift_of([(seen(before, after), torch.tensor([1, 1, 1]))])
    assert found.right.tolist() == [[0, 2, 0, 0]]  # the third is answered wrongly
    assert found.shares()[0, 1].tolist() == [0.5, 0, 0, 0.5]
    assert found.shares("is answered")[0, 1].tolist() == [0, 0.5, 0, 0.5]
    assert found.shares("strongest other")[0, 1].tolist() == [0, 0, 0, 1]
    assert found.shares("falls most beside")[0, 1].tolist() == [0, 0, 0.5, 0.5]
    assert found.shares("runner-up")[0, 1].tolist() == [0, 0, 0, 1]
    assert found.change[0, 1].tolist() == pytest.approx([0.5, -1.0, 0.0, 0.75])
    assert np.isnan(found.shares()[0, 0]).all()


def test_folds_of_a_seed_are_counted_together():
    first = shift_of([(seen([[2.0, 0.0]], [[0.0, 1.0]]), torch.tensor([0]))])
    second = shift_of([(seen([[2.0, 0.0]] * 3, [[3.0, 0.0]] * 3), torch.tensor([0, 0, 0]))])
    both = Shift(
        {name: np.concatenate([one.counts[name] for one in (first, second)]) for name in first.counts},
        np.concatenate([first.change, second.change]),
    )
    found = pooled(both, [7, 7])
    assert found.shares()[0, 0].tolist() == [0.75, 0.25]
    assert found.change[0, 0].tolist() == pytest.approx([(-2 + 3 * 1) / 4, 1 / 4])


@pytest.mark.parametrize(("to_three", "word"), [(95, "comes out"), (40, "does not come out")])
def test_the_verdict_follows_the_figures(to_three, word):
    said = verdict(NAMES, shift_to(to_three, 60))
    assert f"Four Bags {word}:" in said
    assert f"in {to_three}.0 % (the paper: 100 %)" in said
    assert "in 60.0 % (the paper: 62 %)" in said


def test_the_reason_is_told_from_what_the_digits_say():
    change = np.zeros((1, 4, 4))
    change[0, 1] = [1.0, -2.0, 0.4, -1.0]
    both = reasons_lines(NAMES, shift_to(0, 0, change), reasons([-1.0, 2.0, -1.0, 1.5]))[0]
    assert "takes 10.0% of a bag's attention from 8s" in both
    assert "speak for class 1 (+2.00) and 3 (+1.50) and against class 0 (-1.00) and 2 (-1.00)" in both
    assert "class 0 grows most, not class 3: 8s speak for both 1 and 3" in both
    one = reasons_lines(NAMES, shift_to(0, 0, change), reasons([-1.0, 2.0, -1.0, -1.5]))[0]
    assert "speak for both" not in one and "not class 3, whose logit changes by -1.00" in one
    assert "moves by less than" in reasons_lines(NAMES, shift_to(0, 0, change), reasons([0.0] * 4, moved=0.0))[0]


def test_the_nearest_way_to_count_is_named_and_what_it_gives_without_a_counterfactual():
    far, near = shift_to(0, 10), shift_to(99, 60)
    counts = {
        **far.counts,
        "strongest other": near.counts["grows most"],
        "runner-up": shift_to(97, 55).counts["runner-up"],
    }
    said = nearest_reading(Shift(counts, far.change))
    assert "'strongest other'" in said and "99.0 % (class 1 to 3) and 60.0 % (3 to 1)" in said
    assert "gives 97.0 % (class 1 to 3) and 55.0 % (3 to 1)" in said
    assert "it is the paper's own" in nearest_reading(near)


SLIDES = StudyCohort("x", "made slides", Path("x"), Path("x.csv"), ("auc", "f1_macro"), "uni")


def slides_said(counts):
    counts = np.array([counts], float)
    return shift._slide_line(SLIDES, "abc"[: counts.shape[1]], Shift(dict.fromkeys(READINGS, counts), counts))


def test_a_class_that_grows_itself_is_no_competitor_of_itself():
    said = slides_said([[19, 0, 1], [0, 8, 0], [3, 4, 3]])
    assert "most often 0: a to 2: c 5 % (itself 95 %); 1: b to no other class (itself 100 %); 2: c to 1: b 40 %" in said
    assert "no class goes to one competitor in 90 % of its slides" in said and "dominates" not in said


def test_a_competitor_that_dominates_is_told_with_the_class_that_goes_there():
    said = slides_said([[0, 10, 0], [1, 8, 1], [0, 0, 0]])  # no slide of c is answered rightly
    assert "most often 0: a to 1: b 100 % (itself 0 %); 1: b to 0: a 10 % (itself 80 %); one" in said
    assert "one competitor dominates in 0: a; of 2: c fewer than 5 slides were answered rightly. The paper" in said
    assert "no slide was answered rightly" in slides_said(np.zeros((3, 3)))


def test_of_few_slides_no_word_is_made():
    said = slides_said([[0, 10, 0], [0, 0, 1], [1, 0, 2]])
    assert "one competitor dominates in 0: a; of 1: b, 2: c fewer than 5" in said and "1: b to" not in said
    assert "at most 3.0 slides of a class were answered rightly" in slides_said([[0, 0, 0], [0, 0, 1], [1, 0, 2]])


def test_so_few_slides_are_counted_with_a_decimal_place():
    counts = np.array([[[1.0, 0.0], [4.0, 20.0]], [[0.0, 0.0], [4.0, 20.0]]])
    table = shift._table("t", "ab", Shift(dict.fromkeys(READINGS, counts), counts))
    assert [line[-1] for line in table.lines] == ["0.5", "24"]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(digits, "FAST_SIZES", (60, 20, 40))
    monkeypatch.setattr(digits, "FAST", replace(digits.FAST, fast_epochs=4))


def test_the_recipe_counts_digits_and_slides_and_writes_what_it_says(small, tmp_path, monkeypatch):
    home = tmp_path / "four"
    home.mkdir()
    cohort = make_cohort(home, classes=3, slides=27)
    monkeypatch.setattr(slide_cohorts, "find_cohorts", lambda request: slide_cohorts.CohortSet((cohort,), ()))
    monkeypatch.setattr(cautions, "LITTLE", 1.0)  # so that nobody is below it
    request = Request(out=tmp_path / "out", shared=tmp_path / "shared", fast=True)
    found = shift.reproduce(request, points=(Point(), Point(1.0, 0.2)))
    assert any(
        line.startswith("made, 3 classes: the probabilities of CAR-MIL (L1) are no better") for line in found.lines
    )
    facts = json.loads((request.out / "shift.json").read_text())
    counts = np.array(facts["four_bags"]["counts"]["grows most"])
    assert counts.shape == (2, 4, 4)
    matrix = next(table for table in found.tables if table.title.startswith("Four Bags (l1"))
    for y, line in enumerate(matrix.lines):
        shares = [100 * one[y, 0] / one[y].sum() for one in counts if one[y].any()]
        assert line[1].split(" ")[0] == (f"{np.mean(shares):.1f}" if shares else "–")
    slides = next(table for table in found.tables if table.title.startswith("made, 3 classes"))
    assert [len(line) for line in slides.lines] == [5, 5, 5]
    assert np.array(facts["slides"]["counts"]["grows most"]).shape == (2, 3, 3)  # a matrix a seed
    points = next(table for table in found.tables if "other weights" in table.title)
    assert [line[:3] for line in points.lines] == [("l1", "0.2", "1"), ("l1", "1", "0.2")]
    (four,) = digits.digit_cohorts(request, ["four_bags"])
    assert (runs_folder(four, request) / "car-abmil").is_dir()  # where Table 1's is
    assert all(picture.path.is_file() for picture in found.pictures)
    text = (request.out / "shift.md").read_text()
    assert all(line in text for line in (*found.lines, *found.conditions)) and "the figures mean nothing" in text


def test_where_there_are_no_slides_it_is_said_why(tmp_path, monkeypatch):
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


def test_an_unknown_distance_is_refused_before_anything_is_trained(said, tmp_path):
    status, _, error = said("reproduce", "shift", "--distance", "l7", "--out", str(tmp_path / "x"))
    assert status == 2 and "unknown distance 'l7'" in error
    assert not (tmp_path / "x").exists()
