import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
import torch

from carmil.datasets.crc_nuclei import patient_bags
from carmil.datasets.digit_data import load_digits
from carmil.errors import CarmilError
from carmil.evidence import bag_auc, explain
from carmil.evidence.faithfulness import evidence_of_class, faithfulness_of
from carmil.reproduce import crc, faithfulness, recipes
from carmil.reproduce.deletion_curves import Request, curves_of
from carmil.reproduce.digit_runs import population_of
from carmil.reproduce.faithfulness import Nuclei, run_faithfulness
from carmil.reproduce.method_runs import train_model
from carmil.reproduce.table1 import Settings, planned, run_table1
from carmil.training.predict import predict
from carmil.training.runs import read_run

SETTINGS = Settings(models=("abmil", "cia/abmil", "car/abmil"), repetitions=2, epochs=12, lr=1e-2)


@pytest.fixture(scope="module")
def data():
    return load_digits(["adjacent_pairs"], sizes=(120, 40, 40))


@pytest.fixture(scope="module")
def nuclei(tmp_path_factory):
    """Forty patients whose cancerous nuclei show in one feature."""
    folder = tmp_path_factory.mktemp("crc")
    rng = np.random.default_rng(0)
    patients = rng.integers(0, 40, 400)
    cancerous = (rng.random(40) < 0.5)[patients] & (rng.random(400) < 0.5)
    features = rng.normal(size=(400, 8)).astype(np.float16)
    features[cancerous, 0] += 3
    np.save(folder / "features.npy", features)
    pd.DataFrame({"patient_id": patients, "is_cancerous": cancerous.astype(int)}).to_csv(folder / "instances.csv")
    return Nuclei(folder, ("car/abmil.gated",), epochs=8)


@pytest.fixture(scope="module")
def drawn(data, nuclei, tmp_path_factory):
    out = tmp_path_factory.mktemp("faithfulness")
    curves, lines = run_faithfulness(data.studies, SETTINGS, data.about, out, nuclei=nuclei, device="cpu")
    return out, curves, lines


@pytest.fixture(scope="module")
def population(drawn, data):
    """car/abmil as the recipe has trained it, its test bags and what it answers."""
    experiment = planned(data.studies, SETTINGS, data.about)[2]
    test = data.studies["adjacent_pairs"].test.bags
    trained = population_of(read_run(drawn[0] / "runs" / "adjacent_pairs" / "car-abmil"), experiment, test.width)
    return trained, test, predict(trained, test).probabilities


def test_every_model_has_its_curves_on_both_cohorts_and_car_the_papers_order_too(drawn):
    _, curves, _ = drawn
    kinds = {(one.dataset, one.model, one.evidence) for one in curves}
    plain = ("attention", "path")
    assert kinds == {
        *(("Adjacent Pairs", model, order) for model in SETTINGS.models for order in plain),
        *(("CRC nuclei", "car/abmil.gated", order) for order in plain),
        ("Adjacent Pairs", "car/abmil", "factual_minus_counterfactual"),
        ("CRC nuclei", "car/abmil.gated", "factual_minus_counterfactual"),
    }
    assert all(len(one.deletion["mean"]) == len(one.cohort["mean"]) == 101 for one in curves)


def test_a_curve_is_the_mean_over_the_bags_that_each_model_answers_right(drawn, population):
    _, curves, _ = drawn
    trained, test, probabilities = population
    answers = probabilities.argmax(-1)
    right = answers == test.labels
    assert 0 < right.sum() < right.numel()
    rows = []
    for i in range(2):
        model = trained.member(i)
        one = evidence_of_class(explain(model, test, "path"), answers[i], test.offsets)
        rows.append(faithfulness_of(model, test, one.unsqueeze(0), answers[i]).over(right[i]))
    (found,) = [c for c in curves if (c.dataset, c.model, c.evidence) == ("Adjacent Pairs", "car/abmil", "path")]
    expected = torch.cat([row.most_first[0] for row in rows]).mean(0)
    assert np.allclose(found.deletion["mean"], expected, atol=1e-5)
    area = torch.cat([row.insertion_area[0] for row in rows]).mean()
    assert found.measures["insertion area"]["mean"] == pytest.approx(float(area), abs=1e-5)
    assert found.right == pytest.approx(right.double().mean(1).tolist())
    assert found.aucs == pytest.approx([bag_auc(p, test.labels) for p in probabilities])
    low, mean, high = (np.array(found.deletion[side]) for side in ("low", "mean", "high"))
    assert (low <= mean).all()
    assert (mean <= high).all()
    assert (low[:50] < high[:50]).all()


