import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import spearmanr

from carmil.reproduce import correlations, digits, slide_cohorts
from carmil.reproduce.branch_outputs import models_of_run, predict_branches
from carmil.reproduce.correlations import PAIRS, MapCorrelations
from carmil.reproduce.method_runs import train_model
from carmil.reproduce.recipes import Request
from carmil.studies import cautions

from .small_cohorts import make_cohort


def alike(f_abmil, f_cf):
    values = {pair: [np.array([0.1, np.nan])] for pair in PAIRS}
    values["ABMIL", "F"], values["F", "CF"] = f_abmil, f_cf
    return MapCorrelations("made", "l1", {"spearman": values, "pearson": values})


def test_figures_are_means_over_bags_spread_over_models_and_over_bags():
    one = alike([np.array([0.2, 0.4, np.nan]), np.array([0.5, 0.7])], [np.array([np.nan]), np.array([np.nan])])
    assert one.by_model("spearman", ("ABMIL", "F")).tolist() == pytest.approx([0.3, 0.6])
    assert one.figure("spearman", ("ABMIL", "F")) == "0.45 ± 0.21"
    assert one.over_bags("spearman", ("ABMIL", "F")) == f"{np.std([0.2, 0.4, 0.5, 0.7], ddof=1):.2f}"
    assert one.figure("spearman", ("F", "CF")) == "–"


def test_words_follow_the_figures():
    said = correlations._summary(alike([np.array([0.9])], [np.array([-0.7])]))
    assert "F and ABMIL are nearly the same order (0.90)" in said and "F and CF opposed (-0.70)" in said
    assert "no order to compare" in correlations._summary(alike([np.array([np.nan])], [np.array([0.0])]))


def test_slides_and_digits_are_compared_model_by_model(tmp_path, monkeypatch):
    home = tmp_path / "three"
    home.mkdir()
    cohort = make_cohort(home, classes=3, slides=27, stand_in=True)
    monkeypatch.setattr(digits, "FAST_SIZES", (60, 20, 30))
    monkeypatch.setattr(digits, "FAST", replace(digits.FAST, fast_epochs=3))
    monkeypatch.setattr(slide_cohorts, "find_cohorts", lambda request: slide_cohorts.CohortSet((cohort,), ()))
    monkeypatch.setattr(cautions, "LITTLE", 1.0)  # so that nobody is below it
    request = Request(out=tmp_path / "out", shared=tmp_path / "shared", fast=True)
    found = correlations.reproduce(request)
    (told,) = (line for line in found.lines if "no better than always" in line)
    assert told.startswith("made, 3 classes: the probabilities of ABMIL, CAR-MIL (L1), CAR-MIL (cosine) are no better")
    spearman, _ = found.tables
    assert [line[:2] for line in spearman.lines] == [
        ("made, 3 classes", "L1"),
        ("made, 3 classes", "cosine"),
        ("Four Bags", "L1"),
        ("Four Bags", "cosine"),
    ]
    bags, plain = models_of_run(train_model(cohort, "abmil.gated", request), "cpu")  # read, not trained
    first = next(plain)
    car = next(models_of_run(train_model(cohort, "car/abmil.gated", request), "cpu")[1])
    a, b = predict_branches(first.model, bags, first.places), predict_branches(car.model, bags, car.places)
    bounds = a.offsets.starts.tolist()
    expected = [spearmanr(a.scores[i:j], b.scores[i:j]).statistic for i, j in pairwise(bounds)]
    facts = json.loads((request.out / "correlations.json").read_text())["found"]
    assert facts[0]["spearman"]["ABMIL–F"][0] == pytest.approx(np.mean(expected))
    assert any("other data: they stand in no column" in line for line in found.lines)
    assert found.pictures[0].path.is_file()
