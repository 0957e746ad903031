"""`carmil explain`: the files written per slide, the models that explain it, and resuming without repetition."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.metrics import average_precision_score

from carmil.bags.sources import Bag
from carmil.bags.store import open_store
from carmil.bags.writers import write_bag
from carmil.counterfactual import create_model
from carmil.evidence import explain
from carmil.evidence.explainers import default_explainer
from carmil.explanations import explain as command
from carmil.explanations.bag_evidence import explain_bag
from carmil.explanations.explain import explain_run
from carmil.runs.run import read_run
from carmil.runs.settings import PRESETS, Settings
from carmil.runs.slide_evidence import read_slide_evidence
from carmil.studies.subjects import find_run_store, own_subjects, validation_places
from carmil.studies.train import run_study

WIDTH = 6
ODD = "=s,00 é#"


def bag_of(name, label, rng, *, two_sided=False):
    """Return a bag whose instance 0 carries the label; its truth is 1 for class b and, if two-sided, -1 for class a."""
    n = int(rng.integers(4, 9))
    features = rng.normal(size=(n, WIDTH)).astype(np.float32)
    features[0, label] = 5.0
    truth = np.zeros(n, np.int64)
    truth[0] = 1 if label else -two_sided
    places = rng.integers(0, 9000, (n, 2)).astype(np.float32)
    return Bag(id=name, features=features, coordinates=places, coordinate_unit="level0_px", instance_labels=truth)


def cohort(folder, *, two_sided=False):
    rng = np.random.default_rng(0)
    names = [ODD, "summary", *(f"s{i:02d}" for i in range(2, 30))]
    for i, name in enumerate(names):
        write_bag(bag_of(name, i // 2 % 2, rng, two_sided=two_sided), folder / "features", "npz")
    lines = [{"slide": name, "patient": f"P{i // 2}", "label": "ab"[i // 2 % 2]} for i, name in enumerate(names)]
    pd.DataFrame(lines).to_csv(folder / "labels.csv", index=False)
    return {"bags": folder / "features", "labels": folder / "labels.csv", "device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Return a folder with runs of car/abmil (two seeds) and mean on instances with coordinates and truth."""
    folder = tmp_path_factory.mktemp("explained")
    where = cohort(folder, two_sided=True)
    given = {**PRESETS["0.1"], "folds": 3, "epochs": 8, "lr": 1e-2, "validation": 0.25}
    options = {"hidden": 8, "attention": 4}
    car = {"model": "car/abmil", "options": options, "distance": "l1"}
    run_study(Settings(**where, **given, **car, out=folder / "car", seeds=2))
    run_study(Settings(**where, **given, out=folder / "mean", model="mean", options={"hidden": 8}))
    return folder


@pytest.fixture(scope="module")
def evidence(study, tmp_path_factory):
    return run_explain(study / "car", tmp_path_factory.mktemp("out"), methods=("attention",), searched=True)


def run_explain(run, out, *, methods=(), searched=False, bags=None, log=lambda line: None):
    return explain_run(run, out, bags=bags, methods=methods, searched=searched, device="cpu", log=log)


def slide_of(evidence, slide):
    file = evidence.frame.set_index("slide")["file"][slide]
    return pd.read_parquet(evidence.folder / file)


def test_evidence_is_the_mean_over_models_tested_on_the_slide(study, evidence):
    run = read_run(study / "car")
    bags, population = find_run_store(run).bags(), run.population()
    frame = run.predictions()
    for slide in (ODD, "s07", "s20"):
        fold = set(frame[frame["slide"] == slide]["fold"])
        rows = [row for row, model in enumerate(run.models) if model.fold in fold]
        assert len(rows) == 2
        bag = bags[bags.ids.index(slide)]
        for method, name in (("path", "evidence"), ("attention", "attention")):
            by_hand = torch.stack([explain(population.member(row), bag, method) for row in rows]).mean(0)
            result = slide_of(evidence, slide)[[f"{name}_a", f"{name}_b"]].to_numpy()
            np.testing.assert_allclose(result, by_hand.numpy(), atol=1e-6)


