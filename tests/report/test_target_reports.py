"""Reports of runs whose target is a time, a number, a grade or several labels: plots, tables, words and selected slides."""

import html
import json
import re
import shutil
from math import erfc, exp, sqrt

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from carmil.bags.sources import Bag
from carmil.bags.writers import write_bag
from carmil.explanations.explain import explain_run
from carmil.report.cases import Cases
from carmil.report.gallery import select_examples
from carmil.report.number_plots import LIMITS
from carmil.report.plots import Axes, round_numbers
from carmil.report.run import write_report
from carmil.report.survival_plots import log_rank
from carmil.runs.run import read_run
from carmil.runs.settings import Settings
from carmil.statistics.intervals import wilson
from carmil.studies.card import card
from carmil.studies.tables import figures_lines, figures_table
from carmil.studies.train import run_study
from carmil.targets import Labels, Survival, Value
from carmil.training.recipe import TRAIN

WIDTH, SLIDES = 6, 48
TARGETS = {
    "survival": {"target": "months", "event": "recurrence", "batch": 16},
    "value": {"target": "age"},
    "ordinal": {"target": "grade", "kind": "ordinal"},
    "labels": {"target": "node,her2"},
}
KINDS = list(TARGETS)


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    """Write 48 slides of 24 patients; the share of raised instances of a patient decides all outcomes, with noise."""
    folder, rng, rows = tmp_path_factory.mktemp("targets"), np.random.default_rng(0), []
    for p in range(SLIDES // 2):
        share = p / (SLIDES // 2)
        time, end = rng.exponential(30 * exp(-3 * share)), rng.uniform(5, 60)
        outcome = {
            "patient": f"P{p}",
            "months": round(min(time, end), 1) + 0.1,
            "recurrence": int(time <= end),
            "age": round(40 + 40 * share + rng.normal(), 1),
            "grade": 1 + int(share + 0.1 * rng.normal() > 0.3) + int(share + 0.1 * rng.normal() > 0.6),
            "node": int(share > 0.5),
            "her2": "" if p % 6 == 0 else int(rng.random() < 0.5),
            "split": ("train", "train", "val", "test")[p % 4],
        }
        for slide in (f"s{2 * p}", f"s{2 * p + 1}"):
            features = rng.normal(size=(8, WIDTH)).astype(np.float32)
            features[rng.random(8) < share, 0] += 3
            write_bag(Bag(slide, features, encoder="made up"), folder / "features", "npy")
            rows.append({"slide": slide, **outcome})
    pd.DataFrame(rows).to_csv(folder / "labels.csv", index=False)
    return folder


@pytest.fixture(scope="module")
def trained(cohort):
    """Return a function that trains a run of a kind and writes its report; each run is trained once."""
    runs = {}

    def train(kind, name="", **others):
        out = cohort / f"{kind}{name}"
        if out not in runs:
            where = {"bags": cohort / "features", "labels": cohort / "labels.csv", "out": out, "device": "cpu"}
            small = {"model": "car/abmil", "options": {"hidden": 4, "attention": 4}, "epochs": 8, "lr": 1e-2}
            run = run_study(Settings(**{**where, **small, **TARGETS[kind], "folds": 2, "seeds": 2, **others}))
            write_report(run, cohort / f"{out.name}.html")
            runs[out] = run
        return runs[out], (cohort / f"{out.name}.html").read_text(encoding="utf-8")

    return train


@pytest.fixture(scope="module")
def explained(cohort, trained):
    """Return a function like `trained` whose reports show evidence."""

    def explain(kind):
        run, _ = trained(kind)
        quiet = {"bags": None, "methods": (), "searched": False, "device": "cpu", "log": lambda line: None}
        explain_run(run.folder, None, **quiet)
        write_report(run, cohort / "explained.html")
        return run, (cohort / "explained.html").read_text(encoding="utf-8")

    return explain


def words_of(text):
    """Return the text of a page, without scripts, styles and tags."""
    text = re.sub(r"<(script|style|svg).*?</\1>", " ", text, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def tables(text):
    """Return the tables of a page as lists of rows of cells."""
    found = []
    for table in re.findall(r"<table.*?</table>", text, re.DOTALL):
        rows = re.findall(r"<tr.*?</tr>", table, re.DOTALL)
        cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]
        found.append([[html.unescape(re.sub(r"<[^>]*>", "", cell)).strip() for cell in row] for row in cells])
    return found


def answers(text):
    heads, *rows = next(table for table in tables(text) if table[0][0] == "slide")
    return [dict(zip(heads, row, strict=True)) for row in rows]


def figure(text, caption):
    """Return the plot whose caption contains these words."""
    figures = re.findall(r"<figure.*?</figure>", text, re.DOTALL)
    return next(one for one in figures if caption in html.unescape(re.search(r"<figcaption>(.*?)</", one)[1]))


def points(svg, colour, tag="polyline"):
    """Return the points of a line, in pixels (n, 2)."""
    found = re.search(rf'<{tag} class="(?:line|band) {colour}" points="([^"]*)"', svg)[1]
    return np.array([[float(number) for number in pair.split(",")] for pair in found.split()])


def patients_of(run):
    """Return one row per patient and fold: the mean over slides and seeds of the predictions, and the outcome."""
    frame = pd.read_parquet(run.folder / "predictions.parquet")
    names = run.target.prediction_columns()
    keys = ["fold", "patient", *run.target.label_columns]
    return frame.groupby(keys, dropna=False, sort=False)[names].mean().reset_index()


def groups_by_hand(run):
    """Return time, event and risk group of all patients, by the mean threshold of the models of the patient's fold."""
    patients, models = patients_of(run), json.loads((run.folder / "models.json").read_text())
    cut = {fold: np.mean([one["threshold"] for one in models if one["fold"] == fold]) for fold in set(patients["fold"])}
    higher = patients["risk"].to_numpy() >= patients["fold"].map(cut).to_numpy()
    return patients["time"].to_numpy(), patients["event"].to_numpy() > 0, higher


def survival_by_hand(time, event, at):
    """Return the product over the event times up to `at` of 1 - events / cases at risk."""
    share = 1.0
    for one in sorted(set(time[event & (time <= at)])):
        share *= 1 - (event & (time == one)).sum() / (time >= one).sum()
    return share


@pytest.fixture
def lifelines():
    with np.errstate():  # lifelines changes NumPy's handling of errors
        yield pytest.importorskip("lifelines", reason="needs lifelines, from the dev group")


def test_kaplan_meier_curves_use_the_risk_groups_of_each_fold(trained):
    run, text = trained("survival")
    time, event, higher = groups_by_hand(run)
    plot = figure(text, "log-rank test")
    axes = Axes("", "", (0.0, float(time.max())))
    assert 0 < higher.sum() < len(higher)
    for colour, members in (("s0", higher), ("s1", ~higher)):
        line = points(plot, colour)
        for at in (0.0, *sorted(time[members])):
            x, y = axes.place(at, survival_by_hand(time[members], event[members], at))
            assert y == line[line[:, 0] <= x + 0.05][-1, 1]
        censored = {round(axes.place(at, 0)[0], 1) for at in time[members & ~event]}
        ticks = re.findall(rf'<line class="line {colour}" x1="([\d.]+)" x2="\1"', plot)
        assert {float(x) for x in ticks} == censored
    rows = re.findall(r'<text x="([\d.]+)" y="(?:345|360)" text-anchor="middle">(\d+)</text>', plot)
    at_risk = [int(count) for _, count in rows]
    expected = [int((time[group] >= tick).sum()) for group in (higher, ~higher) for tick in axes.x_ticks]
    assert at_risk == expected
    assert f"higher risk: {higher.sum()} patients, {(event & higher).sum()} events" in plot


def test_band_of_the_kaplan_meier_curve_is_its_interval(trained, lifelines):
    run, text = trained("survival")
    time, event, higher = groups_by_hand(run)
    fitter = lifelines.KaplanMeierFitter().fit(time[higher], event[higher])
    limits = fitter.confidence_interval_survival_function_
    band = points(figure(text, "log-rank test"), "s0", "polygon")
    axes = Axes("", "", (0.0, float(time.max())))
    first = min(time[higher & event])
    low, high = limits.loc[first]
    x = axes.place(first, 0)[0]
    assert sorted(band[band[:, 0] == x, 1]) == pytest.approx([axes.place(0, high)[1], axes.place(0, low)[1]], abs=0.11)


def log_rank_by_hand(time, event, group):
    """Return the p of the squared difference of observed and expected events in the group, over its variance."""
    difference = variance = 0.0
    for one in set(time[event]):
        n, inside = (time >= one).sum(), (group & (time >= one)).sum()
        d = (event & (time == one)).sum()
        difference += (event & group & (time == one)).sum() - d * inside / n
        variance += d * (inside / n) * (1 - inside / n) * (n - d) / max(1, n - 1)
    return erfc(abs(difference) / sqrt(2 * variance))


def test_caption_has_the_log_rank_test_of_the_groups(trained):
    run, text = trained("survival")
    time, event, higher = groups_by_hand(run)
    p = log_rank_by_hand(time, event, higher)
    assert log_rank(time, event, higher) == pytest.approx(p, rel=1e-6)
    words = words_of(text)
    assert f"log-rank test: {'p < 0.001' if p < 0.001 else f'p = {p:.3f}'}" in words
    assert "risks of different folds come from different models" in words


@pytest.mark.parametrize(("event", "group"), [([0, 0, 0], [1, 0, 1]), ([1, 1, 0], [1, 1, 1]), ([1, 1, 0], [0, 0, 0])])
def test_log_rank_test_requires_events_and_two_groups(event, group):
    assert log_rank(np.array([1.0, 2.0, 3.0]), np.array(event, dtype=bool), np.array(group, dtype=bool)) is None


def test_calibration_uses_the_baseline_hazard_of_each_fold(trained):
    run, text = trained("survival")
    patients, models = patients_of(run), json.loads((run.folder / "models.json").read_text())
    facts = json.loads((run.folder / "run.json").read_text())
    trained_on = (np.array(facts["splits"]) == TRAIN).any(axis=(0, 1))
    times, events = np.array(facts["outcomes"])[trained_on].T
    horizon = float(np.median(times[events == 1]))
    predicted = []
    for fold, risk in zip(patients["fold"], patients["risk"], strict=True):
        own = [one["baseline"] for one in models if one["fold"] == fold]
        hazards = [max([0.0, *np.array(one["hazard"])[np.array(one["times"]) <= horizon]]) for one in own]
        predicted.append(exp(-np.mean(hazards) * exp(risk)))
    order = np.argsort(predicted)
    quarters = np.array_split(order, 4)
    plot = figure(text, f"Calibration at {horizon:.3g} months")
    dots = re.findall(r'<circle class="dot s0" cx="([\d.]+)" cy="([\d.]+)"', plot)
    time, event = patients["time"].to_numpy(), patients["event"].to_numpy() > 0
    expected = [
        Axes("", "").place(np.mean(np.array(predicted)[part]), survival_by_hand(time[part], event[part], horizon))
        for part in quarters
        if time[part].max() >= horizon or survival_by_hand(time[part], event[part], horizon) == 0
    ]
    assert len(quarters[0]) == SLIDES // 8
    np.testing.assert_allclose(np.array(dots, dtype=float), expected, atol=0.11)


def test_curves_over_time_have_a_line_per_fold_and_their_mean(trained):
    _, text = trained("survival")
    plot = figure(text, "AUC over time")
    folds = [
        np.array([pair.split(",") for pair in found.split()], dtype=float)
        for found in re.findall(r'class="line control" points="([^"]*)"', plot)
    ]
    assert len(folds) == 2
    mean = points(plot, "s0")
    at = {x for x, _ in folds[0]} & {x for x, _ in folds[1]}
    assert at
    for x in at:
        each = [fold[fold[:, 0] == x, 1][0] for fold in folds]
        assert mean[mean[:, 0] == x, 1][0] == pytest.approx(np.mean(each), abs=0.11)


def test_brier_scores_are_shown_beside_those_of_the_kaplan_meier_curve(trained):
    run, text = trained("survival")
    plot, summary = figure(text, "Brier score over time"), run.metrics.summary
    assert f"the models: {100 * summary['ibs'].mean:.1f} over all times" in plot
    assert f"the same for every patient: {100 * summary['ibs_population'].mean:.1f} over all times" in html.unescape(
        plot
    )
    assert len(points(plot, "s0")) == len(points(plot, "s1")) > 1


def test_predicted_numbers_are_drawn_against_the_true_ones(trained):
    run, text = trained("value")
    patients = patients_of(run)
    true, predicted = patients["label"].to_numpy(), patients["predicted"].to_numpy()
    plot = figure(text, "Predicted and true age")
    dots = re.findall(r'<circle class="case" cx="([\d.]+)" cy="([\d.]+)" r="3"><title>(P\d+): ', plot)
    low, high = min(*true, *predicted), max(*true, *predicted)
    room = 0.04 * (high - low)
    axes = Axes("", "", (low - room, high + room), (low - room, high + room))
    expected = {name: axes.place(x, y) for name, x, y in zip(patients["patient"], true, predicted, strict=True)}
    assert {name: (float(x), float(y)) for x, y, name in dots} == expected
    guide = re.search(r'class="guide" points="([^"]*)"', plot)[1]
    assert guide == axes.path([(low - room, low - room), (high + room, high + room)])


def test_limits_of_the_errors_are_about_two_standard_deviations_from_their_mean(trained):
    run, text = trained("value")
    patients = patients_of(run)
    error = (patients["predicted"] - patients["label"]).to_numpy()
    low, high = error.mean() - LIMITS * error.std(ddof=1), error.mean() + LIMITS * error.std(ddof=1)
    words = words_of(figure(text, "Errors of the predicted age"))
    assert f"the mean error, {error.mean():+.3g}".replace("-", "−") in words
    assert f"{low:+.3g} and {high:+.3g}".replace("-", "−") in words


def test_plot_shows_the_mean_probability_of_each_grade_by_true_grade(trained):
    run, text = trained("ordinal")
    patients = patients_of(run)
    plot = figure(text, "Predicted grades by true grade")
    for grade in run.target.names:
        own = patients[patients["label"] == grade]
        assert f">{grade} ({len(own)})</text>" in plot
        for name in run.target.names:
            assert f"{grade} ({len(own)}): {name} {own[f'p_{name}'].mean():.1%}" in plot


def test_calibration_of_grades_uses_the_probabilities_of_being_above_each_grade(trained):
    run, text = trained("ordinal")
    patients, names = patients_of(run), run.target.names
    p = 1 - patients[[f"p_{name}" for name in names[:2]]].sum(axis=1).to_numpy()
    above = (patients["label"] == names[2]).to_numpy()
    highest = np.argsort(p)[-len(p) // 4 :]
    x, y = Axes("", "").place(p[highest].mean(), above[highest].mean())
    plot = figure(text, "Calibration")
    assert f'<circle class="dot s1" cx="{x}" cy="{y}"' in plot
    low, high = wilson(above[highest].mean(), len(highest))
    assert f'y1="{Axes("", "").place(0, low)[1]}" y2="{Axes("", "").place(0, high)[1]}"' in plot
    assert "above 2" in plot and "above 3" not in plot


def test_confusion_matrix_counts_patients_by_grade(trained):
    run, text = trained("ordinal")
    patients = patients_of(run)
    p = patients[run.target.prediction_columns()].to_numpy()
    answered = (p.cumsum(1) >= 0.5).argmax(1)
    truth = patients["label"].map({name: i for i, name in enumerate(run.target.names)}).to_numpy()
    matrix = next(table for table in tables(text) if table[0][0] == "truth \\ answer")
    counts = [[int(re.match(r"\d+", cell)[0]) for cell in row[1:-1]] for row in matrix[1:]]
    by_hand = [[((truth == t) & (answered == a)).sum() for a in range(3)] for t in range(3)]
    totals = [int(row[-1]) for row in matrix[1:]]
    assert totals == [sum(row) for row in by_hand] and sum(totals) == SLIDES // 2
    for shown, row, cells in zip(counts, by_hand, (row[1:-1] for row in matrix[1:]), strict=True):
        assert [f"{n}{100 * n / sum(row):.1f} %" for n in row] == cells
        assert len(shown) == 3


def test_curves_of_labels_omit_missing_labels(trained):
    run, text = trained("labels")
    patients = patients_of(run)
    assert patients["label_her2"].isna().sum() == 4
    plot = figure(text, "ROC curve")
    for name in ("node", "her2"):
        known = patients[patients[f"label_{name}"].notna()]
        area = 100 * roc_auc_score(known[f"label_{name}"], known[f"p_{name}"])
        assert f"{name}: AUC {area:.1f}</span>" in plot
        answered, true = known[f"p_{name}"] >= 0.5, known[f"label_{name}"] == 1
        x, y = Axes("", "").place((answered & ~true).sum() / (~true).sum(), (answered & true).sum() / true.sum())
        assert f'cx="{x}" cy="{y}" r="4.5"/>' in plot


MUST = {
    "survival": (
        "C-index",
        "months to recurrence (survival)",
        "Cox's partial likelihood",
        "the log hazard, relative to the mean of the training slides",
        "median risk of the validation patients",
        "percentiles of 1,000 resamples of the patients",
    ),
    "value": ("Spearman correlation", "R2", "mean absolute error", "age (value)", "squared error", "a larger age"),
    "ordinal": ("quadratic kappa", "median grade", "grade (ordinal)", "cumulative logits", "a higher grade"),
    "labels": ("AUC node", "average precision her2", "node, her2 (labels)", "log-odds of a label", "node in 22 of 48"),
}
NEVER = (r"\bclass(es)?\b", "Macro F1", "macro F1", r"\bECE\b", "Clopper", "stratified by class")
MUST_NOT = {
    "survival": (
        r"\bprobabilit(y|ies) of their\b",
        "wrong answers",
        "Cross-entropy",
        "cross-entropy",
        "label smoothing",
        r"\bkappa\b",
    ),
    "value": (
        "wrong",
        "threshold",
        "Cross-entropy",
        "cross-entropy",
        r"\bAUC\b",
        r"\bprobabilit",
        "label smoothing",
        "another answer",
    ),
    "ordinal": ("threshold", r"\bAUC\b", "label smoothing", "C-index"),
    "labels": ("threshold", "wrong answers", "C-index", r"; \d+ wrong"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_page_and_card_use_only_the_terms_of_the_target(trained, kind):
    run, text = trained(kind)
    written = re.sub(r"\\(.)", r"\1", card(run))
    for words in (words_of(text), " ".join(written.split())):
        words = re.sub(r"Messages during the run.*?What each model chose", "", words)  # written by other rooms
        words = re.sub(r"All settings.*", "", words)
        words = re.sub(r"--[a-z-]+ \S+", "", words)
        for expected in MUST[kind]:
            assert expected in words, expected
        for pattern in (*NEVER, *MUST_NOT[kind]):
            assert not re.search(pattern, words), re.search(f".{{60}}{pattern}.{{60}}", words)


@pytest.mark.parametrize("kind", KINDS)
def test_evidence_is_described_in_the_terms_of_the_target(explained, kind):
    _, text = explained(kind)
    words = words_of(re.search(r'<h2 id="evidence">.*?<h2 id="learning">', text, re.DOTALL)[0])
    assert not re.search(r"\bclass(es)?\b", words), re.search(r".{60}\bclass(es)?\b.{60}", words)
    if kind == "labels":
        assert "for (+) or against (−) every label" in words and "evidence for node" in words
        return
    output = {"survival": "risk", "value": "age", "ordinal": "grade"}[kind]
    assert f"Every tile raises the {output} (+) or lowers the {output} (−)" in words
    assert f"lowers the {output} raises the {output}" in words  # the ends of the colours
    assert not re.search(r"\b(for|against)\b (and against|the answer)", words)
    unit = {
        "survival": "the log hazard",
        "value": "the age in standard deviations",
        "ordinal": "the logit of a higher grade",
    }
    assert f"it adds up to the change of {unit[kind]}" in words and f"contribution to {unit[kind]}" in words
    assert ("slides that get another answer" in words) == (kind != "value")


@pytest.mark.parametrize("kind", KINDS)
def test_every_slide_is_in_the_table_with_its_outcome(trained, kind):
    run, text = trained(kind)
    labels = pd.read_csv(run.settings.labels, dtype=str, keep_default_na=False).set_index("slide")
    rows = answers(text)
    assert len(rows) == SLIDES
    for row in rows:
        given = labels.loc[row["slide"]]
        match kind:
            case "survival":
                assert float(row["months"]) == pytest.approx(float(given["months"]))
                assert row["recurrence"] == ("yes" if given["recurrence"] == "1" else "censored")
                assert row["answer"] == (
                    "higher risk" if float(row["risk"]) >= float(row["threshold"]) else "lower risk"
                )
            case "value":
                assert float(row["age"]) == pytest.approx(float(given["age"]))
                error = float(row["predicted age"]) - float(row["age"])
                assert float(row["predicted − true"]) == pytest.approx(error, abs=0.02)
                assert "answer" not in row and "result" not in row
            case "ordinal":
                assert row["grade"] == given["grade"]
                assert row["result"] == ("right" if row["answer"] == row["grade"] else "wrong")
            case "labels":
                assert row["node"] == given["node"] and row["her2"] == (given["her2"] or "?")
                percent = {name: float(row[f"p({name}) %"]) for name in ("node", "her2")}
                answered = [] if row["answer"] == "none" else row["answer"].split(", ")
                assert [name for name in percent if name in answered] == answered
                assert all((name in answered) == (p > 50) for name, p in percent.items() if p != 50)  # rounded
                assert "result" not in row


def test_report_of_a_value_marks_no_changed_answers_and_has_no_filter(trained):
    _, text = trained("value")
    assert 'class="name turned"' not in text and '<label hidden>show <select id="which">' in text
    assert "counterfactual age" in answers(text)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_report_supports_one_seed_and_an_official_split(trained, kind):
    run, text = trained(kind, "_official", official=True, seeds=1)
    words, test = words_of(text), SLIDES // 4
    assert len(run.models) == 1 and len(answers(text)) == test
    assert f"Of {test // 2} patients of the test folds" in words
    assert "the table's own train/val/test column" in words or "The table's own train/val/test column" in words
    if kind == "survival":
        _, _, higher = groups_by_hand(run)
        assert f"higher risk: {higher.sum()} patient" in text and len(higher) == test // 2
        assert 'class="line control"' not in figure(text, "AUC over time")


@pytest.mark.parametrize("kind", KINDS)
def test_report_of_reshuffled_folds_draws_every_patient_once(trained, kind):
    run, text = trained(kind, "_reshuffled", reshuffle=True)
    assert len(run.data.splits) == 2 and len(answers(text)) == SLIDES
    words = words_of(text)
    assert "48 answers, one for each patient and each of 2 divisions into folds" in words
    match kind:
        case "survival":
            found = re.findall(r"(?:higher|lower) risk: (\d+) patient", text)
            assert sum(map(int, found)) == SLIDES // 2
            assert figure(text, "AUC over time").count('class="line control"') == 4
        case "value":
            assert figure(text, "Predicted and true age").count('class="case"') == SLIDES // 2
        case "ordinal":
            counted = re.findall(r'text-anchor="end">\d \((\d+)\)</text>', figure(text, "Predicted grades"))
            assert sum(map(int, counted)) == SLIDES // 2
        case "labels":
            titles = re.findall(r"<title>node, (\d+) patients", figure(text, "Calibration"))
            assert sum(map(int, titles)) == SLIDES // 2


def cases_of(target, p, truth, thresholds=None, folds=None):
    p, truth = np.asarray(p, dtype=np.float64), np.asarray(truth, dtype=np.float64)
    frame = pd.DataFrame({"slide": [f"s{i}" for i in range(len(p))], "fold": folds or [0] * len(p)})
    rules = tuple(target.decision(at) for at in (thresholds or [None] * len(p)))
    answer = np.array([rule.leading(row[None])[0] for rule, row in zip(rules, p, strict=True)])
    return Cases(target, frame, p, truth, answer, np.ones(len(p), dtype=bool), rules)


def test_highest_lowest_and_worst_numbers_are_selected():
    predicted, true = [[1], [2], [3], [4], [5], [6], [7], [8], [9], [10]], [1, 2, 3, 4, 50, 6, 7, 8, 9, 10]
    cases = cases_of(Value(columns=("age",)), predicted, np.array(true)[:, None])
    examples = {(one.case, one.why) for one in select_examples(cases)}
    assert {(9, "highest predicted age"), (8, "highest predicted age"), (0, "lowest predicted age")} <= examples
    assert (4, "most at odds with the outcome") in examples
    assert len({case for case, _ in examples}) == len(examples) == 9


def test_risks_are_compared_relative_to_the_threshold_and_within_the_fold():
    target = Survival(columns=("months", "recurrence"))
    risk, time = [[5.0], [5.5], [0.1], [0.3], [-1.0], [1.0]], [9, 3, 1, 8, 2, 7]
    outcomes = np.stack([time, np.ones(6)], axis=1)
    cases = cases_of(target, risk, outcomes, thresholds=[5.2, 5.2, 0, 0, 0, 0], folds=[0, 0, 1, 1, 1, 1])
    why = {one.why: one.case for one in select_examples(cases)[::-1]}
    assert why["highest predicted risk"] == 5  # 5.5 is only 0.3 above the threshold of its fold
    assert why["lowest predicted risk"] == 4
    discordance = target.discordance(np.array(risk[2:]), outcomes[2:])
    assert discordance.tolist() == [2, 2, 2, 2]  # of times 1, 8, 2, 7 and risks .1, .3, -1, 1
    assert target.discordance(np.array([[2.0], [1.0]]), np.array([[1, 0], [2, 1]])).tolist() == [0, 0]


def test_correct_and_wrong_slides_of_each_leading_label_are_selected():
    p = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.95], [0.2, 0.6], [0.7, 0.1]]
    truth = [[1, 0], [0, 1], [0, 1], [1, np.nan], [1, 1]]
    found = [(one.case, one.why) for one in select_examples(cases_of(Labels(columns=("node", "her2")), p, truth))]
    assert found == [(0, "node: right"), (4, "node: right"), (1, "node: wrong"), (2, "her2: right")]


def test_name_of_a_censoring_column_is_not_used_as_the_name_of_the_event():
    target = Survival(columns=("days", "censored"))
    assert target.describe(np.array([12.0, 1])) == "12 days, event"
    assert target.describe(np.array([12.0, 0])) == "12 days, censored"
    assert target.title == "days to event" and target.strata(np.array([[1.0, 0]]))[1] == ("censored", "event")
    assert target.outcome_cells(np.array([[12.5, 1], [3, 0]])) == {"days": ["12.5", "3"], "event": ["yes", "censored"]}


def test_ticks_are_round_numbers():
    assert round_numbers(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert round_numbers(-7, 31) == [0, 10, 20, 30]
    assert round_numbers(0, 4000) == [0, 1000, 2000, 3000, 4000]
    assert round_numbers(5, 5) == [5]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "survival",
            "48 slides of 24 patients: {events} with recurrence, {censored} censored, median time {median:.4g} months",
        ),
        ("value", "48 slides of 24 patients: age from {low:.4g} to {high:.4g}, median {middle:.4g}"),
        ("ordinal", "{first} slides of grade 1"),
        ("labels", "node in 22 of 48, her2 in {her2} of 40"),
    ],
)
def test_terminal_lines_describe_the_outcomes(trained, kind, words):
    run, _ = trained(kind)
    labels = pd.read_csv(run.settings.labels)
    events, ages = int(labels["recurrence"].sum()), labels["age"]
    numbers = {"events": events, "censored": SLIDES - events, "median": labels["months"].median()}
    numbers |= {"low": ages.min(), "high": ages.max(), "middle": ages.median()}
    numbers |= {"first": (labels["grade"] == 1).sum(), "her2": int(labels["her2"].sum())}
    assert words.format(**numbers) in figures_lines(run)[0]
    assert figures_table([run]).title.endswith("given" if kind in ("value", "ordinal") else "per cent")


def test_report_needs_only_the_run_folder(trained, tmp_path):
    run, text = trained("survival", "_reshuffled", reshuffle=True)
    shutil.copytree(run.folder, tmp_path / run.folder.name)
    write_report(read_run(tmp_path / run.folder.name), tmp_path / "report.html")
    texts = (tmp_path / "report.html").read_text(encoding="utf-8"), text
    copied, original = (re.sub(r"--(bags|labels) \S+", "", page) for page in texts)  # paths relative to the report
    assert copied == original
