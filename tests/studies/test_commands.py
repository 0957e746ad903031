"""The commands of a study, run from the command line; broken input gives one line, status 2 and no data loss."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from carmil.bags.building import build_store
from carmil.bags.geometry import TileGeometry
from carmil.bags.sources import Bag
from carmil.bags.store import open_store
from carmil.bags.writers import write_bag
from carmil.errors import CarmilError
from carmil.runs.run import read_run
from carmil.runs.settings import Settings
from carmil.studies.card import SCALING
from carmil.studies.subjects import validation_places
from carmil.studies.train import run_study

from .conftest import WIDTH, make_files


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a folder with a cohort, a run of abmil and a run of mean."""
    folder = tmp_path_factory.mktemp("study")
    files = make_files(folder)
    for name in ("abmil", "mean"):
        options = {"hidden": 8, "attention": 4} if name == "abmil" else {"hidden": 8}
        run_study(files.settings(folder / name, model=name, options=options, epochs=6))
    return folder


SMALL_TRAINING = ("--epochs", "2", "--folds", "3", "--device", "cpu", "--model", "mean")


def test_train_writes_a_complete_run_folder(files, tmp_path, run_cli):
    run = tmp_path / "run"
    status, out, _ = run_cli(
        "train", "--bags", str(files.features), "--labels", str(files.labels), "--out", str(run), *SMALL_TRAINING
    )
    assert status == 0
    assert "AUC" in out
    for name in (
        "run.json",
        "weights.safetensors",
        "predictions.parquet",
        "metrics.json",
        "report.html",
        "card.md",
        "splits.tsv",
    ):
        assert (run / name).is_file(), name
    assert len(pd.read_parquet(run / "predictions.parquet")) == 48


def test_train_uses_labels_stored_with_the_bags(shared_data, tmp_path, run_cli):
    """MUSK1 is one npz file with the arrays X, bag and y_bag."""
    words = ("--bags", str(shared_data / "mil" / "musk1.npz"), "--out", str(tmp_path / "run"), "--standardise")
    assert run_cli("train", *words, *SMALL_TRAINING)[0] == 0
    assert len(pd.read_parquet(tmp_path / "run" / "predictions.parquet")) == 92


def test_train_without_labels_raises_an_error(files, tmp_path, run_cli):
    status, _, err = run_cli("train", "--bags", str(files.features), "--out", str(tmp_path / "run"), *SMALL_TRAINING)
    assert status == 2
    assert "name a table with --labels" in err.strip().splitlines()[-1]


def test_cohort_commands_build_describe_check_and_export_a_store(files, tmp_path, run_cli):
    store = tmp_path / "store"
    assert run_cli("cohort", "build", str(files.features), "--out", str(store))[0] == 0
    status, out, _ = run_cli("cohort", "info", str(store))
    assert status == 0
    assert "48" in out
    status, out, _ = run_cli("cohort", "check", str(store), "--labels", str(files.labels))
    assert (status, "no problems" in out) == (0, True)
    assert run_cli("cohort", "export", str(store), "--out", str(tmp_path / "clam"), "--layout", "clam")[0] == 0
    assert len(list((tmp_path / "clam" / "pt_files").glob("*.pt"))) == 48


def copied(files, name, twin):
    """Copy the features of slide `name` to another slide."""
    shutil.copy(files.features / f"{name}.npy", files.features / f"{twin}.npy")


def table_of(out):
    return {tuple(cell.strip() for cell in line.split("│")[1:3]) for line in out.splitlines() if line.startswith("│")}