def test_summary_agrees_with_predictions(study, evidence):
    frame = read_run(study / "car").predictions()
    p = frame.groupby("slide")["p_b"].mean()
    result = evidence.frame.set_index("slide")
    np.testing.assert_allclose(result["p_b"], p[result.index], atol=1e-5)
    assert (result["label"] == frame.groupby("slide")["label"].first()[result.index]).all()
    assert (result["prediction"] == np.where(result["p_b"] > 0.5, "b", "a")).all()


def test_evidence_table_has_one_row_per_instance_with_normalised_attention(study, evidence):
    run = read_run(study / "car")
    bags = find_run_store(run).bags()
    bag = bags[bags.ids.index("s05")]
    table = slide_of(evidence, "s05")
    assert list(table)[:7] == ["instance", "x", "y", "u", "a", "u_cf", "a_cf"]
    np.testing.assert_array_equal(table[["x", "y"]], bag.coordinates)
    np.testing.assert_array_equal(table["instance"], np.arange(len(table)))
    np.testing.assert_allclose(table[["a", "a_cf", "a_searched"]].sum(), 1, atol=1e-5)
    assert evidence.frame["residual"].max() < 1e-3
    assert evidence.frame["residual"].min() >= 0


def test_counterfactual_change_in_the_summary_equals_that_of_the_models(study, evidence):
    run = read_run(study / "car")
    bags, population = find_run_store(run).bags(), run.population()
    line = evidence.frame.set_index("slide").loc["s08"]
    rows = next(subject.models for subject in own_subjects(run, find_run_store(run)) if subject.slide == "s08")
    bag = bags[bags.ids.index("s08")]
    moved, change = [], []
    for row in rows:
        with torch.no_grad():
            prediction = population.member(row)(bag.features, bag.offsets)
        a, a_cf = prediction.scores.softmax(0), prediction.counterfactual.scores[:, 0].softmax(0)
        moved.append(float((a - a_cf).abs().sum()))
        change.append(prediction.counterfactual.logits[0, 0] - prediction.logits[0])
    assert line["counterfactual_attention_moved"] == pytest.approx(np.mean(moved), rel=1e-4)
    assert line["counterfactual_distance"] == pytest.approx(np.mean([float(c.norm()) for c in change]), rel=1e-4)
    assert line["counterfactual_grown"] == "ab"[int(torch.stack(change).mean(0).argmax())]


def test_maps_record_the_distance_to_another_answer(study, evidence):
    run = read_run(study / "car")
    rows = next(subject.models for subject in own_subjects(run, find_run_store(run)) if subject.slide == "s08")
    line = evidence.frame.set_index("slide").loc["s08"]
    found = read_slide_evidence(evidence.folder / line["file"])
    for i, name in enumerate("ab"):
        (one,) = found.maps([name])
        assert one.turning == pytest.approx(run.decision(rows).turning(line[["p_a", "p_b"]].astype(float), i))
        assert one.turning > 0
    assert found.maps(["factual"])[0].turning is None


@pytest.mark.finding(n=3)
def test_slides_with_negligible_class_differences_are_counted(study, evidence, tmp_path, run_cli):
    for slide in (ODD, "s07", "s20"):
        maps = slide_of(evidence, slide)[["evidence_a", "evidence_b"]].to_numpy().astype(float)
        apart = evidence.frame.set_index("slide")["logits_apart"][slide]
        assert apart == pytest.approx(np.abs(maps[:, 0] - maps[:, 1]).sum(), rel=1e-4) and apart > 0.01
    assert evidence.summary.negligible == 0
    shutil.copytree(study / "car", tmp_path / "still")
    path = tmp_path / "still" / "weights.safetensors"
    weights = load_file(path)
    save_file({name: value * (0 if "classif" in name else 1) for name, value in weights.items()}, path)
    _, out, err = run_cli("explain", str(tmp_path / "still"), "--device", "cpu")
    assert "negligible evidence: on 30 of 30 slides all tiles together change the difference between any two" in out, (
        err
    )


