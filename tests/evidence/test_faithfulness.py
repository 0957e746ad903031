import numpy as np
import pytest
import torch

from carmil.bags.bags import Bags
from carmil.counterfactual.branches import create_model
from carmil.errors import CarmilError
from carmil.evidence import bag_auc, explain
from carmil.evidence import faithfulness as module
from carmil.evidence.faithfulness import (
    Faithfulness,
    auc_curve,
    deletion_logits,
    evidence_of_class,
    faithfulness_of,
)
from carmil.models import registry
from carmil.models.scaled_model import ScaledModel

WIDTH = 6
SMALL = {
    "abmil": {"hidden": 8, "attention": 4},
    "abmil.gated": {"hidden": 8, "attention": 4, "output_layers": 1},
    "acmil": {"hidden": 8, "attention": 4},
    "clam.sb": {"hidden": 8, "attention": 4},
    "clam.mb": {"hidden": 8, "attention": 4},
    "dsmil": {"hidden": 8, "query_size": 4},
    "dsmil.official": {"query_size": 4},
    "rrt": {"hidden": 8, "heads": 2, "attention": 4},
    "transmil": {"hidden": 8, "heads": 2, "landmarks": 4},
}
PLAIN = {"additive": {"hidden": 8}, "mean": {"hidden": 8}, "max": {"hidden": 8}}
FAST = {"abmil", "abmil.gated", "acmil", "clam.sb", "clam.mb"}


def model_of(name="abmil", classes=3, **options):
    options = {**{**SMALL, **PLAIN}.get(name.rpartition("/")[2], {}), **options}
    model = create_model(name, WIDTH, classes, **options).double().eval()
    with torch.no_grad():  # attention worth the name
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model


def bags_of(*sizes):
    return Bags.from_list([torch.randn(size, WIDTH, dtype=torch.float64) for size in sizes])


