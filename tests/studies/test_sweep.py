"""Every point of a sweep is the run that `carmil train` would have made; what the sweep adds says how it may be read."""

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
    """A small study as the command line's or a file's words."""
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
    """The paper's grid in small: two alphas, two lambdas, two distances, two seeds."""
    out = tmp_path_factory.mktemp("sweep") / "paper"
    said = []
    found = run_sweep(sweep_of(words(small, out, seeds=2), ALPHA_LAMBDA, where="test"), log=said.append)
    assert "8 points, 32 models in 1 population" in said
    return found


def point_of(swept, **values):
    at = next(i for i, p in enumerate(swept.sweep.points) if all(p.values[n] == v for n, v in values.items()))
    return swept.sweep.points[at], swept.runs[at]


def same(first, second):
    """Are two runs the same to the last bit, in all that was trained, chosen and answered?"""
    pd.testing.assert_frame_equal(first.predictions(), second.predictions(), check_exact=True)
    mine, theirs = (load_file(run.folder / "weights.safetensors") for run in (first, second))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert (first.models, first.metrics) == (second.models, second.metrics)
    assert first.history().validation == second.history().validation
    assert first.history().epochs_run == second.history().epochs_run


@pytest.mark.parametrize(("alpha", "distance"), [(0.0, "l1"), (0.5, "cosine")])
def test_a_point_is_the_run_that_train_makes_bit_by_bit(swept, tmp_path, alpha, distance):
    point, run = point_of(swept, alpha=alpha, lambda_=1.0, distance=distance)
    alone = run_study(replace(point.study, out=tmp_path / "alone"))
    same(run, alone)
    assert run.key == alone.key
    assert replace(run.settings, out=alone.settings.out) == alone.settings
    made = {path.name for path in run.folder.iterdir()}
    assert made == {path.name for path in alone.folder.iterdir()} - {"cohort"}
    assert "checkpoint-0.safetensors" not in {path.name for path in swept.sweep.out.iterdir()}


def test_an_idle_branch_leaves_the_plain_model(swept, small, tmp_path):
    """alpha = lambda = 0: the answers of the model without its branch, to the last bit, for both distances.

    The neighbours' distance is computed for it too, and counts 0 times.
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


def test_a_point_can_be_compared_and_asked_about_new_slides(swept, small, tmp_path):
    runs = [point_of(swept, alpha=a, lambda_=1.0, distance="l1")[1] for a in (0.0, 0.5)]
    (pair,) = compare_runs(runs)
    assert (pair.first, pair.second) == ("alpha=0,lambda=1,distance=l1", "alpha=0.5,lambda=1,distance=l1")
    frame = predict_bags(runs[0].folder, small.features, tmp_path / "new", device="cpu", log=lambda line: None)
    assert len(frame) == 16


def test_validation_bags_choose_and_the_table_says_so(swept):
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


def test_what_validation_chooses_fold_by_fold_is_what_train_chooses_from_lists(small, tmp_path):
    common = words(small, tmp_path / "sweep", epochs=6, folds=2, seeds=2, inner=2)
    found = run_sweep(sweep_of(common, {"lr": [1e-7, 5e-3], "alpha": [0.1, 3.0]}, where="test"))
    listed = found.sweep.points[0].study
    run = run_study(replace(listed, lr=[1e-7, 5e-3], alpha=[0.1, 3.0], out=tmp_path / "lists"))
    figures = choose(found.runs).by_fold
    assert figures.keys() == run.metrics.summary.keys()
    for name, summary in run.metrics.summary.items():
        assert figures[name].mean == pytest.approx(summary.mean, abs=1e-12), name


def test_settings_that_make_other_populations_and_the_models_own_options(small, tmp_path):
    """Epochs, options and yes-or-no settings are swept too; a grid of a point's own is chosen from within the point."""
    given = words(small, tmp_path / "sweep", lr=[1e-3, 5e-3], epochs=2)
    over = parse_over(["options.hidden=4,8", "scale=none,own"])
    said = []
    found = run_sweep(sweep_of(given, over, where="test"), log=said.append)
    assert "4 points, 16 models in 4 populations" in said
    names = [point.name for point in found.sweep.points]
    assert names == [f"options.hidden={h},scale={s}" for h in (4, 8) for s in ("none", "own")]
    assert {model.lr for run in found.runs for model in run.models} <= {1e-3, 5e-3}
    shapes = [load_file(run.folder / "weights.safetensors") for run in found.runs]
    assert ["mean" in weights for weights in shapes] == [False, True, False, True]
    assert all(SMALL["attention"] == run.settings.options["attention"] for run in found.runs)
    same(found.runs[2], run_study(replace(found.sweep.points[2].study, out=tmp_path / "alone")))
    write_sweep(found)
    assert "<img" in (tmp_path / "sweep" / "report.html").read_text()


def test_everything_a_sweep_writes_can_be_read_again(swept):
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


def drawn(swept, monkeypatch, tmp_path, over):
    """The axes of a picture of these runs as if they had been swept like this."""
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


def test_the_picture_of_the_paper_has_a_panel_a_distance_and_a_line_a_lambda(swept, monkeypatch, tmp_path):
    axes, caption = drawn(swept, monkeypatch, tmp_path, ALPHA_LAMBDA)
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


def test_other_sweeps_have_a_picture_too(swept, monkeypatch, tmp_path):
    (panel,), _ = drawn(swept, monkeypatch, tmp_path, {"lr": [1e-4, 1e-3, 1e-2]})
    assert panel.get_xscale() == "log"
    assert panel.get_lines()[0].get_xdata().tolist() == [1e-4, 1e-3, 1e-2]
    (panel,), _ = drawn(swept, monkeypatch, tmp_path, {"model": ["a", "b"], "optimizer": ["adam", "sgd"]})
    assert [bar.get_width() for bar in panel.patches] == pytest.approx(
        [100 * run.metrics.summary["auc"].mean for run in swept.runs[:4]]
    )
    assert [label.get_text() for label in panel.get_yticklabels()] == ["a, adam", "a, sgd", "b, adam", "b, sgd"]


