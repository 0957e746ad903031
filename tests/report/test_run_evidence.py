"""The report of a run shows the results of `carmil explain` and `carmil faithfulness`, or names what is missing."""

import base64
import io
import json
import re
import shutil

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from carmil.bags.sources import Bag
from carmil.bags.writers import write_bag
from carmil.errors import CarmilError
from carmil.explanations.explain import explain_run
from carmil.report.cases import decide_cases
from carmil.report.gallery import select_examples
from carmil.report.run import write_report
from carmil.runs.faithfulness import read_faithfulness, write_faithfulness_file
from carmil.runs.run import read_run
from carmil.runs.settings import PRESETS, Settings
from carmil.studies.figures import mean_over_seeds
from carmil.studies.train import run_study
from carmil.words import probability_text

CLASSES = ("healthy", "<b>tumour")


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    """Return an explained run on sixteen slides with tiles on a grid and known truth."""
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
    """Return a copy of the run folder that tests may damage, and a function that returns the text of its report."""
    shutil.copytree(explained.folder, tmp_path / "run")

    def report():
        write_report(read_run(tmp_path / "run"), tmp_path / "report.html")
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    return tmp_path / "run", report


def text_of(run, name):
    return (run.folder.parent / name).read_text(encoding="utf-8")


def tables(text):
    """Return the tables of a page as lists of rows of cells."""
    results = []
    for table in re.findall(r"<table.*?</table>", text, re.DOTALL):
        rows = re.findall(r"<tr.*?</tr>", table, re.DOTALL)
        cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]
        results.append([[re.sub(r"<[^>]*>|\xa0", " ", cell).strip() for cell in row] for row in cells])
    return results


def table_of(text, head):
    return next(lines[1:] for lines in tables(text) if lines[0][0] == head)


def shown(figure):
    return f"{figure['value']:.2f} ({figure['low']:.2f} to {figure['high']:.2f})"


def test_report_without_evidence_lists_the_commands_that_compute_it(explained):
    text = text_of(explained, "before.html")
    assert "run <code>carmil explain run</code>, then" in text
    assert "run <code>carmil faithfulness run</code>, then" in text
    assert "<img" not in text and 'id="slides"' not in text


def test_report_shows_the_figures_of_the_evidence_summary(explained):
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


def test_report_shows_the_class_shift_matrices_of_the_summary(explained):
    text = text_of(explained, "after.html")
    summary = json.loads((explained.folder / "evidence" / "summary.json").read_text())
    result = [lines for lines in tables(text) if lines[0][0].endswith("class that grew most")]
    counts = [[[int(cell.split()[0]) for cell in line[1:-1]] for line in lines[1:]] for lines in result]
    assert counts == [summary[which]["class_shift"]["matrix"] for which in ("counterfactual", "searched")]


def test_report_shows_every_selected_slide_with_three_maps(explained):
    text = text_of(explained, "after.html")
    cases = decide_cases(explained, mean_over_seeds(explained.predictions(), explained.target))
    figures = re.findall(r'<figure class="slide">.*?</figure>', text, re.DOTALL)
    selected = [example.case for example in select_examples(cases)]
    assert len(figures) == len(selected) > 2
    for i, figure in zip(selected, figures, strict=True):
        assert f"<b>{cases.frame['slide'].iloc[i]}</b>" in figure
        assert f"({probability_text(cases.p[i, cases.answer[i]])})" in figure
        assert figure.count('<img src="data:image/png;base64,') == 3
        answer = explained.outputs[cases.answer[i]].replace("<", "&lt;").replace(">", "&gt;")
        assert f"evidence for {answer}<span" in figure
        assert ('class="rightly"' in figure) == bool(cases.right[i])