@pytest.mark.finding(n=5)
def test_duplicate_features_of_two_patients_are_reported_by_check_and_rejected_by_train(files, tmp_path, run_cli):
    copied(files, "000-0", "002-1")  # P000 and P002 are both of class a
    copied(files, "000-0", "003-0")  # P003 is of class b
    copied(files, "004-0", "004-1")  # both of one patient
    labels = ("--labels", str(files.labels))
    status, out, err = run_cli("cohort", "check", str(files.features), *labels)
    assert (status, table_of(out)) == (1, {("002-1", "duplicate"), ("003-0", "DIFFERENT LABELS")})
    assert "1 pair of slides of one patient has the same features: '004-0' and '004-1' of patient 'P004'" in err
    assert run_cli("cohort", "build", str(files.features), "--out", str(tmp_path / "store"))[0] == 0
    assert table_of(run_cli("cohort", "check", str(tmp_path / "store"), *labels)[1]) == table_of(out)
    status, out, err = run_cli("cohort", "check", str(tmp_path / "store"))
    assert (status, "3 pairs of slides with the same features ('000-0' and '002-1'" in err) == (0, True)
    assert run_cli("cohort", "check", str(tmp_path / "store"), *labels, "--allow-duplicates")[0] == 0

    bags = ("--bags", str(tmp_path / "store"))
    expected = (
        "2 pairs of slides of different patients have the same features, 1 with DIFFERENT LABELS: '000-0' of patient"
    )
    for command in (
        ("train", *bags, *labels, "--out", str(tmp_path / "run"), *SMALL_TRAINING),
        ("sweep", *bags, *labels, "--out", str(tmp_path / "sweep"), "--over", "lr=1e-3,1e-4", *SMALL_TRAINING),
        ("split", *bags, *labels, "--out", str(tmp_path / "splits.tsv")),
    ):
        status, _, err = run_cli(*command)
        assert (status, expected in err.strip().splitlines()[-1]) == (2, True)
    assert not (tmp_path / "run" / "run.json").exists() and not (tmp_path / "splits.tsv").exists()
    assert run_cli("split", *bags, *labels, "--allow-duplicates", "--out", str(tmp_path / "splits.tsv"))[0] == 0
    words = ("train", *bags, *labels, "--allow-duplicates", "--out", str(tmp_path / "run"), *SMALL_TRAINING)
    status, _, err = run_cli(*words)
    assert (status, f"WARNING: {expected}" in err) == (0, True)
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["settings"]["allow_duplicates"] is True
    assert any(expected in line for line in facts["said"])


@pytest.mark.finding(n=5)
@pytest.mark.parametrize(("dtype", "known"), [("float16", True), ("float32", True), ("bfloat16", False)])
def test_evaluate_and_predict_detect_training_slides_under_other_names(trained, tmp_path, run_cli, dtype, known):
    """The run was trained on a float16 store; features stored as bfloat16 can be compared by name only."""
    other = make_files(tmp_path / "other", patients=4, seed=9)
    shutil.copy(trained / "features" / "005-0.npy", other.features / "new.npy")
    other.labels.write_text(other.labels.read_text() + "new,Pnew,b\n")
    build_store(trained / "features", tmp_path / "own", dtype="float16")
    run_study(make_settings(trained, tmp_path))
    build_store(other.features, tmp_path / "store", dtype=dtype)
    words = (str(tmp_path / "run"), "--bags", str(tmp_path / "store"), "--out", str(tmp_path / "answers"))
    line = (
        "the run was trained on the features of 1 of these 9 slides ('new' as '005-0'): each is answered by the models"
    )
    names = "8 of these 9 slides have names of slides that the run was trained on ('000-0', ...)"
    for command in (("predict", *words), ("evaluate", *words, "--labels", str(other.labels))):
        status, _, err = run_cli(*command)
        assert (status, line in err, names in err) == (0, known, True)
        assert ("slides are compared by name only" in err) is not known


def make_settings(trained, tmp_path):
    return Settings(
        bags=tmp_path / "own",
        labels=trained / "labels.csv",
        out=tmp_path / "run",
        model="mean",
        options={"hidden": 8},
        folds=2,
        epochs=1,
        device="cpu",
        dtype="float32",
    )


@pytest.mark.finding(n=6)
def test_info_prints_the_median_bag_size(tmp_path, run_cli):
    for name, rows in (("a", 3), ("b", 8)):
        write_bag(Bag(id=name, features=np.ones((rows, WIDTH), np.float32)), tmp_path / "src", "npy")
    assert run_cli("cohort", "build", str(tmp_path / "src"), "--out", str(tmp_path / "store"))[0] == 0
    assert "11; 3 to 8 per bag, median 5.5" in run_cli("cohort", "info", str(tmp_path / "store"))[1]


@pytest.mark.finding(n=6)
def test_check_and_build_reject_the_same_values(tmp_path, run_cli):
    write_bag(Bag(id="a", features=np.full((2, WIDTH), 1e6, np.float32)), tmp_path / "src", "npy")
    status, out, _ = run_cli("cohort", "check", str(tmp_path / "src"))
    assert (status, "does not fit" in out) == (1, True)
    assert run_cli("cohort", "build", str(tmp_path / "src"), "--out", str(tmp_path / "store"))[0] == 2
    assert run_cli("cohort", "check", str(tmp_path / "src"), "--dtype", "float32")[0] == 0
    assert (
        run_cli("cohort", "build", str(tmp_path / "src"), "--dtype", "float32", "--out", str(tmp_path / "store"))[0]
        == 0
    )


