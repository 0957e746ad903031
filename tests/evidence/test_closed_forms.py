"""Closed forms computed for all instances at once equal the definition applied instance by instance."""

import itertools

import pytest
import torch

from carmil import Bags, create_model, explain, list_models
from carmil.counterfactual import theory
from carmil.errors import CarmilError
from carmil.evidence import residual
from carmil.evidence.leave_one_out import leave_one_out
from carmil.evidence.lrp import lrp
from carmil.evidence.path import REFERENCES, path_change, path_evidence, relative_residual
from carmil.evidence.sensitivity import logit_sensitivity, margin_sensitivity
from carmil.models import Ability
from carmil.models.layers import HeadLinear, Linear
from carmil.models.pooling import Offsets, bag_softmax, bag_sum, bag_weighted_sum

WIDTH, CLASSES = 12, 3
SIZES = [9, 4, 1, 6]
INSTANCES = sum(SIZES)
STARTS = torch.tensor([0, *SIZES]).cumsum(0)
SMALL = {"rrt": {"hidden": 16, "heads": 2, "attention": 8, "regions": 2}, "dsmil.official": {}}


def fresh(name, *, scale=1.5, dtype=torch.float64, **options):
    torch.manual_seed(1)
    options = {**SMALL.get(name.rpartition("/")[2], {"hidden": 16}), **options}
    model = create_model(name, WIDTH, CLASSES, **options).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


def some_features(n=INSTANCES, dtype=torch.float64):
    torch.manual_seed(2)
    return torch.randn(n, WIDTH, dtype=dtype) * 2


POOLING = [name for name in list_models() if name != "weno" and Ability.POOLS_BY_ATTENTION in fresh(name).abilities]


def bags_of(model, x):
    """Return the first row, z and u of every bag."""
    offsets = Offsets(STARTS)
    z = model.embed(x, offsets)
    u = model.attend(z, offsets)
    return [(int(first), z[first:last], u[first:last]) for first, last in itertools.pairwise(STARTS)]


def pooled_answer(model, z, u):
    return model.classify((u.softmax(0).T @ z).unsqueeze(0))[0]


@pytest.mark.parametrize("name", POOLING)
@torch.no_grad()
def test_leave_one_out_equals_pooling_the_other_instances(name):
    model, x = fresh(name), some_features()
    result = leave_one_out(model, x, STARTS)
    for first, z, u in bags_of(model, x):
        whole = pooled_answer(model, z, u)
        for j in range(len(z)):
            others = [i for i in range(len(z)) if i != j]
            nothing = torch.zeros(1, u.shape[1], z.shape[1], dtype=z.dtype)
            without = pooled_answer(model, z[others], u[others]) if others else model.classify(nothing)[0]
            assert torch.allclose(result[first + j], whole - without, atol=1e-9)


@pytest.mark.parametrize("name", ["abmil", "abmil.gated", "clam.sb", "clam.mb", "acmil", "car/abmil", "dsmil.official"])
@torch.no_grad()
def test_leave_one_out_equals_predicting_without_the_instance(name):
    model, x = fresh(name), some_features(8)
    one = torch.tensor([0, 8])
    result, whole = leave_one_out(model, x, one), model(x, one)
    critical = whole.instance_logits.argmax(0).tolist() if name.startswith("dsmil") else []
    for j in set(range(8)) - set(critical):
        without = model(x[torch.arange(8) != j], torch.tensor([0, 7])).logits[0]
        assert torch.allclose(result[j], whole.logits[0] - without, atol=1e-9)


@torch.no_grad()
def test_leave_one_out_is_exact_when_one_attention_weight_is_almost_one():
    model, x = fresh("abmil", output_layers=1), some_features(20)
    model.attention.score.weight.mul_(400)
    attention = model(x, torch.tensor([0, 20])).weights
    assert 1 - attention.max() < 1e-9
    exact = torch.stack(
        [
            (model(x, torch.tensor([0, 20])).logits - model(x[torch.arange(20) != j], torch.tensor([0, 19])).logits)[0]
            for j in range(20)
        ]
    )
    assert torch.allclose(leave_one_out(model, x, torch.tensor([0, 20])), exact, atol=1e-8)
    rounded = leave_one_out(model.float(), x.float(), torch.tensor([0, 20])).double()
    assert torch.allclose(rounded, exact, atol=1e-3)