def test_report_draws_maps_over_the_tissue_of_slides_whose_files_are_found(explained, tmp_path, run_cli):
    tifffile = pytest.importorskip("tifffile", reason="needs carmil[slides]")
    page = tmp_path / "page.html"
    tissue = np.full((256, 448, 3), (214, 120, 170), np.uint8)
    for s in range(15):  # without s15
        tifffile.imwrite(tmp_path / f"s{s}.tif", tissue, photometric="rgb", tile=(64, 64))
    status, _, error = run_cli("report", str(explained.folder), "--slides", str(tmp_path), "--out", str(page))
    assert status == 2 and "give it with --mpp" in error
    run_cli("report", str(explained.folder), "--slides", str(tmp_path), "--mpp", "0.5", "--out", str(page))
    figures = re.findall(r'<figure class="slide([^"]*)">.*?<b>(s[0-9]+)</b>(.*?)</figure>', page.read_text(), re.DOTALL)
    assert figures
    for names, slide, content in figures:
        pictures = re.findall(r"data:image/(jpeg|png);base64,([^\"]+)", content)
        assert ("tissue" in names) == (slide != "s15") == (len(pictures) == 4)
        if slide == "s15":
            continue
        assert {kind for kind, _ in pictures} == {"jpeg"}
        ground, *maps = (np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) for _, data in pictures)
        middle = ground[ground.shape[0] // 2, ground.shape[1] // 2]
        np.testing.assert_allclose(middle, (214, 120, 170), atol=6)
        assert all(one.shape == ground.shape and not np.array_equal(one, ground) for one in maps)
    (tmp_path / "none").mkdir()
    tifffile.imwrite(tmp_path / "none" / "other.tif", tissue, photometric="rgb", tile=(64, 64))
    status, _, error = run_cli("report", str(explained.folder), "--slides", str(tmp_path / "none"))
    assert status == 2 and "has none of the slides of run" in error


def test_report_with_evidence_loads_no_resources_and_escapes_text(explained):
    text = text_of(explained, "after.html")
    assert not re.search(r"https?://|@import|url\(", text)
    sources = re.findall(r'(?:src|href)="([^"]{0,22})', text)
    assert {source[:22] for source in sources if not source.startswith("#")} == {"data:image/png;base64,"}
    assert "<b>tumour" not in text
    assert "default-src 'none'" in text and "img-src data:" in text


def test_report_reads_evidence_of_shown_slides_only(copied):
    folder, report = copied
    cases = decide_cases(read_run(folder), mean_over_seeds(read_run(folder).predictions(), read_run(folder).target))
    selected = [example.case for example in select_examples(cases)]
    kept = {f"{cases.frame['slide'].iloc[i]}.parquet" for i in selected} | {"summary.parquet"}
    deleted = [path for path in (folder / "evidence").glob("*.parquet") if path.name not in kept]
    assert deleted
    for path in deleted:
        path.unlink()
    shutil.rmtree(folder / "cohort")
    assert report().count("<img") == 3 * len(selected)


def test_report_does_not_show_evidence_of_other_weights(copied):
    folder, report = copied
    weights = (folder / "weights.safetensors").read_bytes()
    (folder / "weights.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    text = report()
    assert "run/evidence is not of this run&#39;s weights and slides" in text
    assert "<img" not in text


def test_report_does_not_show_incomplete_evidence(copied):
    folder, report = copied
    (folder / "evidence" / "summary.json").unlink()
    text = report()
    assert "The evidence is incomplete" in text
    assert "<img" not in text


def test_patient_merged_from_several_slides_is_shown_as_a_strip(copied):
    folder, report = copied
    metrics = json.loads((folder / "metrics.json").read_text())
    (folder / "metrics.json").write_text(json.dumps(metrics | {"rule": "one-bag"}))
    text = report()
    assert '<figure class="slide row">' in text and '<figure class="slide">' not in text


def test_faithfulness_of_a_run_is_written_to_its_folder_and_report(copied, run_cli):
    folder, report = copied
    status, out, _ = run_cli("faithfulness", str(folder), "--steps", "10", "--random-orders", "1", "--device", "cpu")
    assert status == 0 and str(folder / "faithfulness" / "faithfulness.html") in " ".join(out.split())
    text, page = report(), (folder / "faithfulness" / "faithfulness.html").read_text(encoding="utf-8")
    head = "verdict"
    in_report, in_page = ([lines for lines in tables(one) if head in lines[0]] for one in (text, page))
    assert in_report == in_page and len(in_report) == 3
    verdicts = re.findall(r'<p class="(?:alarm|praise|unsure)">.*?</p>', page)
    assert len(verdicts) == 2 and all(verdict in text for verdict in verdicts)
    assert re.findall(r"<polyline.*?/>", page)[0] in text


def test_faithfulness_file_survives_a_round_trip(copied, run_cli):
    folder, report = copied
    run_cli("faithfulness", str(folder), "--steps", "10", "--random-orders", "1", "--device", "cpu")
    path = folder / "faithfulness" / "faithfulness.json"
    run = read_run(folder)
    written = json.loads(path.read_text())["runs"][0]
    write_faithfulness_file([read_faithfulness(run)], folder, command="")
    assert json.loads((folder / "faithfulness.json").read_text())["runs"] == [written]
    del written["confidence"], written["region_tiles"]
    for one in written["maps"]:
        del one["figures"]["srg"], one["figures"]["msk"]
    path.write_text(json.dumps({"runs": [written]}))  # as earlier versions wrote it
    assert read_faithfulness(run).maps[0].figures.keys() == written["maps"][0]["figures"].keys()
    assert "SRG" in report()
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
        (["counterfactual", "attention_moved"], None, "counterfactual.attention_moved is None: expected an object"),
        (["searched", "class_shift", "matrix"], [[1]], "is of another run"),
        (["truth", "class"], ..., "truth.class is missing"),
    ],
)
def test_evidence_summary_of_another_run_raises_an_error(copied, place, value, words):
    folder, report = copied
    changed(folder / "evidence" / "summary.json", place, value)
    with pytest.raises(CarmilError) as refused:
        report()
    assert "evidence/summary.json" in str(refused.value) and words in str(refused.value)


@pytest.mark.finding(n=14)
def test_invalid_explanation_file_raises_an_error(copied):
    folder, report = copied
    (folder / "evidence" / "explanation.json").write_text("[1, 2]")
    with pytest.raises(
        CarmilError, match=r"explanation\.json cannot be read: its content is a list: expected an object"
    ):
        report()


@pytest.mark.finding(n=14)
def test_report_names_an_invalid_faithfulness_file(copied, run_cli):
    folder, report = copied
    run_cli("faithfulness", str(folder), "--steps", "10", "--random-orders", "1", "--device", "cpu")
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
