import dataclasses
import json
from contextlib import contextmanager
from functools import partial

import numpy as np
import pandas as pd
import pytest

from carmil.errors import CarmilError
from carmil.evidence import bag_auc, explain, explainers_of
from carmil.reproduce import crc, crc_evidence
from carmil.reproduce.map_comparison import BASELINE, DEFAULT, Folds, Measured, compared
from carmil.studies.agreement import map_auprc
from carmil.training.recipe import VALIDATION

MODELS = ("abmil.gated", "car/abmil.gated")
RECIPE = dataclasses.replace(crc.RECIPE, epochs=7, warmup=2)
SEEDS = 2


def write_crc(folder, *, spoil=None):
    """Forty patients whose cancerous nuclei show in one feature, in the order in which a microscope met them."""
    rng = np.random.default_rng(0)
    patients = rng.integers(0, 40, 400)
    cancerous = (patients % 2 == 0) & (rng.random(400) < 0.5)
    if spoil is not None:
        cancerous = spoil(patients)
    features = rng.normal(size=(400, 8)).astype(np.float16)
    features[cancerous, 0] += 3
    folder.mkdir(exist_ok=True)
    np.save(folder / "features.npy", features)
    table = pd.DataFrame({"patient_id": [f"{p:03d}" for p in patients], "is_cancerous": cancerous.astype(int)})
    table.to_csv(folder / "instances.csv", index_label="instance_id")
    return folder


def run(data, out, **changes):
    request = {"device": "cpu", "seeds": SEEDS, "recipe": RECIPE, **changes}
    return crc_evidence.run_crc_evidence(data, MODELS, out, **request)


@pytest.fixture(scope="module", autouse=True)
def _small_models():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(crc, "OPTIONS", {"abmil.gated": {"hidden": 8, "attention": 4}})
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_crc(tmp_path_factory.mktemp("crc"))


@pytest.fixture(scope="module")
def done(data, tmp_path_factory):
    """A finished study: its result and its folder."""
    out = tmp_path_factory.mktemp("out")
    return run(data, out), out


def trained(model, data, out):
    """The population as it was left, to be asked again by other means."""
    bags = crc.load_crc(data)
    study = crc_evidence.Study(bags, None, None, RECIPE, {**crc.study_of(bags, RECIPE, 0), "seeds": SEEDS}, out, "cpu")
    return crc_evidence._trained(model, study)[0], bags


def test_every_explainer_of_every_model_has_a_row(done, data):
    result, out = done
    request = [(m, e) for m in MODELS for e in explainers_of(trained(m, data, out)[0].member(0))]
    assert [(row.model, row.evidence) for row in result.rows] == request
    assert ("car/abmil.gated", "path.counterfactual") in request


def test_auprc_and_auc_are_crcs_own_on_each_folds_test_and_validation_bags(done, data):
    result, out = done
    population, bags = trained(DEFAULT[0], data, out)
    roles, tested = crc.fold_roles(bags.labels, 0)
    row = next(row for row in result.rows if (row.model, row.evidence) == DEFAULT)
    for chosen, found in ((tested, row.test), (roles == VALIDATION, row.validation)):
        by_seed = [
            np.mean([map_auprc(population.member(5 * s + f), bags, chosen[f], "path") for f in range(crc.FOLDS)])
            for s in range(SEEDS)
        ]
        assert found["auprc"] == pytest.approx((100 * np.mean(by_seed), 100 * np.std(by_seed, ddof=1)))
    assert row.auprc.value == pytest.approx(row.test["auprc"][0])
    answers = crc_evidence.predict(population, bags).probabilities
    aucs = [
        np.mean([bag_auc(answers[5 * s + f][test], bags.labels[test]) for f, test in enumerate(tested)])
        for s in range(SEEDS)
    ]
    assert result.aucs[DEFAULT[0]] == pytest.approx((100 * np.mean(aucs), 100 * np.std(aucs, ddof=1)))
    assert result.contrasts[1].auc.value == pytest.approx(result.aucs[DEFAULT[0]][0])


def test_no_model_was_trained_or_stopped_by_a_bag_it_is_tested_on(data, tmp_path, monkeypatch):
    request = {}

    def spied(population, bags, roles, recipe, **others):
        request[len(request)] = (roles, [member.seed for member in population.members])
        raise KeyboardInterrupt

    monkeypatch.setattr(crc_evidence, "fit", spied)
    with pytest.raises(KeyboardInterrupt):
        run(data, tmp_path)
    roles, seeds = request[0]
    _, tested = crc.fold_roles(crc.load_crc(data).labels, 0)
    assert roles.shape == (crc.FOLDS * SEEDS, 40)
    assert not roles[tested.repeat(SEEDS, 1)].any()
    assert len(set(seeds)) == crc.FOLDS * SEEDS


