"""Optimizers of a population: one matrix of weights (r, p), each row with its own learning rate and step count.

A row that is not active is left unchanged: neither step, nor decay, nor momentum.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from carmil.models import fused


class Optimizer(ABC):
    """An optimizer. `state` is a list of tensors whose first axis is the population's, so that rows can be removed from both."""

    def __init__(self, weights: Tensor, lr: Tensor, *, weight_decay: float = 0.0) -> None:
        self.full_lr = lr
        self.lr = lr.clone()
        self.weight_decay = weight_decay
        self.state: list[Tensor] = []

    def slow_down(self, pace: float) -> None:
        """Set each learning rate to this share of its full value, in place, so that recorded steps use it too."""
        self.lr.copy_(self.full_lr * pace)

    @torch.no_grad()
    def step(self, weights: Tensor, gradients: Sequence[Tensor], active: Tensor, rows: Tensor | None = None) -> None:
        """Update the active rows of `weights` (r, p) in place. active (r) bool.

        gradients: columns of the gradient, (r, p1), (r, p2), ...; with `rows`, of these rows only.
        """
        gradient = torch.cat(list(gradients), dim=1)
        if rows is not None:
            gradient = torch.zeros_like(weights).index_copy_(0, rows, gradient)
        if self.weight_decay:
            gradient = gradient + self.weight_decay * weights
        weights.sub_(self.lr.unsqueeze(-1) * self.direction(gradient, active.unsqueeze(-1)))

    @abstractmethod
    def direction(self, gradient: Tensor, active: Tensor) -> Tensor:
        """Return the vector to subtract, (r, p), zero in rows that are not active (active: (r, 1))."""

    def take(self, rows: Tensor) -> None:
        self.full_lr, self.lr = self.full_lr[rows], self.lr[rows]
        self.state = [tensor[rows] for tensor in self.state]


class SGD(Optimizer):
    """v <- momentum v + g;  w <- w - lr v."""

    def __init__(self, weights: Tensor, lr: Tensor, *, weight_decay: float = 0.0, momentum: float = 0.9) -> None:
        super().__init__(weights, lr, weight_decay=weight_decay)
        self.momentum = momentum
        self.state = [torch.zeros_like(weights)]

    def direction(self, gradient: Tensor, active: Tensor) -> Tensor:
        (velocity,) = self.state
        velocity.mul_(torch.where(active, self.momentum, 1.0)).add_(torch.where(active, gradient, 0.0))
        return velocity * active


class Adam(Optimizer):
    """Adam (Kingma and Ba) with bias correction by each row's own step count; weight decay is L2, as in torch's Adam."""

    def __init__(
        self,
        weights: Tensor,
        lr: Tensor,
        *,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(weights, lr, weight_decay=weight_decay)
        self.betas, self.eps = betas, eps
        self.state = [torch.zeros_like(weights), torch.zeros_like(weights), torch.zeros_like(lr).unsqueeze(-1)]

    def step(self, weights: Tensor, gradients: Sequence[Tensor], active: Tensor, rows: Tensor | None = None) -> None:
        if not weights.is_cuda:
            self._step_of_active(weights, gradients, active, rows)
        elif fused.available():
            self.step_by_kernel(weights, gradients, active, rows)
        else:
            super().step(weights, gradients, active, rows)

    @torch.no_grad()
    def step_by_kernel(
        self, weights: Tensor, gradients: Sequence[Tensor], active: Tensor, rows: Tensor | None = None
    ) -> None:
        """Take a step with one kernel per tensor, on a GPU. Safe to record: the operations do not depend on the active rows."""
        from carmil.training import adam_kernel

        rows = torch.arange(len(weights), device=weights.device) if rows is None else rows
        mean, square, steps = self.state
        first = 0
        for gradient in gradients:
            count = gradient.shape[1]
            gradient = gradient if gradient.stride(1) == 1 else gradient.contiguous()
            adam_kernel.adam[-(-count // 1024), len(rows)](
                weights, mean, square, gradient, rows, steps, self.lr, active, first, count, weights.shape[1],
                gradient.stride(0), *self.betas, *(math.log(beta) for beta in self.betas), self.eps, self.weight_decay,
                BLOCK=1024, num_warps=4,
            )  # fmt: skip
            first += count
        steps.add_(active.unsqueeze(-1).to(steps.dtype))

    @torch.no_grad()
    def _step_of_active(
        self, weights: Tensor, gradients: Sequence[Tensor], active: Tensor, rows: Tensor | None
    ) -> None:
        """Take a step with torch's fused kernel on the active rows: on a CPU, passes over (r, p) dominate the cost of a step."""
        positions = range(len(weights)) if rows is None else rows.tolist()
        stepping, rates = active.tolist(), self.lr.tolist()
        at = {row: i for i, row in enumerate(positions) if stepping[row]}
        sizes = [gradient.shape[1] for gradient in gradients]
        mean, square, steps = self.state
        steps += active.unsqueeze(-1)
        for lr in sorted({rates[row] for row in at}):
            alike = [row for row in at if rates[row] == lr]
            torch._fused_adam_(
                [piece for row in alike for piece in weights[row].split(sizes)],
                [gradient[at[row]] for row in alike for gradient in gradients],
                [piece for row in alike for piece in mean[row].split(sizes)],
                [piece for row in alike for piece in square[row].split(sizes)],
                [],
                [count for row in alike for count in [steps[row, 0]] * len(sizes)],
                lr=lr,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=self.weight_decay,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
            )

    def direction(self, gradient: Tensor, active: Tensor) -> Tensor:
        mean, square, steps = self.state
        on = active.to(gradient.dtype)
        steps.add_(on)
        mean.add_((gradient - mean) * (on * (1 - self.betas[0])))
        square.add_((gradient.square() - square) * (on * (1 - self.betas[1])))
        unbiased = mean / (1 - self.betas[0] ** steps).clamp_min(self.eps)
        scale = (square / (1 - self.betas[1] ** steps).clamp_min(self.eps)).sqrt() + self.eps
        return unbiased / scale * on


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "adam": Adam}
