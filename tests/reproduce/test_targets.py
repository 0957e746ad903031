import json

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.preprocessing import StandardScaler

from carmil.reproduce.recipes import Request
from carmil.reproduce.targets import FITTED, run_targets
from carmil.statistics.hazards import fit_cox
from carmil.targets import Labels, Ordinal, Survival, Value

from .made_crc import made_crc


def made_patients(folder, count=60, seed=0):
    """Write a folder in the layout of ki67, whose patients with more Ki67 recur earlier."""
    rng = np.random.default_rng(seed)
    level, cells = rng.normal(6.4, 0.5, count), 12
    recurrence, node = rng.random(count) < 0.6, rng.integers(0, 2, count)
    table = pd.DataFrame(
        {
            "patient": [f"P{i}" for i in range(count)],
            "cells": cells,
            "recurrence": recurrence.astype(int),
            "months": np.ceil(rng.exponential(60 * np.exp(6.4 - level))) + 1,
            "age": rng.integers(40, 80, count),
            "node": node,
            "t_stage": rng.integers(1, 4, count),
            "hormone_receptor": 1,
            "grade": 1 + (level > 6.2).astype(int) + (level > 6.7),
            "her2": rng.integers(0, 2, count),
        }
    )
    folder.mkdir()
    table.to_csv(folder / "patients.csv", index=False)
    np.savez(
        folder / "cells.npz",
        patient=np.repeat(np.arange(count), cells),
        core=np.repeat(np.arange(count), cells),
        marker=rng.lognormal(np.repeat(level, cells), 0.3).astype(np.float32),
        x=rng.uniform(0, 300, count * cells),
        y=rng.uniform(0, 300, count * cells),
    )
    return folder


@pytest.fixture(scope="module")
def finding(tmp_path_factory):
    home = tmp_path_factory.mktemp("targets")
    crc, ki67 = made_crc(home / "crc"), made_patients(home / "ki67")
    run_targets(crc, ki67, Request(out=home / "out", shared=home / "out", fast=True))
    return json.loads((home / "out" / "targets.json").read_text())


@pytest.mark.slow
def test_every_target_is_measured_together_with_its_baselines(finding):
    titles = [table["title"] for table in finding["tables"]]
    assert titles == [
        "Planted hazards: C-index, per cent",
        "Planted hazards: agreement with the sign of every nucleus, per cent",
        "Ki67, recurrence: C-index, per cent",
        "Ki67, recurrence: what the risk adds, C-index in per cent",
        "Ki67, grade: quadratic kappa, per cent",
        "Ki67, node, HER2: AUC, per cent",
        "Ki67, age: Spearman correlation, per cent",
    ]
    planted = {row[0]: row for row in finding["tables"][0]["lines"]}
    assert 60 < float(planted["true log hazard"][1]) < 95
    assert planted["true log hazard"][3].startswith(("-", "+")) and planted["abmil.gated"][3] == "–"
    for table in finding["tables"]:
        assert all(cell != "" for row in table["lines"] for cell in row)


@pytest.mark.slow
def test_maps_of_both_models_are_compared_with_the_sign_of_every_nucleus(finding):
    rows = [(row[0], row[1]) for row in finding["tables"][1]["lines"]]
    assert rows == [(model, name) for model in ("abmil.gated", "car/abmil.gated") for name in ("path", "attention")]


def test_recipe_without_data_exits_with_one_line(tmp_path, run_cli):
    code, _, err = run_cli("reproduce", "targets", "--out", str(tmp_path / "out"))
    assert code == 2 and "no data: give --crc, --ki67 or both" in err


def test_baselines_are_fitted_on_the_given_cases_only():
    rng = np.random.default_rng(0)
    x, new = rng.normal(size=(80, 2)), rng.normal(size=(5, 2))
    times = np.c_[rng.exponential(np.exp(-x[:, 0])), rng.random(80) < 0.7]
    risk = FITTED["survival"](x, times, new, Survival())
    assert np.allclose(risk[:, 0], new @ fit_cox(x, times[:, 0], times[:, 1] > 0, penalizer=0.01).coefficients)
    value = FITTED["value"](x, times[:, :1], new, Value(columns=("v",)))
    assert np.allclose(value[:, 0], LinearRegression().fit(x, times[:, 0]).predict(new))
    grades = np.digitize(x[:, 0], [-0.5, 0.5])
    given = FITTED["ordinal"](x, grades, new, Ordinal(columns=("g",), names=("1", "2", "3")))
    nearest = LinearRegression().fit(x, grades).predict(new).round().clip(0, 2)
    assert given.argmax(1).tolist() == nearest.tolist() and (given.sum(1) == 1).all()
    labels = np.c_[x[:, 0] > 0, x[:, 1] > 0].astype(float)
    labels[:30, 1] = np.nan
    p = FITTED["labels"](x, labels, new, Labels(columns=("a", "b")))
    scaler = StandardScaler().fit(x[30:])
    known = LogisticRegression().fit(scaler.transform(x[30:]), labels[30:, 1])
    assert np.allclose(p[:, 1], known.predict_proba(scaler.transform(new))[:, 1])
