"""Layers whose parameters may have a leading model axis.

A model built from these layers computes one model or, with stacked parameters (r, ...), r models at once:
x (n, in) or (r, n, in) -> (r, n, out). See `carmil.training.population`.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from carmil.models import fused
from carmil.models.noise import Dropout

PIECE = 2048  # rows of a large bag per product of the first layer, on a CPU

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}


class Linear(nn.Module):
    """y = x W' + b. Initialised as in torch: uniform in +-1/sqrt(in).

    With `scale`, the mean m and deviation s of the inputs, it is y = ((x - m) / s) W' + b (see
    `carmil.models.scaled_model`). `precise`: never in 16 bits, for pools of bags, whose differences are small
    relative to their common part and would be lost in rounding.
    """

    bias: Tensor | None
    scale: "tuple[Tensor, Tensor] | None" = None

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, precise: bool = False) -> None:
        super().__init__()
        self.precise = precise
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound)) if bias else None

    def folded(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias for unscaled inputs: W ((x - m) / s) + b = (W / s) x + (b - (W / s) m)."""
        if self.scale is None:
            return self.weight, self.bias
        mean, deviation = self.scale
        weight = self.weight.to(torch.promote_types(self.weight.dtype, mean.dtype)) / deviation.unsqueeze(-2)
        shift = (weight @ mean.unsqueeze(-1)).squeeze(-1)
        return weight, -shift if self.bias is None else self.bias - shift

    def forward(self, x: Tensor) -> Tensor:
        if not self.precise:
            return linear(x, *self.folded())
        with torch.autocast(x.device.type, enabled=False):
            return linear(x, *self.folded())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x W' + b. x (n, in) or (r, n, in), W (out, in) or (r, out, in), b (out) or (r, out) -> (n, out) or (r, n, out)."""
    if weight.ndim == 2:
        return nn.functional.linear(x.to(weight.dtype), weight, bias)
    if not x.is_cuda:
        return _Products.apply(_per_model(x, weight), weight, bias)
    dtype = torch.bfloat16 if fused.bfloat16_enabled(x) and in_half(weight.shape[1]) else weight.dtype
    with torch.autocast("cuda", enabled=False):
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        if x.ndim == 3:
            return _product(x, weight, bias)
        # All models have the same rows, so that one product is enough.
        y = nn.functional.linear(x, weight.flatten(0, 1), None if bias is None else bias.flatten())
        return y.unflatten(-1, weight.shape[:2]).transpose(0, 1)


def in_half(outputs: int) -> bool:
    """Return whether autocast computes a product with this many outputs in 16 bits; scores and logits, with few
    outputs, stay in 32.
    """
    return outputs >= 16


class _Products(torch.autograd.Function):
    """x W' + b of every model, for CPUs. x (r, n, in), W (r, out, in), b (r, out) -> (r, n, out).

    One product per model, in one call, is as fast on a CPU as one wide product, and a model's result does not depend
    on the number of models, not even in the last bit. The gradient of W has the memory layout of W, which saves a
    copy.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        gradient = gradient.contiguous()  # the last bits of its sums depend on the memory layout
        return (
            torch.bmm(gradient, weight) if of_x else None,
            torch.bmm(gradient.mT, x) if of_weight else None,
            gradient.sum(-2) if of_bias else None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(-2), x, weight.mT)


class HeadLinear(nn.Module):
    """A separate linear layer for each head: y_h = W_h x_h + b_h. (..., b, h, in) -> (..., b, h, out)."""

    def __init__(self, heads: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(heads, outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(heads, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            y = torch.einsum("...bhi,...hoi->...bho", x.to(self.weight.dtype), self.weight)
        return y + self.bias.unsqueeze(-3)


class Hidden(nn.Sequential):
    """The first layer of most methods: dropout(relu(W x + b)).

    In a population it is one operation that stores, for the gradient, only its result and x in its original type.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__(Linear(inputs, outputs, bias=bias), nn.ReLU(inplace=True), Dropout(dropout))

    @property
    def linear(self) -> Linear:
        first = self[0]
        assert isinstance(first, Linear)
        return first

    def forward(self, x: Tensor) -> Tensor:
        first, _, dropout = self
        assert isinstance(first, Linear) and isinstance(dropout, Dropout)
        if first.weight.ndim == 2 or (x.is_cuda and not fused.enabled(x)):
            return super().forward(x)
        weight, bias = first.folded()
        if x.is_cuda:
            return fused.hidden(x.to(torch.bfloat16), weight.to(torch.bfloat16), bias, dropout)
        return _HiddenProducts.apply(x, weight, bias, dropout)


