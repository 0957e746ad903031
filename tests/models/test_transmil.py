"""TransMIL against a dense, one-bag, step-by-step version of itself."""

import itertools
import math

import pytest
import torch

from carmil import create_model
from carmil.errors import CarmilError
from carmil.models import nystrom, transmil
from carmil.models.pooling import Offsets
from carmil.training import Member, Population

WIDTH, CLASSES, HIDDEN = 12, 3, 20
NAMES = ["transmil", "car/transmil", "targeted/transmil"]
BRANCHED = ["car/transmil", "targeted/transmil", "cia/transmil"]


def fresh(name="transmil", **options):
    torch.manual_seed(1)
    return create_model(name, WIDTH, CLASSES, hidden=HIDDEN, **options).eval()


def starts_of(sizes):
    return torch.tensor([0, *sizes]).cumsum(0)


def dense_attention(layer, h):
    """(A, V) of a bag's tokens h (t, d): A (heads, p+t, p+t) computed explicitly, V (heads, p+t, e)."""
    x = torch.nn.functional.layer_norm(h, h.shape[-1:], layer.norm.weight, layer.norm.bias)
    m, e = layer.landmarks, layer.inner // layer.heads
    while len(x) % m:
        x = torch.cat([torch.zeros(1, x.shape[1]), x])
    run = len(x) // m
    q, k, v = (x @ layer.qkv.weight.T).chunk(3, dim=-1)
    matrices, values = [], []
    for head in range(layer.heads):
        Q, K, V = (y[:, head * e : (head + 1) * e] for y in (q * e**-0.5, k, v))
        Qm = torch.stack([Q[i * run : (i + 1) * run].mean(0) for i in range(m)])
        Km = torch.stack([K[i * run : (i + 1) * run].mean(0) for i in range(m)])
        a = (Qm @ Km.T).softmax(-1)
        z = a.T / (a.abs().sum(1).max() * a.abs().sum(0).max())
        one = torch.eye(m)
        for _ in range(6):
            z = 0.25 * z @ (13 * one - (a @ z) @ (15 * one - (a @ z) @ (7 * one - a @ z)))
        matrices.append((Q @ Km.T).softmax(-1) @ z @ (Qm @ K.T).softmax(-1))
        values.append(V)
    return torch.stack(matrices), torch.stack(values)


def dense_layer(layer, h):
    A, V = dense_attention(layer, h)
    mixed = A @ V
    half = layer.residual.weight.shape[2] // 2
    for i, j in itertools.product(range(V.shape[1]), repeat=2):
        if abs(i - j) <= half:
            mixed[:, i] += layer.residual.weight[:, 0, half + j - i] * V[:, j]
    y = mixed.transpose(0, 1).flatten(1) @ layer.out.weight.T + layer.out.bias
    return h + y[-len(h) :]


def dense_position(position, h):
    side = math.isqrt(len(h) - 1)
    square = h[1:].reshape(side, side, -1)
    out = square.clone()
    for conv in (position.wide, position.middle, position.narrow):
        half = conv.weight.shape[-1] // 2
        out += conv.bias
        for y, x, dy, dx in itertools.product(range(side), range(side), *[range(-half, half + 1)] * 2):
            if 0 <= y + dy < side and 0 <= x + dx < side:
                out[y, x] += conv.weight[:, 0, half + dy, half + dx] * square[y + dy, x + dx]
    return torch.cat([h[:1], out.reshape(side * side, -1)])


def dense_tokens(model, x):
    """Return the tokens before the first layer and before the last."""
    h = model.embedding(x)
    full = math.ceil(math.sqrt(len(x))) ** 2
    h = torch.cat([model.class_token[None], h, h[: full - len(x)]])
    return h, dense_position(model.position, dense_layer(model.first, h))


def dense_row(layer, h, count):
    """Return the class token's attention to the instances, averaged over heads, (count)."""
    A, _ = dense_attention(layer, h)
    first = A.shape[1] - len(h)
    return A.mean(0)[first, first + 1 : first + 1 + count]


