"""A slide has the same answer in every output: the decision rule of the run's models."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from carmil.explanations.explain import explain_run
from carmil.report.run import write_report
from carmil.runs.run import read_run
from carmil.studies.evaluate import evaluate_run, predict_bags
from carmil.studies.subjects import JOINT, RULE
from carmil.studies.train import run_study
from carmil.targets.decision import Decision, joint_decision, rule_origin
from carmil.viewer.cases import read_cases
from carmil.viewer.responses import Responses
from carmil.viewer.slide_files import SlideFiles

from .conftest import make_files

NAMED = {"slide": None, "patient": None, "label": None}


def ignore_log(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Return a run with two folds and two seeds whose thresholds are far from 0.5, which changes some answers."""
    folder = tmp_path_factory.mktemp("decisions")
    files = make_files(folder, patients=12, slides=1)
    run_study(files.settings(folder / "run", folds=2, seeds=2, epochs=12), log=ignore_log)
    frame = pd.read_parquet(folder / "run" / "predictions.parquet")
    at = float(np.quantile(frame["p_b"], 0.2 if frame["p_b"].median() < 0.5 else 0.8))
    assert abs(at - 0.5) > 0.1
    models = json.loads((folder / "run" / "models.json").read_text())
    for i, model in enumerate(models):
        model["threshold"] = at + 1e-4 * i
    (folder / "run" / "models.json").write_text(json.dumps(models))
    return folder, files


