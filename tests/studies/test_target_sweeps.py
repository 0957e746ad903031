"""A sweep of a target other than classes shows its key figure, and every point has the target that its settings name."""

import pytest

from carmil.report.sweep import write_sweep
from carmil.studies.point_selection import choose
from carmil.studies.sweep import run_sweep, sweep_of

from .made_targets import TARGETS, write_cohort


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cohort")
    write_cohort(folder, truth=False)
    return folder


def sweep(cohort, out, kind, over, **others):
    given = {"model": "mean", "options": {"hidden": 4}, "folds": 2, **TARGETS[kind], "epochs": 2, "device": "cpu"}
    where = {"bags": str(cohort / "store"), "labels": str(cohort / "labels.csv"), "out": str(out)}
    return run_sweep(sweep_of({**given, **where, **others}, over, where="test"))


def test_points_with_different_losses_use_them_in_training_but_are_not_ranked_by_them(cohort, tmp_path):
    swept = sweep(cohort, tmp_path / "sweep", "survival", {"loss": ["cox", "discrete"]})
    assert [run.target.loss for run in swept.runs] == ["cox", "discrete"]
    losses = [run.models[0].validation_loss for run in swept.runs]
    assert losses[0] != losses[1]
    choice = choose(swept.runs)
    assert (choice.best, choice.by_fold) == (None, {})


def test_sweep_points_with_different_events_have_different_outcomes(cohort, tmp_path):
    text = (cohort / "labels.csv").read_text().splitlines()
    other = [f"{line},{'died' if i == 0 else i % 2}" for i, line in enumerate(text)]
    (tmp_path / "labels.csv").write_text("\n".join(other))
    labels = {"labels": str(tmp_path / "labels.csv")}
    swept = sweep(cohort, tmp_path / "sweep", "survival", {"event": ["recurrence", "died"]}, **labels)
    assert [run.target.columns[1] for run in swept.runs] == ["recurrence", "died"]
    assert swept.runs[0].data.outcomes != swept.runs[1].data.outcomes


@pytest.mark.parametrize(
    ("kind", "words", "figure"),
    [("survival", "C-index", "c_index"), ("value", "Spearman correlation", "spearman"), ("labels", "AUC", "auc")],
)
def test_table_and_picture_show_the_key_figure_of_the_target(cohort, tmp_path, kind, words, figure):
    swept = sweep(cohort, tmp_path / "sweep", kind, {"lr": [1e-3, 1e-2]})
    table, _ = write_sweep(swept)
    column = table.heads.index(words)
    means = [f"{100 * run.metrics.summary[figure].mean:.1f}" for run in swept.runs]
    assert [line[column].split()[0] for line in table.lines[:2]] == means
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert f"{words} of the test folds by lr" in page
