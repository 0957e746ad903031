"""`carmil faithfulness` for targets other than classes: what curves follow, towards which side, and their words."""

import re

import numpy as np
import pytest
import torch

from carmil.errors import CarmilError
from carmil.evidence import explain
from carmil.evidence.faithfulness import deletion_logits, deletion_orders, faithfulness_of
from carmil.explanations.faithfulness import measure_faithfulness
from carmil.report.faithfulness import faithfulness_part, remarks, write_faithfulness
from carmil.runs.faithfulness import read_faithfulness
from carmil.runs.run import read_run
from carmil.studies.predictions import outcomes, predicted
from carmil.studies.subjects import find_run_store, own_subjects

from ..studies.made_targets import NAMES, TARGETS, train, write_cohort

STEPS = 10


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faithful_targets")
    write_cohort(folder)
    train(folder, folder / "survival", "survival", reshuffle=True, seeds=2)
    (folder / "plain").mkdir()
    write_cohort(folder / "plain", truth=False)
    for kind in ("value", "ordinal", "labels"):
        train(folder / "plain", folder / kind, kind)
    return folder


def measure(*runs, out=None, methods=("path", "attention")):
    given = {"steps": STEPS, "random_orders": 2, "device": "cpu", "log": lambda line: None}
    return measure_faithfulness(runs, out or runs[0] / "faithfulness", methods=methods, **given)


@pytest.fixture(scope="module")
def measured(study):
    found = {kind: measure(study / kind)[0] for kind in TARGETS}
    for kind, one in found.items():
        write_faithfulness([one], study / kind / "faithfulness", command="carmil faithfulness run")
    return found


def curves_by_hand(run, row):
    """Yield the slide, the distance of its prediction from the middle, and its deletion curve by path, for one model."""
    bags, model = find_run_store(run).bags(), run.population().member(row)
    link = model.link
    for subject in own_subjects(run, find_run_store(run)):
        if row not in subject.models:
            continue
        bag, column = bags[subject.place], 0
        if run.target.kind == "labels":
            column = int(np.argmax(subject.predicted))
        evidence = explain(model, bag)[:, column]
        with torch.no_grad():
            whole = model(bag.features, bag.offsets).logits
            middle = {
                "survival": lambda F: F - link.centre,
                "value": lambda F: F * link.deviation,
                "ordinal": lambda F: F - link.cuts.mean(),
                "labels": torch.sigmoid,
            }[run.target.kind]
            distance = float(middle(whole)[0, column])
            side = 1 if run.target.kind == "labels" or distance >= 0 else -1
            logits = deletion_logits(model, bag, side * evidence[None], steps=STEPS)
            yield subject.slide, distance, side * middle(logits)[0, 0, :, column].numpy()


@pytest.mark.parametrize("kind", TARGETS)
def test_curves_measure_the_prediction_in_its_own_direction_and_include_all_slides(study, measured, kind):
    run, curves = read_run(study / kind), {}
    for row in range(len(run.models)):
        for slide, _, curve in curves_by_hand(run, row):
            curves.setdefault(slide, []).append(curve)
    found = measured[kind]
    assert found.slides == found.rightly_answered == len(curves) == len(NAMES)
    expected = np.mean([np.mean(some, axis=0) for some in curves.values()], axis=0)
    np.testing.assert_allclose(found.maps[0].deletion.mean, expected, rtol=1e-4, atol=1e-5)
    assert found.maps[0].figures["deletion_area"].value == pytest.approx(expected.mean(), rel=1e-4)
    assert found.maps[0].figures["aopc_over_random"].value > 0


@pytest.mark.parametrize("kind", ["survival", "value", "ordinal"])
def test_slides_lie_on_both_sides_of_the_middle_and_all_curves_start_above_it(study, kind):
    found = list(curves_by_hand(read_run(study / kind), 0))
    assert {distance > 0 for _, distance, _ in found} == {True, False}
    for _, distance, curve in found:
        assert curve[0] == pytest.approx(abs(distance), rel=1e-4, abs=1e-6)