def test_check_lists_problems_and_exits_with_status_1(files, tmp_path, run_cli):
    (files.features / "000-0.npy").write_bytes((files.features / "000-0.npy").read_bytes()[:90])
    np.save(files.features / "zzz.npy", np.zeros((3, WIDTH), np.float32))
    lines = files.labels.read_text().splitlines()
    files.labels.write_text("\n".join([*lines, "ghost,P999,a"]))
    status, out, _ = run_cli("cohort", "check", str(files.features), "--labels", str(files.labels))
    assert status == 1
    result = {
        (line.split("│")[1].strip(), line.split("│")[2].strip()) for line in out.splitlines() if line.startswith("│")
    }
    assert {("000-0", "unreadable"), ("zzz", "no label"), ("ghost", "no features")} <= result


def test_check_has_the_same_column_options_as_train(files, run_cli):
    lines = files.labels.read_text().splitlines()
    head = lines[0].split(",")
    files.labels.write_text("\n".join([",".join(f"my {name}" for name in head), *lines[1:]]))
    words = ["cohort", "check", str(files.features), "--labels", str(files.labels)]
    status, _, err = run_cli(*words)
    assert (status, "name it with --label" in err) == (2, True)
    named = ["--slide=my slide_id", "--patient=my case_id", "--label=my label"]
    status, out, _ = run_cli(*words, *named)
    assert (status, "no problems" in out) == (0, True)


def test_split_writes_splits_and_audits_them(files, tmp_path, run_cli):
    path = tmp_path / "splits.tsv"
    status, out, _ = run_cli("split", "--labels", str(files.labels), "--folds", "3", "--out", str(path))
    assert (status, "sound" in out) == (0, True)
    assert run_cli("split", "--labels", str(files.labels), "--audit", str(path))[0] == 0
    table = pd.read_csv(path, sep="\t", dtype=str)
    slides = table.index[table["patient"] == "P000"]
    table.loc[slides[0], "fold_0"] = "train"
    table.loc[slides[1], "fold_0"] = "test"
    table.to_csv(path, sep="\t", index=False)
    status, _, err = run_cli("split", "--labels", str(files.labels), "--audit", str(path))
    assert status == 2
    assert "P000" in err


def test_predict_writes_answers_for_new_slides(trained, tmp_path, run_cli):
    out = tmp_path / "answers"
    status, shown, _ = run_cli(
        "predict", str(trained / "abmil"), "--bags", str(trained / "features"), "--out", str(out)
    )
    assert status == 0
    frame = pd.read_csv(out / "predictions.csv", dtype={"slide": str})
    assert len(frame) == 48
    assert set(frame["answer"]) <= {"a", "b"}
    assert "000-0" in shown


def test_predict_packs_new_slides_with_the_dtype_of_the_run(files, tmp_path, run_cli):
    large = np.load(files.features / "000-0.npy") * 1e5  # beyond the range of float16
    np.save(files.features / "000-0.npy", large)
    run = run_study(files.settings(tmp_path / "run", epochs=1))
    words = ["--bags", str(files.features), "--out", str(tmp_path / "answers")]
    assert run_cli("predict", str(run.folder), *words)[0] == 0
    status, _, err = run_cli("cohort", "build", str(files.features), "--out", str(tmp_path / "store"))
    assert status == 2 and "carmil cohort build --dtype float32" in err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run", "null"),
        ("run", '{"splits": 1}'),
        ("models", "{}"),
        ("models", "[]"),
        ("metrics", "[]"),
        ("metrics", "{}"),
    ],
)
def test_report_and_explain_of_a_damaged_run_exit_with_one_line(trained, tmp_path, run_cli, name, content):
    run = tmp_path / "run"
    shutil.copytree(trained / "abmil", run)
    (run / f"{name}.json").write_text(content)
    for command in ("report", "explain"):
        status, _, err = run_cli(command, str(run))
        assert status == 2 and f"{name}.json " in err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "content", ["", "slide\tpatient\tfold_0\n000-0\tP000\ttrain\n", "slide\tpatient\nstranger\tP1\n"]
)
def test_damaged_splits_file_raises_an_error(files, tmp_path, content):
    run = run_study(files.settings(tmp_path / "run", epochs=1))
    (run.folder / "splits.tsv").write_text(content)
    with pytest.raises(CarmilError, match=r"splits\.tsv .*train again"):
        validation_places(run, open_store(run.folder / "cohort"))


def test_evaluate_applies_the_thresholds_of_the_run_to_another_cohort(trained, tmp_path, run_cli):
    other = make_files(tmp_path, seed=7, patients=10)
    out = tmp_path / "evaluation"
    status, shown, warned = run_cli(
        "evaluate",
        str(trained / "abmil"),
        "--bags",
        str(other.features),
        "--labels",
        str(other.labels),
        "--out",
        str(out),
    )
    assert status == 0
    facts = json.loads((out / "evaluation.json").read_text())
    assert facts["level"] == "patient"
    assert 0 <= facts["figures"]["auc"] <= 1
    assert "all models together" in shown
    assert "of another cohort" in shown
    assert facts["own_slides"] == 0
    assert "have names of slides that the run was trained on" in warned  # both cohorts use the same slide names


