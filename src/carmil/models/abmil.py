"""Attention-based MIL (Ilse et al., 2018).

z_j = relu(E x_j)                              `embedding_layers` of these, one after the other
u_j = w' tanh(V z_j)                          or, gated, w' (tanh(V z_j) * sigmoid(U z_j))
F   = phi(sum_j softmax(u)_j z_j)             phi: `output_layers` hidden ReLU layers, then a linear one

With `mlp` > 0 hidden units, F = phi(Z) + W_2 relu(W_1 norm(Z)): the linear part adds up the contributions of instances;
the second part can also combine them (an 8 and a 9 in one bag), which no linear classifier of a pool can. norm is a
layer norm.
"""

from torch import Tensor, nn

from carmil.models.attention import Attention, WithAttention
from carmil.models.contract import Ability
from carmil.models.layers import Hidden, LayerNorm, Linear
from carmil.models.noise import Dropout
from carmil.models.pooling import Offsets
from carmil.models.registry import register


class ABMIL(WithAttention):
    abilities = WithAttention.abilities | Ability.INSTANCE_WISE
    inert_parameters = ("score.bias",)

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
        embedding_layers: int = 1,
        output_layers: int = 0,
        mlp: int = 0,
        dropout: float = 0.25,
        feature_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.classes = classes
        self.feature_dropout = Dropout(feature_dropout)
        self.embedding = Hidden(in_features, hidden, bias=embedding_bias, dropout=dropout)
        further = (Hidden(hidden, hidden, dropout=dropout) for _ in range(embedding_layers - 1))
        self.further_embedding = nn.Sequential(*further)
        self.attention = Attention(hidden, attention, gated=gated, activation=activation, bias=attention_bias)
        layers: list[nn.Module] = []
        for _ in range(output_layers):
            layers += [Linear(hidden, hidden, precise=True), nn.ReLU()]
        self.classifier = nn.Sequential(*layers, Linear(hidden, classes))
        self.mlp = (
            nn.Sequential(LayerNorm(hidden), Linear(hidden, mlp, precise=True), nn.ReLU(), Linear(mlp, classes))
            if mlp
            else None
        )

    def embed(self, features: Tensor, offsets: Offsets) -> Tensor:
        return self.further_embedding(self.embedding(self.feature_dropout(features)))

    def input_layers(self) -> tuple[Linear, ...]:
        # With feature dropout, scaling comes first: a dropped feature then takes its mean value.
        return () if self.feature_dropout.p else (self.embedding.linear,)

    def classify(self, pooled: Tensor) -> Tensor:
        Z = pooled.squeeze(-2)
        return self.classifier(Z) if self.mlp is None else self.classifier(Z) + self.mlp(Z)


register("abmil", ABMIL, "attention pooling, tanh attention", gated=False)
register("abmil.gated", ABMIL, "attention pooling, gated attention (tanh times sigmoid)", gated=True)
register("abmil.mlp", ABMIL, "gated attention, and an MLP beside the linear classifier", gated=True, mlp=128)
