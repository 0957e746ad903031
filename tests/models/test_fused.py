"""The GPU kernels, run by Triton's interpreter, against plain torch operations."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")
if torch.cuda.is_available():  # pragma: no cover
    pytest.skip("kernels are interpreted where there is no GPU", allow_module_level=True)

from carmil.models import fused
from carmil.models.noise import Dropout, Noise
from carmil.models.pooling import Offsets, bag_softmax, bag_weighted_sum

R = 2


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dropout(p: float, site: int, noise: Noise) -> Dropout:
    layer = Dropout(p)
    layer.noise, layer.site = noise, site
    return layer


def noise_of(n: int) -> Noise:
    noise = Noise(torch.tensor([7, 2**33 + 5]), torch.tensor([0, 3]))
    noise.rows = torch.arange(n) * 17 + 100_000
    return noise


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("n", "d", "p"), [(1, 16, 0.25), (37, 20, 0.25), (300, 64, 0.5), (40, 16, 0.0)])
def test_fused_first_layer_equals_linear_relu_and_dropout(n: int, d: int, p: float, bias: bool) -> None:
    x, weight = random(n, 8, seed=0), random(R, d, 8, seed=1).requires_grad_()
    b = random(R, d, seed=2).requires_grad_() if bias else None
    drop = dropout(p, 3, noise_of(n))
    result = fused.hidden(x, weight, b, drop)
    expected = drop(torch.relu(x @ weight.mT + (0 if b is None else b.unsqueeze(1))))
    torch.testing.assert_close(result, expected)
    inputs = [weight] if b is None else [weight, b]
    upstream = random(*result.shape, seed=4)
    actual = torch.autograd.grad(result, inputs, upstream)
    reference = torch.autograd.grad(expected, inputs, upstream)
    torch.testing.assert_close(actual, reference, atol=1e-4, rtol=1e-4)


GATED, RELU, DROPPED = (True, False, 0.0), (False, True, 0.0), (True, False, 0.25)


@pytest.mark.parametrize(
    ("lengths", "kind", "maps"),
    [
        ([1], GATED, 2),
        ([1], RELU, 1),
        ([600], GATED, 1),
        ([600], DROPPED, 2),
        ([5, 1, 40], GATED, 5),
        ([5, 1, 40], RELU, 2),
        ([5, 1, 40], DROPPED, 1),
        ([20, 20], GATED, 2),
        ([20, 20], DROPPED, 5),
        ([3] * 40, GATED, 2),  # more pooled vectors than are stored beside the trunk
        ([3] * 40, RELU, 5),
    ],
)
def test_fused_attention_and_pooling_equal_unfused_operations(
    lengths: list[int], kind: tuple[bool, bool, float], maps: int
) -> None:
    gated, relu, p = kind
    n, d, a = sum(lengths), 24, 12
    offsets = Offsets(torch.tensor([0, *lengths]).cumsum(0))
    noise = noise_of(n)
    drops = (dropout(p, 1, noise), dropout(p, 2, noise))
    z = random(R, n, d, seed=0).requires_grad_()
    trunk = (random(R, a * (1 + gated), d, seed=1) / 5).requires_grad_()
    bias = random(R, a * (1 + gated), seed=2).requires_grad_()
    reads, offset = random(R, maps, a, seed=3).requires_grad_(), random(R, maps, seed=4).requires_grad_()
    hidden = torch.zeros(n, dtype=torch.bool)
    hidden[n // 2] = n not in (1, 40)  # a masked instance, in a bag with more than one instance

    def mask(scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(hidden.unsqueeze(-1), float("-inf"))

    if 1 in lengths and len(lengths) > 1:
        hidden[:] = False
    result = fused.attend_and_pool(
        z, (trunk, bias), (reads, offset), offsets, gated=gated, relu=relu, dropouts=drops, mask=mask
    )
    h = z @ trunk.mT + bias.unsqueeze(1)
    t = drops[0](h[..., :a].relu() if relu else h[..., :a].tanh())
    t = t * drops[1](h[..., a:].sigmoid()) if gated else t
    scores = t @ reads.mT + offset.unsqueeze(1)
    weights = bag_softmax(mask(scores), offsets)
    expected = (scores, weights, bag_weighted_sum(weights, z, offsets))
    inputs = [z, trunk, bias, reads, offset]
    upstream = [random(*tensor.shape, seed=5 + i) for i, tensor in enumerate(expected)]
    for actual, reference in zip((result.scores, result.weights, result.pooled), expected, strict=True):
        torch.testing.assert_close(actual, reference, atol=1e-5, rtol=1e-4)
    actual = torch.autograd.grad((result.scores, result.weights, result.pooled), inputs, upstream)
    reference = torch.autograd.grad(expected, inputs, upstream)
    torch.testing.assert_close(actual, reference, atol=1e-4, rtol=1e-4)