def test_compare_and_report_write_their_files(trained, tmp_path, run_cli):
    status, out, _ = run_cli(
        "compare", str(trained / "abmil"), str(trained / "mean"), "--out", str(tmp_path / "pairs.md")
    )
    assert status == 0
    assert "DeLong" in out
    assert "| abmil | mean |" in (tmp_path / "pairs.md").read_text()
    page = tmp_path / "page.html"
    assert run_cli("report", str(trained / "abmil"), "--out", str(page))[0] == 0
    assert "abmil" in page.read_text()


def break_width(files):
    np.save(files.features / "odd.npy", np.zeros((3, 2), np.float32))


def break_truncated(files):
    path = files.features / "001-0.npy"
    path.write_bytes(path.read_bytes()[:100])


def break_nan(files):
    np.save(files.features / "001-0.npy", np.full((3, WIDTH), np.nan, np.float32))


def break_inf(files):
    np.save(files.features / "001-0.npy", np.full((3, WIDTH), np.inf, np.float32))


def break_object(files):
    np.save(files.features / "001-0.npy", np.array([{}], dtype=object), allow_pickle=True)


def break_3d(files):
    np.save(files.features / "001-0.npy", np.zeros((2, 3, WIDTH), np.float32))


def break_text(files):
    np.save(files.features / "001-0.npy", np.array([["a"] * WIDTH]))


def break_all_empty(files):
    for path in files.features.glob("*.npy"):
        np.save(path, np.zeros((0, WIDTH), np.float32))


def break_no_files(files):
    for path in files.features.glob("*.npy"):
        path.unlink()


def break_one_class(files):
    files.labels.write_text(files.labels.read_text().replace(",b\n", ",a\n"))


def break_no_label_column(files):
    lines = [line.rsplit(",", 1)[0] for line in files.labels.read_text().splitlines()]
    files.labels.write_text("\n".join(lines))


def break_other_ids(files):
    files.labels.write_text(files.labels.read_text().replace("-0,", "-x,").replace("-1,", "-y,"))


def break_duplicates(files):
    lines = files.labels.read_text().splitlines()
    files.labels.write_text("\n".join([*lines, lines[1].replace(",a", ",b")]))


def break_few_patients(files):
    lines = files.labels.read_text().splitlines()
    files.labels.write_text("\n".join(lines[:5]))


def break_empty_table(files):
    files.labels.write_text("")


def break_regression(files):
    lines = files.labels.read_text().splitlines()
    files.labels.write_text(
        "\n".join([lines[0], *(f"{line.rsplit(',', 1)[0]},{i * 0.37}" for i, line in enumerate(lines[1:]))])
    )


def break_binary_table(files):
    files.labels.write_bytes(bytes(range(256)) * 4)


def break_xlsx(files):
    files.labels.rename(files.labels.with_suffix(".xlsx"))
    files.labels = files.labels.with_suffix(".xlsx")


BREAKS = [value for name, value in list(globals().items()) if name.startswith("break_")]


@pytest.mark.parametrize("damage", BREAKS, ids=lambda damage: damage.__name__.removeprefix("break_"))
def test_train_on_a_broken_cohort_exits_with_one_line_and_status_2(files, tmp_path, run_cli, damage):
    damage(files)
    run = tmp_path / "run"
    status, _, err = run_cli(
        "train", "--bags", str(files.features), "--labels", str(files.labels), "--out", str(run), *SMALL_TRAINING
    )
    assert status == 2
    last = err.strip().splitlines()[-1]
    assert last.startswith("carmil: ")
    assert "Traceback" not in err
    assert not (run / "metrics.json").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model", "abmill"], "did you mean 'abmil'"),
        (["--folds", "1"], "folds is 1"),
        (["--lr", "fast"], "expected a number"),
        (["--lr", "-1"], "learning rate"),
        (["--alpha", "0.2"], "no counterfactual branch"),
        (["--threshold", "best"], "best"),
        (["--patients", "median"], "expected one of mean, max, one-bag"),
        (["--label", "diagnose"], "diagnose"),
        (["--abstain", "1.5"], "abstain is 1.5"),
        (["--splits", "nowhere.tsv"], "nowhere.tsv"),
        (["--official"], "official split"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--warm-start", "nowhere"], "nowhere does not exist"),
        (["--positive", "z"], "z"),
        (["--seeds", "0"], "seeds is 0"),
        (["--bags", "nowhere"], "nowhere"),
        (["--labels", "nowhere.csv"], "nowhere.csv"),
    ],
)
def test_train_with_an_invalid_option_exits_with_one_line_and_status_2(
    files, tmp_path, run_cli, monkeypatch, words, expected
):
    monkeypatch.chdir(tmp_path)
    given = {
        "--bags": str(files.features),
        "--labels": str(files.labels),
        "--out": "run",
        "--model": "mean",
        "--folds": "3",
    }
    given |= dict(zip(words[::2], words[1::2], strict=False)) if len(words) > 1 else {}
    line = [word for pair in given.items() for word in pair] + (words if len(words) == 1 else [])
    status, _, err = run_cli("train", "--epochs", "2", "--device", "cpu", *line)
    assert status == 2
    last = err.strip().splitlines()[-1]
    assert last.startswith("carmil: ")
    assert expected in last


