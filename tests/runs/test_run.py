"""A run with damaged or modified files raises an error of one line, whichever command reads it."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from carmil.errors import CarmilError
from carmil.report.run import write_report
from carmil.runs import run as runs
from carmil.runs.run import read_run
from carmil.runs.writing import begin
from carmil.studies import card
from carmil.studies.train import run_study

from ..studies.conftest import make_files


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """Return the folder of a run trained for two epochs."""
    folder = tmp_path_factory.mktemp("run")
    files = make_files(folder, patients=12, slides=1)
    return run_study(files.settings(folder / "run", epochs=2, seeds=2)).folder


@pytest.fixture
def run(good, tmp_path) -> Path:
    shutil.copytree(good, tmp_path / "run")
    return tmp_path / "run"


def read_all(folder: Path) -> None:
    """Read all files of a run, as report, card, predict and viewer do."""
    run = read_run(folder)
    run.predictions()
    run.history()
    run.population()
    write_report(run, folder / "report.html")
    card.card(run)


def changed(path: Path, place: list, value: object) -> None:
    """Replace a value of a JSON file; `...` removes it."""
    tree = json.loads(path.read_text())
    holder = tree
    for key in place[:-1]:
        holder = holder[key]
    if value is ...:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    if path.name == "run.json" and isinstance(tree.get("settings"), dict):
        tree["key"] = runs.key_of(tree["settings"], tree)  # as if to hide the change
    path.write_text(json.dumps(tree))


ODD = [
    ("run", ["classes"], ["a"], "two or more different classes"),
    ("run", ["classes"], ["a", "a"], "two or more different classes"),
    ("run", ["classes", 0], 3, "classes[0] is 3: expected text"),
    ("run", ["class_counts"], [1], "classes and class_counts do not match"),
    ("run", ["width"], 10**18, "width is 1000000000000000000: expected less than or equal to 16777216"),
    ("run", ["width"], 0, "width is 0: expected greater than or equal to 1"),
    ("run", ["width"], "6", "width is '6': expected a whole number"),
    ("run", ["splits"], [], "splits are empty"),
    ("run", ["splits", 0, 0], [], "splits are empty"),
    ("run", ["said"], [1], "said[0] is 1: expected text"),
    ("run", ["machine"], None, "machine is None: expected an object"),
    ("run", ["store"], ..., "store is missing"),
    ("run", ["settings"], {}, "'bags' is missing"),
    ("run", ["settings", "epochs"], "many", "epochs is 'many': expected a number"),
    ("run", ["settings", "options"], {"hidden": 10**12}, "expected at most 65,536"),
    ("run", ["settings", "options"], {"hidden": 4096}, "weights: expected"),
    ("run", ["settings", "model"], "nonesuch", "unknown model 'nonesuch'"),
    ("run", ["tile_mpp"], -1, "tile_mpp is -1"),
    ("models", [0, "fold"], 99, "folds or seeds that the splits of run.json do not have"),
    ("models", [0, "fold"], -1, "[0].fold is -1: expected greater than or equal to 0"),
    ("models", [0, "seed"], 2**40, "[0].seed is 1099511627776: expected less than 4294967296"),
    ("models", [0, "lr"], None, "lr is None: expected a number"),
    ("models", [0, "lr"], -1.0, "a learning rate of -1.0"),
    ("models", [0, "point"], 7, "of other models than models.json"),
    ("models", [0, "threshold"], [], "threshold is a list: expected a number"),
    ("models", [0, "threshold"], 5, "models.json: a threshold of 5.0: expected a probability, from 0 to 1"),
    ("models", [0, "threshold"], -0.1, "models.json: a threshold of -0.1: expected a probability, from 0 to 1"),
    ("models", [0, "abstain_below"], 7, "models.json: no answer below a confidence of 7.0"),
    ("models", [0], ..., "models.json lists 5 models: expected 6, one per fold and seed of run.json"),
    ("models", [3, "fold"], 1, "models.json lists two models of the same fold and seed"),
    ("run", ["settings", "seeds"], 3, "models.json lists 6 models: expected 9, one per fold and seed of run.json"),
    ("models", [0, "settings"], [], "settings is a list"),
    ("metrics", ["level"], "fold", "level is 'fold': expected one of slide, patient"),
    ("metrics", ["summary", "auc"], {}, "summary.auc.mean is missing"),
    ("metrics", ["summary", "auc", "mean"], "x", "summary.auc.mean is 'x': expected a number"),
    ("metrics", ["intervals"], {}, "intervals.auc is missing"),
    ("metrics", ["calibration", "count"], [], "calibration"),
    ("metrics", ["calibration", "edges"], [0.0, 1.0], "calibration"),
    ("metrics", ["by_fold", 0, "fold"], None, "by_fold[0].fold is None: expected a whole number"),
    ("metrics", ["by_fold", 0, "fold"], 77, "different folds than metrics.json"),
    ("metrics", ["by_fold", 0], 3, "by_fold[0] is 3: expected an object"),
    ("metrics", ["by_fold", 0, "auc"], "x", "by_fold[0].figures.auc is 'x': expected a number"),
    ("metrics", ["readings", "cross_entropy"], {}, "readings.cross_entropy is an object: expected a number"),
    ("metrics", ["intervals", "auc", "high"], None, "intervals.auc has one end only"),
    ("models", [0, "best_epoch"], 99, "of other models than models.json"),
    ("history", ["train", "cls"], [], "of other models than models.json"),
    ("run", ["settings", "labels"], "9" * 400, "expected the name of a file, at most 255 bytes long"),
    ("history", ["train"], {}, "of other models than models.json"),
    ("history", ["validation", 0], [1.0], "of other models than models.json"),
    ("history", ["best_epoch"], "x", "best_epoch is 'x': expected a list"),
]


@pytest.mark.finding(n=14)
@pytest.mark.parametrize(("name", "place", "value", "words"), ODD, ids=[f"{n}-{p}-{v}"[:60] for n, p, v, _ in ODD])
def test_run_with_an_invalid_value_raises_an_error_of_one_line(run, name, place, value, words):
    changed(run / f"{name}.json", place, value)
    with pytest.raises(CarmilError) as refused:
        read_all(run)
    assert words in str(refused.value) and len(str(refused.value).splitlines()) == 1


@pytest.mark.finding(n=14)
@pytest.mark.parametrize("name", ["run.json", "models.json", "metrics.json", "history.json"])
@pytest.mark.parametrize("text", ["", "[" * 100_000, "null", '{"a": ' + "9" * 5000 + "}", "\xff"])
def test_run_with_unreadable_json_raises_an_error_of_one_line(run, name, text):
    (run / name).write_text(text, encoding="latin-1")
    with pytest.raises(CarmilError) as refused:
        read_all(run)
    assert name in str(refused.value) and len(str(refused.value).splitlines()) == 1


@pytest.mark.finding(n=14)
@pytest.mark.parametrize(
    "change",
    [
        lambda frame: frame.iloc[:0],
        lambda frame: frame.drop(columns="slide"),
        lambda frame: frame.drop(columns="p_a"),
        lambda frame: frame.assign(p_a=2.0),
        lambda frame: frame.assign(p_a=float("nan")),
        lambda frame: frame.assign(p_a="x"),
        lambda frame: frame.assign(cf_a=True),
        lambda frame: frame.assign(label="z"),
        lambda frame: frame.assign(slide=3),
        lambda frame: frame.assign(patient=None),
        lambda frame: frame.assign(fold=0.5),
        lambda frame: frame.assign(fold=0),
        lambda frame: frame.assign(fold=pd.Timestamp(0)),
        lambda frame: frame.assign(fold=frame["fold"] + 7),
        lambda frame: frame.drop(columns="cf_b"),
    ],
)
def test_predictions_with_invalid_columns_raise_an_error_of_one_line(run, change):
    path = run / "predictions.parquet"
    change(pd.read_parquet(path)).to_parquet(path, index=False)
    with pytest.raises(CarmilError) as refused:
        read_all(run)
    assert str(path) in str(refused.value) and len(str(refused.value).splitlines()) == 1


@pytest.mark.finding(n=14)
@pytest.mark.parametrize(
    "change",
    [
        lambda state: {name: tensor[:, :1] for name, tensor in state.items() if tensor.ndim > 1},
        lambda state: {f"x{name}": tensor for name, tensor in state.items()},
        lambda state: {**state, "more": torch.ones(3)},
        lambda state: {},
    ],
)
def test_weights_of_another_model_raise_an_error_of_one_line(run, change):
    path = run / "weights.safetensors"
    state = {name: tensor.contiguous().clone() for name, tensor in change(load_file(path)).items()}
    save_file(state, path)
    with pytest.raises(CarmilError) as refused:
        read_run(run).population()
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.finding(n=14)
def test_model_size_is_compared_with_the_weights_before_creating_the_model(run, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("a model was created")

    changed(run / "run.json", ["settings", "options"], {"hidden": 65536, "attention": 65536})
    monkeypatch.setattr(runs, "Population", fail)
    with pytest.raises(CarmilError, match="weights: expected"):
        read_run(run).population()


def test_valid_run_is_read_by_every_reader(run):
    read_all(run)
    assert (run / "report.html").stat().st_size > 10_000
    assert read_run(run).settings.options == {"hidden": 8, "attention": 4}


@pytest.mark.finding(n=13)
@pytest.mark.parametrize("name", ["splits.tsv", "report.html", "study.yaml"])
def test_run_does_not_overwrite_files_of_the_user(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(CarmilError, match=rf"holds {name} but no run\.json: {name} would be overwritten"):
        begin(tmp_path, {}, {})
    assert (tmp_path / name).read_text() == "mine" and [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.finding(n=14)
def test_pandas_metadata_of_the_predictions_table_is_ignored(run):
    path = run / "predictions.parquet"
    table = pq.read_table(path)
    odd = {b"pandas": b'{"index_columns": [], "column_indexes": [{"name": {}}], "columns": [{"name": {}}]}'}
    pq.write_table(table.replace_schema_metadata(odd), path)
    assert list(read_run(run).predictions().columns) == table.column_names


@pytest.mark.finding(n=14)
def test_run_with_swapped_classes_raises_an_error(run):
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "classes": facts["classes"][::-1]}))
    with pytest.raises(CarmilError, match=r"run\.json was changed after it was written"):
        read_run(run)


@pytest.mark.finding(n=14)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_raise_an_error_naming_them(run, value):
    path = run / "weights.safetensors"
    state = load_file(path)
    name = next(iter(state))
    save_file({**state, name: torch.full_like(state[name], value)}, path)
    with pytest.raises(CarmilError, match=rf"weights\.safetensors: {name} has values that are not finite"):
        read_run(run).population()
