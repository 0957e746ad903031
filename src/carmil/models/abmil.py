"""Attention-based MIL (Ilse et al., 2018).

z_j = relu(E x_j)
u_j = w' tanh(V z_j)                          or, gated, w' (tanh(V z_j) * sigmoid(U z_j))
F   = phi(sum_j softmax(u)_j z_j)             phi: `output_layers` hidden ReLU layers, then a linear one
"""

from typing import Any

from torch import Tensor, nn

from carmil.models.contract import BagModel
from carmil.models.layers import ACTIVATIONS, Dropout, Linear
from carmil.models.pooling import Offsets
from carmil.models.registry import register


class Attention(nn.Module):
    """u = score(trunk(z)): a trunk of features worth attending by, and a projection onto `heads` maps."""

    def __init__(
        self, inputs: int, size: int, *, gated: bool, heads: int = 1, activation: str = "tanh", bias: bool = True
    ) -> None:
        super().__init__()
        self._made_with: dict[str, Any] = dict(
            inputs=inputs, size=size, gated=gated, heads=heads, activation=activation, bias=bias
        )
        self.V = Linear(inputs, size, bias=bias)
        self.U = Linear(inputs, size, bias=bias) if gated else None
        self.activation = ACTIVATIONS[activation]()
        self.score = Linear(size, heads, bias=bias)
        self.size = size

    def trunk(self, z: Tensor) -> Tensor:
        """(..., n, d) -> (..., n, size)."""
        t = self.activation(self.V(z))
        return t if self.U is None else t * self.U(z).sigmoid()

    def forward(self, z: Tensor) -> Tensor:
        return self.score(self.trunk(z))

    def fresh(self) -> "Attention":
        """Another attention of this shape with weights of its own."""
        return Attention(**self._made_with)


class ABMIL(BagModel):
    def __init__(
        self,
        in_features: int,
        classes: int,
        *,
        gated: bool = False,
        hidden: int = 512,
        attention: int = 128,
        activation: str = "tanh",
        attention_bias: bool = True,
        embedding_bias: bool = True,
        output_layers: int = 0,
        dropout: float = 0.0,
        feature_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.classes = classes
        self.embedding = nn.Sequential(
            Dropout(feature_dropout), Linear(in_features, hidden, bias=embedding_bias), nn.ReLU(), Dropout(dropout)
        )
        self.attention = Attention(hidden, attention, gated=gated, activation=activation, bias=attention_bias)
        layers: list[nn.Module] = []
        for _ in range(output_layers):
            layers += [Linear(hidden, hidden), nn.ReLU()]
        self.classifier = nn.Sequential(*layers, Linear(hidden, classes))

    def embed(self, features: Tensor, offsets: Offsets) -> Tensor:
        return self.embedding(features)

    def attend(self, instances: Tensor, offsets: Offsets) -> Tensor:
        return self.attention(instances)

    def classify(self, pooled: Tensor) -> Tensor:
        return self.classifier(pooled.squeeze(-2))


register("abmil", ABMIL, "attention pooling, tanh attention", gated=False)
register("abmil.gated", ABMIL, "attention pooling, gated attention (tanh times sigmoid)", gated=True)