def test_predict_rejects_features_of_another_width_or_encoder(trained, tmp_path, run_cli):
    write_bag(Bag(id="x", features=np.zeros((4, WIDTH + 1), np.float32)), tmp_path / "wide", "npy")
    status, _, err = run_cli(
        "predict", str(trained / "abmil"), "--bags", str(tmp_path / "wide"), "--out", str(tmp_path / "p")
    )
    assert status == 2
    assert (
        f"{WIDTH + 1} features per tile, the run was trained on {WIDTH}: expected features made as the run's were"
        in err
    )
    for encoder in ("uni", "resnet50"):
        for i in range(12):
            features = np.random.default_rng(i).normal(size=(5, 4)).astype(np.float32) + i % 2
            place = {"coordinates": np.zeros((5, 2), np.float32), "coordinate_unit": "level0_px", "tile_size": 256.0}
            write_bag(Bag(id=f"s{i:02d}", features=features, encoder=encoder, **place), tmp_path / encoder, "trident")
    (tmp_path / "t.csv").write_text("slide,label\n" + "".join(f"s{i:02d},{i % 2}\n" for i in range(12)))
    run = tmp_path / "run"
    words = ("--labels", str(tmp_path / "t.csv"), "--out", str(run), "--folds", "2", "--epochs", "2", "--model", "mean")
    assert run_cli("train", "--bags", str(tmp_path / "uni"), *words)[0] == 0
    status, _, err = run_cli("predict", str(run), "--bags", str(tmp_path / "resnet50"), "--out", str(tmp_path / "q"))
    assert status == 2
    assert "encoded by resnet50" in err
    assert "trained on uni" in err


@pytest.fixture(scope="module")
def at_10x(tmp_path_factory):
    """Return a folder with a run on 256-pixel tiles at 1 um/px and features of slides at 1, 0.5 and unknown um/px."""
    folder = tmp_path_factory.mktemp("geometry")
    cohorts = {"own": 1.0, "same": 1.0, "other": 0.5, "unknown": None}
    for cohort, mpp in cohorts.items():
        for i in range(12):
            features = np.random.default_rng(i).normal(size=(5, 4)).astype(np.float32) + i % 2
            place = {"coordinates": np.zeros((5, 2), np.float32), "coordinate_unit": "level0_px", "tile_size": 512.0}
            tile_attributes = {"encoder": "uni", "geometry": TileGeometry(None if mpp is None else 256, mpp)}
            write_bag(
                Bag(id=f"{cohort}{i:02d}", features=features, **place, **tile_attributes), folder / cohort, "trident"
            )
        lines = "".join(f"{cohort}{i:02d},{i % 2}\n" for i in range(12))
        (folder / f"{cohort}.csv").write_text("slide,label\n" + lines)
    out = {
        "labels": folder / "own.csv",
        "out": folder / "run",
        "folds": 2,
        "epochs": 2,
        "model": "mean",
        "device": "cpu",
    }
    run_study(Settings(bags=folder / "own", **out))
    return folder


@pytest.mark.finding(n=1)
@pytest.mark.parametrize("command", ["predict", "evaluate", "explain"])
def test_predict_evaluate_and_explain_reject_tiles_of_another_geometry(at_10x, tmp_path, run_cli, command):
    def run(cohort, out):
        labels = ["--labels", str(at_10x / f"{cohort}.csv")] if command == "evaluate" else []
        words = ["--bags", str(at_10x / cohort), *labels, "--out", str(tmp_path / out), "--device", "cpu"]
        return run_cli(command, str(at_10x / "run"), *words)

    status, _, err = run("other", "a")
    last = err.strip().splitlines()[-1]
    assert status == 2 and "other has tiles of 256 pixels at 0.5 um/px, the run" in last
    assert "has 256 pixels at 1 um/px: cut them with `carmil slides tile --pixels 256 --tile-mpp 1`" in last
    status, _, err = run("unknown", "b")
    assert status == 0, err
    assert "the tile geometry (pixels, um/px) of" in err and "unknown is not fully known" in err
    status, _, err = run("same", "c")
    assert status == 0 and "tile geometry" not in err, err


