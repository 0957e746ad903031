"""The first layer of most methods, in a population, against the separate operations it replaces."""

import pytest
import torch
from torch import nn

from carmil.models.layers import Hidden, Linear
from carmil.models.noise import Noise


def hidden_of(seeds: list[int], *, dropout: float, bias: bool) -> Hidden:
    """A layer 6 -> 5 whose parameters have a model axis."""
    layer = Hidden(6, 5, bias=bias, dropout=dropout)
    generator = torch.Generator().manual_seed(0)
    for name, shape in (("weight", (5, 6)), ("bias", (5,))):
        if layer[0]._parameters.pop(name, None) is not None:
            setattr(layer[0], name, torch.randn(len(seeds), *shape, generator=generator).requires_grad_())
    layer[2].noise = Noise(torch.tensor(seeds))
    return layer


def reference_output(layer: Hidden, x: torch.Tensor) -> torch.Tensor:
    linear, _, dropout = layer
    y = x.to(linear.weight.dtype) @ linear.weight.mT
    if linear.bias is not None:
        y = y + linear.bias.unsqueeze(-2)
    kept = dropout.kept((x.shape[-2], 5), 1 - dropout.p, x)
    return nn.functional.relu(y) * kept / (1 - dropout.p)


@pytest.mark.parametrize("rows", [1, 2048, 5000])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_hidden_layer_equals_linear_relu_and_dropout(rows: int, bias: bool, dtype: torch.dtype) -> None:
    layer = hidden_of([3, 4], dropout=0.25, bias=bias)
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    parameters = [tensor for tensor in (layer[0].weight, layer[0].bias) if tensor is not None]
    result, expected = layer(x), reference_output(layer, x)
    torch.testing.assert_close(result, expected)
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(2))
    actual = torch.autograd.grad((result * weights).sum(), parameters)
    reference = torch.autograd.grad((expected * weights).sum(), parameters)
    torch.testing.assert_close(actual, reference, atol=1e-4, rtol=1e-4)


def test_hidden_layer_passes_gradients_to_features_of_each_model() -> None:
    layer = hidden_of([3, 4], dropout=0.5, bias=True)
    x = torch.randn(2, 3000, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    (actual,) = torch.autograd.grad(layer(x).square().sum(), x)
    (expected,) = torch.autograd.grad(reference_output(layer, x).square().sum(), x)
    torch.testing.assert_close(actual, expected)


def test_hidden_layer_drops_nothing_outside_training() -> None:
    layer = hidden_of([3], dropout=0.9, bias=True).eval()
    x = torch.randn(7, 6)
    torch.testing.assert_close(layer(x), nn.functional.relu(x @ layer[0].weight.mT + layer[0].bias.unsqueeze(-2)))


def test_precise_layer_is_not_computed_in_16_bits() -> None:
    x = torch.randn(3, 32)
    usual, precise = Linear(32, 20), Linear(32, 20, precise=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert usual(x).dtype == torch.bfloat16
        result = precise(x)
    assert torch.equal(result, nn.functional.linear(x, precise.weight, precise.bias))
