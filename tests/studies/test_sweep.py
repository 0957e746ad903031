"""Every point of a sweep equals the run of `carmil train`; the sweep adds tables and how to interpret them."""

import html
import json
import re
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file

from carmil.errors import CarmilError
from carmil.report.sensitivity import write_picture
from carmil.report.sweep import sweep_lines, sweep_table, write_sweep
from carmil.runs.run import read_run
from carmil.studies.compare import compare_runs
from carmil.studies.evaluate import predict_bags
from carmil.studies.point_selection import choose
from carmil.studies.sweep import parse_over, run_sweep, sweep_of
from carmil.studies.train import run_study

from .conftest import SMALL, make_files

ALPHA_LAMBDA = {"alpha": [0.0, 0.5], "lambda_": [0.0, 1.0], "distance": ["l1", "cosine"]}


def words(files, out, **others):
    """Return the settings of a small study as given on the command line or in a file."""
    given = dict(
        bags=str(files.features),
        labels=str(files.labels),
        out=str(out),
        model="car/abmil",
        options=dict(SMALL),
        folds=2,
        epochs=4,
        lr=5e-3,
        patience=2,
        device="cpu",
        dtype="float32",
    )
    return {**given, **others}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("files"), patients=16, slides=1)


@pytest.fixture(scope="module")
def swept(small, tmp_path_factory):
    """Return a small version of the paper's grid: two alphas, two lambdas, two distances, two seeds."""
    out = tmp_path_factory.mktemp("sweep") / "paper"
    logged = []
    result = run_sweep(sweep_of(words(small, out, seeds=2), ALPHA_LAMBDA, where="test"), log=logged.append)
    assert "8 points, 32 models in 1 population" in logged
    return result


def point_of(swept, **values):
    at = next(i for i, p in enumerate(swept.sweep.points) if all(p.values[n] == v for n, v in values.items()))
    return swept.sweep.points[at], swept.runs[at]


def assert_same(first, second):
    """Assert that two runs have bitwise equal weights, models, metrics and predictions."""
    pd.testing.assert_frame_equal(first.predictions(), second.predictions(), check_exact=True)
    actual, expected = (load_file(run.folder / "weights.safetensors") for run in (first, second))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)
    assert (first.models, first.metrics) == (second.models, second.metrics)
    assert first.history().validation == second.history().validation
    assert first.history().epochs_run == second.history().epochs_run


@pytest.mark.parametrize(("alpha", "distance"), [(0.0, "l1"), (0.5, "cosine")])
def test_sweep_point_is_bitwise_equal_to_the_run_of_train(swept, tmp_path, alpha, distance):
    point, run = point_of(swept, alpha=alpha, lambda_=1.0, distance=distance)
    alone = run_study(replace(point.study, out=tmp_path / "alone"))
    assert_same(run, alone)
    assert run.key == alone.key
    assert replace(run.settings, out=alone.settings.out) == alone.settings
    files = {path.name for path in run.folder.iterdir()}
    assert files == {path.name for path in alone.folder.iterdir()} - {"cohort"}
    assert "checkpoint-0.safetensors" not in {path.name for path in swept.sweep.out.iterdir()}


def test_idle_branch_predicts_like_the_plain_model(swept, small, tmp_path):
    """With alpha = lambda = 0, predictions are bitwise equal to the model without a branch, for both distances.

    The distances of other points are computed for it too, with weight 0.
    """
    point, run = point_of(swept, alpha=0.0, lambda_=0.0, distance="l1")
    other, twin = point_of(swept, alpha=0.0, lambda_=0.0, distance="cosine")
    assert point.idle and other.idle
    assert sum(p.idle for p in swept.sweep.points) == 2
    study = replace(point.study, model="abmil", alpha=None, lambda_=None, distance=None, out=tmp_path / "plain")
    plain = run_study(study)
    columns = ["slide", "p_a", "p_b"]
    pd.testing.assert_frame_equal(run.predictions()[columns], twin.predictions()[columns], check_exact=True)
    pd.testing.assert_frame_equal(run.predictions()[columns], plain.predictions()[columns], check_exact=True)


def test_sweep_point_can_be_compared_and_used_for_prediction(swept, small, tmp_path):
    runs = [point_of(swept, alpha=a, lambda_=1.0, distance="l1")[1] for a in (0.0, 0.5)]
    (pair,) = compare_runs(runs)
    assert (pair.first, pair.second) == ("alpha=0,lambda=1,distance=l1", "alpha=0.5,lambda=1,distance=l1")
    frame = predict_bags(runs[0].folder, small.features, tmp_path / "new", device="cpu", log=lambda line: None)
    assert len(frame) == 16


