import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from carmil.datasets.study_cohort import ModelProtocol
from carmil.evidence import explainers_of
from carmil.reproduce import crc
from carmil.reproduce.crc_evidence import BASELINE, DEFAULT, MapFigures, compare_maps, run_crc_evidence
from carmil.reproduce.recipes import Request
from carmil.runs.run import read_run
from carmil.studies.compare import ComparedRun, compare_pairs
from carmil.targets import Classes

MODELS = ("abmil.gated", "car/abmil.gated")
SEEDS, EPOCHS = 2, 7


@pytest.fixture(scope="module", autouse=True)
def _small_models():
    small = replace(crc.PROTOCOL, warmup=2, of_model=lambda model: ModelProtocol({"hidden": 8, "attention": 4}))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(crc, "PROTOCOL", small)
        yield


def write_crc(folder, *, whole=False):
    """Write forty patients whose cancerous nuclei have a large first feature; `whole`: one kind of nuclei per patient."""
    rng = np.random.default_rng(0)
    patients = rng.integers(0, 40, 400)
    cancerous = (patients % 2 == 0) & ((rng.random(400) < 0.5) | whole)
    features = rng.normal(size=(400, 8)).astype(np.float16)
    features[cancerous, 0] += 3
    folder.mkdir(exist_ok=True)
    np.save(folder / "features.npy", features)
    table = pd.DataFrame({"patient_id": [f"{p:03d}" for p in patients], "is_cancerous": cancerous.astype(int)})
    table.to_csv(folder / "instances.csv", index_label="instance_id")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_crc(tmp_path_factory.mktemp("crc"))


def measure(data, out):
    return run_crc_evidence(data, MODELS, Request(out=out, shared=out), seeds=SEEDS, epochs=EPOCHS)


@pytest.fixture(scope="module")
def study(data, tmp_path_factory):
    """Return a finished study: its finding, its JSON, its runs by model, and its folder."""
    out = tmp_path_factory.mktemp("out")
    finding = measure(data, out)
    folder = out / "runs" / f"crc-nuclei-epochs{EPOCHS}-seeds{SEEDS}-seed0"
    runs = {model: read_run(folder / model.replace("/", "-")) for model in MODELS}
    return finding, json.loads((out / "crc_evidence.json").read_text()), runs, out


def test_every_explainer_of_every_model_has_a_row(study):
    _, facts, runs, _ = study
    expected = [(model, name) for model, run in runs.items() for name in explainers_of(run.model())]
    assert [(row["model"], row["evidence"]) for row in facts["rows"]] == expected
    assert ("car/abmil.gated", "path.counterfactual") in expected


def test_figures_are_means_over_folds_and_comparisons_equal_carmil_compare(study):
    _, facts, runs, _ = study
    rows = {(row["model"], row["evidence"]): row for row in facts["rows"]}
    for model, run in runs.items():
        by_seed = {}
        for fold in run.metrics.by_fold:
            by_seed.setdefault(fold.seed, []).append((fold.figures["auprc_path"], fold.figures["auc"]))
        means = 100 * np.array([np.mean(folds, axis=0) for folds in by_seed.values()])
        assert rows[model, "path"]["test"]["auprc_plus"][0] == pytest.approx(means[:, 0].mean())
        assert rows[model, "path"]["test"]["auprc_plus"][1] == pytest.approx(means[:, 0].std(ddof=1))
        assert facts["aucs"][model][0] == pytest.approx(means[:, 1].mean())
    product = facts["contrasts"][1]
    assert product["maps"] == [list(DEFAULT)] * 5
    plain, car = runs["abmil.gated"], runs["car/abmil.gated"]
    (auc,) = compare_pairs([(ComparedRun.of(car, name="car"), ComparedRun.of(plain, name="plain"))])
    maps = ComparedRun.of(car, "auprc_path", name="car"), ComparedRun.of(plain, "auprc_attention", name="plain")
    (auprc,) = compare_pairs([maps])
    for result, expected in ((product["auc_difference"], auc), (product["auprc_difference"], auprc)):
        values = [result[name] for name in ("value", "low", "high")]
        assert values == pytest.approx([100 * expected.difference, 100 * expected.low, 100 * expected.high])
        assert result["p"] == pytest.approx(expected.p_patients)


def test_written_files_contain_the_finding(study):
    finding, facts, _, out = study
    text = (out / "crc_evidence.md").read_text()
    path = next(row for row in facts["rows"] if (row["model"], row["evidence"]) == DEFAULT)
    assert f"| car/abmil.gated | path | signed, a class | {path['test']['auprc_plus'][0]:.1f} ±" in text
    assert "validation, fold by fold" in text
    assert (out / "crc_evidence.png").read_bytes()[:4] == b"\x89PNG"
    assert all(line in text for line in finding.conditions)


def test_finished_study_is_read_without_training(data, study, monkeypatch):
    finding, *_, out = study
    monkeypatch.setattr("carmil.studies.train.train_protocol", None)
    monkeypatch.setattr("carmil.evidence.map_agreement.explain", None)
    assert measure(data, out) == finding


FOLDS, PATIENTS = 5, 60


