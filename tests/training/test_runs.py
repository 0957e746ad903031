import json

import pandas as pd
import pytest
import torch

from carmil.errors import CarmilError
from carmil.files import atomic_file, atomic_folder
from carmil.training.runs import has_run, read_run


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a" / "figures.json"
    with pytest.raises(RuntimeError), atomic_file(path) as aside:
        aside.write_text("half")
        raise RuntimeError
    assert list((tmp_path / "a").iterdir()) == []
    with atomic_file(path) as aside:
        aside.write_text("whole")
    assert path.read_text() == "whole"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["figures.json"]


def test_a_folder_appears_whole_or_leaves_what_was_there(tmp_path):
    path = tmp_path / "run"
    with atomic_folder(path) as aside:
        (aside / "old").write_text("1")
    with pytest.raises(RuntimeError), atomic_folder(path) as aside:
        (aside / "new").write_text("2")
        raise RuntimeError
    assert [p.name for p in path.iterdir()] == ["old"]
    with atomic_folder(path) as aside:
        (aside / "new").write_text("2")
    assert [p.name for p in path.iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_run_that_is_not_whole_is_named(tmp_path):
    assert not has_run(tmp_path, {})
    with pytest.raises(CarmilError, match="is not a whole run"):
        read_run(tmp_path)


def test_a_run_folder_holds_what_the_report_needs(demo_folder):
    folder = demo_folder / "runs" / "four_bags" / "car-abmil"
    run = read_run(folder)
    facts = json.loads((folder / "run.json").read_text())
    assert facts["config"]["members"][1]["seed"] == 1
    assert has_run(folder, run.config)
    assert not has_run(folder, {**run.config, "model": "abmil"})
    table = pd.read_parquet(folder / "predictions.parquet")
    assert len(table) == 2 * 100
    assert torch.allclose(torch.tensor(table[["p0", "p1", "p2", "p3"]].to_numpy()).sum(1), torch.ones(200), atol=1e-5)
    assert run.maps["attention"].shape == (2, 3000, 4)
    assert run.maps["counterfactual"].shape == (2, 3000, 1, 1)
    assert run.maps["path"].shape == (2, 3000, 4)
    assert run.weights["model.embedding.0.weight"].shape == (2, 20, 64)
    assert len(run.metrics["auc"]) == 2
