import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch

from carmil.errors import CarmilError
from carmil.reproduce import crc
from carmil.training.recipe import TRAIN, UNUSED, VALIDATION


@pytest.fixture
def small(tmp_path):
    """Forty patients whose cancerous nuclei show in one feature, in the order in which a microscope met them."""
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


def test_a_bag_is_a_patient_and_positive_if_any_nucleus_is(small):
    bags = crc.load_crc(small)
    table = pd.read_csv(small / "instances.csv", dtype={"patient_id": str})
    assert list(bags.ids) == sorted(table["patient_id"].unique())
    for i, (name, rows) in enumerate(table.groupby("patient_id")):
        assert bags.ids[i] == name
        assert bags.labels[i] == rows["is_cancerous"].max()
        assert bags.sizes[i] == len(rows)
        assert bags[i].instance_labels.tolist() == rows["is_cancerous"].tolist()


def test_folds_test_every_bag_once_and_never_train_on_it():
    labels = torch.arange(98) % 2
    roles, tested = crc.fold_roles(labels, 0)
    assert (tested.sum(0) == 1).all()
    assert (roles[tested] == UNUSED).all()
    assert ((roles == TRAIN) | (roles == VALIDATION) | tested).all()
    assert ((roles == VALIDATION).sum(1) >= 10).all()


def test_the_command_measures_and_goes_on_where_it_was(small, tmp_path, monkeypatch):
    recipe = dataclasses.replace(crc.RECIPE, epochs=8, warmup=2)
    out = tmp_path / "out"
    first = crc.run_crc(small, ["mean"], out, device="cpu", recipe=recipe)
    rows = crc.run_crc(small, ["mean", "abmil"], out, device="cpu", recipe=recipe)
    assert rows[: len(first)] == first
    kinds = {(row.model, row.evidence) for row in rows}
    assert kinds == {("mean", "patch_scores"), ("abmil", "path"), ("abmil", "attention")}
    assert all(row.auc[0] > 60 for row in rows)
    monkeypatch.setattr(crc, "fit", None)
    assert crc.run_crc(small, ["mean", "abmil"], out, device="cpu", recipe=recipe) == rows
    assert "abmil" in (out / "crc.md").read_text()


def test_another_study_is_not_written_over(small, tmp_path):
    recipe = dataclasses.replace(crc.RECIPE, epochs=6, warmup=2)
    crc.run_crc(small, ["mean"], tmp_path / "out", device="cpu", recipe=recipe)
    with pytest.raises(CarmilError, match="holds another study"):
        crc.run_crc(small, ["mean"], tmp_path / "out", device="cpu", recipe=recipe, seed=1)


def test_a_folder_that_is_not_crcs_is_named(small, tmp_path):
    with pytest.raises(CarmilError, match=r"has no features.npy"):
        crc.load_crc(tmp_path / "nowhere")
    table = pd.read_csv(small / "instances.csv", dtype={"patient_id": str})
    for broken, words in (
        (table.drop(columns="patient_id"), "expected a column 'patient_id' without gaps"),
        (table.assign(is_cancerous=2), "is_cancerous must be 0 or 1"),
        (table.iloc[:5], "400 rows of features for 5 instances"),
    ):
        broken.to_csv(small / "instances.csv", index=False)
        with pytest.raises(CarmilError) as raised:
            crc.load_crc(small)
        assert words in str(raised.value)
    (small / "instances.csv").write_text("")
    with pytest.raises(CarmilError, match="cannot be read as a table"):
        crc.load_crc(small)
    with pytest.raises(CarmilError, match="expected at least 10 of each"):
        crc.fold_roles(torch.tensor([0, 1, 0, 1]), 0)


def test_the_real_cohort_has_the_published_counts(shared_data):
    bags = crc.load_crc(shared_data / "crc")
    assert len(bags) == 98
    assert bags.labels.sum() == 51
    assert (bags.sizes.min(), bags.sizes.max()) == (6, 699)