def test_the_written_figures_are_those_of_the_result(done):
    result, out = done
    facts = json.loads((out / "crc_evidence.json").read_text())
    assert len(facts["rows"]) == len(result.rows)
    for row, written in zip(result.rows, facts["rows"], strict=True):
        assert written["test"]["ndcg"]["mean"] == row.test["ndcg"][0]
        assert written["difference"]["p"] == row.difference.p
        assert written["auprc"]["p"] is None
    text = (out / "crc_evidence.md").read_text()
    (path,) = [row for row in result.rows if (row.model, row.evidence) == ("car/abmil.gated", "path")]
    assert f"| car/abmil.gated | path | signed, a class | {path.test['auprc'][0]:.1f} ±" in text
    assert "machine" not in facts["study"]
    assert (out / "crc_evidence.png").read_bytes()[:4] == b"\x89PNG"


def test_a_killed_study_goes_on_with_the_explainer_it_was_at(data, done, tmp_path, monkeypatch):
    def killed(model, bags, method):
        if method == "lrp":
            raise KeyboardInterrupt
        return explain(model, bags, method)

    with monkeypatch.context() as patched:
        patched.setattr(crc_evidence, "explain", killed)
        with pytest.raises(KeyboardInterrupt):
            run(data, tmp_path)
    request = []

    def counted(model, bags, method):
        request.append(method)
        return explain(model, bags, method)

    trainings = []

    def fitted(population, *others, **named):
        trainings.append(population.build.args[0])
        return fit(population, *others, **named)

    fit = crc_evidence.fit
    monkeypatch.setattr(crc_evidence, "explain", counted)
    monkeypatch.setattr(crc_evidence, "fit", fitted)
    result = run(data, tmp_path)
    assert trainings == ["car/abmil.gated"]
    assert request[: 2 * crc.FOLDS * SEEDS] == ["lrp"] * crc.FOLDS * SEEDS + ["random"] * crc.FOLDS * SEEDS
    assert result.rows == done[0].rows
    assert result.contrasts == done[0].contrasts


def test_a_killed_training_goes_on_from_its_checkpoint(data, done, tmp_path, monkeypatch):
    epochs = []

    @contextmanager
    def told(title, most, models, *, until=None):
        def on_epoch(epoch, losses, running):
            if epoch == until:
                raise KeyboardInterrupt
            epochs.append(epoch)

        yield on_epoch

    monkeypatch.setattr(crc_evidence, "Checkpoint", partial(crc_evidence.Checkpoint, every=0.0))
    monkeypatch.setattr(crc_evidence, "training_progress", partial(told, until=4))
    with pytest.raises(KeyboardInterrupt):
        run(data, tmp_path)
    monkeypatch.setattr(crc_evidence, "training_progress", told)
    result = run(data, tmp_path)
    assert epochs == [0, 1, 2, 3, 4, 5, 6, *range(7)]
    assert result.rows == done[0].rows
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == [
        "abmil.gated.safetensors",
        "car-abmil.gated.safetensors",
    ]


def test_a_finished_study_is_only_read(data, done, monkeypatch):
    result, out = done
    for name in ("fit", "explain", "predict"):
        monkeypatch.setattr(crc_evidence, name, None)
    assert run(data, out) == result


def test_another_study_is_not_written_over(data, done):
    with pytest.raises(CarmilError, match="is of another training: choose another --out"):
        run(data, done[1], seed=1)


def test_a_broken_file_is_named(data, done, tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "abmil.gated.safetensors").write_text("half a file")
    with pytest.raises(CarmilError, match=r"abmil\.gated\.safetensors cannot be read"):
        run(data, tmp_path)


PATIENTS = 60
FOLDS = Folds(
    tested=np.arange(PATIENTS) % 5 == np.arange(5)[:, None],
    validated=np.arange(PATIENTS) % 5 == (np.arange(5)[:, None] + 1) % 5,
    labels=np.arange(PATIENTS) // 5 % 2,
)


