"""The attention shared by most methods, and the base class of models that use it.

u_j = w' tanh(V z_j)        or, gated, w' (tanh(V z_j) * sigmoid(U z_j))
"""

from typing import Any

import torch
from torch import Tensor, nn

from carmil.models import fused
from carmil.models.contract import AttendingModel, CounterfactualAttention, PooledMaps
from carmil.models.layers import ACTIVATIONS, Linear, linear
from carmil.models.noise import Dropout
from carmil.models.pooling import Offsets


class Attention(nn.Module):
    """u = score(trunk(z)): a hidden layer, the trunk, and a projection onto `heads` maps."""

    def __init__(
        self,
        inputs: int,
        size: int,
        *,
        gated: bool,
        heads: int = 1,
        activation: str = "tanh",
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self._options: dict[str, Any] = dict(
            inputs=inputs, size=size, gated=gated, heads=heads, activation=activation, bias=bias, dropout=dropout
        )
        self.V = Linear(inputs, size, bias=bias)
        self.U = Linear(inputs, size, bias=bias) if gated else None
        self.activation = ACTIVATIONS[activation]()
        self.drop_V, self.drop_U = Dropout(dropout), Dropout(dropout)
        self.score = Linear(size, heads, bias=bias)
        self.size, self.heads = size, heads

    def trunk(self, z: Tensor) -> Tensor:
        """Compute the trunk: (..., n, d) -> (..., n, size)."""
        h = linear(z, *self.stacked_trunk())
        t = self.drop_V(self.activation(h[..., : self.size]))
        return t if self.U is None else t * self.drop_U(h[..., self.size :].sigmoid())

    def forward(self, z: Tensor) -> Tensor:
        return self.score(self.trunk(z))

    def projections(self, branch: CounterfactualAttention | None) -> tuple[Tensor, Tensor | None] | None:
        """Return all projections of the trunk stacked, the factual one first; None if some map is not a projection."""
        if isinstance(self.activation, nn.Sigmoid):
            return None
        if branch is None:
            return self.score.weight.contiguous(), None if self.score.bias is None else self.score.bias.contiguous()
        others = branch.projections(self.score)
        if others is None or self.score.bias is None:
            return None
        return torch.cat([self.score.weight, others[0]], dim=-2), torch.cat([self.score.bias, others[1]], dim=-1)

    def stacked_trunk(self) -> tuple[Tensor, Tensor | None]:
        """Return V, or V over U as one matrix (..., 2 size, d), so that z is read once; and their bias."""
        if self.U is None:
            return self.V.weight, self.V.bias
        weight = torch.cat([self.V.weight, self.U.weight], dim=-2)
        if self.V.bias is None or self.U.bias is None:
            return weight, None
        return weight, torch.cat([self.V.bias, self.U.bias], dim=-1)

    def fresh(self) -> "Attention":
        """Return a new attention of the same shape with its own initial weights."""
        return Attention(**self._options)


class WithAttention(AttendingModel):
    """A model whose attention is `self.attention`."""

    attention: Attention

    @property
    def trunk_size(self) -> int:  # type: ignore[override]
        return self.attention.size

    def trunk(self, instances: Tensor, offsets: Offsets) -> Tensor:
        return self.attention.trunk(instances)

    def score(self, trunk: Tensor, instances: Tensor, offsets: Offsets) -> Tensor:
        return self.attention.score(trunk)

    def attend_and_pool(
        self, instances: Tensor, offsets: Offsets, branch: CounterfactualAttention | None
    ) -> PooledMaps:
        """Use one fused operation on a GPU in bfloat16, if all maps are projections of one trunk."""
        projections = self.attention.projections(branch) if fused.enabled(instances) else None
        if projections is None or instances.ndim != 3:
            return super().attend_and_pool(instances, offsets, branch)

        def mask(scores: Tensor) -> Tensor:
            return torch.cat([self.mask_scores(scores[..., : self.heads], offsets), scores[..., self.heads :]], dim=-1)

        attention = self.attention
        weight, bias = attention.stacked_trunk()
        fused_maps = fused.attend_and_pool(
            instances,
            (weight.to(instances.dtype), None if bias is None else bias.contiguous()),
            projections,
            offsets,
            gated=attention.U is not None,
            relu=isinstance(attention.activation, nn.ReLU),
            dropouts=(attention.drop_V, attention.drop_U),
            mask=mask,
        )
        maps = fused_maps.scores.unflatten(-1, (-1, self.heads))
        return PooledMaps(maps, fused_maps.weights, fused_maps.pooled)

    def second_attention(self) -> nn.Module:
        return self.attention.fresh()

    def attend_with(self, attention: nn.Module, instances: Tensor, trunk: Tensor, offsets: Offsets) -> Tensor:
        return attention(instances)