def dense_logits(model, layer, h):
    token = torch.nn.functional.layer_norm(dense_layer(layer, h)[0], (HIDDEN,), model.norm.weight, model.norm.bias)
    return model.classifier.weight @ token + model.classifier.bias


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 2, 7, 30])
def test_logits_and_scores_equal_dense_implementation(size):
    model, x = fresh(), torch.randn(size, WIDTH)
    _, h = dense_tokens(model, x)
    prediction = model(x, torch.tensor([0, size]))
    assert torch.allclose(prediction.logits[0], dense_logits(model, model.last, h), atol=1e-5)
    assert torch.allclose(prediction.scores[:, 0], dense_row(model.last, h, size), atol=1e-5)
    normed = torch.nn.functional.layer_norm(h, (HIDDEN,), model.last.norm.weight, model.last.norm.bias)
    assert torch.allclose(prediction.instances, normed[1 : size + 1], atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("size", [7, 30])
def test_car_branch_duplicates_last_layer_and_shares_classifier(size):
    model, x = fresh("car/transmil"), torch.randn(size, WIDTH)
    _, h = dense_tokens(model.model, x)
    prediction = model(x, torch.tensor([0, size]))
    second = model.branch.attention
    expected = dense_logits(model.model, second, h)
    assert torch.allclose(prediction.counterfactual.logits[0, 0], expected, atol=1e-5)
    assert torch.allclose(prediction.counterfactual.scores[:, 0, 0], dense_row(second, h, size), atol=1e-5)
    assert not torch.allclose(prediction.logits[0], expected, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 7, 30])
def test_class_token_row_equals_row_of_explicit_attention_matrix(size):
    model, x = fresh(), torch.randn(size, WIDTH)
    h, _ = dense_tokens(model, x)
    A, _ = dense_attention(model.first, h)
    first = A.shape[1] - len(h)
    attention, _ = model.first.attention(h[None])
    assert torch.allclose(model.first.view(h[None]).row[0, :, 0], A[:, first], atol=1e-5)
    assert torch.allclose(attention.row_sums()[0], A.sum(-1), atol=1e-5)
    assert torch.allclose(attention.reach(torch.eye(A.shape[1]))[0], A, atol=1e-5)


@torch.no_grad()
def test_rollout_is_product_of_normalised_attention_matrices():
    model, sizes = fresh(), [7, 1, 30]
    x, starts = torch.randn(sum(sizes), WIDTH), starts_of(sizes)
    rolled = model.rollout(x, starts)
    for first, last in itertools.pairwise(starts):
        size = int(last - first)
        product = None
        for layer, h in zip((model.first, model.last), dense_tokens(model, x[first:last]), strict=True):
            A = dense_attention(layer, h)[0].mean(0)
            a = (A + torch.eye(len(A))) / 2
            a = a / a.sum(-1, keepdim=True)
            product = a if product is None else a @ product
        token = len(product) - len(h)
        assert torch.allclose(rolled[first:last, 0], product[token, token + 1 : token + 1 + size], atol=1e-5)


@torch.no_grad()
def test_targeted_map_tilts_class_token_row_and_preserves_its_mass():
    model, x = fresh("targeted/transmil"), torch.randn(7, WIDTH)
    prediction = model(x, torch.tensor([0, 7]))
    net, layer = model.model, model.model.last
    _, h = dense_tokens(net, x)
    A, V = dense_attention(layer, h)
    token = A.shape[1] - len(h)
    plain = dense_layer(layer, h)[0]
    for c in range(CLASSES):
        delta = torch.zeros(A.shape[1])
        delta[token + 1 : token + 8] = (prediction.counterfactual.scores[:, c] - prediction.scores)[:, 0]
        row = A[:, token] * delta.exp()
        row = row * A[:, token].abs().sum(-1, keepdim=True) / row.abs().sum(-1, keepdim=True)
        moved = torch.einsum("ht,hte->he", row - A[:, token], V).flatten()
        changed = net.norm((plain + layer.out.weight @ moved)[None])
        assert torch.allclose(prediction.counterfactual.logits[0, c], net.classifier(changed)[0], atol=1e-5)


def test_zero_tilt_changes_nothing_and_huge_tilt_stays_finite():
    rows = torch.randn(2, 4, 1, 9)
    assert torch.allclose(transmil.tilt(rows, torch.zeros(2, 1, 3, 9)), rows.expand(2, 4, 3, 9))
    tilted = transmil.tilt(rows, 1e6 * torch.randn(2, 1, 3, 9))
    assert torch.allclose(tilted.abs().sum(-1), rows.abs().sum(-1).expand(2, 4, 3), rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [[1], [3, 1, 7], [4, 4], [2, 30, 1, 6], [5, 30, 9, 7]])
