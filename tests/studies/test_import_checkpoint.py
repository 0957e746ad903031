"""`carmil import`: a checkpoint of another tool becomes a run that every command reads."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.models.made_checkpoints import clam_logits, clam_state, xmil_state

from carmil.bags.bags import Bags
from carmil.bags.sources import Bag
from carmil.bags.writers import write_bag
from carmil.errors import CarmilError
from carmil.evidence import explain
from carmil.explanations.explain import explain_run
from carmil.explanations.faithfulness import measure_faithfulness
from carmil.runs.run import read_run
from carmil.runs.settings import Settings
from carmil.studies.evaluate import evaluate_run, predict_bags
from carmil.studies.import_checkpoint import import_checkpoint
from carmil.studies.train import run_study
from carmil.viewer.cases import read_cases

WIDTH, SLIDES = 6, 12
OPTIONS = {"device": "cpu", "log": lambda line: None}


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def write_features(folder, width):
    rng = np.random.default_rng(1)
    for i in range(SLIDES):
        write_bag(Bag(f"s{i:02d}", rng.normal(size=(5 + i, width)).astype(np.float32)), folder / "features", "npy")
    rows = [f"s{i:02d},P{i // 2},{('normal', 'tumor')[i // 2 % 2]}" for i in range(SLIDES)]
    (folder / "labels.csv").write_text("\n".join(["slide,patient,label", *rows, ""]))
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a folder with features, labels and a checkpoint of CLAM."""
    folder = write_features(tmp_path_factory.mktemp("files"), WIDTH)
    torch.manual_seed(0)
    torch.save({"epoch": 7, "state_dict": clam_state(width=WIDTH)}, folder / "clam.pt")
    return folder


@pytest.fixture(scope="module")
def plain(files):
    """Return a run without slides."""
    return import_checkpoint(files / "clam.pt", "clam", files / "plain", classes=("normal", "tumor"), **OPTIONS)


@pytest.fixture(scope="module")
def measured(files):
    """Return a run that was measured on the slides."""
    with_slides = {"bags": files / "features", "labels": files / "labels.csv"}
    return import_checkpoint(
        files / "clam.pt", "clam", files / "measured", classes=("normal", "tumor"), **with_slides, **OPTIONS
    )


def expected_probabilities(files):
    """Return p(tumor) of each slide by CLAM's equations."""
    state = torch.load(files / "clam.pt", weights_only=True)["state_dict"]
    logits = [
        clam_logits(state, np.load(files / "features" / f"s{i:02d}.npy").astype(np.float64)) for i in range(SLIDES)
    ]
    return np.array([1 / (1 + np.exp(first - second)) for first, second in logits])


def test_imported_run_predicts_new_slides_as_the_other_tool_does(files, plain, tmp_path):
    frame = predict_bags(plain.folder, files / "features", tmp_path / "out", **OPTIONS)
    p = expected_probabilities(files)
    assert np.allclose(frame["p_tumor"], p, atol=1e-6)
    assert frame["answer"].to_list() == ["tumor" if value >= 0.5 else "normal" for value in p]
    assert set(frame["answer_rule"]) == {"tumor if p(tumor) >= 0.5, else normal (threshold given)"}


def test_run_without_slides_has_one_model_and_no_figures(plain):
    run = read_run(plain.folder)
    assert (len(run.models), run.data.splits, run.data.slides, dict(run.metrics.summary)) == (1, (), 0, {})
    assert (run.settings.model, run.data.width, run.data.imported.architecture) == ("clam.sb", WIDTH, "CLAM-SB, gated")
    assert run.predictions().empty
    card = (plain.folder / "card.md").read_text()
    assert "Features must come from the encoder that the model was trained on" in card and "Figures" not in card


def test_classes_without_given_names_are_numbered_with_a_note(files, tmp_path):
    lines: list[str] = []
    run = import_checkpoint(files / "clam.pt", "clam", tmp_path / "run", device="cpu", log=lines.append)
    note = "clam.pt does not name its classes: they are called class_0, class_1; --classes names them"
    assert run.outputs == ("class_0", "class_1") and lines == [note] and run.notes == (note,)


