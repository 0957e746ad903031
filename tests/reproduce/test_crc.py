"""crc is an ordinary cohort, and its recipes read ordinary runs."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from carmil.bags.store import open_store
from carmil.datasets.crc_nuclei import patient_bags
from carmil.datasets.study_cohort import ModelProtocol
from carmil.errors import CarmilError
from carmil.reproduce import crc
from carmil.reproduce.recipes import Request
from carmil.runs.run import read_run


def small_models(model):
    return ModelProtocol({"hidden": 8} if model == "mean" else {"hidden": 8, "attention": 4})


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(crc, "PROTOCOL", replace(crc.PROTOCOL, warmup=2, lr=1e-2, of_model=small_models))


@pytest.fixture
def small(tmp_path):
    """Write forty patients with nuclei in random order, whose cancerous nuclei have a large first feature."""
    rng = np.random.default_rng(0)
    patients = rng.integers(0, 40, 400)
    sick = rng.random(40) < 0.5
    cancerous = sick[patients] & (rng.random(400) < 0.5)
    features = rng.normal(size=(400, 8)).astype(np.float16)
    features[cancerous, 0] += 3
    np.save(tmp_path / "features.npy", features)
    table = pd.DataFrame({"patient_id": [f"{p:03d}" for p in patients], "is_cancerous": cancerous.astype(int)})
    table.to_csv(tmp_path / "instances.csv", index_label="instance_id")
    return tmp_path


def request_in(out, **others):
    return Request(out=out, shared=out, **others)


def test_bag_is_a_patient_and_positive_if_any_nucleus_is(small, tmp_path):
    table = pd.read_csv(small / "instances.csv", dtype={"patient_id": str})
    bags = patient_bags(small)
    store = open_store(crc.crc_cohort(small, request_in(tmp_path / "out")).bags)
    labels = pd.read_csv(tmp_path / "out" / "cohorts" / "crc-nuclei" / "labels.csv", dtype=str).set_index("slide")
    for i, (name, rows) in enumerate(table.groupby("patient_id")):
        assert bags.ids[i] == name
        assert bags.labels[i] == rows["is_cancerous"].max()
        assert bags[i].instance_labels.tolist() == rows["is_cancerous"].tolist()
        place = store.ids.index(f"patient_{name}")
        assert store.bags()[place].instance_labels.tolist() == rows["is_cancerous"].tolist()
        assert (labels.loc[f"patient_{name}", "label"] == "cancerous") == rows["is_cancerous"].any()


def test_crc_table_shows_figures_of_the_runs_and_reuses_finished_runs(small, tmp_path, monkeypatch):
    out = tmp_path / "out"
    result = crc.run_crc(small, ["mean", "abmil"], request_in(out), epochs=8)
    facts = json.loads((out / "crc.json").read_text())
    kinds = [(row["model"], row["evidence"]) for row in facts["rows"]]
    assert kinds == [("mean", "patch_scores"), ("abmil", "path"), ("abmil", "attention")]
    run = read_run(out / "runs" / "crc-nuclei-epochs8-seeds1-seed0" / "abmil")
    for row in facts["rows"][1:]:
        aucs, areas = (
            [100 * one.figures[name] for one in run.metrics.by_fold] for name in ("auc", f"auprc_{row['evidence']}")
        )
        assert row["ours"]["auc"] == pytest.approx([np.mean(aucs), np.std(aucs, ddof=1)])
        assert row["ours"]["auprc_plus"] == pytest.approx([np.mean(areas), np.std(areas, ddof=1)])
    assert row["ours"]["auc"][0] > 60
    assert "| abmil | path |" in (out / "crc.md").read_text()
    assert "carmil train --preset 0.1 --epochs 8 --patience 50" in " ".join(result.conditions)
    monkeypatch.setattr("carmil.studies.train.train_protocol", None)
    assert crc.run_crc(small, ["mean", "abmil"], request_in(out), epochs=8) == result


def test_acmil_is_trained_without_masking():
    assert crc.model_protocol("car/acmil").options == {"masked_share": 0.0}
    assert crc.model_protocol("abmil").options == {}


def test_invalid_crc_input_raises_an_error(small, tmp_path):
    out = request_in(tmp_path / "out")
    with pytest.raises(CarmilError, match="unknown model 'nomil'"):
        crc.run_crc(small, ["nomil"], out)
    with pytest.raises(CarmilError, match=r"has no features.npy"):
        crc.run_crc(tmp_path / "nowhere", ["mean"], out)
    table = pd.read_csv(small / "instances.csv", dtype={"patient_id": str})
    for broken, words in (
        (table.drop(columns="patient_id"), "expected a column 'patient_id'"),
        (table.assign(is_cancerous=2), "is_cancerous must be 0 or 1"),
        (table.iloc[:5], "features.npy has 400 rows: expected 5, one per nucleus"),
    ):
        broken.to_csv(small / "instances.csv", index=False)
        with pytest.raises(CarmilError) as raised:
            crc.run_crc(small, ["mean"], out)
        assert words in str(raised.value)
    assert not (tmp_path / "out" / "runs").exists()


def test_real_crc_cohort_has_the_published_counts(shared_data):
    bags = patient_bags(shared_data / "crc")
    assert len(bags) == 98
    assert bags.labels.sum() == 51
    assert (bags.sizes.min(), bags.sizes.max()) == (6, 699)
