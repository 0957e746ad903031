import json
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from carmil.bags.building import build_store
from carmil.bags.labels import read_labels
from carmil.bags.sources import Bag
from carmil.bags.split_files import read_splits
from carmil.bags.store import open_store
from carmil.bags.writers import write_bag
from carmil.errors import CarmilError
from carmil.locks import folder_lock
from carmil.runs.run import read_run
from carmil.runs.settings import Settings, read_settings
from carmil.studies.predictions import predict_frame
from carmil.studies.train import grid_of, run_study

from .conftest import SMALL, make_files


def test_study_learns_the_rule_and_tests_every_slide_once(files, tmp_path):
    run = run_study(files.settings(tmp_path / "run", epochs=25, seeds=2))
    frame = run.predictions()
    assert run.metrics.summary["auc"].mean > 0.9
    assert run.metrics.level == "patient"
    assert (frame.groupby("slide").size() == 2).all()  # once per seed
    assert frame["slide"].nunique() == 48
    splits = pd.read_csv(tmp_path / "run" / "splits.tsv", sep="\t", dtype=str)
    tested = {
        (row["slide"], fold) for _, row in splits.iterrows() for fold in range(3) if row[f"fold_{fold}"] == "test"
    }
    assert set(zip(frame["slide"], frame["fold"], strict=True)) == tested
    assert np.allclose(frame[["p_a", "p_b"]].sum(axis=1), 1)
    assert {"cf_a", "cf_b"} <= set(frame.columns)


def with_noise(files, tested: set[str], folder):
    """Return the cohort with features of some slides replaced by noise and their labels swapped."""
    rng = np.random.default_rng(99)
    (folder / "features").mkdir(parents=True)
    for path in files.features.rglob("*.npy"):
        values = np.load(path)
        if path.stem in tested:
            values = rng.normal(size=values.shape).astype(values.dtype) * 7
        np.save(folder / "features" / path.name, values)
    table = pd.read_csv(files.labels, dtype=str)
    own = table["slide_id"].isin(tested)
    table.loc[own, "label"] = np.where(table.loc[own, "label"] == "a", "b", "a")
    table.to_csv(folder / "labels.csv", index=False)
    return replace(files, features=folder / "features", labels=folder / "labels.csv")


STOPPING = dict(lr=[5e-3, 1e-3], seeds=2, epochs=12, warmup=1, patience=2)  # models stop at different epochs


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    """Return a cohort, its splits, and two runs on it: the first made the splits, the second was given them."""
    folder = tmp_path_factory.mktemp("twice")
    files = make_files(folder)
    clean = run_study(files.settings(folder / "clean", **STOPPING))
    splits = (folder / "clean" / "splits.tsv").rename(folder / "splits.tsv")
    return files, splits, clean, run_study(files.settings(folder / "again", splits=splits, **STOPPING))


@pytest.mark.parametrize("fold", [0, 2])
def test_noise_in_the_test_fold_does_not_affect_model_selection(twice, tmp_path, fold):
    """Replacing the test fold before training leaves epochs, hyper-parameters, thresholds and weights bitwise equal."""
    files, splits, clean, again = twice
    table = pd.read_csv(splits, sep="\t", dtype=str)
    tested = set(table.loc[table[f"fold_{fold}"] == "test", "slide"])
    assert tested
    noise = with_noise(files, tested, tmp_path / "noise")
    noisy = run_study(noise.settings(tmp_path / "noisy", splits=splits, **STOPPING))
    own, expected = (load_file(run.folder / "weights.safetensors") for run in (again, noisy))
    rows = [i for i, model in enumerate(again.models) if model.fold == fold]
    assert len(rows) == 2
    for row in rows:
        assert again.models[row] == noisy.models[row]  # epoch, grid point, threshold, validation loss
        assert all(torch.equal(own[name][row], expected[name][row]) for name in own)
    others = [i for i in range(len(again.models)) if i not in rows]
    assert any(again.models[i] != noisy.models[i] for i in others)  # in other folds the noise was training data
    assert clean.models == again.models
    first, second = (run.predictions() for run in (again, noisy))
    assert first.loc[first["fold"] == fold, "p_b"].tolist() != second.loc[second["fold"] == fold, "p_b"].tolist()