def test_unsigned_maps_are_not_reversed_for_predictions_below_the_middle(study, measured):
    """For a slide at lower risk, too, the tiles with the highest attention are removed first."""
    run = read_run(study / "value")
    bags, population, curves = find_run_store(run).bags(), run.population(), []
    for subject in own_subjects(run, find_run_store(run)):
        model, bag = population.member(subject.models[0]), bags[subject.place]
        logits = deletion_logits(model, bag, explain(model, bag, "attention")[:, :1].T, steps=STEPS)[0, 0, :, 0]
        curves.append((logits * logits[0].sign() * model.link.deviation.item()).numpy())
    np.testing.assert_allclose(measured["value"].maps[1].deletion.mean, np.mean(curves, axis=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "figure", "name"),
    [
        ("value", "spearman", "Spearman correlation"),
        ("ordinal", "kappa", "quadratic kappa"),
        ("labels", "auc", "AUC"),
        ("survival", "c_index", "C-index"),
    ],
)
def test_curve_of_the_key_figure_starts_at_the_key_figure_of_the_run(study, measured, kind, figure, name):
    """Folds are averaged as in the metrics of the run, over all seeds if every seed has its own folds."""
    found, run = measured[kind], read_run(study / kind)
    assert found.words.figure == name
    assert all(one.auc[0] == pytest.approx(run.metrics.summary[figure].mean, abs=1e-6) for one in found.maps)
    assert len(found.auc_of_twins) == 19


def test_risks_of_different_models_are_not_compared(study, measured):
    """The C-index of all folds together differs from the mean over the folds."""
    run = read_run(study / "survival")
    frame = run.predictions()
    parts = [part for _, part in frame.groupby(["fold", "seed"])]
    by_fold = [run.target.key_measure(predicted(part, run.target), outcomes(part, run.target)) for part in parts]
    pooled = run.target.key_measure(predicted(frame, run.target), outcomes(frame, run.target))
    assert len(parts) == 6
    assert measured["survival"].maps[0].auc[0] == pytest.approx(np.mean(by_fold))
    assert measured["survival"].maps[0].auc[0] != pytest.approx(pooled, abs=1e-4)


def test_map_of_the_model_passes_and_a_random_map_fails(study, tmp_path):
    (found,) = measure(study / "value", out=tmp_path, methods=("path", "random"))
    path, chance = found.maps
    assert path.fails is False
    assert chance.figures["randomisation"].value == pytest.approx(1)
    assert chance.figures["aopc_gain"].value == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("kind", TARGETS)
def test_page_and_tables_use_the_terms_of_the_target(study, measured, kind):
    run = read_run(study / kind)
    assert read_faithfulness(run).words == measured[kind].words
    part = faithfulness_part([measured[kind]])
    page = (study / kind / "faithfulness" / "faithfulness.html").read_text(encoding="utf-8")
    text = re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL)
    text += " ".join(
        [*(table.title for table in part["tables"]), part["tested"].markdown(), *remarks([measured[kind]])]
    )
    assert measured[kind].words.value in text
    assert f"{measured[kind].words.figure} of the cohort" in text
    assert "all slides" in text
    for words in ("correctly answered", "answers correctly", "answered class", "probability of the label"):
        assert words not in text
    assert ("AUC" in text) == (kind == "labels")


def test_axes_cover_the_whole_range_of_their_curves(measured):
    for kind, one in measured.items():
        ys = [float(y) for _, svg in faithfulness_part([one])["panels"] for y in re.findall(r",(-?[\d.]+)", svg)]
        assert ys and all(9 <= y <= 281 for y in ys), kind


def test_runs_of_different_targets_are_refused(study, tmp_path):
    with pytest.raises(CarmilError, match=r"predicts months to recurrence and .* age") as refused:
        measure(study / "survival", study / "value", out=tmp_path)
    assert "\n" not in str(refused.value)


def test_curves_of_one_output_are_on_the_scale_of_the_link(study):
    """In the viewer, the curve of a risk shows the output itself, and the curve of a label its probability."""
    for kind in ("survival", "labels"):
        run = read_run(study / kind)
        model, bag = run.population().member(0), find_run_store(run).bags()[0]
        evidence = explain(model, bag)[:, 0]
        found = faithfulness_of(model, bag, evidence[None], torch.tensor([0]), steps=STEPS, random_orders=2)
        logits = deletion_logits(model, bag, deletion_orders(evidence[None], random_orders=2), steps=STEPS)[..., 0]
        expected = logits.sigmoid() if kind == "labels" else logits
        assert torch.allclose(found.most_first, expected[:1])
        assert found.right.all()
