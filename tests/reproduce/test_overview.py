import json

import pytest
import torch

from carmil.counterfactual import create_model
from carmil.models.pooling import Offsets
from carmil.reproduce import overview
from carmil.reproduce.overview import CLASSES, MODEL, WIDTH, stages_of
from carmil.reproduce.recipes import Request


def test_the_parts_that_are_drawn_are_all_of_the_model():
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


def test_sizes_follow_the_model_that_is_built():
    other = {s.name: s for s in stages_of(create_model(MODEL, 30, 5, hidden=16, attention=4, output_layers=1))}
    assert other["embedding"].sizes == "30 → 16"
    assert other["classifier"].sizes == "16 → 16 → 5"
    assert other["classifier"].parameters == 16 * 16 + 16 + 16 * 5 + 5


def test_the_bag_is_drawn_as_the_trained_model_sees_it(tmp_path, monkeypatch):
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
    found = overview.reproduce(request)
    assert description in found.lines[1] and found.pictures[0].path.is_file()
    assert json.loads((request.out / "overview.json").read_text())["parameters"] == 657_412


def test_the_distance_that_is_drawn_is_the_mean_absolute_difference():
    u, u_cf = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0.0, 4.0])
    terms = overview._terms(
        u, u_cf, torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([0]), Offsets(torch.tensor([0, 3]))
    )
    assert terms[2] == pytest.approx(1.0)
