"""The report of a run shows what `carmil explain` and `carmil faithfulness` left in the run's folder, and says what is missing."""

import json
import re
import shutil

import numpy as np
import pandas as pd
import pytest

from carmil.bags.sources import Bag
from carmil.bags.writers import write_bag
from carmil.errors import CarmilError
from carmil.report.cases import decide_cases
from carmil.report.gallery import select_cases
from carmil.report.run import write_report
from carmil.runs.faithfulness import read_faithfulness, write_faithfulness_file
from carmil.runs.run import read_run
from carmil.runs.settings import PRESETS, Settings
from carmil.studies.explain import explain_run
from carmil.studies.figures import mean_over_seeds
from carmil.studies.train import run_study

CLASSES = ("healthy", "<b>tumour")


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    """Sixteen slides of tiles on a grid, whose instances are known; explained."""
    folder = tmp_path_factory.mktemp("explained")
    rng = np.random.default_rng(0)
    lines = []
    for s in range(16):
        features = rng.normal(size=(12 + s, 6)).astype(np.float32)
        truth = np.zeros(len(features), dtype=np.int64)
        truth[:4] = s % 2
        features[truth == 1, 0] += 3.0
        corners = np.array([(x * 64, y * 64) for y in range(4) for x in range(7)], dtype=np.float32)[: len(features)]
        bag = Bag(f"s{s}", features, corners, "level0_px", 64, "made up", truth)
        write_bag(bag, folder / "features", "npz")
        lines.append({"slide": f"s{s}", "patient": f"P{s}", "label": CLASSES[s % 2]})
    pd.DataFrame(lines).to_csv(folder / "labels.csv", index=False)
    where = {"bags": folder / "features", "labels": folder / "labels.csv", "out": folder / "run", "device": "cpu"}
    run = run_study(
        Settings(**where, **{**PRESETS["0.1"], "epochs": 6, "lr": 1e-2}, distance="l1", folds=2, positive=CLASSES[1])
    )
    write_report(run, folder / "before.html")
    explain_run(run.folder, None, bags=None, methods=("attention",), searched=True, device="cpu", log=lambda line: None)
    write_report(run, folder / "after.html")
    return run


@pytest.fixture
def copied(explained, tmp_path):
    """The run's folder, to be spoiled; gives what a report of it says."""
    shutil.copytree(explained.folder, tmp_path / "run")

    def report():
        write_report(read_run(tmp_path / "run"), tmp_path / "report.html")
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    return tmp_path / "run", report


def text_of(run, name):
    return (run.folder.parent / name).read_text(encoding="utf-8")


def tables(text):
    """Tables as lists of lines of cells."""
    found = []
    for table in re.findall(r"<table.*?</table>", text, re.DOTALL):
        rows = re.findall(r"<tr.*?</tr>", table, re.DOTALL)
        cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]
        found.append([[re.sub(r"<[^>]*>|\xa0", " ", cell).strip() for cell in row] for row in cells])
    return found


def table_of(text, head):
    return next(lines[1:] for lines in tables(text) if lines[0][0] == head)


def shown(figure):
    return f"{figure['value']:.2f} ({figure['low']:.2f} to {figure['high']:.2f})"


def test_without_evidence_the_report_says_which_command_makes_it(explained):
    text = text_of(explained, "before.html")
    assert "run <code>carmil explain run</code>, then" in text
    assert "run <code>carmil faithfulness run</code>, then" in text
    assert "<img" not in text and 'id="slides"' not in text