def test_killed_run_resumes_and_ends_with_the_same_weights(files, tmp_path):
    """Kill training twice; the results are bitwise equal to those of an uninterrupted run."""
    script = (
        "import sys, carmil.training.checkpoint as c, carmil.training.loop as loop, time\n"
        "from pathlib import Path\n"
        "from carmil.runs.settings import Settings\n"
        "from carmil.studies.train import run_study\n"
        "saved, most = [], int(sys.argv[2])  # after so many checkpoints it waits to be killed\n"
        "def save(self, *a):\n"
        "    self.save(*a)\n"
        "    saved.append(self)\n"
        "    time.sleep(0.1 if len(saved) < most else 600)\n"
        "c.Checkpoint.save_if_due = save\n"
        f"run_study(Settings(bags=Path({str(files.features)!r}), labels=Path({str(files.labels)!r}), out=Path(sys.argv[1]),"
        f" model='car/abmil', options={SMALL!r}, folds=3, seeds=2, epochs=12, lr=[5e-3, 1e-3], patience=4, device='cpu'))\n"
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    command = [sys.executable, "-c", script]
    subprocess.run([*command, str(whole), "1000"], check=True)
    checkpoint, last_saved = broken / "checkpoint.safetensors", 0
    for kills in range(2):
        process = subprocess.Popen([*command, str(broken), "3"])
        while not checkpoint.exists() or checkpoint.stat().st_mtime_ns == last_saved:
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(0.05 * kills)  # while it waits, or while it writes the next
        process.kill()
        process.wait()
        last_saved = checkpoint.stat().st_mtime_ns
    assert not (broken / "metrics.json").exists()
    subprocess.run([*command, str(broken), "1000"], check=True)
    first, second = (load_file(run / "weights.safetensors") for run in (whole, broken))
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name in ("models.json", "history.json", "metrics.json"):
        assert json.loads((whole / name).read_text()) == json.loads((broken / name).read_text())
    assert not (broken / "checkpoint.safetensors").exists()


def test_repeated_study_reads_the_run_and_changed_settings_raise_an_error(files, tmp_path):
    settings = files.settings(tmp_path / "run", epochs=3)
    first = run_study(settings)
    logged = []
    assert run_study(settings, log=logged.append).metrics == first.metrics
    assert any("has ended already" in line for line in logged)
    with pytest.raises(CarmilError, match="its lr differ"):
        run_study(replace(settings, lr=1e-4))


def test_run_and_data_may_be_moved_but_not_modified(tmp_path):
    files = make_files(tmp_path / "here")
    first = run_study(files.settings(tmp_path / "here" / "run", epochs=3))
    (tmp_path / "here").rename(tmp_path / "there")
    moved = Settings(
        **{**vars(files.settings(tmp_path / "there" / "run", epochs=3)), **_moved(files, tmp_path / "there")}
    )
    logged = []
    assert run_study(moved, log=logged.append).metrics == first.metrics
    assert any("has ended already" in line for line in logged)
    assert read_run(moved.out).settings.bags == moved.bags  # later commands find the slides
    lines = (tmp_path / "there" / "labels.csv").read_text().splitlines()
    (tmp_path / "there" / "labels.csv").write_text("\n".join(lines[:-2]) + "\n")
    with pytest.raises(CarmilError, match="holds another run \\(its data or splits differ\\)"):
        run_study(moved)


def test_study_with_changed_instance_truth_raises_an_error(tmp_path):
    """Equal features with different truth would give different figures of the maps."""
    rng = np.random.default_rng(0)
    features = [rng.normal(size=(4, 3)).astype(np.float32) for _ in range(12)]
    for folder, last in (("first", 0), ("second", 1)):
        for i, rows in enumerate(features):
            bag = Bag(id=f"s{i}", features=rows, instance_labels=np.array([i % 2, 0, 0, last * (i % 2)]))
            write_bag(bag, tmp_path / folder, "safetensors")
    lines = ["slide_id,case_id,label", *(f"s{i},p{i},{'ab'[i % 2]}" for i in range(12))]
    (tmp_path / "labels.csv").write_text("\n".join(lines) + "\n")
    settings = Settings(
        bags=tmp_path / "first", labels=tmp_path / "labels.csv", out=tmp_path / "run", model="abmil", options=SMALL,
        folds=2, epochs=2, device="cpu",
    )  # fmt: skip
    run_study(settings)
    build_store(tmp_path / "second", tmp_path / "other")
    with pytest.raises(CarmilError, match="its data or splits differ"):
        run_study(replace(settings, bags=tmp_path / "other"))


def _moved(files, folder):
    return {"bags": folder / files.features.name, "labels": folder / files.labels.name}


def test_grid_point_is_chosen_on_validation_bags(files, tmp_path):
    run = run_study(files.settings(tmp_path / "run", lr=[1e-7, 5e-3], epochs=15))
    assert {model.lr for model in run.models} == {5e-3}
    history = json.loads((tmp_path / "run" / "history.json").read_text())
    assert len(history["best_epoch"]) == 6  # three folds, two learning rates
    for model in run.models:
        row = model.fold * 2 + model.point
        assert model.best_epoch == history["best_epoch"][row]
        assert model.validation_loss == pytest.approx(history["validation"][model.best_epoch][row])


def test_models_of_inner_folds_give_one_prediction_per_slide(files, tmp_path):
    run = run_study(files.settings(tmp_path / "run", inner=2, epochs=4, lr=[1e-3, 5e-3]))
    assert len(run.models) == 6
    assert {(model.fold, model.inner) for model in run.models} == {(f, i) for f in range(3) for i in range(2)}
    for fold in range(3):
        assert len({model.point for model in run.models if model.fold == fold}) == 1
    frame = run.predictions()
    assert (frame.groupby("slide").size() == 1).all()


def test_reshuffle_gives_every_seed_its_own_folds(files, tmp_path):
    run = run_study(files.settings(tmp_path / "run", seeds=2, reshuffle=True, epochs=3))
    frame = run.predictions()
    assert sorted(frame["fold"].unique()) == [0, 1, 2, 3, 4, 5]
    slides_of = {fold: set(frame.loc[frame["fold"] == fold, "slide"]) for fold in range(6)}
    assert {frozenset(slides_of[f]) for f in range(3)} != {frozenset(slides_of[f]) for f in range(3, 6)}
    assert (tmp_path / "run" / "splits_1.tsv").exists()


@pytest.mark.parametrize("rule", ["mean", "max", "one-bag"])
def test_slides_of_a_patient_are_evaluated_together(files, tmp_path, rule):
    run = run_study(files.settings(tmp_path / "run", patients=rule, epochs=4))
    assert run.metrics.level == "patient"
    frame = run.predictions()
    assert len(frame) == (24 if rule == "one-bag" else 48)
    assert frame["patient"].nunique() == 24
    if rule != "one-bag":
        p = frame.groupby("patient")["p_b"].agg(rule)
        label = frame.groupby("patient")["label"].first()
        fold = frame.groupby("patient")["fold"].first()
        from sklearn.metrics import roc_auc_score

        aucs = [roc_auc_score(label[fold == f] == "b", p[fold == f]) for f in range(3)]
        assert run.metrics.summary["auc"].mean == pytest.approx(np.mean(aucs))


def test_study_with_three_classes_has_metrics_but_no_threshold(tmp_path):
    run = run_study(make_files(tmp_path, classes=3).settings(tmp_path / "run", epochs=20, model="abmil"))
    assert run.outputs == ("a", "b", "c")
    assert all(model.threshold is None for model in run.models)
    assert run.metrics.summary["auc"].mean > 0.8


def test_class_weights_and_label_smoothing_change_training(files, tmp_path):
    table = pd.read_csv(files.labels, dtype=str)
    table[(table["label"] == "a") | (table["case_id"] < "P012")].to_csv(
        files.labels, index=False
    )  # fewer slides of class b
    plain = run_study(files.settings(tmp_path / "plain", epochs=3))
    for i, other in enumerate(({"class_weights": "balanced"}, {"label_smoothing": 0.2})):
        run = run_study(files.settings(tmp_path / str(i), epochs=3, **other))
        assert [m.validation_loss for m in run.models] != [m.validation_loss for m in plain.models]


@pytest.mark.parametrize("scale", ["none", "halfway"])
def test_warm_start_requires_the_same_folds(files, tmp_path, scale):
    same = {"scale": scale}
    baseline = run_study(files.settings(tmp_path / "baseline", model="abmil", epochs=10, **same))
    warm = run_study(files.settings(tmp_path / "warm", warm_start=baseline.folder, epochs=2, lr=1e-9, **same))
    first, second = load_file(baseline.folder / "weights.safetensors"), load_file(warm.folder / "weights.safetensors")
    name = next(name for name in first if name.endswith("weight"))
    assert torch.allclose(first[name], second[f"model.{name}"], atol=1e-6)
    with pytest.raises(CarmilError, match="other data or folds"):
        run_study(files.settings(tmp_path / "other", warm_start=baseline.folder, seed=5))


def test_abstention_withholds_uncertain_answers(files, tmp_path):
    run = run_study(files.settings(tmp_path / "run", abstain=0.6, epochs=2))
    assert all(model.abstain_below is not None for model in run.models)
    assert 0 < run.metrics.summary["answered"].mean < 1


def test_official_split_is_used_unchanged(files, tmp_path):
    table = pd.read_csv(files.labels, dtype=str)
    number = table["case_id"].str[1:].astype(int)
    table["split"] = np.where(number < 12, "train", np.where(number < 18, "val", "test"))
    table.to_csv(files.labels, index=False)
    run = run_study(files.settings(tmp_path / "run", official=True, epochs=3))
    assert set(run.predictions()["patient"]) == {f"P{p:03d}" for p in range(18, 24)}
    labels = read_labels(files.labels)
    numbers = [labels.classes.index(name) for name in labels.labels]
    assert read_splits(tmp_path / "run" / "splits.tsv", labels.slides, labels.patients, numbers).folds == 1


def test_settings_are_read_from_yaml(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text("bags: features\nlabels: t.csv\nout: run\nlr: [2e-4, 1e-3]\nlambda: 0.5\nseeds: 3\n")
    settings = Settings.of(read_settings(path), where=str(path))
    assert settings.lr == [2e-4, 1e-3]
    assert settings.lambda_ == 0.5
    assert [point.settings["lr"] for point in grid_of(settings)] == [2e-4, 1e-3]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bags: f\nlabels: t\nout: r\nepoch: 3\n", "did you mean 'epochs'"),
        ("labels: t\nout: r\n", "'bags' is missing"),
        ("bags: f\nlabels: t\nout: r\nfolds: many\n", "expected a number"),
        ("bags: f\nlabels: t\nout: r\nfolds: 2.5\n", "whole number"),
        ("bags: f\nlabels: t\nout: r\nfolds: 1\n", "folds is 1"),
        ("bags: f\nlabels: t\nout: r\nlr: .inf\n", "finite"),
        ("bags: f\nlabels: t\nout: r\nlr: []\n", "lr is a list: expected a number or a list of at least one number"),
        ("bags: f\nlabels: t\nout: r\npatients: median\n", "expected one of mean, max, one-bag"),
        ("bags: f\nlabels: t\nout: r\nofficial: maybe\n", "true or false"),
        ("bags: f\nlabels: t\nout: r\noptions: 3\n", "expected names with values"),
        ("bags: f\nlabels: t\nout: r\nofficial: true\ninner: 3\n", "one or the other"),
        ("- a\n- b\n", "expected lines such as"),
        ("a: [\n", "expected lines such as"),
    ],
)
def test_invalid_settings_raise_an_error_of_one_line(tmp_path, text, words):
    path = tmp_path / "study.yaml"
    path.write_text(text)
    with pytest.raises(CarmilError, match=words) as error:
        Settings.of(read_settings(path), where=str(path))
    assert "\n" not in str(error.value)