def test_class_shift_counts_correctly_predicted_slides(evidence):
    frame = evidence.frame
    right = frame[frame["label"] == frame["prediction"]]
    for which in ("counterfactual", "searched"):
        matrix = np.array(evidence.summary.counterfactuals[which].class_shift.matrix)
        assert matrix.sum() == len(right) > 0
        assert matrix[1, 0] == ((right["label"] == "b") & (right[f"{which}_grown"] == "a")).sum()


def test_successful_counterfactual_search_changes_the_prediction(evidence):
    reached = evidence.frame[evidence.frame["searched_reached"] == 1]
    assert len(reached) > 0
    assert (reached["searched_prediction"] != reached["prediction"]).mean() > 0.9  # two models may have disagreed
    assert set(reached["searched_steps"]) != {0.0}


def test_agreement_with_the_truth_equals_scikit_learn(study, evidence):
    bags = find_run_store(read_run(study / "car")).bags()
    positive, both = [], []
    for slide in evidence.frame["slide"]:
        place = bags.ids.index(slide)
        truth = bags.instance_labels[bags.offsets[place] : bags.offsets[place + 1]].numpy()
        scores = slide_of(evidence, slide)["evidence_b"]
        if (truth > 0).any():
            positive.append(average_precision_score(truth > 0, scores))
            both.append(positive[-1])
        else:
            both.append(average_precision_score(truth < 0, -scores))
    result = evidence.summary.truth.agreement["path"]
    assert result["auprc_plus"].value == pytest.approx(np.mean(positive))
    assert result["auprc_plus"].slides == len(positive)
    assert result["auprc_both_mirror"].value == pytest.approx(np.mean(both))
    assert result["auprc_plus"].low <= result["auprc_plus"].value <= result["auprc_plus"].high
    assert {"auroc", "ndcg", "froc", "dice"} <= set(result)
    assert evidence.summary.truth.negative_rule.startswith("mirror")


def test_dice_threshold_is_chosen_on_validation_bags_only(study):
    run = read_run(study / "car")
    store = find_run_store(run)
    places = validation_places(run, store)
    subjects = own_subjects(run, store)
    for row, chosen in enumerate(places):
        assert chosen
        assert not {subject.place for subject in subjects if row in subject.models} & set(chosen)
    table = pd.read_csv(study / "car" / "splits.tsv", sep="\t")
    of_first = table[table[f"fold_{run.models[0].fold}"] == "val"].iloc[:, 0]
    assert {store.ids[place] for place in places[0]} == set(of_first)


def test_interrupted_explain_resumes_and_writes_identical_files(study, evidence, tmp_path, monkeypatch):
    explained = []

    def killed_after_five(models, bag, *words, **more):
        if len(explained) == 5:
            raise KeyboardInterrupt
        explained.append(bag.ids[0])
        return explain_bag(models, bag, *words, **more)

    monkeypatch.setattr(command, "explain_bag", killed_after_five)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run_explain(study / "car", out, methods=("attention",), searched=True)
    assert len(list(out.glob("*.parquet"))) == 5
    damaged = next(out.glob("s*.parquet"))
    damaged.write_bytes(damaged.read_bytes()[:200])
    monkeypatch.undo()
    again = run_explain(study / "car", out, methods=("attention",), searched=True)
    assert again.written == 30 - 4
    for name in (*again.frame["file"], "summary.json", "summary.csv"):
        assert (out / name).read_bytes() == (evidence.folder / name).read_bytes(), name
    assert run_explain(study / "car", out, methods=("attention",), searched=True).written == 0


def test_explain_into_a_folder_with_other_evidence_exits_with_an_error(study, evidence, run_cli):
    status, _, err = run_cli("explain", str(study / "car"), "--out", str(evidence.folder), "--device", "cpu")
    assert status == 2
    assert "holds another explanation (its methods, searched differ)" in err