def test_the_figures_of_the_evidence_are_those_of_its_summary(explained):
    text = text_of(explained, "after.html")
    summary = json.loads((explained.folder / "evidence" / "summary.json").read_text())
    moved = {line[0]: line[1:] for line in table_of(text, "mean over slides, 95 % interval")}
    learned, searched = summary["counterfactual"], summary["searched"]
    assert moved["slides that get another answer"] == [f"{learned['turned']} of 16", f"{searched['turned']} of 16"]
    assert moved["attention weight that moved (2 is the most)"] == [
        shown(part["attention_moved"]) for part in (learned, searched)
    ]
    for name in ("spearman", "pearson"):
        between = summary["correlations"]["u and u_cf"][name]
        assert moved[f"{name.capitalize()} of attention scores and counterfactual ones"] == [shown(between), "–"]
    agreement = next(lines for lines in tables(text) if "AUPRC+" in lines[0])
    assert agreement[1][0] == "path" and agreement[2][0] == "attention"
    auprc = summary["truth"]["agreement"]["path"]["auprc_plus"]
    assert agreement[1][1].startswith(f"{100 * auprc['value']:.1f}")
    concentration = next(lines for lines in tables(text) if "Gini" in lines[0])
    assert concentration[1][:3] == [
        "attention weight",
        shown(summary["concentration"]["attention_normalised_entropy"]),
        shown(summary["concentration"]["attention_gini"]),
    ]


def test_the_class_shift_matrices_are_those_of_the_summary(explained):
    text = text_of(explained, "after.html")
    summary = json.loads((explained.folder / "evidence" / "summary.json").read_text())
    found = [lines for lines in tables(text) if lines[0][0].endswith("class that grew most")]
    counts = [[[int(cell.split()[0]) for cell in line[1:-1]] for line in lines[1:]] for lines in found]
    assert counts == [summary[which]["class_shift"]["matrix"] for which in ("counterfactual", "searched")]


def test_every_chosen_slide_is_there_with_its_three_maps(explained):
    text = text_of(explained, "after.html")
    cases = decide_cases(explained, mean_over_seeds(explained.predictions(), explained.classes))
    figures = re.findall(r'<figure class="slide">.*?</figure>', text, re.DOTALL)
    assert len(figures) == len(select_cases(cases)) > 2
    for i, figure in zip(select_cases(cases), figures, strict=True):
        assert f"<b>{cases.frame['slide'].iloc[i]}</b>" in figure
        assert f"({100 * cases.p[i, cases.answer[i]]:.1f} %)" in figure
        assert figure.count('<img src="data:image/png;base64,') == 3
        answer = explained.classes[cases.answer[i]].replace("<", "&lt;").replace(">", "&gt;")
        assert f"evidence for {answer}<span" in figure
        assert ('class="rightly"' in figure) == bool(cases.right[i])


def test_the_page_fetches_nothing_and_runs_nothing_of_the_files(explained):
    text = text_of(explained, "after.html")
    assert not re.search(r"https?://|@import|url\(", text)
    sources = re.findall(r'(?:src|href)="([^"]{0,22})', text)
    assert {source[:22] for source in sources if not source.startswith("#")} == {"data:image/png;base64,"}
    assert "<b>tumour" not in text
    assert "default-src 'none'" in text and "img-src data:" in text


def test_of_the_evidence_only_the_slides_that_are_shown_are_read(copied):
    folder, report = copied
    cases = decide_cases(read_run(folder), mean_over_seeds(read_run(folder).predictions(), CLASSES))
    kept = {f"{cases.frame['slide'].iloc[i]}.parquet" for i in select_cases(cases)} | {"summary.parquet"}
    gone = [path for path in (folder / "evidence").glob("*.parquet") if path.name not in kept]
    assert gone
    for path in gone:
        path.unlink()
    shutil.rmtree(folder / "cohort")
    assert report().count("<img") == 3 * len(select_cases(cases))


