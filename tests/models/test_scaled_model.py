"""Feature scaling is part of the model: its first layers absorb the scale, which is fitted on its training bags."""

import pytest
import torch

from carmil import Bags, create_model, list_models
from carmil.models.pooling import Offsets
from carmil.models.scaled_model import SCALES, ScaledModel, deviation_of
from carmil.training import TRAIN, VALIDATION, Member, Population, Recipe, fit
from carmil.training.feeder import Feeder, _convert
from carmil.training.recipe import UNUSED
from carmil.training.scaling import fit_scales

WIDTH = 12
SMALL = {
    "rrt": {"hidden": 16, "heads": 2, "attention": 8, "regions": 2},
    "weno": {"hidden": 8, "teacher": 8, "attention": 4, "student": 8, "init_std": None},
    "dsmil.official": {},
}


def model_of(name, **options):
    plain = name.rpartition("/")[2]
    return create_model(name, WIDTH, 2, **(SMALL.get(plain, {"hidden": 16}) | options))


def scaled(name, **options):
    model = ScaledModel(model_of(name, **options), WIDTH)
    model.mean.copy_(5 + torch.randn(WIDTH))
    model.deviation.copy_(0.5 + torch.rand(WIDTH))
    return model


def offset_bags(count=8, size=6):
    generator = torch.Generator().manual_seed(3)
    x = 5 + torch.randn(count * size, WIDTH, generator=generator)
    labels = torch.arange(count) % 2
    x[:, 0] += labels.repeat_interleave(size)
    return Bags(x, torch.arange(count + 1) * size, labels=labels)


@pytest.mark.parametrize("name", list(list_models()))
def test_absorbing_the_scale_predicts_the_same_as_scaling_features(name):
    torch.manual_seed(0)
    model, bags = scaled(name).double().eval(), offset_bags()
    x = (bags.features.double() - model.mean) / model.deviation
    assert torch.allclose(model(bags.features.double(), bags.offsets).logits, model.model(x, bags.offsets).logits)
    assert all(layer.scale is None for layer in model.model.input_layers())


@pytest.mark.parametrize("name", [name for name in list_models() if "/" not in name])
def test_every_model_but_official_dsmil_absorbs_the_scale_in_its_input_layers(name):
    assert bool(model_of(name).input_layers()) == (name != "dsmil.official")


def test_dropped_feature_is_replaced_by_its_mean():
    torch.manual_seed(0)
    model = scaled("abmil", feature_dropout=0.5, dropout=0.0)
    assert model.model.input_layers() == ()
    mean = Bags(model.mean.expand(4, -1).clone(), torch.tensor([0, 4]))
    model.train()
    dropped = model(mean.features, mean.offsets).logits
    assert torch.allclose(dropped, model.eval()(mean.features, mean.offsets).logits, atol=1e-6)


@pytest.mark.parametrize("name", ["abmil.gated", "car/abmil", "additive", "dsmil.official", "mean"])
def test_each_model_of_a_population_uses_its_own_scale(name):
    bags = offset_bags()
    population = Population(lambda: ScaledModel(model_of(name), WIDTH), [Member(seed=i) for i in range(3)])
    roles = torch.full((3, len(bags)), TRAIN)
    roles[0, :4], roles[1, 4:], roles[2, ::2] = UNUSED, UNUSED, UNUSED
    fit_scales(population, bags, roles, "halfway")
    population.train(False)
    together = population(bags.features, Offsets(bags.offsets)).logits
    for row in range(3):
        alone = population.member(row)(bags.features, bags.offsets).logits
        assert torch.allclose(together[row], alone, atol=1e-4)


