import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from carmil.evidence.branch_outputs import predict_branches
from carmil.evidence.counterfactual_direction import followed
from carmil.reproduce import digits, theory
from carmil.reproduce.method_runs import models_of_run, train_model
from carmil.reproduce.recipes import Request


def test_theory_recipe_measures_both_tasks_and_distances(tmp_path, monkeypatch):
    monkeypatch.setattr(digits, "FAST_SIZES", (60, 20, 30))
    monkeypatch.setattr(digits, "FAST", replace(digits.FAST, fast_epochs=3))
    request = Request(out=tmp_path / "out", shared=tmp_path / "shared", fast=True)
    result = theory.reproduce(request)
    facts = json.loads((request.out / "theory.json").read_text())["rows"]
    assert [(row["task"], row["distance"]) for row in facts if row["rival"] == "all others"] == [
        ("Adjacent Pairs", "L1"),
        ("Adjacent Pairs", "cosine"),
        ("Four Bags", "L1"),
        ("Four Bags", "cosine"),
    ]
    run = train_model(
        digits.digit_cohorts(request, ["four_bags"])[0], "car/abmil", request
    )  # read from disk, not trained
    bags, models = models_of_run(run, "cpu")
    tested = list(models)
    measured = followed(bags, tested)
    row = next(r for r in facts if (r["task"], r["distance"], r["rival"]) == ("Four Bags", "L1", "all others"))
    assert row["pearson"] == pytest.approx(measured.intervals["pearson"])
    outputs = predict_branches(tested[0].model, bags, tested[0].places)
    promised = measured.margin[0]
    change = (outputs.logits - outputs.counterfactual_logits).double()
    y = tested[0].labels
    expected = change[torch.arange(30), y] - (change.sum(1) - change[torch.arange(30), y]) / 3
    assert promised.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    mean, low, high = row["pearson"]
    line = next(line for line in result.tables[0].lines if line[:3] == ("Four Bags", "L1", "all others"))
    assert line[3] == f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]" and row["pearson_shuffled"][1] <= 0.1 < 1
    assert result.tables[0].heads[3:5] == ("Pearson", "Pearson, shuffled")
    assert np.isfinite(measured.instances).mean() > 0.9
    assert result.pictures[0].path.is_file()
