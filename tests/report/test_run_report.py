import inspect
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from carmil import cli
from carmil.bags.sources import Bag
from carmil.bags.writers import write_bag
from carmil.report.cases import decide_cases, decision_of_folds
from carmil.report.plots import Line, colour, reliability_svg, share_svg
from carmil.report.run import write_report
from carmil.report.run_plots import learning_curves
from carmil.runs.facts import Calibration
from carmil.runs.run import read_run
from carmil.runs.settings import Settings
from carmil.statistics.performance import bag_auc
from carmil.studies.card import YAML_ONLY, card, command_of, remarks, yaml_part
from carmil.studies.figures import mean_over_seeds
from carmil.studies.train import run_study

EVIL = "<script>alert(1)"
WIDTH = 8


class Page(HTMLParser):
    """Parser that collects tables as lists of rows of cells, resources a page would load, and its scripts."""

    VOID = frozenset({"meta", "br", "img", "link", "input"})

    def __init__(self, path):
        super().__init__()
        self.open, self.fetched, self.scripts, self.tables = [], [], 0, []
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
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.fetched += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["small"]:
            data = f" {data}"
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data

    def table(self, head):
        """Return the rows of the table whose first column is `head`, as dicts."""
        heads, *lines = next(table for table in self.tables if table[0][0] == head)
        return [dict(zip(heads, cells, strict=True)) for cells in lines]