@pytest.mark.parametrize("scale", SCALES[1:])
def test_scales_are_fitted_on_training_bags_in_one_pass(scale, monkeypatch):
    bags = offset_bags()
    roles = torch.full((4, len(bags)), TRAIN)
    roles[0, :2], roles[1, 2:4], roles[2, 4:6], roles[3, :2] = VALIDATION, VALIDATION, UNUSED, VALIDATION
    read = []
    whole = Bags.parts
    monkeypatch.setattr(Bags, "parts", lambda self, rows, chosen: read.append(len(chosen)) or whole(self, rows, chosen))
    population = Population(lambda: ScaledModel(model_of("abmil"), WIDTH), [Member(seed=i) for i in range(4)])
    fit_scales(population, bags, roles, scale)
    assert read == [len(bags)]
    state = population.state()
    for row in range(4):
        x = bags[roles[row] == TRAIN].features.double()
        assert torch.allclose(state["mean"][row].double(), x.mean(0), atol=1e-5)
        expected = deviation_of(x.var(0, correction=0), scale)
        assert torch.allclose(state["deviation"][row].double(), expected, atol=1e-5)
    noisy = bags.features.clone()
    noisy[:12] = torch.randn(12, WIDTH) * 100  # bags 0 and 1, which models 0 and 3 do not train on
    again = Population(lambda: ScaledModel(model_of("abmil"), WIDTH), [Member(seed=i) for i in range(4)])
    fit_scales(again, Bags(noisy, bags.offsets, labels=bags.labels), roles, scale)
    for name in ("mean", "deviation"):
        assert torch.equal(again.state()[name][0], state[name][0]) and torch.equal(
            again.state()[name][3], state[name][3]
        )
        assert not torch.equal(again.state()[name][1], state[name][1])


def test_scaling_divisor_is_own_or_common_deviation_or_their_geometric_mean():
    variance = torch.tensor([4.0, 16.0, 0.0, 4.0])
    common = 6.0**0.5
    assert torch.allclose(deviation_of(variance, "own"), torch.tensor([2.0, 4.0, common, 2.0]))
    assert torch.allclose(deviation_of(variance, "common"), torch.full((4,), common))
    assert torch.allclose(
        deviation_of(variance, "halfway"), torch.tensor([2 * common, 4 * common, 6.0, 2 * common]).sqrt()
    )
    assert torch.equal(deviation_of(torch.zeros(3), "own"), torch.ones(3))


def test_subtracting_a_shift_from_the_features_preserves_predictions():
    torch.manual_seed(0)
    model, bags = scaled("car/abmil.gated").double().eval(), offset_bags()
    expected = model(bags.features.double(), bags.offsets).logits
    model.shift = torch.full((WIDTH,), 5.0, dtype=torch.float64)
    assert torch.allclose(model(bags.features.double() - 5, bags.offsets).logits, expected)


def test_subtracting_the_mean_makes_16_bit_features_more_precise():
    bags = offset_bags()
    features = 100 + bags.features
    shift = features.mean(0)
    plain, less = (_convert(features, torch.device("cpu"), torch.bfloat16, by) for by in (None, shift))
    error = (plain.float() - features).abs().max()
    assert (less.float() + shift - features).abs().max() < error / 20
    fed = next(Feeder(bags, torch.device("cpu"), torch.bfloat16, bags.features.mean(0)).feed([torch.tensor([0])]))
    assert fed.features.dtype == torch.bfloat16 and abs(float(fed.features.float().mean())) < 1


def test_scaled_model_learns_from_features_with_a_large_common_offset():
    bags = offset_bags(count=40)
    bags = Bags(bags.features + 200, bags.offsets, labels=bags.labels)
    roles = torch.tensor([TRAIN] * 30 + [VALIDATION] * 10)
    recipe = Recipe(epochs=15, batch=1, optimizer="adam", shuffle=True, warmup=1, patience=15)
    losses = {}
    for scale in ("none", "halfway"):
        population = Population(
            lambda: ScaledModel(model_of("abmil.gated"), WIDTH) if scale != "none" else model_of("abmil.gated"),  # noqa: B023
            [Member(seed=i, lr=2e-3) for i in range(2)],
        )
        if scale != "none":
            fit_scales(population, bags, roles.expand(2, -1), scale)
        history = fit(population, bags, roles, recipe)
        losses[scale] = float(history.validation.nan_to_num(torch.inf).amin(0).mean())
    assert losses["halfway"] < 0.4 < losses["none"]