def test_slides_with_unusual_names_have_unique_files(evidence):
    files = evidence.frame.set_index("slide")["file"]
    assert files.is_unique
    assert files["summary"] != "summary.parquet"
    assert set(pd.read_parquet(evidence.folder / "summary.parquet")["slide"]) == set(files.index)
    assert "/" not in files[ODD]
    assert files["s05"] == "s05.parquet"


@pytest.mark.finding(n=16)
def test_slide_name_that_is_a_formula_is_escaped_in_summary_csv(evidence):
    table = pd.read_csv(evidence.folder / "summary.csv", dtype={"slide": str})
    assert f"'{ODD}" in set(table["slide"]) and ODD not in set(table["slide"])
    assert ODD in set(pd.read_parquet(evidence.folder / "summary.parquet")["slide"])


def test_new_slides_are_explained_by_all_models_and_the_cohort_of_the_run_is_recognised(study, tmp_path):
    rng = np.random.default_rng(5)
    for i in range(3):
        write_bag(bag_of(f"new{i}", i % 2, rng), tmp_path / "new", "npz")
    result = run_explain(study / "car", tmp_path / "out", bags=tmp_path / "new")
    assert result.frame["models"].tolist() == [6, 6, 6]
    assert result.frame["label"].isna().all()
    assert "dice" not in result.summary.truth.agreement["path"]
    assert result.summary.counterfactual.class_shift is None
    shutil.copytree(study / "car" / "cohort", tmp_path / "moved")
    logged = []
    own = run_explain(study / "car", tmp_path / "own", bags=tmp_path / "moved", log=logged.append)
    assert set(own.frame["models"]) == {2}
    assert any("is the cohort of the run" in line for line in logged)


def test_feature_files_of_the_run_are_recognised(study, evidence, tmp_path):
    logged = []
    own = run_explain(
        study / "car", tmp_path / "out", methods=("attention",), bags=study / "features", log=logged.append
    )
    assert set(own.frame["models"]) == {2}
    assert any("is the cohort of the run" in line for line in logged)
    pd.testing.assert_frame_equal(slide_of(own, "s07"), slide_of(evidence, "s07")[list(slide_of(own, "s07"))])
    assert "dice" in own.summary.truth.agreement["path"]


def test_slides_merged_into_patient_bags_are_recognised(study, tmp_path):
    where = cohort(tmp_path / "files")
    options = {"hidden": 8}
    given = {"folds": 3, "epochs": 2, "patients": "one-bag", "out": tmp_path / "run"}
    run_study(Settings(**where, **given, model="mean", options=options))
    result = run_explain(tmp_path / "run", tmp_path / "out", bags=tmp_path / "files" / "features")
    assert set(result.frame["slide"]) == {f"P{i}" for i in range(15)}
    assert set(result.frame["models"]) == {1}


@pytest.mark.parametrize("kind", ["run", "sweep"])
def test_explain_into_a_folder_with_a_run_or_sweep_exits_with_an_error(study, tmp_path, run_cli, kind):
    (tmp_path / f"{kind}.json").write_text("{}")
    before = sorted(path.name for path in (study / "car").iterdir())
    out = study / "car" if kind == "run" else tmp_path
    status, _, err = run_cli("explain", str(study / "car"), "--out", str(out), "--device", "cpu")
    assert status == 2
    assert f"--out {out} holds a {kind}" in err.strip().splitlines()[-1]
    assert sorted(path.name for path in (study / "car").iterdir()) == before
    assert [path.name for path in tmp_path.iterdir()] == [f"{kind}.json"]


def test_dice_thresholds_are_computed_once_and_cached(study, tmp_path, monkeypatch):
    first = run_explain(study / "car", tmp_path / "out")
    monkeypatch.setattr(command, "dice_thresholds", lambda *words: pytest.fail("chosen again"))
    again = run_explain(study / "car", tmp_path / "out")
    assert again.written == 0
    assert again.summary.truth == first.summary.truth
    assert np.isfinite(first.summary.truth.agreement["path"]["dice"].value)


