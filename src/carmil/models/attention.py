"""The attention that most methods share, and the models that have it.

u_j = w' tanh(V z_j)        or, gated, w' (tanh(V z_j) * sigmoid(U z_j))
"""

from typing import Any

from torch import Tensor, nn

from carmil.models.contract import AttendingModel
from carmil.models.layers import ACTIVATIONS, Dropout, Linear
from carmil.models.pooling import Offsets


class Attention(nn.Module):
    """u = score(trunk(z)): a trunk of features worth attending by, and a projection onto `heads` maps."""

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
        self._made_with: dict[str, Any] = dict(
            inputs=inputs, size=size, gated=gated, heads=heads, activation=activation, bias=bias, dropout=dropout
        )
        self.V = Linear(inputs, size, bias=bias)
        self.U = Linear(inputs, size, bias=bias) if gated else None
        self.activation = ACTIVATIONS[activation]()
        self.drop_V, self.drop_U = Dropout(dropout), Dropout(dropout)
        self.score = Linear(size, heads, bias=bias)
        self.size, self.heads = size, heads

    def trunk(self, z: Tensor) -> Tensor:
        """(..., n, d) -> (..., n, size)."""
        t = self.drop_V(self.activation(self.V(z)))
        return t if self.U is None else t * self.drop_U(self.U(z).sigmoid())

    def forward(self, z: Tensor) -> Tensor:
        return self.score(self.trunk(z))

    def fresh(self) -> "Attention":
        """Another attention of this shape with weights of its own."""
        return Attention(**self._made_with)


class WithAttention(AttendingModel):
    """An attending model whose attention is `self.attention`."""

    attention: Attention

    @property
    def trunk_size(self) -> int:  # type: ignore[override]
        return self.attention.size

    def trunk(self, instances: Tensor, offsets: Offsets) -> Tensor:
        return self.attention.trunk(instances)

    def score(self, trunk: Tensor, instances: Tensor, offsets: Offsets) -> Tensor:
        return self.attention.score(trunk)

    def second_attention(self) -> nn.Module:
        return self.attention.fresh()

    def attend_with(self, attention: nn.Module, instances: Tensor, trunk: Tensor, offsets: Offsets) -> Tensor:
        return attention(instances)