def test_with_nothing_left_the_cohort_tells_no_bag_from_another(drawn):
    _, curves, _ = drawn
    for one in curves:
        assert one.cohort["mean"][-1] == pytest.approx(0.5)
        assert one.cohort["mean"][0] == pytest.approx(np.mean(one.aucs))


def test_a_bag_is_tested_by_the_model_of_its_own_fold_only(nuclei, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(faithfulness, "curves_of", lambda *names: seen.extend(names[2]) or [])
    bags = patient_bags(nuclei.folder)
    request = recipes.Request(out=tmp_path, shared=tmp_path)
    cohort = crc.crc_cohort(nuclei.folder, request, epochs=2)
    faithfulness._of_nuclei(train_model(cohort, "abmil.gated", request), tmp_path, "cpu")
    assert len(seen) == 5
    assert sorted(torch.cat([one.places for one in seen]).tolist()) == list(range(len(bags)))
    for one in seen:
        assert torch.equal(one.bags.labels, bags.labels[one.places])


def test_the_papers_order_is_drawn_and_everything_is_written(drawn):
    out, curves, lines = drawn
    for name in ("faithfulness.png", "cohort_auc.png"):
        assert (out / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    labels = [ribbon.label for ribbon in faithfulness._ribbons(curves, "Adjacent Pairs", "attention", cohort=False)]
    assert "car/abmil, attention - counterfactual" in labels
    assert sum("random order" in label for label in labels) == 3
    written = json.loads((out / "faithfulness.json").read_text())
    assert written["curves"] == [dataclasses.asdict(one) for one in curves]
    text = (out / "faithfulness.md").read_text()
    first = curves[0].measures["deletion area"]
    assert f"{first['mean']:.3f} [{first['low']:.3f}, {first['high']:.3f}]" in text
    assert all(line in text for line in lines)
    assert any("bootstrap over bags and initialisations together" in line for line in lines)


def test_started_again_it_asks_for_nothing_that_is_there(drawn, data, nuclei, monkeypatch):
    out, curves, lines = drawn
    monkeypatch.setattr("carmil.reproduce.digit_runs.fit", None)
    monkeypatch.setattr("carmil.studies.train.train_protocol", None)
    monkeypatch.setattr(faithfulness, "curves_of", None)
    again = run_faithfulness(data.studies, SETTINGS, data.about, out, nuclei=nuclei, device="cpu")
    assert again == (curves, lines)


def test_models_that_table1_has_trained_are_used_again(data, tmp_path, monkeypatch):
    settings = Settings(models=("abmil",), repetitions=1, epochs=12, lr=1e-2)
    run_table1(data.studies, settings, data.about, tmp_path, device="cpu")
    monkeypatch.setattr("carmil.reproduce.digit_runs.fit", None)
    curves, _ = run_faithfulness(data.studies, settings, data.about, tmp_path, device="cpu")
    assert [one.evidence for one in curves] == ["attention", "path"]


def test_what_makes_no_curve_is_named_before_any_training(data, nuclei, population, tmp_path):
    grid = Settings(models=("car/abmil",), epochs=1, alpha=(0.1, 0.2))
    with pytest.raises(CarmilError, match="expected one --alpha and one --lambda"):
        run_faithfulness(data.studies, grid, data.about, tmp_path, device="cpu")
    with pytest.raises(CarmilError, match="expected a digit task, crc's folder, or both"):
        run_faithfulness({}, SETTINGS, data.about, tmp_path, device="cpu")
    for models, nuclear in ((("abmil", "mean"), ()), (("abmil",), ("mean",))):
        of_mean = Settings(models=models, epochs=1)
        request = dataclasses.replace(nuclei, models=nuclear) if nuclear else None
        with pytest.raises(CarmilError, match="mean has none of the maps that curves are drawn of"):
            run_faithfulness(data.studies, of_mean, data.about, tmp_path, nuclei=request, device="cpu")
    trained, test, _ = population
    wrong = Request(trained.member(0), test, torch.arange(len(test)), 1 - test.labels)
    with pytest.raises(CarmilError, match="answers no test bag of Adjacent Pairs right"):
        curves_of("Adjacent Pairs", "car/abmil", [wrong])
    assert not list(tmp_path.iterdir())