def test_best_point_is_chosen_on_validation_bags_and_marked_in_the_table(swept):
    choice = choose(swept.runs)
    by_hand = [np.mean([m.validation_loss for m in run.models]) for run in swept.runs]
    assert choice.best == int(np.argmin(by_hand))
    assert [loss.mean for loss in choice.losses] == pytest.approx(by_hand)
    table = sweep_table(swept, choice)
    marked = [i for i, line in enumerate(table.lines) if line[3].endswith("*")]
    assert marked == [choice.best]
    auc = swept.runs[0].metrics.summary["auc"]
    assert table.lines[0][:3] == ("0", "0", "l1 †")
    assert table.lines[0][4] == f"{100 * auc.mean:.1f} ± {100 * auc.std:.1f}"
    assert table.lines[-1][0] == "chosen by fold"
    lines = " ".join(sweep_lines(swept, choice))
    assert "choosing on the test set" in lines
    assert "idle branch" in lines


def test_choice_by_fold_equals_the_choice_of_train_from_lists(small, tmp_path):
    common = words(small, tmp_path / "sweep", epochs=6, folds=2, seeds=2, inner=2)
    result = run_sweep(sweep_of(common, {"lr": [1e-7, 5e-3], "alpha": [0.1, 3.0]}, where="test"))
    listed = result.sweep.points[0].study
    run = run_study(replace(listed, lr=[1e-7, 5e-3], alpha=[0.1, 3.0], out=tmp_path / "lists"))
    figures = choose(result.runs).by_fold
    assert figures.keys() == run.metrics.summary.keys()
    for name, summary in run.metrics.summary.items():
        assert figures[name].mean == pytest.approx(summary.mean, abs=1e-12), name


def test_sweep_over_options_and_scale_trains_separate_populations(small, tmp_path):
    """Options and scale are swept; a grid given as a list within a point is chosen within that point."""
    given = words(small, tmp_path / "sweep", lr=[1e-3, 5e-3], epochs=2)
    over = parse_over(["options.hidden=4,8", "scale=none,own"])
    logged = []
    result = run_sweep(sweep_of(given, over, where="test"), log=logged.append)
    assert "4 points, 16 models in 4 populations" in logged
    names = [point.name for point in result.sweep.points]
    assert names == [f"options.hidden={h},scale={s}" for h in (4, 8) for s in ("none", "own")]
    assert {model.lr for run in result.runs for model in run.models} <= {1e-3, 5e-3}
    shapes = [load_file(run.folder / "weights.safetensors") for run in result.runs]
    assert ["mean" in weights for weights in shapes] == [False, True, False, True]
    assert all(SMALL["attention"] == run.settings.options["attention"] for run in result.runs)
    assert_same(result.runs[2], run_study(replace(result.sweep.points[2].study, out=tmp_path / "alone")))
    write_sweep(result)
    assert "<img" in (tmp_path / "sweep" / "report.html").read_text()


def test_sweep_writes_json_markdown_report_and_picture(swept):
    table, lines = write_sweep(swept)
    out = swept.sweep.out
    facts = json.loads((out / "sweep.json").read_text())
    assert [point["values"] for point in facts["points"]] == [dict(p.values) for p in swept.sweep.points]
    assert [p["summary"]["auc"] for p in facts["points"]] == [asdict(r.metrics.summary["auc"]) for r in swept.runs]
    assert sum(point["chosen_on_validation_bags"] for point in facts["points"]) == 1
    assert facts["over"] == {"alpha": [0.0, 0.5], "lambda_": [0.0, 1.0], "distance": ["l1", "cosine"]}
    text = (out / "sweep.md").read_text()
    assert all(line in text for line in lines)
    assert all(f"| {' | '.join(line)} |" in text for line in table.lines)
    page = (out / "report.html").read_text()
    assert "RESEARCH USE ONLY" in page
    assert str(out.parent) not in page
    assert (out / "sweep.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def drawn_axes(swept, monkeypatch, tmp_path, over):
    """Return the axes and caption of the picture of these runs, as if swept over `over`."""
    from matplotlib.figure import Figure

    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: kept.append(self))
    combinations = [dict(zip(over, values, strict=True)) for values in product(*over.values())]
    points = tuple(
        replace(point, values=values) for point, values in zip(swept.sweep.points, combinations, strict=False)
    )
    fewer = replace(swept, sweep=replace(swept.sweep, over=over, points=points), runs=swept.runs[: len(points)])
    caption = write_picture(fewer, 1, tmp_path / "sweep.png")
    return kept[0].axes, caption