@pytest.mark.parametrize("name", POOLING)
def test_sensitivity_equals_derivative_with_respect_to_attention_score(name):
    model, x = fresh(name), some_features()
    result, margins = logit_sensitivity(model, x, STARTS), margin_sensitivity(model, x, STARTS)
    for first, z, u in bags_of(model, x):
        z, u = z.detach(), u.detach()
        own = slice(first, first + len(z))
        jacobian = torch.autograd.functional.jacobian(lambda u, z=z: pooled_answer(model, z, u), u).sum(-1).T
        assert torch.allclose(result[own], jacobian, atol=1e-9)
        F = pooled_answer(model, z, u)
        for c in range(CLASSES):
            rival = max((k for k in range(CLASSES) if k != c), key=lambda k: F[k])
            assert torch.allclose(margins[own, c], jacobian[:, c] - jacobian[:, rival], atol=1e-9)
    assert torch.allclose(bag_sum(result, Offsets(STARTS)), torch.zeros(1, dtype=result.dtype), atol=1e-9)


@torch.no_grad()
def test_sensitivity_of_linear_classifier_equals_paper_formula_and_finite_difference():
    model, x = fresh("abmil"), some_features(9)
    result = logit_sensitivity(model, x, torch.tensor([0, 9]))
    z = model.embed(x, Offsets(torch.tensor([0, 9])))
    u = model.attend(z, Offsets(torch.tensor([0, 9])))
    assert torch.allclose(result, theory.logit_sensitivity(u[:, 0], model.classifier(z)), atol=1e-10)
    step = 1e-6
    for j in range(9):
        more, less = (u + sign * step * torch.eye(9, dtype=u.dtype)[:, j : j + 1] for sign in (1, -1))
        slope = (pooled_answer(model, z, more) - pooled_answer(model, z, less)) / (2 * step)
        assert torch.allclose(result[j], slope, atol=1e-4)


