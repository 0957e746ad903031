import inspect
import json
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from carmil import cli
from carmil.bags.readers import Bag
from carmil.bags.writers import write_bag
from carmil.evidence.performance import bag_auc
from carmil.report.plots import Line, colour, reliability_svg, share_svg, wilson
from carmil.report.run import decided, learning_curves, operating_points, write_report
from carmil.studies.answers import by_patient
from carmil.studies.card import YAML_ONLY, card, command, remarks, yaml_part
from carmil.studies.figures import line, mean_over_seeds
from carmil.studies.run_folder import read_run
from carmil.studies.settings import Settings
from carmil.studies.train import run_study

EVIL = "<script>alert(1)"
WIDTH = 8


class Page(HTMLParser):
    """Tables as lists of lines of cells, what a page would fetch, and its scripts."""

    VOID = frozenset({"meta", "br", "img", "link", "input"})

    def __init__(self, path):
        super().__init__()
        self.open, self.fetched, self.scripts, self.tables, self.classes = [], [], 0, [], []
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "data", "action")]
        self.scripts += tag == "script"
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
            self.classes.append(dict(attrs).get("class", ""))
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.fetched += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data

    def table(self, head):
        """Lines of the table whose first head is this, by their heads."""
        heads, *lines = next(table for table in self.tables if table[0][0] == head)
        return [dict(zip(heads, cells, strict=True)) for cells in lines]


def _cohort(folder, classes, *, per_patient):
    """30 slides of 8 features; the label is in the first features, not easily."""
    rng = np.random.default_rng(0)
    lines = []
    for i in range(30):
        patient = i // per_patient
        label = patient % len(classes)
        slide = f"{EVIL} {i}" if i < 2 else f"slide {i}"
        features = rng.normal(size=(int(rng.integers(3, 9)), WIDTH)).astype(np.float32)
        features[: 1 + i % 2, label] += 2.0
        write_bag(Bag(slide, features, encoder="made up"), folder / "features", "npy")
        lines.append({"slide": slide, "patient": f"patient {patient}", "label": classes[label]})
    pd.DataFrame(lines).to_csv(folder / "labels.csv", index=False)
    return {"bags": folder / "features", "labels": folder / "labels.csv", "out": folder / "run", "device": "cpu"}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two classes, two slides a patient, two seeds, a grid, a counterfactual branch, some answers withheld."""
    folder = tmp_path_factory.mktemp("two")
    where = _cohort(folder, ("healthy", EVIL), per_patient=2)
    run = run_study(
        Settings(**where, folds=2, seeds=2, epochs=4, lr=[1e-3, 1e-2], abstain=0.2, positive=EVIL, weight_decay=0.0)
    )
    write_report(run, folder / "report.html")
    return run, Page(folder / "report.html")


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three classes, a slide a patient, other folds for every seed."""
    folder = tmp_path_factory.mktemp("three")
    where = _cohort(folder, ("grade|1", "grade 2", "grade 3"), per_patient=1)
    run = run_study(
        Settings(**where, model="abmil.gated", folds=2, seeds=2, reshuffle=True, epochs=4, lr=1e-2, validation=0.25)
    )
    write_report(run, folder / "report.html")
    return run, Page(folder / "report.html")


def _answers_by_hand(run):
    """(truth, answer, p) of the patients: the mean over slides and seeds, at the median of the fold's thresholds."""
    frame = pd.read_parquet(run.folder / "predictions.parquet")
    models = json.loads((run.folder / "models.json").read_text())
    positive = run.classes[1]
    found = []
    for (fold, _), part in frame.groupby(["fold", "patient"]):
        at = np.median([model["threshold"] for model in models if model["fold"] == fold])
        p = part[f"p_{positive}"].mean()
        found.append((part["label"].iloc[0] == positive, p >= at, p))
    return (np.array(column) for column in zip(*found, strict=True))


@pytest.mark.parametrize("which", ["two", "three"])
def test_the_report_is_one_whole_page_that_fetches_nothing(which, request):
    _, page = request.getfixturevalue(which)
    assert page.open == []
    assert all(target.startswith("#") for target in page.fetched)
    assert not re.search(r"https?://|@import|url\(", page.text)
    assert "RESEARCH USE ONLY" in page.text


@pytest.mark.parametrize("which", ["two", "three"])
def test_text_from_files_stays_text(which, request):
    run, page = request.getfixturevalue(which)
    assert page.scripts == 1  # ours
    assert "<script>alert" not in page.text
    assert {row["slide"] for row in page.table("slide") if "script" in row["slide"]} == {f"{EVIL} 0", f"{EVIL} 1"}
    assert "<script" not in card(run)


def test_the_figures_are_those_of_the_run(two):
    run, page = two
    metrics = json.loads((run.folder / "metrics.json").read_text())
    shown = {row["figure, per cent"]: row for row in page.table("figure, per cent")}
    pooled = metrics["intervals"]["auc"]
    assert shown["AUC"]["mean ± sd over folds"] == line(metrics["summary"], "auc")
    assert shown["AUC"]["folds together"] == f"{100 * pooled['value']:.1f}"
    assert shown["AUC"]["95 % interval"] == f"{100 * pooled['low']:.1f} to {100 * pooled['high']:.1f}"
    assert shown["AUC, DeLong"]["folds together"] == shown["AUC"]["folds together"]
    assert f"AUC {100 * pooled['value']:.1f}</span>" in page.text  # below the ROC curve
    folds = page.table("fold")
    assert [row["sensitivity"] for row in folds] == [f"{100 * found['sensitivity']:.1f}" for found in metrics["by_fold"]]
    assert [int(row["patients"]) for row in folds] == [8, 7, 8, 7] or [int(row["patients"]) for row in folds] == [
        7,
        8,
        7,
        8,
    ]


def test_every_patient_is_once_in_the_confusion_matrix(two):
    run, page = two
    truth, answer, p = _answers_by_hand(run)
    counts = np.array([[int(re.match(r"\d+", cell)[0]) for cell in list(row.values())[1:3]] for row in _matrix(page)])
    # a cell reads "12" + "80.0 %"; what is counted is before the share
    expected = [[int(((truth == t) & (answer == a)).sum()) for a in (False, True)] for t in (False, True)]
    cases = decided(run, by_patient(mean_over_seeds(run.predictions(), run.classes), run.classes, "mean"))
    assert cases.confusion.tolist() == expected
    assert cases.confusion.sum() == run.facts["patients"] == 15
    assert [str(sum(line)) for line in expected] == [row["patients"] for row in _matrix(page)]
    assert counts.shape == (2, 2)
    np.testing.assert_allclose(np.sort(cases.p[:, 1]), np.sort(p))
    shown = {row["figure, per cent"]: row["folds together"] for row in page.table("figure, per cent")}
    assert shown["accuracy"] == f"{100 * (truth == answer).mean():.1f}"
    assert shown["sensitivity"] == f"{100 * answer[truth].mean():.1f}"
    assert shown["specificity"] == f"{100 * (~answer[~truth]).mean():.1f}"


def _matrix(page):
    return page.table("truth \\ answer")