def test_picture_has_one_panel_per_distance_and_one_line_per_lambda(swept, monkeypatch, tmp_path):
    axes, caption = drawn_axes(swept, monkeypatch, tmp_path, ALPHA_LAMBDA)
    assert [panel.get_title() for panel in axes] == ["distance = l1", "distance = cosine"]
    for panel, distance in zip(axes, ("l1", "cosine"), strict=True):
        lines = {line.get_label(): line for line in panel.get_lines()}
        for lambda_ in (0.0, 1.0):
            aucs = [
                100 * point_of(swept, alpha=a, lambda_=lambda_, distance=distance)[1].metrics.summary["auc"].mean
                for a in (0.0, 0.5)
            ]
            assert lines[f"{lambda_:g}"].get_xdata().tolist() == [0.0, 0.5]
            assert lines[f"{lambda_:g}"].get_ydata().tolist() == pytest.approx(aucs)
        baseline = point_of(swept, alpha=0.0, lambda_=0.0, distance=distance)[1].metrics.summary["auc"].mean
        assert lines["plain model,\nidle branch"].get_ydata()[0] == pytest.approx(100 * baseline)
    assert "idle branch" in caption


def test_picture_of_other_sweeps_has_lines_or_bars(swept, monkeypatch, tmp_path):
    (panel,), _ = drawn_axes(swept, monkeypatch, tmp_path, {"lr": [1e-4, 1e-3, 1e-2]})
    assert panel.get_xscale() == "log"
    assert panel.get_lines()[0].get_xdata().tolist() == [1e-4, 1e-3, 1e-2]
    (panel,), _ = drawn_axes(swept, monkeypatch, tmp_path, {"model": ["a", "b"], "optimizer": ["adam", "sgd"]})
    assert [bar.get_width() for bar in panel.patches] == pytest.approx(
        [100 * run.metrics.summary["auc"].mean for run in swept.runs[:4]]
    )
    assert [label.get_text() for label in panel.get_yticklabels()] == ["a, adam", "a, sgd", "b, adam", "b, sgd"]


def test_no_best_point_if_runs_were_validated_on_different_bags(small, tmp_path):
    given = words(small, tmp_path / "sweep", epochs=1, model="mean", options={"hidden": 4})
    result = run_sweep(sweep_of(given, {"seed": [0, 1]}, where="test"))
    choice = choose(result.runs)
    assert (choice.best, choice.by_fold) == (None, {})
    assert [line[0] for line in sweep_table(result, choice).lines] == ["0", "1"]
    assert any("different bags" in line for line in sweep_lines(result, choice))