def test_explain_prints_agreement_and_the_output_folder(study, tmp_path, run_cli):
    status, out, err = run_cli("explain", str(study / "mean"), "--out", str(tmp_path / "out"), "--device", "cpu")
    assert status == 0
    assert "AUPRC+" in out
    assert "30 slides to" in out
    assert "its evidence is patch_scores" in err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["evidence"] == "patch_scores"
    assert "counterfactual" not in summary
    assert list(pd.read_parquet(tmp_path / "out" / "s03.parquet")) == ["instance", "x", "y", "evidence_a", "evidence_b"]


@pytest.mark.parametrize(
    ("run", "words", "expected"),
    [
        ("nowhere", [], "nowhere does not exist"),
        ("features", [], "is not a run"),
        ("car", ["--methods", "pathh"], "did you mean 'path'"),
        ("car", ["--methods", "patch_scores"], "'car/abmil', which 'patch_scores' does not fit"),
        ("mean", ["--methods", "path"], "which 'path' does not fit; expected one of coalition"),
        ("mean", ["--searched"], "--searched needs attention pooling"),
        ("car", ["--bags", "nowhere"], "nowhere"),
    ],
)
def test_invalid_arguments_exit_with_one_line_and_status_2(study, tmp_path, run_cli, monkeypatch, run, words, expected):
    monkeypatch.chdir(study)
    status, _, err = run_cli("explain", run, "--out", str(tmp_path / "out"), "--device", "cpu", *words)
    assert status == 2
    assert expected in err.strip().splitlines()[-1]
    assert not list(tmp_path.glob("out/*.parquet"))


def test_missing_cohort_exits_with_an_error_naming_bags_option(study, tmp_path, run_cli):
    shutil.copytree(study / "car", tmp_path / "run", ignore=shutil.ignore_patterns("cohort"))
    status, _, err = run_cli("explain", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--device", "cpu")
    assert status == 2
    assert err.strip().splitlines()[-1].startswith(f"carmil: the cohort of {tmp_path / 'run'} is neither at")
    assert "--bags" in err
    assert not (tmp_path / "out").exists()


def test_store_with_another_fingerprint_is_not_the_store_of_the_run(study, tmp_path):
    run = read_run(study / "car")
    shutil.copytree(study / "car" / "cohort", tmp_path / "store")
    assert find_run_store(run, tmp_path / "store") is not None
    index = json.loads((tmp_path / "store" / "index.json").read_text())
    (tmp_path / "store" / "index.json").write_text(json.dumps(index | {"fingerprint": "another"}))
    assert open_store(tmp_path / "store").fingerprint == "another"
    assert find_run_store(run, tmp_path / "store") is None


def test_model_with_one_map_per_class_has_one_attention_column_per_class():
    model = create_model("clam.mb", WIDTH, 2, hidden=8, attention=4).eval()
    bag = _bags()
    result = explain_bag([model], bag, ["path"], ("a", "b"), searched=False)
    assert {"u_a", "u_b", "a_a", "a_b"} <= set(result.columns)
    assert not torch.equal(result.columns["u_a"], result.columns["u_b"])
    prediction = model(bag.features, bag.offsets)
    torch.testing.assert_close(result.columns["u_b"], prediction.scores[:, 1].detach())


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("abmil", "path"),
        ("car/abmil.gated", "path"),
        ("transmil", "attention"),
        ("additive", "patch_scores"),
        ("mean", "patch_scores"),
    ],
)
def test_default_explainer_is_path_evidence_if_supported(name, default):
    assert default_explainer(create_model(name, WIDTH, 2)) == default


def _bags():
    from carmil.bags.bags import Bags

    return Bags.from_list([torch.randn(7, WIDTH)])
