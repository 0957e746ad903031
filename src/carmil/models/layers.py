"""Layers whose parameters may carry a leading model axis.

A model built from these answers for one set of weights, and, its parameters replaced by stacked ones (r, ...), for r
models at once: x (n, in) or (r, n, in) -> (r, n, out). See `carmil.training.population`.
"""

import math

import torch
from torch import Tensor, nn

from carmil.models.noise import Noisy

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}


class Linear(nn.Module):
    """y = x W' + b. Initialised as torch's: uniform in +-1/sqrt(in)."""

    bias: Tensor | None

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.ndim == 2:
            return nn.functional.linear(x, self.weight, self.bias)
        if x.ndim == 2:  # all models look at the same rows: one product for all of them
            models, outputs, inputs = self.weight.shape
            bias = None if self.bias is None else self.bias.reshape(-1)
            y = nn.functional.linear(x, self.weight.reshape(-1, inputs), bias)
            return y.unflatten(-1, (models, outputs)).transpose(0, 1)
        if self.bias is None:
            return x @ self.weight.mT
        return torch.baddbmm(self.bias.unsqueeze(-2), x, self.weight.mT)


class Dropout(Noisy):
    """Each element is dropped with probability p while training, the others scaled by 1 / (1-p)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        kept = self.draw((x.shape[-2], x.shape[-1]), x) >= self.p
        return x * kept / (1 - self.p)