def maps_of(model, *, test, validation, certainty=0.0):
    """Return noisy maps for two seeds, from AUPRC+ on test and validation bags by explainer (one number, or one per fold)."""
    fold, label = np.arange(PATIENTS) % FOLDS, np.arange(PATIENTS) // FOLDS % 2
    noise = np.random.default_rng(7).normal(size=(2, PATIENTS))
    results = []
    for method in test:
        values = np.broadcast_to(np.asarray(test[method], dtype=float), FOLDS)[fold]
        frames = []
        for seed in range(2):
            own = np.random.default_rng([len(method), seed]).normal(0, 0.02, PATIENTS)
            p = 1 / (1 + np.exp(-(noise[seed] + certainty * label)))
            auprc = np.where(label == 1, np.clip(values + own, 0, 1), np.nan)
            who = {"slide": [f"s{i}" for i in range(PATIENTS)], "patient": [f"p{i}" for i in range(PATIENTS)]}
            names = {"fold": fold, "seed": seed, "label": np.array(["a", "b"])[label]}
            frames.append(pd.DataFrame({**who, **names, "p_a": 1 - p, "p_b": p, "auprc": auprc}))
        by_fold = [
            {"auprc_plus": np.tile(np.broadcast_to(np.asarray(part[method], dtype=float), FOLDS), (2, 1))}
            for part in (test, validation)
        ]
        results.append(MapFigures((model, method), Classes(names=("a", "b")), pd.concat(frames), *by_fold))
    return results


def test_best_explainer_is_chosen_on_validation_bags_and_reported_on_test_bags():
    plain = maps_of("abmil.gated", test={"attention": 0.6, "lrp": 0.9}, validation={"attention": 0.6, "lrp": 0.99})
    test = {"path": 0.7, "lrp": 0.5, "leave_one_out": 0.9, "attention": 0.9, "single": 0.9, "random": 0.9}
    validation = {"path": 0.7, "lrp": 0.8, "leave_one_out": 0.6, "attention": 0.9, "single": 0.9, "random": 0.9}
    car = maps_of("car/abmil.gated", test=test, validation=validation, certainty=3.0)
    _, product, best, own = compare_maps([*plain, *car])[1].values()
    assert product.maps == (DEFAULT,) * FOLDS
    assert best.maps == own.maps == (("car/abmil.gated", "lrp"),) * FOLDS
    assert product.auprc_difference.value == pytest.approx(10, abs=1)
    assert best.auprc_difference.value == pytest.approx(-10, abs=1)
    assert 0 < product.auprc_difference.low < 10 < product.auprc_difference.high
    assert product.auprc_difference.p < 0.002
    assert product.auc_difference.value > 30
    assert product.auc_difference.p < 0.002


def test_best_explainer_can_differ_between_folds():
    plain = maps_of("abmil.gated", test={"attention": 0.6}, validation={"attention": 0.6})
    first = np.array([1, 1, 0, 0, 0])
    validation = {"path": 0.5 + 0.3 * first, "lrp": 0.6}
    car = maps_of("car/abmil.gated", test={"path": 0.9 * first, "lrp": 0.9 * (1 - first)}, validation=validation)
    _, _, best, own = compare_maps([*plain, *car])[1].values()
    assert best.maps == (("car/abmil.gated", "path"),) * FOLDS
    assert [method for _, method in own.maps] == ["path", "path", "lrp", "lrp", "lrp"]
    assert best.auprc.value == pytest.approx(36, abs=1.5)
    assert own.auprc.value == pytest.approx(90, abs=1)


def test_difference_of_a_map_to_itself_is_zero():
    values = {"attention": 0.6, "path": 0.6}
    maps = [one for model in MODELS for one in maps_of(model, test=values, validation=values)]
    rows, contrasts = compare_maps(maps)
    attention = rows[BASELINE].auprc_difference
    assert (attention.value, attention.p) == (0, 1)
    assert contrasts["product default"].auc_difference.value == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--models", "abmil.gated,nomil"), "unknown model 'nomil'"),
        (("--models", "car/abmil.gated"), "expected 'abmil.gated' among them, whose attention maps are compared with"),
        (("--models", "abmil.gated"), "expected 'car/abmil.gated' among them, the default model"),
        (("--data", "nowhere"), "nowhere has no features.npy"),
    ],
)
def test_invalid_options_exit_with_one_line_and_write_nothing(run_cli, data, tmp_path, monkeypatch, words, expected):
    monkeypatch.chdir(tmp_path)
    status, out, err = run_cli("reproduce", "crc-evidence", "--data", str(data), "--device", "cpu", *words)
    assert status == 2
    assert out == ""
    assert err.startswith("carmil: ")
    assert expected in err
    assert len(err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_error_names_a_fold_without_patients_to_evaluate_maps(run_cli, tmp_path):
    write_crc(tmp_path / "whole", whole=True)
    given = ("--data", str(tmp_path / "whole"), "--out", str(tmp_path / "out"), "--epochs", "3", "--device", "cpu")
    status, _, err = run_cli("reproduce", "crc-evidence", *given, "--seeds", "1")
    assert status == 2
    assert "no validation or test patient of fold 0 has both cancerous and other nuclei" in err


def test_crc_evidence_command_prints_the_finding(run_cli, data, study):
    _, facts, _, folder = study
    given = ("--data", str(data), "--out", str(folder), "--seeds", str(SEEDS), "--epochs", str(EPOCHS))
    status, out, _ = run_cli("reproduce", "crc-evidence", *given, "--device", "cpu")
    assert status == 0
    assert f"{facts['contrasts'][1]['auprc_difference']['value']:+z.1f} [" in out
    assert str(folder / "crc_evidence.png") in out.replace("\n", "")