@pytest.mark.parametrize("name", POOLING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_path_evidence_is_complete_from_every_reference(name, dtype):
    model, x = fresh(name, dtype=dtype), some_features(dtype=dtype)
    offsets = Offsets(STARTS)
    prediction = model(x, offsets)
    z, u = prediction.instances, prediction.scores
    scores = {"reversed": -u, "uniform": torch.zeros_like(u)}
    if Ability.COUNTERFACTUAL_MAP in model.abilities:
        scores["counterfactual"] = prediction.counterfactual.scores[:, 0]
    references = {name: bag_weighted_sum(bag_softmax(s, offsets), z, offsets) for name, s in scores.items()}
    references["zero"] = torch.zeros_like(prediction.pooled)
    for reference, start in references.items():
        expected = prediction.logits - model.classify(start)
        evidence = path_evidence(model, x, offsets, reference=reference)
        error = (bag_sum(evidence, offsets) - expected).abs() / expected.abs().clamp_min(1)
        assert error.max() < 1e-3
        assert torch.allclose(path_change(model, x, offsets, reference=reference), expected, atol=1e-4)
        assert references.keys() <= REFERENCES.keys()


def test_reported_residual_of_path_evidence_equals_its_actual_error():
    model, x = fresh("abmil", scale=3.0, output_layers=2), some_features()
    offsets = Offsets(STARTS)
    change = path_change(model, x, offsets)
    tight, loose = (
        relative_residual(path_evidence(model, x, offsets, tolerance=tolerance), change, offsets)
        for tolerance in (5e-4, 100.0)
    )
    assert tight.max() < 5e-4 < loose.max()
    evidence = path_evidence(model, x, offsets, tolerance=100.0)
    z = model.embed(x, offsets)
    u = model.attend(z, offsets)
    F, F_ref = (model.classify(bag_weighted_sum(bag_softmax(s, offsets), z, offsets)) for s in (u, -u))
    expected = (bag_sum(evidence, offsets) - (F - F_ref)).abs() / (F - F_ref).abs().clamp_min(1)
    assert torch.allclose(loose, expected, atol=1e-9)


def test_unknown_or_unsupported_reference_raises_an_error_naming_it():
    model, x = fresh("abmil"), some_features()
    with pytest.raises(CarmilError, match="unknown reference 'unifrom'; did you mean 'uniform'"):
        path_evidence(model, x, STARTS, reference="unifrom")
    with pytest.raises(CarmilError, match="needs a model with CAR's branch"):
        path_evidence(model, x, STARTS, reference="counterfactual")


@pytest.mark.parametrize("name", POOLING)
def test_lrp_conserves_relevance(name):
    model, x = fresh(name), some_features()
    sums, logits = bag_sum(lrp(model, x, STARTS), Offsets(STARTS)), model(x, STARTS).logits
    assert logits.abs().max() > 0.1
    assert torch.allclose(sums, logits, atol=1e-5)
    assert residual(model, Bags(x, STARTS), "lrp").max() < 1e-5


@pytest.mark.parametrize("layers", [0, 1, 2])
@torch.no_grad()
def test_lrp_equals_applying_its_rules_layer_by_layer(layers):
    model, x = fresh("abmil", output_layers=layers), some_features(7)
    prediction = model(x, torch.tensor([0, 7]))
    z, a, Z = prediction.instances, prediction.weights, prediction.pooled[0]

    def linear(layer, inputs, relevance):
        products = inputs.unsqueeze(-2) * layer.weight
        return (products / products.sum(-1, keepdim=True) * relevance.unsqueeze(-1)).sum(-2)

    inputs, stack = Z, []
    for layer in model.classifier:
        if isinstance(layer, Linear):
            stack.append((layer, inputs))
        inputs = layer(inputs)
    for c in range(CLASSES):
        relevance = torch.zeros(1, CLASSES, dtype=x.dtype)
        relevance[0, c] = prediction.logits[0, c]
        for layer, entering in reversed(stack):
            relevance = linear(layer, entering, relevance)
        at_z = (a * z / Z).nan_to_num() * relevance
        at_x = linear(model.embedding[0], x, at_z)
        assert torch.allclose(lrp(model, x, torch.tensor([0, 7]))[:, c], at_x.sum(-1), atol=1e-5)


@torch.no_grad()
def test_lrp_changes_sign_when_the_bias_outweighs_the_features():
    """Ignoring biases scales relevance: with a linear classifier it is a_j w_c . z_j times F_c / (F_c - b_c)."""
    model, x = fresh("abmil"), some_features(7)
    linear = model.classifier[0]
    without_bias = model(x, torch.tensor([0, 7])).logits[0] - linear.bias
    linear.bias.copy_(torch.tensor([-2.0, 0.5, 0.0]) * without_bias)
    prediction = model(x, torch.tensor([0, 7]))
    products = prediction.weights * (prediction.instances @ linear.weight.T)
    result = lrp(model, x, torch.tensor([0, 7]))
    assert torch.allclose(result, products * torch.tensor([-1.0, 1.5, 1.0], dtype=x.dtype), atol=1e-6)
    assert torch.allclose(explain(model, Bags(x, torch.tensor([0, 7])), "path.zero"), products, atol=1e-9)


def test_lrp_leaves_model_unchanged():
    model, x = fresh("clam.mb"), some_features()
    before = model(x, STARTS).logits
    lrp(model, x, STARTS)
    assert torch.equal(model(x, STARTS).logits, before)
    assert not any(m._forward_hooks for m in model.modules() if isinstance(m, Linear | HeadLinear))


@pytest.mark.parametrize("method", ["lrp", "leave_one_out", "margin_sensitivity", "path.zero"])
def test_model_without_attention_pooling_raises_an_error(method):
    bags = Bags.from_list([torch.randn(5, WIDTH)])
    for name in ("mean", "additive", "transmil"):
        with pytest.raises(CarmilError, match="needs a model that declares 'pools by attention'"):
            explain(create_model(name, WIDTH, 2, hidden=8), bags, method)