def test_explain_and_evaluate_accept_new_slides(files, plain, tmp_path):
    evidence = explain_run(
        plain.folder, tmp_path / "e", bags=files / "features", methods=("attention",), searched=False, **OPTIONS
    )
    assert len(evidence.frame) == SLIDES and evidence.frame["residual"].max() < 1e-5
    assert np.allclose(evidence.frame["p_tumor"], expected_probabilities(files), atol=1e-6)
    found = evaluate_run(plain.folder, files / "features", files / "labels.csv", tmp_path / "v", named={}, **OPTIONS)
    assert (found.cases, found.level, found.own) == (SLIDES // 2, "patient", 0)


def test_labelled_slides_are_the_only_test_fold(files, measured):
    run = read_run(measured.folder)
    frame = run.predictions()
    assert run.data.splits == (((3,) * SLIDES,),) and set(frame["fold"]) == {0}
    assert np.allclose(frame.set_index("slide").sort_index()["p_tumor"], expected_probabilities(files), atol=1e-6)
    assert frame["label"].to_list() == [("normal", "tumor")[i // 2 % 2] for i in range(SLIDES)]
    external = evaluate_run(run.folder, files / "features", files / "labels.csv", files / "v", named={}, **OPTIONS)
    assert external.own == SLIDES
    assert np.isclose(external.figures["auc"], run.metrics.summary["auc"].mean)


def test_evidence_faithfulness_and_viewer_show_the_slides(measured):
    evidence = explain_run(measured.folder, None, bags=None, methods=(), searched=False, **OPTIONS)
    assert len(evidence.frame) == SLIDES and evidence.frame["residual"].max() < 1e-5
    (found,) = measure_faithfulness(
        [measured.folder], measured.folder / "faithfulness", methods=(), steps=10, random_orders=1, **OPTIONS
    )
    assert [one.method for one in found.maps] == ["path", "attention"] and found.slides == SLIDES
    assert found.maps[0].figures["deletion_area"].slides == found.rightly_answered > 0
    cases = read_cases(measured.folder)
    assert len(cases) == SLIDES and cases.evidence is not None


def test_srg_equals_a_loop_over_the_equations_of_the_other_tool(files, measured):
    (found,) = measure_faithfulness(
        [measured.folder], files / "srg", methods=("path",), steps=10, random_orders=1, **OPTIONS
    )
    state = torch.load(files / "clam.pt", weights_only=True)["state_dict"]
    model, areas = measured.population("cpu").member(0), []
    for i in range(SLIDES):
        x, label = np.load(files / "features" / f"s{i:02d}.npy"), i // 2 % 2

        def p(rows, x=x, label=label):
            logits = clam_logits(state, x[np.sort(rows)] if len(rows) else np.zeros_like(x))
            return 1 / (1 + np.exp(logits[1 - label] - logits[label]))

        n = len(x)
        if p(range(n)) > 0.5:
            evidence = explain(model, Bags.from_list([x]), "path")[:, label].numpy()
            most, least = np.argsort(-evidence, kind="stable"), np.argsort(evidence, kind="stable")
            areas.append(np.mean([p(least[n * s // 10 :]) - p(most[n * s // 10 :]) for s in range(11)]))
    assert found.maps[0].figures["srg"].slides == len(areas) > 3
    assert found.maps[0].figures["srg"].value == pytest.approx(np.mean(areas), abs=1e-6)


def test_report_states_the_origin_of_the_model_and_shows_no_training(files, measured, run_cli):
    status, out, _ = run_cli("report", str(measured.folder))
    assert status == 0, out
    page = (measured.folder / "report.html").read_text()
    assert "clam.sb imported from clam, CLAM-SB, gated, clam.pt; 12 slides of 6 patients" in page
    assert "clam.pt does not say which slides its model was trained on" in page
    assert (
        "carmil import clam.pt --from clam --classes normal,tumor --bags features --labels labels.csv --out measured"
        in page
    )
    for absent in ("How it learned", "validation bags", "learning rate", "carmil train"):
        assert absent not in page


def test_repeated_import_writes_the_same_run_and_another_checkpoint_is_refused(files, plain, tmp_path):
    again = import_checkpoint(files / "clam.pt", "clam", plain.folder, classes=("normal", "tumor"), **OPTIONS)
    assert again.key == plain.key
    torch.save(clam_state(width=WIDTH), tmp_path / "other.pt")
    with pytest.raises(CarmilError, match="holds another run"):
        import_checkpoint(tmp_path / "other.pt", "clam", plain.folder, classes=("normal", "tumor"), **OPTIONS)


def test_changed_origin_in_a_run_raises_an_error(files, tmp_path):
    run = import_checkpoint(files / "clam.pt", "clam", tmp_path / "run", **OPTIONS)
    path = run.folder / "run.json"
    path.write_text(path.read_text().replace(run.data.imported.sha256, "0" * 64))
    with pytest.raises(CarmilError, match="was changed after it was written"):
        read_run(run.folder)


@pytest.mark.parametrize("words", [("explain",), ("faithfulness",), ("view",), ("report",), ("compare", "measured")])
def test_commands_that_need_slides_exit_with_one_line(words, files, plain, measured, run_cli):
    more = [str(files / word) for word in words[1:]]
    status, _, error = run_cli(words[0], str(plain.folder), *more)
    assert status == 2
    assert error.startswith(f"carmil: {plain.folder} was imported without slides") and error.count("\n") == 1


def test_files_of_unknown_models_exit_with_one_line_and_execute_no_code(files, tmp_path, run_cli):
    mark = tmp_path / "executed"
    torch.save({"state_dict": {"evil": Evil(mark)}}, tmp_path / "evil.pt")
    (tmp_path / "cut.pt").write_bytes((files / "clam.pt").read_bytes()[:900])
    torch.save({"fc.weight": torch.ones(2, 3), "evil": Evil(mark)}, tmp_path / "unknown.pt")
    (tmp_path / "folder").mkdir()
    for name, words in {
        "evil.pt": "holds no tensors under names",
        "cut.pt": "cannot be read",
        "unknown.pt": "its weights are fc.weight (2, 3)",
        "absent.pt": "does not exist",
        "folder": "is a folder: expected a file",
    }.items():
        status, _, error = run_cli("import", str(tmp_path / name), "--from", "clam", "--out", str(tmp_path / "run"))
        assert status == 2 and words in error and str(tmp_path / name) in error and error.count("\n") == 1
    assert not mark.exists() and not (tmp_path / "run").exists()


def test_checkpoint_with_a_program_beside_its_weights_is_imported_without_running_it(files, tmp_path):
    mark = tmp_path / "executed"
    state = clam_state(width=WIDTH)
    torch.save({"model": state, "settings": Evil(mark)}, tmp_path / "evil.pt")
    run = import_checkpoint(tmp_path / "evil.pt", "clam", tmp_path / "run", **OPTIONS)
    assert torch.equal(
        run.population().state()["attention.score.weight"][0], state["attention_net.3.attention_c.weight"]
    )
    assert not mark.exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"classes": ("a", "b", "c")}, r"--classes a,b,c: .*clam\.pt has 2 outputs, expected as many different names"),
        ({"classes": ("a", "a")}, "expected as many different names"),
        ({"labels": Path("labels.csv")}, "--labels .* needs the features of its slides"),
        ({"bags": Path("features")}, "--bags needs --classes, in the order of the model's outputs"),
        ({"bags": Path("wide"), "classes": ("a", "b")}, "features has 3 features per tile, the model reads 6"),
        ({"bags": Path("features"), "classes": ("a", "b")}, "features came without labels: name a table with --labels"),
        (
            {"bags": Path("features"), "labels": Path("labels.csv"), "classes": ("tumor", "benign")},
            r"has a label that the run does not have, 'normal'; .* --map 'normal=CLASS'",
        ),
    ],
)
def test_options_that_do_not_fit_the_checkpoint_are_refused(given, words, files, tmp_path):
    write_features(tmp_path / "w", 3)
    places = {"features": files / "features", "labels.csv": files / "labels.csv", "wide": tmp_path / "w" / "features"}
    given = {name: places.get(str(value), value) if isinstance(value, Path) else value for name, value in given.items()}
    with pytest.raises(CarmilError, match=words):
        import_checkpoint(files / "clam.pt", "clam", tmp_path / "run", **given, **OPTIONS)
    assert not (tmp_path / "run" / "run.json").exists()


def test_settings_beside_the_checkpoint_must_agree_with_its_weights(tmp_path):
    torch.save(xmil_state(width=4), tmp_path / "best_model.pt")
    settings = {"input_dim": 4, "num_classes": 2, "no_bias": False, "optimizer": "SGD"}
    (tmp_path / "args.json").write_text(json.dumps(settings))
    lines: list[str] = []
    import_checkpoint(tmp_path / "best_model.pt", "xmil", tmp_path / "run", device="cpu", log=lines.append)
    assert lines[0] == f"{tmp_path / 'args.json'} agrees with the weights (input_dim 4, num_classes 2, no_bias False)"
    (tmp_path / "args.json").write_text(json.dumps({**settings, "objective": "bce-with-logit"}))
    with pytest.raises(
        CarmilError, match=r"args\.json: objective is 'bce-with-logit', but best_model\.pt holds AttentionMIL with"
    ):
        import_checkpoint(tmp_path / "best_model.pt", "xmil", tmp_path / "run", **OPTIONS)
    (tmp_path / "other.json").write_text('{"lr": 1}')
    with pytest.raises(CarmilError, match=r"other\.json has no settings of AttentionMIL: expected aggregation_model, "):
        import_checkpoint(
            tmp_path / "best_model.pt", "xmil", tmp_path / "run", config=tmp_path / "other.json", **OPTIONS
        )


def test_features_of_an_encoder_other_than_the_one_named_at_import_are_refused(files, tmp_path):
    run = import_checkpoint(files / "clam.pt", "clam", tmp_path / "run", encoder="resnet50", **OPTIONS)
    assert read_run(run.folder).data.encoder == "resnet50"
    bag = Bag("s0", np.ones((3, WIDTH), np.float32), encoder="uni")
    write_bag(bag, tmp_path / "features", "trident")
    with pytest.raises(CarmilError, match="was encoded by uni, the run was trained on resnet50"):
        predict_bags(run.folder, tmp_path / "features", tmp_path / "out", **OPTIONS)


def test_class_without_slides_keeps_its_position(files, tmp_path):
    state = clam_state(width=WIDTH, classes=3, multi=True)
    torch.save(state, tmp_path / "three.pt")
    given = {"bags": files / "features", "labels": files / "labels.csv", "classes": ("benign", "normal", "tumor")}
    run = import_checkpoint(tmp_path / "three.pt", "clam", tmp_path / "run", **given, **OPTIONS)
    row = run.predictions().set_index("slide").loc["s03"]
    logits = clam_logits(state, np.load(files / "features" / "s03.npy").astype(np.float64))
    assert (run.outputs, run.data.class_counts) == (given["classes"], (0, SLIDES // 2, SLIDES // 2))
    assert np.allclose(
        row[["p_benign", "p_normal", "p_tumor"]].astype(float), np.exp(logits) / np.exp(logits).sum(), atol=1e-6
    )
    assert row["label"] == "tumor" and row["answer_rule"] == "the most probable class"


def test_training_does_not_start_from_an_imported_run(files, measured, tmp_path):
    study = dict(bags=files / "features", labels=files / "labels.csv", out=tmp_path / "run", model="car/clam.sb")
    with pytest.raises(CarmilError, match="was trained on other data or folds"):
        run_study(
            Settings(
                **study, warm_start=measured.folder, options=measured.settings.options, folds=2, epochs=1, device="cpu"
            )
        )


@pytest.mark.parametrize(
    ("name", "tool", "width"),
    [("clam_demo", "clam", 1024), ("xmil_attnmil_camelyon", "xmil", 768), ("xmil_attnmil_nsclc", "xmil", 768)],
)
def test_published_checkpoints_are_explained_and_probed(name, tool, width, shared_data, tmp_path):
    folder = write_features(tmp_path, width)
    given = {"classes": ("normal", "tumor"), "bags": folder / "features", "labels": folder / "labels.csv"}
    run = import_checkpoint(shared_data / "checkpoints" / f"{name}.pt", tool, tmp_path / "run", **given, **OPTIONS)
    evidence = explain_run(run.folder, None, bags=None, methods=("lrp",), searched=False, **OPTIONS)
    assert evidence.frame["residual"].max() < 1e-4
    (found,) = measure_faithfulness([run.folder], tmp_path / "f", methods=(), steps=10, random_orders=1, **OPTIONS)
    assert found.slides == SLIDES and np.isfinite(found.maps[0].figures["randomisation"].value)