def test_reading_an_unfinished_run_raises_an_error(files, tmp_path):
    run = run_study(files.settings(tmp_path / "run", epochs=2))
    (run.folder / "metrics.json").unlink()
    with pytest.raises(CarmilError, match="is an unfinished run"):
        read_run(run.folder)


def test_scales_are_fitted_on_the_training_bags_of_each_fold(files, tmp_path):
    run = run_study(files.settings(tmp_path / "run", scale="own", epochs=2))
    store = open_store(tmp_path / "run" / "cohort").bags()
    table = pd.read_csv(tmp_path / "run" / "splits.tsv", sep="\t", dtype=str).set_index("slide")
    weights = load_file(run.folder / "weights.safetensors")
    for row, model in enumerate(run.models):
        own = [i for i, name in enumerate(store.ids) if table.loc[name, f"fold_{model.fold}"] == "train"]
        x = store[own].features
        assert torch.allclose(weights["mean"][row], x.mean(0), atol=1e-5)
        assert torch.allclose(weights["deviation"][row], x.std(0, correction=0), atol=1e-4)
    assert run.metrics.summary["auc"].mean > 0.4
    again = predict_frame(run.population(), [0], store, torch.arange(3), run.target)
    frame = run.predictions().set_index("slide")
    own = frame[frame["fold"] == run.models[0].fold]
    for _, line in again.iterrows():
        if line["slide"] in own.index:
            assert own.loc[line["slide"], "p_b"] == pytest.approx(line["p_b"], abs=1e-5)


