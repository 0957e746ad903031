import json

import pytest
import torch

from carmil.counterfactual import create_model
from carmil.evidence.branch_outputs import predict_branches
from carmil.report.overview_figure import stages_of
from carmil.reproduce import overview
from carmil.reproduce.method_runs import models_of_run
from carmil.reproduce.overview import CLASSES, MODEL, WIDTH
from carmil.reproduce.recipes import Request
from carmil.runs.run import read_run


def test_overview_stages_cover_all_parameters_of_the_model():
    model = create_model(MODEL, WIDTH, CLASSES)
    stages = stages_of(model)
    assert sum(stage.parameters for stage in stages) == sum(p.numel() for p in model.parameters())
    assert {stage.name: stage.sizes for stage in stages} == {
        "embedding": "1024 → 512",
        "attention trunk": "2 x 512 → 128",
        "attention": "128 → 1",
        "counterfactual attention": "128 → 1",
        "classifier": "512 → 2",
    }


def test_stage_sizes_follow_the_model():
    other = {s.name: s for s in stages_of(create_model(MODEL, 30, 5, hidden=16, attention=4, output_layers=1))}
    assert other["embedding"].sizes == "30 → 16"
    assert other["classifier"].sizes == "16 → 16 → 5"
    assert other["classifier"].parameters == 16 * 16 + 16 + 16 * 5 + 5


def test_example_bag_shows_the_outputs_of_the_trained_model(tmp_path, monkeypatch):
    monkeypatch.setattr(overview, "SIZES", (60, 20, 30))
    monkeypatch.setattr(overview, "FAST_EPOCHS", 3)
    request = Request(out=tmp_path / "out", shared=tmp_path / "shared", fast=True)
    bag, description = overview.example_bag(request)
    assert bag.attention.sum() == pytest.approx(1, abs=1e-5) and bag.counterfactual.sum() == pytest.approx(1, abs=1e-5)
    assert bag.pictures.shape == (30, 28, 28)
    before, after = torch.tensor(bag.logits), torch.tensor(bag.counterfactual_logits)
    label = torch.tensor(bag.label)
    assert bag.terms[0] == pytest.approx(float(torch.nn.functional.cross_entropy(before, label)), abs=1e-5)
    assert bag.terms[1] == pytest.approx(float(torch.nn.functional.cross_entropy(before - after, label)), abs=1e-5)
    (run,) = [read_run(path.parent) for path in tmp_path.rglob("run.json")]
    bags, (one,) = models_of_run(run, "cpu")
    outputs = predict_branches(one.model, bags)
    gaps = (outputs.scores - outputs.counterfactual_scores).abs().split(bags.sizes.tolist())
    distances = [float(gap.mean()) for gap in gaps]  # the mean absolute difference of each bag
    assert min(abs(bag.terms[2] - distance) for distance in distances) == pytest.approx(0, abs=1e-5)
    result = overview.reproduce(request)
    assert description in result.lines[1] and result.pictures[0].path.is_file()
    assert json.loads((request.out / "overview.json").read_text())["parameters"] == 657_412
