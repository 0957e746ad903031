"""carmil slides run with a run that predicts a risk or a number: columns, words and maps."""

import json

import numpy as np
import pandas as pd
import pytest
from tools.small_study import train_small_run

from carmil.bags.sources import Bag
from carmil.bags.writers import write_bag
from carmil.runs.run import read_run

ENCODER, WIDTH = "timm/resnet10t", 512
OPTIONS = {"survival": {"target": "months", "event": "recurrence"}, "value": {"target": "age"}}


@pytest.fixture(scope="module", params=OPTIONS)
def trained(request, tmp_path_factory):
    """Return a kind of target, and a run of it on made-up features of the encoder's width."""
    folder, rng = tmp_path_factory.mktemp(request.param), np.random.default_rng(0)
    rows = ["slide_id,case_id,months,recurrence,age"]
    for s in range(12):
        features = np.abs(rng.normal(size=(10, WIDTH))).astype(np.float32) * (1 + s % 4)
        write_bag(Bag(f"s{s}", features, encoder=None), folder / "features", "trident")
        rows.append(f"s{s},P{s},{30 - 5 * (s % 4) + s / 10},{int(s % 3 > 0)},{50 + 5 * (s % 4) + s / 10}")
    return request.param, train_small_run(folder, rows, **OPTIONS[request.param], folds=2, epochs=3)


def test_slides_run_writes_answers_and_maps_in_the_terms_of_the_target(
    tmp_path, run_cli, shared_data, small_weights, trained
):
    kind, folder = trained
    slide, out = shared_data / "slides" / "CMU-1-Small-Region.svs", tmp_path / "out"
    words = ["--model", str(folder), "--encoder", ENCODER, "--weights", str(small_weights), "--longest", "400"]
    status, stdout, err = run_cli("slides", "run", str(slide), *words, "--out", str(out), "--device", "cpu")
    assert status == 0, err
    name, column, title = {
        "survival": ("risk", "risk", "contribution to the log hazard"),
        "value": ("age", "predicted", "contribution to the age in standard deviations"),
    }[kind]
    table = pd.read_csv(out / "predictions.csv")
    rule = read_run(folder).decision()
    assert list(table)[:3] == ["slide", column, f"cf_{column}"] and table["models"].tolist() == [2]
    assert table["answer"].astype(str).tolist() == [rule.answer([table[column][0]])]
    assert f" {column}" in stdout.splitlines()[0] and f"- answer: {rule.words}" in stdout
    evidence = pd.read_parquet(out / "evidence" / f"{slide.stem}.parquet")
    features = json.loads((out / "maps" / slide.stem / f"{slide.stem}.geojson").read_text())["features"]
    tiles = [one["properties"] for one in features if one["properties"]["objectType"] == "tile"]
    drawn = [one["measurements"][title] for one in tiles]
    assert len(tiles) > 5 and np.allclose(drawn, evidence[f"evidence_{name}"], rtol=1e-5, atol=1e-9)
    classes = {one["properties"].get("classification", {}).get("name") for one in features}
    assert classes <= {f"raises the {name}", f"lowers the {name}", None}
    for file in (f"evidence_{name}", f"tiles_evidence_{name}", "factual", "counterfactual", "comparison"):
        assert (out / "maps" / slide.stem / f"{file}.png").stat().st_size > 1000


def test_slides_draw_accepts_the_output_of_the_target_as_the_name_of_a_map(
    tmp_path, run_cli, shared_data, small_weights, trained
):
    _, folder = trained
    slide = shared_data / "slides" / "CMU-1-Small-Region.svs"
    words = ["--model", str(folder), "--encoder", ENCODER, "--weights", str(small_weights), "--longest", "100"]
    run_cli("slides", "run", str(slide), *words, "--out", str(tmp_path / "out"), "--device", "cpu")
    (name,) = read_run(folder).outputs
    draw = ["slides", "draw", str(slide), "--evidence", str(tmp_path / "out" / "evidence")]
    draw += ["--tiles", str(tmp_path / "out" / "tiles"), "--longest", "300", "--top", "0"]
    status, _, err = run_cli(*draw, "--map", name, "--out", str(tmp_path / "maps"))
    assert status == 0, err
    assert sorted(path.name for path in (tmp_path / "maps" / slide.stem).iterdir()) == [
        "comparison.png",
        f"evidence_{name}.png",
    ]
    status, _, err = run_cli(*draw, "--map", "tumour", "--out", str(tmp_path / "none"))
    assert status == 2 and "tumour" in err and name in err
