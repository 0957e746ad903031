import json

import numpy as np
import pandas as pd
import pytest

from carmil.errors import CarmilError
from carmil.explanations.faithfulness import measure_faithfulness
from carmil.reproduce import faithfulness
from carmil.reproduce.crc import crc_cohort
from carmil.reproduce.digits import digit_methods
from carmil.reproduce.faithfulness import MODELS, run_faithfulness
from carmil.reproduce.method_runs import train_methods

from .digit_tables import request_for, rows_of, small_cohorts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write forty patients whose cancerous nuclei have a large first feature."""
    folder = tmp_path_factory.mktemp("crc")
    rng = np.random.default_rng(0)
    patients = rng.integers(0, 40, 400)
    cancerous = (rng.random(40) < 0.5)[patients] & (rng.random(400) < 0.5)
    features = rng.normal(size=(400, 8)).astype(np.float16)
    features[cancerous, 0] += 3
    np.save(folder / "features.npy", features)
    pd.DataFrame({"patient_id": patients, "is_cancerous": cancerous.astype(int)}).to_csv(folder / "instances.csv")
    return folder


@pytest.fixture(scope="module")
def drawn(folder, tmp_path_factory):
    request = request_for(tmp_path_factory.mktemp("faithfulness"))
    digits = small_cohorts(request.shared, ["adjacent_pairs"], epochs=12, lr=1e-2)
    nuclei = [crc_cohort(folder, request, epochs=8)]
    of_nuclei = digit_methods(["car/abmil.gated"])
    result = run_faithfulness(digits, digit_methods(MODELS), request, nuclei=nuclei, nuclei_methods=of_nuclei)
    return request, digits, nuclei, result


def test_every_model_has_curves_and_car_has_one_more_in_the_order_of_the_paper(drawn):
    kinds = [(row["task"], row["model"], row["evidence"]) for row in rows_of(drawn[3])]
    papers = faithfulness.PAPERS_ORDER
    assert kinds == [
        ("Adjacent Pairs", "abmil", "attention"),
        ("Adjacent Pairs", "abmil", "path"),
        ("Adjacent Pairs", "cia/abmil", "attention"),
        ("Adjacent Pairs", "cia/abmil", "path"),
        ("Adjacent Pairs", "car/abmil", "attention"),
        ("Adjacent Pairs", "car/abmil", papers),
        ("Adjacent Pairs", "car/abmil", "path"),
        ("CRC nuclei", "car/abmil.gated", "attention"),
        ("CRC nuclei", "car/abmil.gated", papers),
        ("CRC nuclei", "car/abmil.gated", "path"),
    ]


def test_curves_equal_those_of_carmil_faithfulness(drawn, tmp_path):
    request, digits, _, result = drawn
    (one,) = train_methods(digits, digit_methods(["car/abmil"]), request)
    (measured,) = measure_faithfulness(
        [one.run.folder], tmp_path, methods=("path",), steps=30, random_orders=10, device="cpu", log=print
    )
    (path,) = measured.maps
    curve = json.loads((request.out / "faithfulness.json").read_text())["curves"][6]
    assert (curve["model"], curve["evidence"]) == ("car/abmil", "path")
    assert curve["deletion"]["mean"] == pytest.approx(path.deletion.mean)
    assert curve["measures"]["deletion_area"]["value"] == pytest.approx(path.figures["deletion_area"].value)
    assert len(curve["deletion"]["mean"]) == 31  # one step per digit
    row = next(r for r in rows_of(result) if (r["model"], r["evidence"]) == ("car/abmil", "path"))
    area = path.figures["deletion_area"]
    assert row["deletion area ↓"].startswith(f"{area.value:.3f} (")


def test_auc_of_empty_bags_is_one_half(drawn):
    curves = json.loads((drawn[0].out / "faithfulness.json").read_text())["curves"]
    assert [one["cohort"][-1] for one in curves if one["dataset"] == "Adjacent Pairs"] == pytest.approx([0.5] * 7)


def test_recipe_writes_pictures_and_conditions(drawn):
    request, _, _, result = drawn
    for picture in result.pictures:
        assert picture.path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = (request.out / "faithfulness.md").read_text()
    assert all(line in text for line in result.conditions)
    assert any("bootstrap over bags" in line for line in result.conditions)


def test_repeated_recipe_measures_nothing_again(drawn, monkeypatch):
    request, digits, nuclei, result = drawn
    monkeypatch.setattr("carmil.studies.train.train_protocol", None)
    monkeypatch.setattr("carmil.explanations.faithfulness.probe", None)
    methods, of_nuclei = digit_methods(MODELS), digit_methods(["car/abmil.gated"])
    assert run_faithfulness(digits, methods, request, nuclei=nuclei, nuclei_methods=of_nuclei) == result


def test_methods_without_curves_raise_an_error_before_training(folder, tmp_path):
    request, digits = request_for(tmp_path), small_cohorts(tmp_path, ["adjacent_pairs"])
    with pytest.raises(CarmilError, match="expected one --alpha and one --lambda"):
        run_faithfulness(digits, digit_methods(["car/abmil"], alpha=(0.1, 0.2)), request)
    with pytest.raises(CarmilError, match="mean has none of the maps that curves are drawn for"):
        run_faithfulness(digits, digit_methods(["mean", "abmil"]), request)
    assert not (tmp_path / "runs").exists()