def _cohort(folder, classes, *, per_patient):
    """Write 30 slides with 8 features whose label is noisily encoded in the first features."""
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
    """Return a run and its report: two classes, two slides per patient, two seeds, a grid, a branch, abstention."""
    folder = tmp_path_factory.mktemp("two")
    where = _cohort(folder, ("healthy", EVIL), per_patient=2)
    run = run_study(
        Settings(**where, folds=2, seeds=2, epochs=4, lr=[1e-3, 1e-2], abstain=0.6, positive=EVIL, schedule="constant")
    )
    write_report(run, folder / "report.html")
    return run, Page(folder / "report.html")


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Return a run and its report: three classes, one slide per patient, different folds for every seed."""
    folder = tmp_path_factory.mktemp("three")
    where = _cohort(folder, ("grade|1", "grade 2", "grade 3"), per_patient=1)
    run = run_study(
        Settings(**where, model="abmil.gated", folds=2, seeds=2, reshuffle=True, epochs=4, lr=1e-2, validation=0.25)
    )
    write_report(run, folder / "report.html")
    return run, Page(folder / "report.html")


def _rules(run):
    """Return the decision of each fold."""
    return {fold: decision_of_folds(run, [fold]) for fold in sorted(set(run.predictions()["fold"]))}


def _answers_by_hand(run):
    """Return truth, answer and p of patients: the mean over slides and seeds at the mean threshold of the fold."""
    frame = pd.read_parquet(run.folder / "predictions.parquet")
    models = json.loads((run.folder / "models.json").read_text())
    positive = run.outputs[1]
    results = []
    for (fold, _), part in frame.groupby(["fold", "patient"]):
        at = np.mean([model["threshold"] for model in models if model["fold"] == fold])
        p = part[f"p_{positive}"].mean()
        results.append((part["label"].iloc[0] == positive, p >= at, p))
    return (np.array(column) for column in zip(*results, strict=True))


@pytest.mark.parametrize("which", ["two", "three"])
def test_report_is_valid_html_that_loads_no_resources(which, request):
    _, page = request.getfixturevalue(which)
    assert page.open == []
    assert all(target.startswith("#") for target in page.fetched)
    assert not re.search(r"https?://|@import|url\(", page.text)
    assert "RESEARCH USE ONLY" in page.text


@pytest.mark.parametrize("which", ["two", "three"])
def test_text_from_files_is_escaped(which, request):
    run, page = request.getfixturevalue(which)
    assert page.scripts == 1  # the script of the report
    assert "<script>alert" not in page.text
    assert {row["slide"] for row in page.table("slide") if "script" in row["slide"]} == {f"{EVIL} 0", f"{EVIL} 1"}
    assert "<script" not in re.sub(r"```.*?```", "", card(run), flags=re.DOTALL)


def test_report_shows_the_figures_of_the_run(two):
    run, page = two
    metrics = json.loads((run.folder / "metrics.json").read_text())
    shown = {row["figure, per cent"]: row for row in page.table("figure, per cent")}
    for name, words in (
        ("auc", "AUC"),
        ("f1_macro", "macro F1"),
        ("sensitivity", "sensitivity"),
        ("accuracy", "accuracy"),
    ):
        interval, summary = metrics["intervals"][name], metrics["summary"][name]
        assert interval["value"] == pytest.approx(summary["mean"])
        assert shown[words]["mean over folds"] == f"{100 * interval['value']:.1f}"
        assert shown[words]["sd over folds"] == f"{100 * summary['std']:.1f}"
        assert (
            shown[words]["95 % interval of that mean"] == f"{100 * interval['low']:.1f} to {100 * interval['high']:.1f}"
        )
    truth, _, p = _answers_by_hand(run)
    assert f"AUC {100 * roc_auc_score(truth, p):.1f}</span>" in page.text  # under the ROC curve of all folds together
    by_fold = page.table("fold")
    for name in ("sensitivity", "ece", "answered"):
        assert [row[name.replace("ece", "ECE")] for row in by_fold] == [
            f"{100 * result[name]:.1f}" for result in metrics["by_fold"]
        ]
    assert sum(int(row["patients"]) for row in by_fold) == 2 * run.data.patients  # two seeds


def test_confusion_matrix_counts_every_patient_once(two):
    run, page = two
    truth, answer, _ = _answers_by_hand(run)
    expected = [[int(((truth == t) & (answer == a)).sum()) for a in (False, True)] for t in (False, True)]
    assert np.sum(expected) == run.data.patients == 15
    assert _matrix(page) == expected


def test_dot_on_the_roc_curve_is_at_the_operating_point(two):
    run, page = two
    truth, answer, _ = _answers_by_hand(run)
    svg = share_svg([Line([(0, 0), (1, 1)], (answer[~truth].mean(), answer[truth].mean()))], x_label="", y_label="")
    assert re.search(r"<circle[^>]*>", svg)[0] in page.text


def test_table_lists_every_slide_and_marks_errors(two):
    run, page = two
    rows = page.table("slide")
    frame = pd.read_parquet(run.folder / "predictions.parquet").groupby(["fold", "slide"])[list(_p(run))].mean()
    points = _rules(run)
    assert len(rows) == run.data.slides == 30
    for row in rows:
        fold = int(row["fold"])
        p = frame.loc[(fold, row["slide"]), f"p_{EVIL}"]
        leading = run.outputs[int(p >= points[fold].threshold)]
        verdict = "right" if leading == row["label"] else "wrong"
        near = abs(p - points[fold].threshold) < points[fold].cut
        assert row["answer"] == ("no answer" if near else leading)
        assert row["result"] == (f"no answer, would be {verdict}" if near else verdict)
        assert float(row[f"p({EVIL}) %"]) == pytest.approx(100 * p, abs=0.051)
        assert float(row["threshold %"]) == pytest.approx(100 * points[fold].threshold, rel=1e-3)
    assert any(row["answer"] == "no answer" for row in rows)
    wrong = sum(row["result"] == "wrong" for row in rows)
    assert 0 < wrong == page.text.count('<tr class="err')
    assert f"{wrong} wrong" in page.text


def test_slides_of_a_patient_have_the_same_patient_answer(two):
    run, page = two
    of_patient = {(row["patient"], row["label"], row["patient's answer"]) for row in page.table("slide")}
    assert len(of_patient) == 15
    frame, rules = run.predictions().groupby(["fold", "patient"])[list(_p(run))].mean(), _rules(run)
    given = {patient: rules[fold].answer(p) for (fold, patient), p in zip(frame.index, frame.to_numpy(), strict=True)}
    assert {patient: answer_text for patient, _, answer_text in of_patient} == given


def test_counterfactual_answer_uses_the_same_threshold(two):
    run, page = two
    frame = pd.read_parquet(run.folder / "predictions.parquet").groupby(["fold", "slide"])[[f"cf_{EVIL}"]].mean()
    points = _rules(run)
    for row in page.table("slide"):
        p = frame.loc[(int(row["fold"]), row["slide"]), f"cf_{EVIL}"]
        answer_text = points[int(row["fold"])].answer([1 - p, p])
        assert row["counterfactual answer"].startswith(f"{answer_text} (")


def test_report_without_a_branch_has_no_counterfactual_column(three):
    _, page = three
    assert "counterfactual answer" not in page.table("slide")[0]


def test_three_classes_have_one_roc_curve_each_with_the_mean_auc_of_the_run(three):
    run, page = three
    areas = [float(area) for area in re.findall(r"AUC ([\d.]+)</span>", page.text)]
    assert len(areas) == 3
    frame = mean_over_seeds(run.predictions(), run.target)
    cases = decide_cases(run, frame)
    assert np.mean(areas) == pytest.approx(100 * bag_auc(cases.p, cases.truth), abs=0.06)


def test_reshuffled_folds_count_every_patient_once_per_seed(three):
    run, page = three
    assert np.sum(_matrix(page)) == 2 * run.data.patients == 60
    assert sorted(_rules(run)) == sorted(set(run.predictions()["fold"])) == [0, 1, 2, 3]
    frame = run.predictions()
    most_probable = frame[list(_p(run))].to_numpy().argmax(1)
    truth = frame["label"].map({name: i for i, name in enumerate(run.outputs)}).to_numpy()
    assert _matrix(page) == [[int(((truth == t) & (most_probable == a)).sum()) for a in range(3)] for t in range(3)]


def test_reshuffled_folds_use_the_thresholds_of_their_seed(two):
    run, _ = two
    reshuffled = replace(run, data=replace(run.data, splits=run.data.splits * 2))
    assert [decision_of_folds(reshuffled, [fold]).threshold for fold in range(4)] == [
        model.threshold for model in run.models
    ]


def test_fold_numbers_are_consistent_in_all_tables(three):
    run, page = three
    tables = [table for table in page.tables if table[0][0] == "fold"]
    assert [[row[0] for row in table[1:]] for table in tables] == [["0", "1", "2", "3"]] * 2
    assert [heading for heading, _ in learning_curves(run)] == ["fold 0", "fold 1", "fold 2", "fold 3"]


def test_learning_curves_show_the_selected_models(two):
    run, _ = two
    history = json.loads((run.folder / "history.json").read_text())
    assert len(history["best_epoch"]) == 2 * len(run.models)  # a grid of two
    for i, model in enumerate(run.models):
        kept = 2 * i + model.point
        assert history["best_epoch"][kept] == model.best_epoch
        assert history["validation"][model.best_epoch][kept] == pytest.approx(model.validation_loss)
    result = learning_curves(run)
    assert [heading for heading, _ in result] == ["fold 0", "fold 1"]
    for fold, (_, svg) in enumerate(result):
        assert svg.count("<polyline") == 2 * 2  # two seeds, training and validation
        dots = re.findall(r'<circle class="c1" cx="([\d.]+)" cy="([\d.]+)"', svg)
        validation = [points.split() for points in re.findall(r'dashed" points="([^"]*)"', svg)]
        epochs = [model.best_epoch for model in run.models if model.fold == fold]
        kept = [points[epoch] for points, epoch in zip(validation, epochs, strict=True)]
        assert [",".join(dot) for dot in dots] == kept


def test_report_needs_only_the_run_folder(two, tmp_path):
    run, _ = two
    moved = tmp_path / "elsewhere"
    shutil.copytree(run.folder, moved)
    frame = run.predictions()
    thousands = pd.concat([frame.assign(slide=frame["slide"] + f" {i}") for i in range(170)])
    thousands[f"cf_{EVIL}"] = 1 - thousands[f"p_{EVIL}"]
    thousands.to_parquet(moved / "predictions.parquet", index=False)
    write_report(read_run(moved), tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert len(page.table("slide")) == 30 * 170
    assert len(page.text) < 4_000_000
    assert 'class="long"' in page.text
    means = thousands.groupby(["fold", "slide"])[f"p_{EVIL}"].mean()
    rules, folds = _rules(run), means.index.get_level_values("fold")
    changed = sum(rules[f].answer([1 - p, p]) != rules[f].answer([p, 1 - p]) for f, p in zip(folds, means, strict=True))
    assert page.text.count('class="name turned"') == changed > 0
    assert f"{changed} of 5100" in page.text


def test_withheld_answers_are_counted(two):
    run, page = two
    truth, answer, p = _answers_by_hand(run)
    points, frame = _rules(run), run.predictions()
    fold_of = frame.groupby(["fold", "patient"]).size().index.get_level_values("fold")
    near = np.array([abs(q - points[f].threshold) < points[f].cut for q, f in zip(p, fold_of, strict=True)])
    assert 0 < near.sum() < len(near)
    right = 100 * (truth == answer)[~near].mean()
    assert f"{near.sum()} of them have no answer" in page.text
    assert f"of the others {right:.1f} % are answered right" in page.text


def test_reliability_diagram_has_one_dot_per_nonempty_bin():
    nan = float("nan")
    bins = Calibration(0.1, 0.1, (0.0, 0.5, 0.75, 1.0), (0, 8, 2), (nan, 0.6, 0.9), (nan, 0.5, 1.0))
    svg = reliability_svg(bins)
    assert svg.count("<circle") == svg.count("<rect") == 2
    assert "8 cases: 60.0 % sure, 50.0 % right" in svg


def test_lines_beyond_the_number_of_colours_are_dashed():
    assert colour(0) == "s0"
    assert colour(6) == "s0 dashed"
    assert len({colour(i) for i in range(12)}) == 12


def test_card_states_data_training_and_intervals(two):
    run, _ = two
    text = card(run)
    auc = run.metrics.intervals["auc"]
    sd = f"{100 * run.metrics.summary['auc'].std:.1f}"
    interval = f"{100 * auc.low:.1f} to {100 * auc.high:.1f}"
    assert "| figure, per cent | mean over folds | 95 % interval of that mean | sd over folds |" in text
    assert f"| AUC | {100 * auc.value:.1f} | {interval} | {sd} |" in text
    assert run.data.fingerprint in text
    assert "slides: 30 of 15 patients" in text
    assert "healthy (16)" in text
    assert "models kept: 4: 2 folds x 2 seeds" in text
    assert "chosen on validation bags only" in text
    assert "Research use only" in text


def test_card_and_report_contain_no_local_paths(two):
    run, page = two
    assert any(str(run.folder.parent) in note for note in run.notes)
    for text in (card(run), page.text):
        assert str(run.folder.parent) not in text
    assert any(note.startswith("features is packed once into run/cohort") for note in remarks(run))


def test_vertical_bar_in_a_class_name_is_escaped(three):
    run, _ = three
    assert "grade\\|1 (10)" in card(run)


def test_command_lists_settings_that_differ_from_the_defaults(two, three):
    arguments = "--lr 0.001,0.01 --abstain 0.6 --out run"
    assert command_of("train", two[0], two[0].folder) == (
        "carmil train --config run/study.yaml --bags features --labels labels.csv --model car/abmil.gated "
        f"--positive '{EVIL}' --folds 2 --seeds 2 --epochs 4 {arguments}"
    )
    assert yaml_part(two[0]) == "schedule: constant\n"
    assert "--reshuffle --epochs" in command_of("train", three[0], three[0].folder)
    assert yaml_part(three[0]) == "validation: 0.25\n"


def test_settings_without_a_command_line_option_are_written_to_yaml():
    words = set(inspect.signature(cli.studies.train).parameters)
    assert set(YAML_ONLY) == set(Settings.__dataclass_fields__) - words


def _p(run):
    return (f"p_{name}" for name in run.outputs)


def _matrix(page):
    """Return counts by truth and answer from cells such as "12 80.0 %"."""
    return [[int(cell.split()[0]) for cell in list(row.values())[1:-1]] for row in page.table("truth \\ answer")]