@pytest.mark.finding(n=1)
def test_run_card_and_info_state_geometry_and_encoder(at_10x, run_cli):
    facts = json.loads((at_10x / "run" / "run.json").read_text())
    assert (facts["tile_pixels"], facts["tile_mpp"], facts["encoder"]) == (256, 1.0, "uni")
    assert "256 pixels at 1 um/px" in (at_10x / "run" / "card.md").read_text()
    _, out, _ = run_cli("cohort", "info", str(at_10x / "run" / "cohort"))
    assert "256 pixels at 1 um/px" in out and "uni" in out


@pytest.mark.finding(n=1)
def test_run_of_version_0_1_0_is_used_with_unchecked_tile_geometry(at_10x, tmp_path, run_cli):
    shutil.copytree(at_10x / "run", tmp_path / "old")
    facts = json.loads((tmp_path / "old" / "run.json").read_text())
    for name in ("tile_pixels", "tile_mpp", "pooling"):
        del facts[name]
    (tmp_path / "old" / "run.json").write_text(json.dumps(facts))
    words = ["--bags", str(at_10x / "other"), "--out", str(tmp_path / "p"), "--device", "cpu"]
    status, _, err = run_cli("predict", str(tmp_path / "old"), *words)
    assert status == 0 and "old is not fully known: it could not be checked that it is the same" in err


def test_train_with_a_file_as_out_folder_exits_with_an_error(files, tmp_path, run_cli):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    status, _, err = run_cli(
        "train", "--bags", str(files.features), "--labels", str(files.labels), "--out", str(blocked)
    )
    assert status == 2
    assert "is a file" in err


def test_train_on_a_full_disk_exits_with_one_line_and_can_be_resumed(files, tmp_path, run_cli, monkeypatch):
    words = (
        "train",
        "--bags",
        str(files.features),
        "--labels",
        str(files.labels),
        "--out",
        str(tmp_path / "run"),
        *SMALL_TRAINING,
    )
    import carmil.studies.evaluate_folds as evaluate_folds

    def disk_full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(evaluate_folds, "write_models", disk_full)
    status, _, err = run_cli(*words)
    assert status == 2
    assert "No space left on device" in err.strip().splitlines()[-1]
    monkeypatch.undo()
    status, _, _ = run_cli(*words)
    assert status == 0


def test_build_terminates_on_circular_symlinks(tmp_path, run_cli):
    (tmp_path / "a").mkdir()
    os.symlink(tmp_path / "a", tmp_path / "a" / "again")
    status, _, err = run_cli("cohort", "build", str(tmp_path / "a"), "--out", str(tmp_path / "store"))
    assert status == 2
    assert err.strip().splitlines()[-1].startswith("carmil: ")


def test_train_reads_label_tables_with_a_bom_and_semicolons(files, tmp_path, run_cli):
    text = files.labels.read_text().replace(",", ";")
    files.labels.write_bytes(b"\xef\xbb\xbf" + text.encode())
    words = ("--bags", str(files.features), "--labels", str(files.labels), "--out", str(tmp_path / "run"))
    assert run_cli("train", *words, *SMALL_TRAINING)[0] == 0
    assert Path(tmp_path / "run" / "metrics.json").exists()


@pytest.mark.finding(n=17)
def test_train_predict_and_evaluate_support_skip_broken(files, tmp_path, run_cli):
    (files.features / "000-0.npy").write_bytes(b"nothing")
    words = ("train", "--bags", str(files.features), "--labels", str(files.labels), "--out", str(tmp_path / "run"))
    status, _, err = run_cli(*words, *SMALL_TRAINING)
    assert (status, "--skip-broken" in err.strip().splitlines()[-1]) == (2, True)
    assert run_cli(*words, *SMALL_TRAINING, "--skip-broken")[0] == 0
    assert open_store(tmp_path / "run" / "cohort").index.left_out == ("000-0",)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["skip_broken"] is True
    for command in ("predict", "evaluate"):
        labels = ("--labels", str(files.labels)) if command == "evaluate" else ()
        again = (
            command,
            str(tmp_path / "run"),
            "--bags",
            str(files.features),
            *labels,
            "--out",
            str(tmp_path / command),
        )
        assert run_cli(*again)[0] == 2
        assert run_cli(*again, "--skip-broken")[0] == 0


@pytest.mark.finding(n=17)
def test_check_distinguishes_empty_labels_from_missing_slides(files, run_cli):
    text = files.labels.read_text().replace("000-0,P000,a", "000-0,P000,").replace("001-0,P001,b\n", "")
    files.labels.write_text(text)
    status, out, err = run_cli("cohort", "check", str(files.features), "--labels", str(files.labels))
    assert (status, table_of(out)) == (1, {("000-0", "empty label"), ("001-0", "no label")})
    assert "1 slide has an empty label in column 'label' (guessed) and is left out (line 2)" in err
    assert "1 of 48 bags has no label and is left out ('001-0')" in err


