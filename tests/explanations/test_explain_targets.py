"""`carmil explain` for targets other than classes: units, sentences, signed truth, and what is refused."""

import json

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import average_precision_score

from carmil.bags.sources import Bag
from carmil.bags.store import open_store
from carmil.bags.writers import write_bag
from carmil.errors import CarmilError
from carmil.evidence import explain
from carmil.explanations.explain import agreement_table, explain_run, summary_lines
from carmil.runs.evidence import read_run_evidence
from carmil.runs.run import read_run
from carmil.runs.slide_evidence import read_slide_evidence

from ..studies.made_targets import NAMES, TARGETS, WIDTH, train, write_cohort


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Return a folder with one run per kind of target; the run of survival has truth about the risk of its instances."""
    folder = tmp_path_factory.mktemp("targets")
    write_cohort(folder)
    train(folder, folder / "survival", "survival", seeds=2)
    (folder / "plain").mkdir()
    write_cohort(folder / "plain", truth=False)
    for kind in ("value", "ordinal", "labels"):
        train(folder / "plain", folder / kind, kind)
    return folder


@pytest.fixture(scope="module")
def explained(study):
    """Return the explanation of each run, with `single` as a second map."""
    return {kind: run_explain(study / kind, methods=("single",)) for kind in TARGETS}


def run_explain(run, out=None, *, methods=(), searched=False, bags=None):
    lines = []
    return explain_run(run, out, bags=bags, methods=methods, searched=searched, device="cpu", log=lines.append)


@pytest.mark.parametrize("kind", TARGETS)
def test_evidence_of_a_slide_adds_up_to_the_change_of_the_outputs(study, explained, kind):
    frame, outputs = explained[kind].frame, read_run(study / kind).outputs
    assert len(frame) == len(NAMES)
    assert frame["residual"].max() < 1e-3
    table = pd.read_parquet(explained[kind].folder / frame["file"][0])
    assert [name for name in table if name.startswith("evidence_")] == [f"evidence_{name}" for name in outputs]
    assert [name for name in table if name.startswith("single_")] == [f"single_{name}" for name in outputs]


def test_single_evidence_is_a_probability_for_labels_and_the_output_for_a_number(study, explained):
    labels = pd.read_parquet(explained["labels"].folder / "s00.parquet")
    assert labels[["single_node", "single_her2"]].to_numpy().min() > 0
    assert labels[["single_node", "single_her2"]].to_numpy().max() < 1
    run = read_run(study / "value")
    (row,) = [
        i for i, fold in enumerate(run.tested_folds) if fold in set(run.predictions().query("slide == 's00'").fold)
    ]
    bags = open_store(study / "plain" / "store").bags()
    alone = explain(run.population().member(row), bags[bags.ids.index("s00")], "single")
    values = pd.read_parquet(explained["value"].folder / "s00.parquet")
    np.testing.assert_allclose(values["single_age"], alone[:, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "column", "expected"),
    [
        (
            "survival",
            "evidence_risk",
            ["the log hazard", "positive evidence raises the risk", "would get another answer"],
        ),
        ("value", "evidence_age", ["age in standard deviations", "negative evidence lowers the age", "it changes"]),
        ("ordinal", "evidence_grade", ["the logit of a higher grade", "raises the grade", "would get another answer"]),
        ("labels", "evidence_LABEL", ["the label logit", "the change of the logit", "would get another answer"]),
    ],
)
def test_sentences_use_the_terms_of_the_target(explained, kind, column, expected):
    text = "\n".join(summary_lines(explained[kind].summary))
    assert f"{column} is path" in text
    assert all(words in text for words in expected)
    methods = " ".join(explained[kind].summary.methods.values())
    assert "class" not in (text + methods).lower().replace("classifier", "")


@pytest.mark.parametrize("kind", TARGETS)
def test_summary_and_slides_are_read_as_written(study, explained, kind):
    read = read_run_evidence(read_run(study / kind))
    assert read.summary == explained[kind].summary
    evidence = read.slide("s03")
    assert evidence.words == read_run(study / kind).target.words
    assert evidence.apart is None
    shown = evidence.maps()[0]
    size = np.abs(evidence.columns[f"evidence_{evidence.explained_class}"]).sum()
    assert evidence.row["total_evidence"] == pytest.approx(float(size), rel=1e-5)
    assert shown.negligible == (size < 0.01)


def test_only_targets_that_are_numbers_have_no_count_of_changed_answers(explained):
    turned = {kind: one.summary.counterfactual.turned for kind, one in explained.items()}
    assert turned.pop("value") is None
    assert all(0 <= count <= len(NAMES) for count in turned.values())
    assert "turned" not in json.loads((explained["value"].folder / "summary.json").read_text())["counterfactual"]


def test_agreement_with_signed_truth_of_the_risk_is_measured_by_the_mirror_rule(study, explained):
    bags = open_store(study / "store").bags()
    both = []
    for slide, file in zip(explained["survival"].frame["slide"], explained["survival"].frame["file"], strict=True):
        place = bags.ids.index(slide)
        truth = bags.instance_labels[int(bags.offsets[place]) : int(bags.offsets[place + 1]), 0].numpy()
        scores = pd.read_parquet(explained["survival"].folder / file)["evidence_risk"].to_numpy()
        sides = [(truth > 0, scores), (truth < 0, -scores)]
        both.append(
            [average_precision_score(hits, s) if hits.any() and not hits.all() else np.nan for hits, s in sides]
        )
    truth = explained["survival"].summary.truth
    assert truth.class_ == "risk"
    figures = truth.agreement["path"]
    known = np.array(both)[~np.isnan(both).all(1)]
    assert figures["auprc_both_mirror"].value == pytest.approx(np.nanmean(known, axis=1).mean())
    assert figures["auprc_plus"].value == pytest.approx(np.nanmean(np.array(both)[:, 0]))
    assert figures["auprc_both_mirror"].value > 0.7, "the planted instances are found"
    assert {"auroc", "ndcg", "froc", "dice"} <= set(figures)
    assert agreement_table(explained["survival"].summary).title.startswith("Agreement with the truth, risk:")


def test_training_reports_both_signs_of_the_agreement_of_a_single_output(study):
    run = read_run(study / "survival")
    summary = run.metrics.summary
    assert summary["auprc_both_path"].mean > 0.7
    assert {"auprc_path", "auprc_attention", "auprc_both_attention"} <= set(summary)
    frame = run.predictions()
    assert frame["auprc_both_path"].mean() == pytest.approx(summary["auprc_both_path"].mean, abs=0.02)
    assert "auprc_both_path" not in read_run(study / "value").metrics.summary


def test_marks_without_named_columns_are_not_taken_as_the_truth_about_a_risk(study, tmp_path):
    """A mark per instance, such as "tumour", says nothing about what raises the risk."""
    for name in NAMES[:4]:
        bag = Bag(name, np.ones((3, WIDTH), np.float32), instance_labels=np.array([1, 0, 0]))
        write_bag(bag, tmp_path / "new", "npz")
    new = run_explain(study / "survival", tmp_path / "out", bags=tmp_path / "new")
    assert new.summary.truth is None


@pytest.mark.parametrize("kind", TARGETS)
def test_new_slides_are_explained_by_all_models(study, tmp_path, kind):
    rng = np.random.default_rng(1)
    for name in ("new0", "new1"):
        write_bag(Bag(name, rng.normal(size=(5, WIDTH)).astype(np.float32)), tmp_path / "new", "npy")
    new = run_explain(study / kind, tmp_path / "out", bags=tmp_path / "new")
    assert new.frame["slide"].tolist() == ["new0", "new1"]
    assert (new.frame["models"] == len(read_run(study / kind).models)).all()
    assert new.frame["label"].isna().all()
    assert "label:" not in " ".join(read_slide_evidence(tmp_path / "out" / "new0.parquet").answer_lines)


@pytest.mark.parametrize("kind", TARGETS)
def test_explainers_and_options_that_need_classes_raise_an_error_of_one_line_naming_them(study, tmp_path, kind):
    for words, expected in (
        ({"methods": ("margin_sensitivity",)}, "'margin_sensitivity' does not fit"),
        ({"methods": ("targeted",)}, "'targeted' does not fit"),
        ({"searched": True}, "--searched needs classes"),
    ):
        with pytest.raises(CarmilError, match=expected) as refused:
            run_explain(study / kind, tmp_path / "out", **words)
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()