def test_killed_sweep_resumes_without_changing_finished_points(small, tmp_path):
    """Kill the sweep in the second population: points of the first stay unchanged, and results are bitwise equal."""
    given = {name: words(small, tmp_path / name) for name in ("whole", "broken")}
    over = {"batch": [1, 2], "alpha": [0.0, 0.5]}
    script = (
        "import sys, json, time, carmil.training.checkpoint as c\n"
        "from carmil.studies.sweep import run_sweep, sweep_of\n"
        "c.Checkpoint.save_if_due = lambda self, *a: (self.save(*a), time.sleep(600 * self.path.stem.endswith('1')))\n"
        f"run_sweep(sweep_of({given['broken']!r}, {over!r}, where='test'))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    while not (tmp_path / "broken" / "checkpoint-1.safetensors").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    first = tmp_path / "broken" / "points" / "batch=1,alpha=0"
    written = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    assert (first / "metrics.json").exists()
    assert not (tmp_path / "broken" / "points" / "batch=2,alpha=0" / "metrics.json").exists()
    again = run_sweep(sweep_of(given["broken"], over, where="test"))
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == written
    whole = run_sweep(sweep_of(given["whole"], over, where="test"))
    for actual, expected in zip(again.runs, whole.runs, strict=True):
        assert_same(actual, expected)
    assert not list((tmp_path / "broken").glob("checkpoint*"))
    (again.runs[3].folder / "metrics.json").unlink()  # as if the sweep had been killed before writing the last point
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == written
    assert_same(run_sweep(sweep_of(given["broken"], over, where="test")).runs[3], whole.runs[3])
    with pytest.raises(CarmilError, match="holds another sweep \\(its data, splits or grid differ"):
        run_sweep(sweep_of(given["broken"], {"batch": [1, 4], "alpha": [0.0, 0.5]}, where="test"))
    with pytest.raises(CarmilError, match="holds another sweep \\(its epochs differ"):
        run_sweep(sweep_of({**given["broken"], "epochs": 9}, over, where="test"))
    with pytest.raises(CarmilError, match="holds a run"):
        run_sweep(sweep_of({**given["broken"], "out": str(first)}, over, where="test"))


@pytest.mark.finding(n=17)
def test_command_printed_in_the_sweep_report_can_be_run_again(small, tmp_path, run_cli, monkeypatch):
    over = ("--over", "alpha=0,0.5", "--over", "lambda=0.5,1")
    config = tmp_path / "mine.yaml"
    study = words(small, tmp_path / "swept", epochs=2)
    config.write_text(yaml.safe_dump(study))
    assert run_cli("sweep", "--config", str(config), *over)[0] == 0
    config.unlink()
    page = (tmp_path / "swept" / "report.html").read_text()
    printed = shlex.split(html.unescape(re.search(r"<pre>(carmil sweep.*?)</pre>", page)[1]))
    assert printed[:4] == ["carmil", "sweep", "--config", "swept/study.yaml"]
    assert printed[-6:] == [*over, "--out", "swept"]
    monkeypatch.chdir(tmp_path)
    status, out, err = run_cli(*printed[1:])
    assert (status, "written: swept/report.html" in out) == (0, True), err


def test_command_line_overrides_the_sweep_of_the_settings_file(small, tmp_path, run_cli):
    """The test covers everything from the command line to the printed table."""
    path = tmp_path / "study.yaml"
    path.write_text(
        f"bags: {small.features}\nlabels: {small.labels}\nmodel: car/abmil\noptions: {{hidden: 4, attention: 2}}\n"
        "folds: 2\nepochs: 1\ndevice: cpu\nsweep:\n  alpha: [0, 0.5]\n  lambda: [0, 1]\n"
    )
    status, out, err = run_cli("sweep", "--config", str(path), "--over", "lambda=0", "--out", str(tmp_path / "sweep"))
    assert status == 0
    assert "2 points, 4 models in 1 population" in err
    assert "chosen by fold" in out
    assert "choosing on the test set" in out
    points = sorted(folder.name for folder in (tmp_path / "sweep" / "points").iterdir())
    assert points == ["alpha=0,lambda=0", "alpha=0.5,lambda=0"]
    assert read_run(tmp_path / "sweep" / "points" / "alpha=0.5,lambda=0").settings.alpha == 0.5
    assert (tmp_path / "sweep" / "sweep.png").exists()
    status, out, _ = run_cli("report", str(tmp_path / "sweep" / "points" / "alpha=0,lambda=0"))
    assert status == 0


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        ([], "nothing to sweep over"),
        (["alpha"], "expected NAME=VALUE"),
        (["alpha="], "expected NAME=VALUE"),
        (["alpha=0,,1"], "expected NAME=VALUE"),
        (["=1"], "expected NAME=VALUE"),
        (["alpa=0,1"], "did you mean 'alpha'"),
        (["lambd=0,1"], "did you mean 'lambda'"),
        (["alpha=0,much"], "expected a number"),
        (["epochs=1.5,2"], "whole number"),
        (["distance=l1,l7"], "expected one of relative, l1, cosine"),
        (["model=abmil,nomil"], "unknown model 'nomil'"),
        (["model=abmil,car/abmil", "alpha=0,1"], "has no counterfactual branch"),
        (["options.hidden=4", "options.hiden=4"], "unknown option 'hiden'"),
        (["alpha=0,1", "alpha=2"], "is swept already"),
        (["alpha=0,0.0"], "two points of the sweep are the same"),
        (["out=a,b"], "cannot be swept"),
        (["device=cpu,cuda"], "cannot be swept"),
        (["threshold=f1,best"], "best"),
        (["folds=1,2"], "folds is 1"),
    ],
)
def test_invalid_sweep_exits_with_one_line_and_trains_nothing(small, tmp_path, run_cli, over, expected):
    command = ["sweep", "--bags", str(small.features), "--labels", str(small.labels), "--out", str(tmp_path / "sweep")]
    status, _, err = run_cli(*command, "--device", "cpu", *(word for one in over for word in ("--over", one)))
    last = err.strip().splitlines()[-1]
    assert status == 2
    assert last.startswith("carmil: ")
    assert expected in last
    assert not (tmp_path / "sweep" / "points").exists()


@pytest.mark.parametrize("sweep", ["3", "[alpha]", "{alpha: 3}", "{alpha: []}"])
def test_invalid_sweep_section_of_a_settings_file_exits_with_an_error(tmp_path, run_cli, sweep):
    (tmp_path / "study.yaml").write_text(f"bags: b\nout: {tmp_path / 's'}\nsweep: {sweep}\n")
    status, _, err = run_cli("sweep", "--config", str(tmp_path / "study.yaml"))
    assert status == 2
    assert "expected names with lists of values" in err