class _HiddenProducts(torch.autograd.Function):
    """dropout(relu(x W' + b)) of every model, for CPUs, PIECE rows at a time. x (n, in) or (r, n, in).

    The gradient is 0 wherever the result is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dropout: Dropout) -> Tensor:
        n = x.shape[-2]
        x = x.to(weight.dtype) if n <= PIECE else x  # a small bag is converted once, a large one piece by piece
        pieces = (
            (rows, dropout.drop_(_product(_per_model(x[..., rows, :], weight), weight, bias).relu_(), rows, n))
            for rows in _row_slices(n)
        )
        if n <= PIECE:
            _, y = next(pieces)
        else:
            y = weight.new_empty(len(weight), n, weight.shape[1])
            for rows, piece in pieces:
                y[:, rows] = piece
        ctx.scale = dropout.scale
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, y = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        for_x, for_weight, for_bias = [], None, None
        for rows in _row_slices(x.shape[-2]):
            passed = torch.ops.aten.threshold_backward(gradient[:, rows].contiguous(), y[:, rows].contiguous(), 0.0)
            passed.mul_(ctx.scale)
            piece = _per_model(x[..., rows, :], weight)
            if of_x:
                for_x.append(torch.bmm(passed, weight))
            if of_weight:
                for_weight = (
                    torch.bmm(passed.mT, piece) if for_weight is None else for_weight.baddbmm_(passed.mT, piece)
                )
            if of_bias:
                for_bias = passed.sum(-2) if for_bias is None else for_bias + passed.sum(-2)
        return torch.cat(for_x, dim=1) if of_x else None, for_weight, for_bias, None


def _per_model(x: Tensor, weight: Tensor) -> Tensor:
    """Return (n, in) or (r, n, in) as (r, n, in) in the type of W; rows shared by the models are not copied."""
    x = x.to(weight.dtype)
    return x.expand(len(weight), -1, -1) if x.ndim == 2 else x


def _row_slices(count: int) -> list[slice]:
    """Return slices of PIECE rows, which bound the memory; the same for any number of models, so that results have
    the same bits.
    """
    return [slice(first, first + PIECE) for first in range(0, count, PIECE)]


class LayerNorm(nn.Module):
    """Normalises each row to zero mean and unit variance, then scales and shifts it."""

    def __init__(self, features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.ndim == 1:
            return nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return nn.functional.layer_norm(x, x.shape[-1:], eps=self.eps) * self.weight.unsqueeze(
            -2
        ) + self.bias.unsqueeze(-2)


class BatchNorm(nn.Module):
    """Normalises each feature to zero mean and unit variance over the instances; outside training, running statistics
    are used.

    `counted` (r, n, 1), set by a population, marks the instances of each model's own training bags.
    """

    running_mean: Tensor
    running_var: Tensor
    counted: Tensor | None = None

    def __init__(self, features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean, var = self._learned(x)
        else:
            mean, var = self.running_mean.unsqueeze(-2), self.running_var.unsqueeze(-2)
        return (x - mean) * (var + self.eps).rsqrt() * self.weight.unsqueeze(-2) + self.bias.unsqueeze(-2)

    def _learned(self, x: Tensor) -> tuple[Tensor, Tensor]:
        counted = x.new_ones(*x.shape[:-1], 1) if self.counted is None else self.counted.to(x.dtype)
        count = counted.sum(-2, keepdim=True)
        mean = (x * counted).sum(-2, keepdim=True) / count.clamp_min(1)
        var = ((x - mean).square() * counted).sum(-2, keepdim=True) / count.clamp_min(1)
        with torch.no_grad():
            step = self.momentum * (count > 0).to(x.dtype).squeeze(-2)
            unbiased = var * count / (count - 1).clamp_min(1)
            self.running_mean.add_(step * (mean.squeeze(-2) - self.running_mean))
            self.running_var.add_(step * (unbiased.squeeze(-2) - self.running_var))
        return mean, var


INITS = ("xavier", "own")


def xavier(model: nn.Module) -> None:
    """Set every linear layer to Xavier-normal weights and zero biases, as several original implementations do."""
    for module in model.modules():
        if isinstance(module, Linear):
            nn.init.xavier_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
