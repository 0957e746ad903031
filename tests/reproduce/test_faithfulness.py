import json

import numpy as np
import pandas as pd
import pytest

from carmil.errors import CarmilError
from carmil.reproduce import faithfulness
from carmil.reproduce.crc import crc_cohort
from carmil.reproduce.digits import digit_methods
from carmil.reproduce.faithfulness import MODELS, run_faithfulness
from carmil.reproduce.method_runs import train_methods
from carmil.studies.faithfulness import measure_faithfulness

from .digit_tables import request_for, rows_of, small_cohorts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Forty patients whose cancerous nuclei show in one feature."""
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
    found = run_faithfulness(digits, digit_methods(MODELS), request, nuclei=nuclei, nuclei_methods=of_nuclei)
    return request, digits, nuclei, found


def test_every_model_has_its_curves_on_both_cohorts_and_car_the_papers_order_too(drawn):
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


def test_the_curves_are_those_of_the_one_engine(drawn, tmp_path):
    request, digits, _, found = drawn
    (one,) = train_methods(digits, digit_methods(["car/abmil"]), request)
    (measured,) = measure_faithfulness(
        [one.run.folder], tmp_path, methods=("path",), steps=30, random_orders=10, device="cpu", log=print
    )
    (path,) = measured.maps
    curve = json.loads((request.out / "faithfulness.json").read_text())["curves"][6]
    assert (curve["model"], curve["evidence"]) == ("car/abmil", "path")
    assert curve["deletion"]["mean"] == pytest.approx(path.deletion.mean)
    assert curve["measures"]["deletion_area"]["value"] == pytest.approx(path.figures["deletion_area"].value)
    assert len(curve["deletion"]["mean"]) == 31  # a step per digit
    row = next(r for r in rows_of(found) if (r["model"], r["evidence"]) == ("car/abmil", "path"))
    area = path.figures["deletion_area"]
    assert row["deletion area"].startswith(f"{area.value:.3f} [")


def test_with_nothing_left_the_cohort_tells_no_bag_from_another(drawn):
    curves = json.loads((drawn[0].out / "faithfulness.json").read_text())["curves"]
    assert [one["cohort"][-1] for one in curves if one["dataset"] == "Adjacent Pairs"] == pytest.approx([0.5] * 7)


def test_the_papers_order_is_drawn_and_everything_is_written(drawn):
    request, _, _, found = drawn
    for picture in found.pictures:
        assert picture.path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = (request.out / "faithfulness.md").read_text()
    assert all(line in text for line in found.conditions)
    assert any("bootstrap over bags" in line for line in found.conditions)


def test_run_again_it_measures_nothing_that_is_there(drawn, monkeypatch):
    request, digits, nuclei, found = drawn
    monkeypatch.setattr("carmil.studies.train.train_protocol", None)
    monkeypatch.setattr("carmil.studies.faithfulness.probe", None)
    methods, of_nuclei = digit_methods(MODELS), digit_methods(["car/abmil.gated"])
    assert run_faithfulness(digits, methods, request, nuclei=nuclei, nuclei_methods=of_nuclei) == found


def test_what_makes_no_curve_is_named_before_any_training(folder, tmp_path):
    request, digits = request_for(tmp_path), small_cohorts(tmp_path, ["adjacent_pairs"])
    with pytest.raises(CarmilError, match="expected one --alpha and one --lambda"):
        run_faithfulness(digits, digit_methods(["car/abmil"], alpha=(0.1, 0.2)), request)
    with pytest.raises(CarmilError, match="expected a digit task, crc's folder, or both"):
        run_faithfulness([], [], request)
    with pytest.raises(CarmilError, match="mean has none of the maps that curves are drawn of"):
        run_faithfulness(digits, digit_methods(["mean", "abmil"]), request)
    assert not (tmp_path / "runs").exists()