@pytest.mark.finding(n=17)
def test_error_names_the_guessed_label_column(trained, files, tmp_path, run_cli):
    lines = [line.rpartition(",")[0] for line in files.labels.read_text().splitlines()]
    rows = [f"{line},{i}.5" for i, line in enumerate(lines[1:])]
    (tmp_path / "ages.csv").write_text("\n".join([f"{lines[0]},age", *rows]))
    words = (
        "train",
        "--bags",
        str(files.features),
        "--labels",
        str(tmp_path / "ages.csv"),
        "--out",
        str(tmp_path / "run"),
    )
    status, _, err = run_cli(*words, *SMALL_TRAINING)
    assert (status, "column 'age' (guessed) has 48 different numbers" in err) == (2, True)
    assert "--label" in err.strip().splitlines()[-1]
    status, _, err = run_cli(*words, "--label", "age", *SMALL_TRAINING)
    assert (status, "column 'age' has 48" in err) == (2, True)
    (tmp_path / "ages.csv").write_text(files.labels.read_text().replace("slide_id", "wsi").replace("-", "_x"))
    status, _, err = run_cli(*words, *SMALL_TRAINING)
    assert (status, "column 'wsi' (guessed) has ids like '000_x0', the bags like '000-0'" in err) == (2, True)


@pytest.mark.finding(n=17)
def test_evaluate_maps_or_drops_labels_of_another_table(trained, tmp_path, run_cli):
    other = make_files(tmp_path / "other", patients=8, seed=9)
    text = other.labels.read_text().replace(",a\n", ",normal\n").replace(",b\n", ",tumour\n")
    other.labels.write_text(text.replace("000-0,P000,normal", "000-0,P000,not known"))
    words = ("evaluate", str(trained / "mean"), "--bags", str(other.features), "--labels", str(other.labels))
    words = (*words, "--out", str(tmp_path / "evaluation"))
    status, _, err = run_cli(*words)
    assert status == 2
    assert (
        "column 'label' (guessed) has labels that the run does not have, 'normal', 'not known', 'tumour'; its classes are 'a', "
        "'b': give the class of each with --map 'normal=CLASS' --map 'not known=CLASS' --map 'tumour=CLASS', leave slides out "
        "with --map 'normal='" in err
    )
    status, _, err = run_cli(*words, "--map", "normal=a", "--map", "tumor=b", "--map", "not known=")
    assert (status, "unknown label to map 'tumor'; did you mean 'tumour'?" in err) == (2, True)
    status, _, err = run_cli(*words, "--map", "normal=c")
    assert (status, "--map normal=c: unknown class of the run 'c'" in err) == (2, True)
    for wrong in ("normal", "=a"):
        assert "expected LABEL=CLASS" in run_cli(*words, "--map", wrong)[2]
    status, _, err = run_cli(*words, "--map", "normal=a", "--map", "tumour=b", "--map", "not known=")
    assert (status, "1 slide labelled 'not known' left out" in err) == (0, True)
    assert "guessed" in err and "positive class" not in err  # the run knows its positive class
    frame = pd.read_csv(tmp_path / "evaluation" / "predictions.csv", dtype={"slide": str})
    assert len(frame) == 15 and set(frame["label"]) == {"a", "b"}
    facts = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert facts["map"] == {"normal": "a", "tumour": "b", "not known": ""}


@pytest.mark.finding(n=17)
def test_predictions_are_also_written_as_csv(trained):
    table = pd.read_parquet(trained / "mean" / "predictions.parquet")
    pd.testing.assert_frame_equal(pd.read_csv(trained / "mean" / "predictions.csv"), table, check_dtype=False)


@pytest.mark.finding(n=17)
def test_command_printed_in_the_card_can_be_run_again(files, tmp_path, run_cli, monkeypatch):
    """Names need quotes, data are in another folder, and some settings exist only in YAML."""
    home = tmp_path / "my runs"
    (home / "of today").mkdir(parents=True)
    files.labels.rename(tmp_path / "it's the labels.csv")
    (home / "study.yaml").write_text("validation: 0.3\noptions: {hidden: 8}\nlr: [1e-3, 1e-2]\n")
    monkeypatch.chdir(home)
    words = ("--config", "study.yaml", "--bags", str(files.features), "--labels", "../it's the labels.csv")
    assert run_cli("train", *words, "--out", "of today/a run", *SMALL_TRAINING, "--patients", "max")[0] == 0
    run = home / "of today" / "a run"
    card = (run / "card.md").read_text()
    program, *again = shlex.split(re.search(r"```sh\n(carmil train .*)\n```", card)[1])
    assert (program, again[-2:]) == ("carmil", ["--out", "a run"])
    assert str(tmp_path) not in card
    monkeypatch.chdir(run.parent)
    status, _, err = run_cli(*again)
    assert (status, "has ended already; its figures are read" in err) == (0, True)
    assert run_cli(*again[:-1], "another")[0] == 0
    keys = [json.loads((run.parent / name / "run.json").read_text())["key"] for name in ("a run", "another")]
    assert keys[0] == keys[1]
    first, second = (pd.read_parquet(run.parent / name / "predictions.parquet") for name in ("a run", "another"))
    pd.testing.assert_frame_equal(first, second)


