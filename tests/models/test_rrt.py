"""RRT-MIL: regions, squares and padding, against a straightforward re-implementation."""

import itertools
import math

import pytest
import torch

from carmil import create_model
from carmil.errors import CarmilError
from carmil.models import registered_models, rrt
from carmil.models.pooling import Offsets
from carmil.training import Member, Population

WIDTH, CLASSES = 12, 3
SMALL = {"hidden": 16, "heads": 2, "attention": 8}


def fresh(name="rrt", **options):
    torch.manual_seed(1)
    return create_model(name, WIDTH, CLASSES, **{**SMALL, **options}).eval()


def starts_of(sizes):
    return torch.tensor([0, *sizes]).cumsum(0)


def normed(layer, x):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], layer.weight, layer.bias)


def linear(layer, x):
    return x @ layer.weight.T + layer.bias


def attended_by_loops(layer, tokens, heads, epeg=None):
    """Return the attention output for the tokens (t, d) of one sequence, with EPEG applied to the logits as published."""
    out, width = [], tokens.shape[-1] // heads
    q, k, v = linear(layer.qkv, tokens).chunk(3, dim=-1)
    for head in range(heads):
        own = slice(head * width, (head + 1) * width)
        logits = (q[:, own] * width**-0.5) @ k[:, own].T
        if epeg is not None:
            half = epeg.weight.shape[-2] // 2
            conv = torch.full_like(logits, epeg.bias[head].item())
            for i, j in itertools.product(range(len(logits)), range(-half, half + 1)):
                if 0 <= i + j < len(logits):
                    conv[i] += epeg.weight[head, 0, j + half, 0] * logits[i + j]
            logits = logits + conv
        out.append(logits.softmax(-1) @ v[:, own])
    return linear(layer.proj, torch.cat(out, dim=-1))


def region_places(side, regions):
    size = side // regions
    for top, left in itertools.product(range(0, side, size), repeat=2):
        yield [(top + i) * side + left + j for i in range(size) for j in range(size)]


def embedded_by_loops(model, x, regions=8):
    n, heads = len(x), model.within.heads
    side = math.ceil(math.ceil(math.sqrt(n)) / regions) * regions
    places = list(region_places(side, regions))
    first = x = linear(model.embedding[0], x).relu()

    square = torch.cat([normed(model.within.norm, x), torch.zeros(side * side - n, x.shape[1])])
    added = torch.zeros_like(square)
    for own in places:
        added[own] = attended_by_loops(model.within, square[own], heads, model.within.epeg)
    x = x + added[:n]

    square = torch.cat([normed(model.across.norm, x), torch.zeros(side * side - n, x.shape[1])])
    added = torch.zeros_like(square)
    for k in range(model.across.phi.shape[1]):
        logits = [square[own] @ model.across.phi for own in places]
        pooled = torch.stack(
            [(a[:, k].softmax(0)[:, None] * square[own]).sum(0) for a, own in zip(logits, places, strict=True)]
        )
        attended = attended_by_loops(model.across, pooled, heads)
        for region, (a, own) in enumerate(zip(logits, places, strict=True)):
            scaled = (a[:, k] - a[:, k].min()) / (a[:, k].max() - a[:, k].min() + 1e-8)
            added[own] += (a.softmax(1)[:, k] * scaled)[:, None] * attended[region]
    x = x + added[:n]
    return normed(model.norm, x + first if model.all_shortcut else x)