def test_runs_validated_on_different_bags_choose_nothing(small, tmp_path):
    given = words(small, tmp_path / "sweep", epochs=1, model="mean", options={"hidden": 4})
    found = run_sweep(sweep_of(given, {"seed": [0, 1]}, where="test"))
    choice = choose(found.runs)
    assert (choice.best, choice.by_fold) == (None, {})
    assert [line[0] for line in sweep_table(found, choice).lines] == ["0", "1"]
    assert any("different bags" in line for line in sweep_lines(found, choice))


def test_a_sweep_killed_goes_on_and_finished_points_are_left_alone(small, tmp_path):
    """kill -9 in the second population: the first one's points stay untouched, and all ends with the same bits."""
    given = {name: words(small, tmp_path / name) for name in ("whole", "broken")}
    over = {"batch": [1, 2], "alpha": [0.0, 0.5]}
    script = (
        "import sys, json, time, carmil.training.checkpoint as c\n"
        "from carmil.studies.sweep import run_sweep, sweep_of\n"
        "c.Checkpoint.save_if_due = lambda self, *a: (self.save(*a), time.sleep(0.3))\n"
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
    for mine, theirs in zip(again.runs, whole.runs, strict=True):
        same(mine, theirs)
    assert not list((tmp_path / "broken").glob("checkpoint*"))
    (again.runs[3].folder / "metrics.json").unlink()  # as if killed before the last point was written
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == written
    same(run_sweep(sweep_of(given["broken"], over, where="test")).runs[3], whole.runs[3])
    with pytest.raises(CarmilError, match="holds another sweep \\(its data, splits or grid differ"):
        run_sweep(sweep_of(given["broken"], {"batch": [1, 4], "alpha": [0.0, 0.5]}, where="test"))
    with pytest.raises(CarmilError, match="holds another sweep \\(its epochs differ"):
        run_sweep(sweep_of({**given["broken"], "epochs": 9}, over, where="test"))
    with pytest.raises(CarmilError, match="holds a run"):
        run_sweep(sweep_of({**given["broken"], "out": str(first)}, over, where="test"))


@pytest.mark.finding(n=17)
def test_the_command_of_the_page_runs_again_as_printed(small, tmp_path, said, monkeypatch):
    over = ("--over", "alpha=0,0.5", "--over", "lambda=0.5,1")
    config = tmp_path / "mine.yaml"
    study = words(small, tmp_path / "swept", epochs=2)
    config.write_text(yaml.safe_dump(study))
    assert said("sweep", "--config", str(config), *over)[0] == 0
    config.unlink()
    page = (tmp_path / "swept" / "report.html").read_text()
    printed = shlex.split(html.unescape(re.search(r"<pre>(carmil sweep.*?)</pre>", page)[1]))
    assert printed[:4] == ["carmil", "sweep", "--config", "swept/study.yaml"]
    assert printed[-6:] == [*over, "--out", "swept"]
    monkeypatch.chdir(tmp_path)
    status, out, err = said(*printed[1:])
    assert (status, "written: swept/report.html" in out) == (0, True), err


def test_a_file_and_the_command_line_say_the_same(small, tmp_path, said):
    """From words to a table on the terminal."""
    path = tmp_path / "study.yaml"
    path.write_text(
        f"bags: {small.features}\nlabels: {small.labels}\nmodel: car/abmil\noptions: {{hidden: 4, attention: 2}}\n"
        "folds: 2\nepochs: 1\ndevice: cpu\nsweep:\n  alpha: [0, 0.5]\n  lambda: [0, 1]\n"
    )
    status, out, err = said("sweep", "--config", str(path), "--over", "lambda=0", "--out", str(tmp_path / "sweep"))
    assert status == 0
    assert "2 points, 4 models in 1 population" in err
    assert "chosen by fold" in out
    assert "choosing on the test set" in out
    points = sorted(folder.name for folder in (tmp_path / "sweep" / "points").iterdir())
    assert points == ["alpha=0,lambda=0", "alpha=0.5,lambda=0"]
    assert read_run(tmp_path / "sweep" / "points" / "alpha=0.5,lambda=0").settings.alpha == 0.5
    assert (tmp_path / "sweep" / "sweep.png").exists()
    status, out, _ = said("report", str(tmp_path / "sweep" / "points" / "alpha=0,lambda=0"))
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
def test_a_sweep_that_cannot_be_is_one_line_and_trains_nothing(small, tmp_path, said, over, expected):
    command = ["sweep", "--bags", str(small.features), "--labels", str(small.labels), "--out", str(tmp_path / "sweep")]
    status, _, err = said(*command, "--device", "cpu", *(word for one in over for word in ("--over", one)))
    last = err.strip().splitlines()[-1]
    assert status == 2
    assert last.startswith("carmil: ")
    assert expected in last
    assert not (tmp_path / "sweep" / "points").exists()


@pytest.mark.parametrize("sweep", ["3", "[alpha]", "{alpha: 3}", "{alpha: []}"])
def test_a_files_sweep_is_names_and_lists(tmp_path, said, sweep):
    (tmp_path / "study.yaml").write_text(f"bags: b\nout: {tmp_path / 's'}\nsweep: {sweep}\n")
    status, _, err = said("sweep", "--config", str(tmp_path / "study.yaml"))
    assert status == 2
    assert "expected names with lists of values" in err