@pytest.mark.finding(n=2)
def test_evaluate_states_that_slides_are_the_test_slides_of_the_run(trained, tmp_path, run_cli):
    own = ("--bags", str(trained / "features"), "--labels", str(trained / "labels.csv"))
    words = (*own, "--out", str(tmp_path / "evaluation"))
    status, shown, _ = run_cli("evaluate", str(trained / "abmil"), *words)
    assert status == 0
    facts = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert facts["own_slides"] == len(read_run(trained / "abmil").predictions())
    assert "of its own cohort" in shown
    assert "all slides are the run's own test slides: no external validation" in shown
    assert "another cohort" not in shown and "all models together" not in shown
    assert "models tested on each slide" in shown


@pytest.mark.finding(n=18)
def test_evaluate_warns_that_the_auc_may_be_chance(trained, tmp_path, run_cli):
    other = make_files(tmp_path, seed=7, patients=10)
    table = pd.read_csv(other.labels, dtype=str)
    label = table.columns[-1]
    table[label] = table[label].sample(frac=1, random_state=3).to_numpy()
    patients = table.columns[1]
    table[label] = table.groupby(patients)[label].transform("first")
    table.to_csv(other.labels, index=False)
    words = ("--bags", str(other.features), "--labels", str(other.labels), "--out", str(tmp_path / "evaluation"))
    status, shown, _ = run_cli("evaluate", str(trained / "abmil"), *words)
    assert status == 0
    low = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())["intervals"]["auc"]["low"]
    assert low <= 0.5
    assert "the AUC may be chance" in shown


@pytest.mark.finding(n=17)
def test_card_lists_every_training_setting(trained):
    text = (trained / "abmil" / "card.md").read_text()
    settings = read_run(trained / "abmil").settings
    assert f"- input scaling: {SCALING[settings.scale]}" in text
    assert "- initial weights: " in text
    for words in (f"learning rate {settings.lr}", f"weight decay {settings.weight_decay:g}", "label smoothing"):
        assert words in text


@pytest.mark.finding(n=17)
def test_invalid_learning_rate_writes_no_run(files, tmp_path, run_cli):
    words = ("train", "--bags", str(files.features), "--labels", str(files.labels), "--out", str(tmp_path / "run"))
    status, _, error = run_cli(*words, *SMALL_TRAINING, "--lr", "-1")
    assert status == 2 and "a learning rate of -1.0" in error
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.finding(n=14)
@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_predict_and_evaluate_do_not_overwrite_a_run(trained, tmp_path, run_cli, command):
    labels = ("--labels", str(trained / "labels.csv")) if command == "evaluate" else ()
    before = (trained / "mean" / "predictions.csv").read_bytes()
    words = (command, str(trained / "mean"), "--bags", str(trained / "mean" / "cohort"), *labels)
    status, _, error = run_cli(*words, "--out", str(trained / "mean"))
    assert status == 2 and "holds a run, whose files would be overwritten" in error
    assert (trained / "mean" / "predictions.csv").read_bytes() == before


def test_missing_run_folder_exits_with_an_error_naming_it(tmp_path, run_cli):
    status, _, error = run_cli("report", str(tmp_path / "rnu"))
    assert status == 2 and f"{tmp_path / 'rnu'} does not exist" in error


@pytest.mark.finding(n=14)
@pytest.mark.parametrize("command", ["predict", "explain"])
def test_predict_and_explain_reject_features_that_are_nan(trained, tmp_path, run_cli, command):
    other = make_files(tmp_path, seed=7, patients=4)
    store = build_store(other.features, tmp_path / "store", dtype="float32", workers=1)
    path = store.path / "features.bin"
    path.write_bytes(np.full(path.stat().st_size // 4, np.nan, dtype=np.float32).tobytes())
    words = (command, str(trained / "abmil"), "--bags", str(store.path), "--out", str(tmp_path / "out"))
    status, _, error = run_cli(*words, "--device", "cpu")
    assert status == 2 and "'000-0' has a prediction that is not a number" in error