def perturbed(model):
    """Return the model with perturbed parameters: biases and norms at 0 and 1 would hide their wrong use."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


@pytest.mark.parametrize(("options", "count"), [({}, 2_697_474), ({"epeg_k": 21, "crmsa_k": 5}, 2_698_546)])
def test_parameter_count_equals_published_count(options, count):
    assert sum(p.numel() for p in create_model("rrt", 1024, 2, **options).parameters()) == count


@pytest.mark.parametrize("n", [1, 5, 64, 70, 300])
@pytest.mark.parametrize("options", [{}, {"all_shortcut": True, "crmsa_k": 1, "epeg_k": 3}, {"hidden": 20}])
@torch.no_grad()
def test_embedding_equals_explicit_loops_over_regions_and_heads(n, options):
    model, x = perturbed(fresh(**options)), torch.randn(n, WIDTH)
    z = model.embed(x, Offsets(torch.tensor([0, n])))
    assert torch.allclose(z, embedded_by_loops(model, x), atol=1e-5)
    prediction = model(x, torch.tensor([0, n]))
    u = torch.tanh(z @ model.attention.V.weight.T) @ model.attention.score.weight.T
    expected = linear(model.classifier, (u.softmax(0) * z).sum(0))
    assert torch.allclose(prediction.logits[0], expected, atol=1e-5)


@torch.no_grad()
def test_embedding_with_fewer_regions_equals_explicit_loops():
    model, x = perturbed(fresh(regions=2)), torch.randn(11, WIDTH)
    z = model.embed(x, Offsets(torch.tensor([0, 11])))
    assert torch.allclose(z, embedded_by_loops(model, x, regions=2), atol=1e-5)


@pytest.mark.parametrize("name", ["rrt", "car/rrt"])
@pytest.mark.parametrize("sizes", [[1], [3, 1, 7], [4, 4], [2, 70, 1, 6], [70, 300, 66]])
def test_a_bag_alone_and_in_company_gets_the_same_answer(name, sizes):
    model, x, starts = perturbed(fresh(name)), torch.randn(sum(sizes), WIDTH), starts_of(sizes)
    together = model(x, starts)
    for i, (first, last) in enumerate(itertools.pairwise(starts)):
        alone = model(x[first:last], torch.tensor([0, last - first]))
        assert torch.allclose(alone.logits[0], together.logits[i], atol=1e-5)
        assert torch.allclose(alone.scores, together.scores[first:last], atol=1e-5)
        if together.counterfactual is not None:
            assert torch.allclose(alone.counterfactual.logits[0], together.counterfactual.logits[i], atol=1e-5)
            assert torch.allclose(alone.counterfactual.scores, together.counterfactual.scores[first:last], atol=1e-5)


def test_splitting_sequences_over_attention_calls_preserves_logits(monkeypatch):
    model, x, starts = fresh(), torch.randn(80, WIDTH), torch.tensor([0, 4, 74, 80])
    whole = model(x, starts).logits
    monkeypatch.setattr(rrt, "_SEQUENCES", 10)
    assert torch.allclose(model(x, starts).logits, whole, atol=1e-6)


@pytest.mark.parametrize("name", ["rrt", "car/rrt"])
def test_population_predicts_and_learns_like_its_members(name):
    population = Population(lambda: create_model(name, WIDTH, CLASSES, **SMALL), [Member(seed=s) for s in range(3)])
    population.weights += 0.1 * torch.randn_like(population.weights)
    population.train(False)
    x, starts, labels = torch.randn(80, WIDTH), torch.tensor([0, 3, 80]), torch.tensor([0, 2])
    leaves = population.leaves()
    together = population(x, Offsets(starts), leaves=leaves)
    population.losses(together, labels)["cls"].sum().backward()
    for row in range(3):
        member = population.member(row)
        alone = member(x, starts)
        assert torch.allclose(together.logits[row], alone.logits, atol=1e-5)
        assert torch.allclose(together.scores[row], alone.scores, atol=1e-5)
        member.losses(alone, labels, ())["cls"].sum().backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in member.parameters()]
        for leaf, grad in zip(leaves, grads, strict=True):
            own = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            assert torch.allclose(own[row], grad, atol=1e-4, rtol=1e-3)
    assert not torch.allclose(together.logits[0], together.logits[1])


@pytest.mark.parametrize("shortcut", [False, True])
def test_gradients_reach_every_parameter_not_declared_inert(shortcut):
    model, x, starts = fresh(all_shortcut=shortcut).train(), torch.randn(150, WIDTH), torch.tensor([0, 70, 150])
    model.losses(model(x, starts), torch.tensor([0, 2]), model.coefficients)["cls"].mean().backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 1e-7}
    unreached = {name for name, _ in model.named_parameters()} - reached
    assert unreached == {"within.epeg.bias"}
    assert all(name.endswith(registered_models()["rrt"].build.inert_parameters) for name in unreached)


def test_gradients_of_small_bags_are_finite():
    model, x, starts = fresh().train(), torch.randn(72, WIDTH), torch.tensor([0, 1, 4, 72])
    model(x, starts).logits.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("options", "words"), [({"heads": 3}, "16 hidden features for 3 heads"), ({"epeg_k": 4}, "odd number")]
)
def test_invalid_sizes_raise_an_error(options, words):
    with pytest.raises(CarmilError, match=words):
        fresh(**options)