def test_a_bag_alone_and_in_company_gets_the_same_answer(name, sizes):
    model, x, starts = fresh(name), torch.randn(sum(sizes), WIDTH), starts_of(sizes)
    together = model(x, starts)
    for i, (first, last) in enumerate(itertools.pairwise(starts)):
        alone = model(x[first:last], torch.tensor([0, last - first]))
        assert torch.allclose(alone.logits[0], together.logits[i], atol=1e-5)
        assert torch.allclose(alone.scores, together.scores[first:last], atol=1e-5)
        assert torch.allclose(alone.instances, together.instances[first:last], atol=1e-5)
        if together.counterfactual is not None:
            assert torch.allclose(alone.counterfactual.logits[0], together.counterfactual.logits[i], atol=1e-5)
            assert torch.allclose(alone.counterfactual.scores, together.counterfactual.scores[first:last], atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", [*NAMES, "cia/transmil"])
def test_population_predicts_like_its_members(name):
    make = lambda: create_model(name, WIDTH, CLASSES, hidden=HIDDEN)  # noqa: E731
    population = Population(make, [Member(seed=s) for s in range(3)])
    population.train(False)
    x, starts = torch.randn(14, WIDTH), starts_of([3, 7, 4])
    together = population(x, Offsets(starts))
    for row in range(3):
        alone = population.member(row)(x, starts)
        assert torch.allclose(together.logits[row], alone.logits, atol=1e-5)
        assert torch.allclose(together.scores[row], alone.scores, atol=1e-5)
        if alone.counterfactual is not None:
            assert torch.allclose(together.counterfactual.logits[row], alone.counterfactual.logits, atol=1e-5)
    assert not torch.allclose(together.logits[0], together.logits[1])


@torch.no_grad()
@pytest.mark.parametrize("name", BRANCHED)
def test_dropout_of_one_model_is_independent_of_other_models_and_bags(name):
    make = lambda seeds: Population(  # noqa: E731
        lambda: create_model(name, WIDTH, CLASSES, hidden=HIDDEN, dropout=0.5), [Member(seed=s) for s in seeds]
    )
    x, rows = torch.randn(12, WIDTH), torch.arange(100, 112)
    together = make([5, 6])(x, Offsets(starts_of([3, 7, 2])), rows=rows)
    alone = make([6])(x[3:10], Offsets(torch.tensor([0, 7])), rows=rows[3:10])
    assert torch.allclose(together.logits[1, 1], alone.logits[0, 0], atol=1e-5)
    assert torch.allclose(together.counterfactual.logits[1, 1], alone.counterfactual.logits[0, 0], atol=1e-5)
    assert not torch.allclose(together.logits[1], make([6])(x, Offsets(starts_of([3, 7, 2]))).logits[0], atol=1e-3)


@pytest.mark.parametrize(
    ("name", "options"), [("transmil", {}), *((name, {}) for name in BRANCHED), ("car/transmil", {"branch": "shared"})]
)
def test_gradients_reach_every_parameter(name, options):
    model, x, starts = fresh(name, **options).train(), torch.randn(10, WIDTH), torch.tensor([0, 4, 10])
    losses = model.losses(model(x, starts), torch.tensor([0, 2]), model.coefficients)
    sum(model.coefficients[term] * value.mean() for term, value in losses.items()).backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().max() < 1e-7]


def test_recomputing_softmax_preserves_results_and_gradients(monkeypatch):
    x, starts = torch.randn(40, WIDTH), starts_of([30, 10])

    def answer():
        model = fresh("car/transmil")
        prediction = model(x, starts)
        (prediction.counterfactual.scores.square().sum() + prediction.logits.sum()).backward()
        return prediction.logits.detach(), [p.grad for p in model.parameters()]

    logits, gradients = answer()
    monkeypatch.setattr(nystrom, "_KEPT", 700)
    again, gradients_again = answer()
    assert torch.allclose(logits, again, atol=1e-6)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(gradients, gradients_again, strict=True))


@pytest.mark.parametrize(
    ("name", "in_features", "classes", "hidden", "count"),
    [
        ("transmil", 512, 4, 20, 15_332),
        ("transmil", 1024, 2, 512, 2_672_146),
        ("car/transmil", 1024, 2, 512, 3_722_522),
        ("cia/transmil", 1024, 2, 512, 2_672_146),
    ],
)
def test_parameter_counts_equal_published_counts(name, in_features, classes, hidden, count):
    model = create_model(name, in_features, classes, hidden=hidden)
    assert sum(p.numel() for p in model.parameters()) == count


@torch.no_grad()
def test_embed_and_classify_agree_with_forward_and_attend_raises_an_error():
    model, x, offsets = fresh(), torch.randn(10, WIDTH), Offsets(torch.tensor([0, 4, 10]))
    prediction = model(x, offsets)
    assert torch.allclose(model.embed(x, offsets), prediction.instances)
    assert torch.allclose(model.classify(prediction.pooled), prediction.logits)
    with pytest.raises(CarmilError, match="class token"):
        model.attend(prediction.instances, offsets)


def test_fewer_features_than_heads_raises_an_error():
    with pytest.raises(CarmilError, match="hidden is 4 with 8 heads"):
        create_model("transmil", WIDTH, CLASSES, hidden=4)


@torch.no_grad()
def test_leading_axis_of_features_is_supported():
    model, x, starts = fresh("targeted/transmil"), torch.randn(2, 10, WIDTH), torch.tensor([0, 4, 10])
    both = model(x, starts)
    for i in range(2):
        assert torch.allclose(both.logits[i], model(x[i], starts).logits, atol=1e-5)