def measured(*, test, validation, answers=0.0):
    """Two seeds; explainer -> its precision on test bags and on validation bags, each a number or a fold's, with some noise."""

    def maps(method):
        noise = np.random.default_rng(len(method)).normal(0, 0.02, (3, 2, 5, PATIENTS))
        values = np.full((3, 2, 5, PATIENTS), np.nan)
        for bags, given in ((FOLDS.tested, test[method]), (FOLDS.validated, validation[method])):
            values = np.where(bags & (FOLDS.labels == 1), np.broadcast_to(given, 5)[:, None] + noise, values)
        return values.reshape(3, 10, PATIENTS)

    noise = np.random.default_rng(7).normal(size=(10, PATIENTS))
    return Measured(noise + answers * FOLDS.labels, {method: maps(method) for method in test}, ("a machine",))


def test_the_default_is_chosen_on_validation_bags_among_signed_maps_of_a_class_and_reported_on_test_bags():
    plain = measured(test={"attention": 0.6, "lrp": 0.9}, validation={"attention": 0.6, "lrp": 0.99})
    test = {"path": 0.7, "lrp": 0.5, "leave_one_out": 0.9, "attention": 0.9, "single": 0.9, "random": 0.9}
    validation = {"path": 0.7, "lrp": 0.8, "leave_one_out": 0.6, "attention": 0.9, "single": 0.9, "random": 0.9}
    car = measured(test=test, validation=validation, answers=3.0)
    _, product, best, own = compared({"abmil.gated": plain, "car/abmil.gated": car}, FOLDS, []).contrasts
    assert product.maps == (DEFAULT,) * 5
    assert best.maps == own.maps == (("car/abmil.gated", "lrp"),) * 5
    assert product.auprc_difference.value == pytest.approx(10, abs=1)
    assert best.auprc_difference.value == pytest.approx(-10, abs=1)
    assert product.auprc_difference.low < 10 < product.auprc_difference.high
    assert product.auprc_difference.low > 0
    assert product.auprc_difference.p < 0.002
    assert product.auc_difference.value > 30
    assert product.auc_difference.p < 0.002


def test_each_fold_may_choose_its_own_map():
    plain = measured(test={"attention": 0.6}, validation={"attention": 0.6})
    first = np.array([1, 1, 0, 0, 0])
    validation = {"path": 0.5 + 0.3 * first, "lrp": 0.6}
    car = measured(test={"path": 0.9 * first, "lrp": 0.9 * (1 - first)}, validation=validation)
    _, _, best, own = compared({"abmil.gated": plain, "car/abmil.gated": car}, FOLDS, []).contrasts
    assert best.maps == (("car/abmil.gated", "path"),) * 5
    assert [method for _, method in own.maps] == ["path", "path", "lrp", "lrp", "lrp"]
    assert best.auprc.value == pytest.approx(36, abs=1)
    assert own.auprc.value == pytest.approx(90, abs=1)


def test_a_map_does_not_differ_from_itself():
    same = measured(test={"attention": 0.6, "path": 0.6}, validation={"attention": 0.6, "path": 0.6})
    result = compared({"abmil.gated": same, "car/abmil.gated": same}, FOLDS, [])
    attention = next(row for row in result.rows if (row.model, row.evidence) == BASELINE)
    assert (attention.difference.low, attention.difference.value, attention.difference.high) == (0, 0, 0)
    assert attention.difference.p == 1
    assert result.contrasts[1].auc_difference.value == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--models", "abmil.gated,nomil"), "unknown model 'nomil'"),
        (("--models", "car/abmil.gated"), "expected 'abmil.gated', whose attention maps are compared with"),
        (("--models", "abmil.gated"), "expected 'car/abmil.gated', the default model"),
        (("--epochs", "0"), "epochs is 0: expected at least 1"),
        (("--data", "nowhere"), "nowhere has no features.npy"),
        (("--data", "whole"), "no validation patient of fold 0 has nuclei of both kinds"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(said, data, tmp_path, monkeypatch, words, expected):
    write_crc(tmp_path / "whole", spoil=lambda patients: patients % 2 == 0)
    monkeypatch.chdir(tmp_path)
    status, out, err = said("reproduce", "crc-evidence", "--data", str(data), "--device", "cpu", *words)
    assert status == 2
    assert out == ""
    assert err.startswith("carmil: ")
    assert expected in err
    assert len(err.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_the_command_prints_what_was_found(said, data, done, monkeypatch):
    monkeypatch.setattr(crc, "RECIPE", RECIPE)
    result, folder = done
    words = ("--data", str(data), "--out", str(folder), "--seeds", str(SEEDS), "--epochs", "7", "--device", "cpu")
    status, out, _ = said("reproduce", "crc-evidence", *words)
    assert status == 0
    assert f"{result.contrasts[1].auprc_difference.value:+z.1f} [" in out
    assert "validation, fold by fold" in out
    assert str(folder / "crc_evidence.png") in out.replace("\n", "")