def test_evidence_of_other_weights_is_not_shown(copied):
    folder, report = copied
    weights = (folder / "weights.safetensors").read_bytes()
    (folder / "weights.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    text = report()
    assert "run/evidence is not of this run&#39;s weights and slides" in text
    assert "<img" not in text


def test_evidence_that_is_not_whole_is_not_shown(copied):
    folder, report = copied
    (folder / "evidence" / "summary.json").unlink()
    text = report()
    assert "The evidence is incomplete" in text
    assert "<img" not in text


def test_a_patient_of_several_slides_in_one_bag_is_a_strip(copied):
    folder, report = copied
    metrics = json.loads((folder / "metrics.json").read_text())
    (folder / "metrics.json").write_text(json.dumps(metrics | {"rule": "one-bag"}))
    text = report()
    assert '<figure class="slide row">' in text and '<figure class="slide">' not in text


def test_the_faithfulness_of_one_run_goes_into_its_folder_and_its_report(copied, said):
    folder, report = copied
    status, told, _ = said("faithfulness", str(folder), "--steps", "10", "--random-orders", "1", "--device", "cpu")
    assert status == 0 and str(folder / "faithfulness" / "faithfulness.html") in " ".join(told.split())
    text, page = report(), (folder / "faithfulness" / "faithfulness.html").read_text(encoding="utf-8")
    head = "verdict"
    mine, its = ([lines for lines in tables(one) if head in lines[0]] for one in (text, page))
    assert mine == its and len(mine) == 2
    verdicts = re.findall(r'<p class="(?:alarm|praise|unsure)">.*?</p>', page)
    assert len(verdicts) == 2 and all(verdict in text for verdict in verdicts)
    assert re.findall(r"<polyline.*?/>", page)[0] in text


def test_what_was_found_comes_back_from_its_file_as_it_was(copied, said):
    folder, report = copied
    said("faithfulness", str(folder), "--steps", "10", "--random-orders", "1", "--device", "cpu")
    path = folder / "faithfulness" / "faithfulness.json"
    run = read_run(folder)
    written = json.loads(path.read_text())["runs"][0]
    write_faithfulness_file([read_faithfulness(run)], folder, command="")
    assert json.loads((folder / "faithfulness.json").read_text())["runs"] == [written]
    written["weights"] = "others"
    path.write_text(json.dumps({"runs": [written]}))
    assert "run/faithfulness/faithfulness.json is not of the weights of this run" in report()


def changed(path, place, value):
    """Replace a value of a JSON file; `...` removes it."""
    tree = json.loads(path.read_text())
    holder = tree
    for key in place[:-1]:
        holder = holder[key]
    if value is ...:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    path.write_text(json.dumps(tree))


@pytest.mark.finding(n=14)
@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (["concentration"], ..., "concentration is missing"),
        (["concentration", "attention_gini"], 3, "concentration.attention_gini is 3: expected an object"),
        (["methods"], {}, "is of another run"),
        (["run"], "0" * 16, "is of another run"),
        (["counterfactual", "turned"], None, "counterfactual.turned is None: expected a whole number"),
        (["searched", "class_shift", "matrix"], [[1]], "is of another run"),
        (["truth", "class"], ..., "truth.class is missing"),
    ],
)
def test_a_foreign_summary_of_evidence_is_refused_in_one_line(copied, place, value, words):
    folder, report = copied
    changed(folder / "evidence" / "summary.json", place, value)
    with pytest.raises(CarmilError) as refused:
        report()
    assert "evidence/summary.json" in str(refused.value) and words in str(refused.value)


@pytest.mark.finding(n=14)
def test_a_foreign_explanation_is_refused_in_one_line(copied):
    folder, report = copied
    (folder / "evidence" / "explanation.json").write_text("[1, 2]")
    with pytest.raises(
        CarmilError, match=r"explanation\.json cannot be read: its content is a list: expected an object"
    ):
        report()


@pytest.mark.finding(n=14)
def test_a_foreign_faithfulness_file_is_named_in_the_report(copied, said):
    folder, report = copied
    said("faithfulness", str(folder), "--steps", "10", "--random-orders", "1", "--device", "cpu")
    path = folder / "faithfulness" / "faithfulness.json"
    good = path.read_text()
    for place, value, words in (
        (["runs", 0, "maps", 0, "figures"], {}, "randomisation of the map &#39;path&#39; is missing"),
        (["runs", 0, "maps", 0, "auc"], [0.5], "its curves have different numbers of steps"),
        (["runs", 0, "maps"], [], "maps or auc_of_twins is empty"),
        (["runs", 0, "maps", 0, "deletion"], 3, "deletion is 3: expected an object"),
    ):
        path.write_text(good)
        changed(path, place, value)
        assert words in report()