def answers_in_report(run, tmp_path) -> dict[str, str]:
    write_report(run, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    table = text[text.index('<table id="table"') :]
    heads = re.findall(r"<button[^>]*>(.*?)</button>", table[: table.index("</thead>")])
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr class=.*?</tr>", table, re.DOTALL)]
    return {row[heads.index("slide")]: row[heads.index("answer")] for row in rows}


def answers_in_viewer(folder) -> dict[str, str]:
    cases = read_cases(folder)
    table = json.loads(Responses(cases, SlideFiles(None, ())).cohort())["cases"]
    return {row["slide"]: row["prediction"] for row in table}


@pytest.mark.finding(n=2)
def test_every_output_gives_the_same_answer_for_a_slide(study, tmp_path):
    folder, files = study
    run = read_run(folder / "run")
    frame = run.predictions()
    mean = frame.groupby("slide")[["p_a", "p_b"]].mean()
    expected = {}
    for slide, p in mean["p_b"].items():
        fold = frame.loc[frame["slide"] == slide, "fold"].iloc[0]
        at = np.mean([model.threshold for model in run.models if model.fold == fold])
        expected[slide] = "b" if p >= at else "a"
    most_probable = {slide: "b" if row["p_b"] > row["p_a"] else "a" for slide, row in mean.iterrows()}
    assert sum(expected[slide] != most_probable[slide] for slide in expected) > 2  # the threshold matters

    assert answers_in_report(run, tmp_path) == expected
    assert answers_in_viewer(folder / "run") == expected
    table = predict_bags(folder / "run", files.features, tmp_path / "predict", device="cpu", log=ignore_log)
    assert dict(zip(table["slide"], table["answer"], strict=True)) == expected
    result = evaluate_run(
        folder / "run", files.features, files.labels, tmp_path / "evaluate", named=NAMED, device="cpu", log=ignore_log
    )
    table = pd.read_parquet(tmp_path / "evaluate" / "predictions.parquet")
    assert dict(zip(table["slide"], table["answer"], strict=True)) == expected
    assert result.figures["accuracy"] == pytest.approx((table["answer"] == table["label"]).mean())
    options = {"bags": None, "methods": (), "searched": False, "device": "cpu", "log": ignore_log}
    table = explain_run(folder / "run", tmp_path / "evidence", **options).frame
    assert dict(zip(table["slide"], table["prediction"], strict=True)) == expected
    assert (table["explained_class"] == table["prediction"]).all()


@pytest.mark.finding(n=2)
def test_new_slides_are_decided_by_the_mean_threshold_of_all_models(study, tmp_path):
    folder, _ = study
    new = make_files(tmp_path, patients=6, slides=1, seed=7)
    for path in new.features.glob("*.npy"):
        path.rename(path.with_name(f"new{path.name}"))
    table = predict_bags(folder / "run", new.features, tmp_path / "predict", device="cpu", log=ignore_log)
    at = float(np.mean([model.threshold for model in read_run(folder / "run").models]))
    assert table["answer"].tolist() == ["b" if p >= at else "a" for p in table["p_b"]]
    assert set(table["models"]) == {4}
    options = {"methods": (), "searched": False, "device": "cpu", "log": ignore_log}
    explained = explain_run(folder / "run", tmp_path / "evidence", bags=new.features, **options).frame
    assert explained["prediction"].tolist() == table["answer"].tolist()


@pytest.mark.finding(n=2)
def test_joint_decision_agrees_with_unanimous_models():
    classes = ("a", "b")
    each = [Decision(classes, at, 0.01) for at in (0.1, 0.2, 0.9)]
    p = np.array(
        [[0.85, 0.15], [0.75, 0.25], [0.05, 0.95]]
    )  # each model answers b; the median threshold is 0.2, the mean 0.4
    assert [one.answer(row) for one, row in zip(each, p, strict=True)] == ["b"] * 3
    assert joint_decision(each).answer(p.mean(0)) == "b"
    low = np.array(
        [[0.92, 0.08], [0.82, 0.18], [0.2, 0.8]]
    )  # each answers a; the mean of p, 0.353, is above the median
    assert [one.answer(row) for one, row in zip(each, low, strict=True)] == ["a"] * 3
    assert joint_decision(each).answer(low.mean(0)) == "a"
    assert joint_decision([Decision(classes, 0.1)] * 3).threshold == 0.1
    rng = np.random.default_rng(0)
    for _ in range(500):
        models = [Decision(classes, at, cut) for at, cut in zip(rng.random(4), 0.2 * rng.random(4), strict=True)]
        second = rng.random(4)
        answers = {one.answer([1 - q, q]) for one, q in zip(models, second, strict=True)}
        if len(answers) == 1:
            assert {joint_decision(models).answer([1 - second.mean(), second.mean()])} == answers


@pytest.mark.finding(n=2)
def test_every_table_of_answers_states_the_decision_rule(study, tmp_path):
    folder, files = study
    run = read_run(folder / "run")
    rule = run.decision().rule
    assert re.fullmatch(
        r"b if p\(b\) >= [\d.]+, else a \(mean of the thresholds of 4 models, each chosen for balanced accuracy on "
        r"validation patients; slides use the same\)",
        rule,
    )
    table = predict_bags(folder / "run", files.features, tmp_path / "predict", device="cpu", log=ignore_log)
    assert set(table["models"]) == {2}  # the models of the fold in which the slide was tested
    of_folds = {run.decision([row for row, model in enumerate(run.models) if model.fold == f]).rule for f in (0, 1)}
    assert set(pd.read_csv(tmp_path / "predict" / "predictions.csv")[RULE]) == of_folds
    write_report(run, tmp_path / "report.html")
    assert "slides use the threshold of their patients" in (tmp_path / "report.html").read_text()
    options = {"bags": None, "methods": (), "searched": False, "device": "cpu", "log": ignore_log}
    result = explain_run(folder / "run", tmp_path / "evidence", **options)
    assert set(result.frame[RULE]) == of_folds == set(result.summary.answer_rules)
    evaluate_run(
        folder / "run", files.features, files.labels, tmp_path / "e", named=NAMED, device="cpu", log=ignore_log
    )
    assert set(json.loads((tmp_path / "e" / "evaluation.json").read_text())["answer_rules"]) == of_folds
    assert {
        row["rule"] for row in json.loads(Responses(read_cases(folder / "run"), SlideFiles(None, ())).cohort())["cases"]
    } == of_folds
    assert {"answer", RULE} <= set(run.predictions())


@pytest.mark.finding(n=2)
def test_train_predictions_have_the_answer_of_each_model_and_the_joint_answer(tmp_path):
    files = make_files(tmp_path, patients=8, slides=1)
    for reshuffle in (False, True):
        folder = tmp_path / f"run{reshuffle}"
        run_study(files.settings(folder, folds=2, seeds=2, epochs=3, reshuffle=reshuffle), log=ignore_log)
        run, frame = read_run(folder), pd.read_csv(folder / "predictions.csv")
        for row in frame.itertuples():
            pairs = zip(run.tested_folds, run.models, strict=True)
            (model,) = [model for fold, model in pairs if (fold, model.seed) == (row.fold, row.seed)]
            assert row.answer == ("b" if row.p_b >= model.threshold else "a")
        assert frame[RULE].str.startswith("this model alone: b if p(b) >= ").all()
        assert frame.groupby("slide")[JOINT].nunique().eq(1).all()
        assert dict(zip(frame["slide"], frame[JOINT], strict=True)) == answers_in_report(run, tmp_path)
    run_study(files.settings(tmp_path / "one", folds=2, seeds=1, epochs=3), log=ignore_log)
    one = read_run(tmp_path / "one").predictions()
    assert JOINT not in one and one[RULE].str.startswith("b if p(b) >= ").all()


@pytest.mark.finding(n=2)
def test_rule_of_a_single_fold_names_the_fold(study, tmp_path, run_cli):
    folder, _ = study
    run = read_run(folder / "run")
    for fold in (0, 1):
        rows = [row for row, model in enumerate(run.models) if model.fold == fold]
        assert f", else a (fold {fold}: mean of the thresholds of 2 models" in run.decision(rows).rule
    own = run.predictions()
    assert all(f"(fold {fold}: threshold chosen" in rule for fold, rule in zip(own["fold"], own[RULE], strict=True))
    _, out, _ = run_cli("explain", str(folder / "run"), "--out", str(tmp_path / "evidence"), "--device", "cpu")
    rules = [line for line in out.splitlines() if line.startswith("- answer: ")]
    assert sorted(line.partition("(fold ")[2][:2] for line in rules) == ["0:", "1:"]
    same = replace(run, models=tuple(replace(model, threshold=0.5) for model in run.models))
    assert {same.decision([row]).rule for row in range(4)} == {same.decision().rule}  # one rule in all folds


@pytest.mark.finding(n=2)
def test_rule_origin_names_folds_only_if_rules_differ_between_folds():
    given = {"level": "slide", "patients": "mean"}
    abstaining, plain = Decision(("a", "b", "c"), None, 0.2), Decision(("a", "b", "c"))
    assert rule_origin("balanced", [abstaining], folds=[1], **given) == "fold 1"
    assert rule_origin("balanced", [plain], folds=[1], **given) == ""
    assert rule_origin("0.3", [Decision(("a", "b"), 0.3)], folds=[1], **given) == "threshold given"
    two = [Decision(("a", "b"), at) for at in (0.3, 0.4)]
    assert rule_origin("balanced", two, folds=[0, 2], **given).startswith(
        "folds 0, 2: mean of the thresholds of 2 models"
    )


@pytest.mark.finding(n=2)
def test_what_if_answer_changes_at_the_threshold_of_the_case(study):
    folder, _ = study
    cases = read_cases(folder / "run")
    answers = Responses(cases, SlideFiles(None, ()))
    for number, case in enumerate(cases.cases):
        for removed in range(cases.size(number)):
            result = json.loads(answers.without(number, {"remove": [removed]}))
            assert result["answer_before"] == case.answer
            assert result["answer_after"] == ("b" if result["after"][1] >= case.decision.threshold else "a")


@pytest.mark.finding(n=2)
def test_training_slide_among_new_slides_is_answered_as_in_the_report(study, tmp_path):
    folder, files = study
    own = sorted(files.features.glob("*.npy"))[3]
    make_files(tmp_path, patients=2, slides=1, seed=7)
    mixed = tmp_path / "features"
    for path in mixed.glob("*.npy"):
        path.rename(path.with_name(f"new{path.name}"))
    shutil.copy(own, mixed / own.name)
    table = predict_bags(folder / "run", mixed, tmp_path / "predict", device="cpu", log=ignore_log).set_index("slide")
    frame = read_run(folder / "run").predictions()
    assert table.loc[own.stem, "models"] == 2 and (table["models"] == 4).sum() == 2
    assert table.loc[own.stem, "p_b"] == pytest.approx(frame.loc[frame["slide"] == own.stem, "p_b"].mean(), abs=0)