def test_number_of_models_trained_at_once_does_not_affect_results(files, tmp_path):
    """A run started with another number of models at once is the same run."""
    common = dict(lr=[5e-3, 1e-3], epochs=4)
    whole = run_study(files.settings(tmp_path / "whole", **common))
    parts = run_study(files.settings(tmp_path / "parts", models_at_once=2, **common))
    first, second = (load_file(run.folder / "weights.safetensors") for run in (whole, parts))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert whole.models == parts.models and whole.metrics == parts.metrics and whole.history() == parts.history()
    assert not (tmp_path / "parts" / "checkpoint.parts").exists()
    assert run_study(files.settings(tmp_path / "parts", **common)).key == whole.key
    with pytest.raises(CarmilError, match="models_at_once is 1: expected at least 2"):
        files.settings(tmp_path / "run", models_at_once=1)


@pytest.mark.finding(n=5)
def test_run_records_checksums_of_training_and_validation_slides(files, tmp_path):
    quick = dict(model="mean", options={"hidden": 8}, folds=2, epochs=1)
    slides = {path.stem for path in files.features.glob("*.npy")}
    merged = run_study(files.settings(tmp_path / "merged", patients="one-bag", **quick)).data.trained_on
    store = open_store(tmp_path / "merged" / "cohort")
    assert merged == {entry.id: entry.checksum[:16] for entry in store.entries} and set(merged) == slides
    head, *rows = files.labels.read_text().splitlines()
    parts = ["test" if row.startswith(("000", "001", "002")) else "train" for row in rows]
    files.labels.write_text(
        "\n".join([f"{head},split", *(f"{row},{part}" for row, part in zip(rows, parts, strict=True))])
    )
    official = run_study(files.settings(tmp_path / "official", official=True, **quick)).data.trained_on
    assert slides - set(official) == {"000-0", "000-1", "001-0", "001-1", "002-0", "002-1"}


@pytest.mark.finding(n=13)
def test_concurrent_training_into_one_folder_raises_an_error(files, tmp_path):
    with (
        folder_lock(tmp_path / "run" / "checkpoint.lock", tmp_path / "run"),
        pytest.raises(CarmilError, match=r"run is being written by process \d+ .*: wait until it ends"),
    ):
        run_study(files.settings(tmp_path / "run"))