def reduced_bag_by_bag(model, bags, maps, steps):
    """The plain loop: one forward pass for every map, bag and step."""
    curves = []
    for one in maps:
        for i, j in zip(bags.offsets[:-1].tolist(), bags.offsets[1:].tolist(), strict=True):
            order = sorted(range(i, j), key=lambda row: (-float(one[row]), row))
            for s in range(steps):
                kept = sorted(order[(j - i) * s // steps :])
                curves.append(model(bags.features[kept], torch.tensor([0, len(kept)])).logits)
            curves.append(model(torch.zeros_like(bags.features[i:j]), torch.tensor([0, j - i])).logits)
    return torch.cat(curves).view(len(maps), len(bags), steps + 1, -1)


def test_every_attending_model_is_tried():
    assert set(SMALL) == {name for name, entry in registry.registered_models().items() if entry.carries_branch}


@pytest.mark.parametrize("name", [*SMALL, *PLAIN, "car/abmil", "targeted/clam.mb", "car/dsmil", "car/transmil"])
def test_curves_are_those_of_real_passes_of_the_reduced_bags(name):
    model, bags = model_of(name), bags_of(70, 9, 1)
    maps = torch.randn(2, 80, dtype=torch.float64)
    steps = 100 if name in FAST else 12
    with torch.no_grad():
        expected = reduced_bag_by_bag(model, bags, maps, steps)
    assert expected[:, :2].std(2).min() > 1e-3  # there is something to follow
    ours = deletion_logits(model, bags, maps, steps=steps)
    assert torch.allclose(ours, expected, atol=1e-9, rtol=0)
    assert torch.allclose(deletion_logits(model, bags, maps, steps=steps, fast=False), expected, atol=1e-9, rtol=0)
    assert torch.allclose(
        deletion_logits(model, bags, maps, steps=steps, max_instances=10), expected, atol=1e-9, rtol=0
    )


@pytest.mark.parametrize("name", [*SMALL, "car/abmil", "car/rrt", "scaled"])
def test_only_models_whose_instances_need_no_company_are_asked_once(name, monkeypatch):
    model = ScaledModel(model_of("abmil"), WIDTH).double() if name == "scaled" else model_of(name)
    passes = []
    monkeypatch.setattr(module, "_by_passes", lambda *given: passes.append(1) or by_passes(*given))
    deletion_logits(model, bags_of(3, 70), torch.randn(1, 73), steps=2)
    assert bool(passes) != (name in FAST | {"car/abmil", "scaled"})


by_passes = module._by_passes


def test_maps_one_at_a_time_and_all_together_make_the_same_curves(monkeypatch):
    model, bags, maps = model_of("acmil"), bags_of(200, 30), torch.randn(5, 230)
    together = deletion_logits(model, bags, maps)
    monkeypatch.setattr(module, "ROWS", 1)
    assert torch.allclose(deletion_logits(model, bags, maps), together, atol=1e-12)
    assert torch.allclose(deletion_logits(model, bags[0], maps[:, :200]), together[:, :1], atol=1e-12)


def test_nothing_is_lost_when_the_instances_with_all_the_weight_go_first():
    model, bags = model_of("abmil").float(), bags_of(500)
    with torch.no_grad():
        model.attention.score.weight.mul_(200)  # scores hundreds apart, where exp(u) of the rest is zero in float32
        u = model.attend(model.embed(bags.features.float(), bags.offsets), bags.offsets)[:, 0]
        assert u.max() - u.min() > 200
        expected = reduced_bag_by_bag(model, bags, u[None], 100)
    ours = deletion_logits(model, bags, u[None])
    assert torch.allclose(ours, expected, atol=1e-4)


def test_equally_relevant_instances_go_in_their_own_order():
    model, bags = model_of(), bags_of(20)
    flat, falling = torch.zeros(1, 20), -torch.arange(20.0)[None]
    assert torch.equal(deletion_logits(model, bags, flat), deletion_logits(model, bags, falling))


def test_a_map_of_the_answers_own_evidence_is_faithful_and_its_reverse_is_not():
    model, bags = model_of("mean"), bags_of(*[40] * 12)
    classes = deletion_logits(model, bags, torch.zeros(1, 480), steps=1)[0, :, 0].argmax(-1)
    evidence = evidence_of_class(explain(model.float(), bags, "patch_scores"), classes, bags.offsets)
    found = faithfulness_of(model.double(), bags, torch.stack([evidence, -evidence]), classes)
    assert found.right.all()
    good, bad = found.aopc_over_random.mean(1)
    assert good > 0.02 > -0.02 > bad
    assert (found.deletion_area[0] < found.deletion_area[1]).all()
    assert (found.insertion_area[0] > found.insertion_area[1]).all()
    assert (found.necessity(0.2)[0] > 0).all()
    assert (found.sufficiency(0.2)[0] > 0).all()
    assert torch.allclose(found.most_first[0], found.least_first[1])
    assert torch.allclose(found.most_first[..., 0], found.insertion[..., -1])


def test_what_a_curve_is_worth_by_hand():
    falling, wobbling = torch.tensor([0.9, 0.5, 0.5, 0.1, 0.6]), torch.tensor([0.8, 0.4, 0.6, 0.2, 0.6])
    curves = torch.stack([falling, wobbling])[:, None]
    found = Faithfulness(curves, curves.flip(-1), torch.full((3, 1, 5), 0.7), right=torch.tensor([True]))
    assert found.deletion_area[:, 0].tolist() == pytest.approx([0.52, 0.52])
    assert found.aopc[:, 0].tolist() == pytest.approx([0.38, 0.28])
    assert found.aopc_over_random[:, 0].tolist() == pytest.approx([0.18, 0.18])
    assert found.monotonicity[:, 0].tolist() == pytest.approx([1.0, 0.8])  # the bag of zeros is left out
    assert found.necessity(0.25)[:, 0].tolist() == pytest.approx([0.4, 0.4])
    assert found.sufficiency(0.75)[:, 0].tolist() == pytest.approx([0.1 - 0.6, 0.2 - 0.6])
    assert torch.equal(found.insertion, curves)
    assert found.over(~found.right).deletion_area.shape == (2, 0)
    with pytest.raises(CarmilError, match=r"a fraction of 0\.3 at 4 steps: expected a multiple of"):
        found.necessity(0.3)


def test_a_curve_that_does_not_move_has_no_monotonicity():
    flat = torch.full((1, 1, 5), 0.5)
    assert Faithfulness(flat, flat, flat, right=torch.tensor([True])).monotonicity.isnan().all()


def test_only_bags_answered_with_their_class_are_right():
    model, bags = model_of(), bags_of(5, 6, 7, 8)
    answers = deletion_logits(model, bags, torch.zeros(1, 26), steps=1)[0, :, 0].argmax(-1)
    labels = answers.clone()
    labels[1] = (labels[1] + 1) % 3
    found = faithfulness_of(model, bags, torch.zeros(1, 26), labels, random_orders=2)
    assert found.right.tolist() == [True, False, True, True]
    assert found.over(found.right).most_first.shape == (1, 3, 101)
    assert torch.equal(
        found.at_random, faithfulness_of(model, bags, torch.zeros(1, 26), labels, random_orders=2).at_random
    )


@pytest.mark.parametrize("labels", [[0, 1, 0, 1, 1, 1, 0, 0], [0, 1, 2, 1, 0, 2, 2, 0]])
def test_the_cohorts_auc_is_that_of_every_steps_answers(labels):
    logits = torch.randn(2, 8, 4, max(labels) + 1)
    logits[:, :, 3] = logits[:, :1, 3]  # where nothing is left, all bags are answered alike
    curve = auc_curve(logits, labels)
    assert curve[:, 3].tolist() == [0.5, 0.5]
    assert curve.shape == (2, 4)
    for e in range(2):
        for s in range(4):
            assert curve[e, s] == pytest.approx(bag_auc(logits[e, :, s].softmax(-1).numpy(), labels))
    assert np.isnan(auc_curve(logits, [1] * 8)).all()


def test_maps_that_do_not_fit_are_named_and_the_model_goes_on_as_it_was():
    model, bags = model_of().train(), bags_of(5)
    with pytest.raises(CarmilError, match=r"maps have shape \(5, 3\) for 5 instances"):
        deletion_logits(model, bags, torch.zeros(5, 3))
    with pytest.raises(CarmilError, match="a map holds NaN"):
        deletion_logits(model, bags, torch.full((1, 5), torch.nan))
    with pytest.raises(CarmilError, match="0 steps"):
        deletion_logits(model, bags, torch.zeros(1, 5), steps=0)
    deletion_logits(model, bags, torch.zeros(1, 5))
    assert model.training
