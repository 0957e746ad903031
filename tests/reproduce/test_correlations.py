import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from carmil.evidence.branch_outputs import predict_branches
from carmil.reproduce import correlations, digits, slide_cohorts
from carmil.reproduce.method_runs import models_of_run, train_model
from carmil.reproduce.recipes import Request
from carmil.studies import cautions

from .small_cohorts import make_cohort


def correlation_table(*models):
    return pd.concat({i: pd.DataFrame({("spearman", "ABMIL–F"): values}) for i, values in enumerate(models)})


def test_cells_show_mean_and_deviations_over_models_and_bags():
    result = correlation_table([0.2, 0.4, np.nan], [0.5, 0.7])
    assert correlations.of_models(result, "spearman", "ABMIL–F").tolist() == pytest.approx([0.3, 0.6])
    assert correlations.cells(result, "spearman", "ABMIL–F") == (
        "0.45 ± 0.21",
        f"{np.std([0.2, 0.4, 0.5, 0.7], ddof=1):.2f}",
    )
    assert correlations.cells(correlation_table([np.nan], [np.nan]), "spearman", "ABMIL–F") == ("–", "–")


def test_correlations_compare_maps_of_slides_and_digits_model_by_model(tmp_path, monkeypatch):
    home = tmp_path / "three"
    home.mkdir()
    cohort = make_cohort(home, classes=3, slides=27, stand_in=True)
    monkeypatch.setattr(digits, "FAST_SIZES", (60, 20, 30))
    monkeypatch.setattr(digits, "FAST", replace(digits.FAST, fast_epochs=3))
    monkeypatch.setattr(slide_cohorts, "find_cohorts", lambda request: slide_cohorts.CohortSet((cohort,), ()))
    monkeypatch.setattr(cautions, "LITTLE", 1.0)  # so that no run is below it
    request = Request(out=tmp_path / "out", shared=tmp_path / "shared", fast=True)
    result = correlations.reproduce(request)
    cautioned = [line.split(": ")[0] for line in result.lines if "no better than class frequencies" in line]
    assert cautioned == [f"made, 3 classes, {name}" for name in ("ABMIL", "CAR-MIL (L1)", "CAR-MIL (cosine)")]
    spearman, _ = result.tables
    assert [line[:2] for line in spearman.lines] == [
        ("made, 3 classes", "L1"),
        ("made, 3 classes", "cosine"),
        ("Four Bags", "L1"),
        ("Four Bags", "cosine"),
    ]
    bags, plain = models_of_run(train_model(cohort, "abmil.gated", request), "cpu")  # read from disk, not trained
    first = next(plain)
    car = next(models_of_run(train_model(cohort, "car/abmil.gated", request), "cpu")[1])
    a, b = predict_branches(first.model, bags, first.places), predict_branches(car.model, bags, car.places)
    bounds = a.offsets.starts.tolist()
    expected = [spearmanr(a.scores[i:j], b.scores[i:j]).statistic for i, j in pairwise(bounds)]
    facts = json.loads((request.out / "correlations.json").read_text())["found"]
    assert facts[0]["spearman"]["ABMIL–F"][0] == pytest.approx(np.mean(expected))
    assert any("other data: they stand in no column" in line for line in result.lines)
    assert result.pictures[0].path.is_file()
