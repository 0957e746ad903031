"""Mean-MIL: the logits of a bag are the mean of its instances' logits.

z_j = relu(E x_j),   l_j = W z_j + c,   F = mean_j l_j
"""

from torch import Tensor

from carmil.models.contract import Ability, BagModel, Prediction
from carmil.models.layers import Hidden, Linear, xavier
from carmil.models.pooling import Offsets, bag_mean
from carmil.models.registry import register


class MeanMIL(BagModel):
    abilities = BagModel.abilities | Ability.INSTANCE_LOGITS

    def __init__(self, in_features: int, classes: int, *, hidden: int = 512, dropout: float = 0.25) -> None:
        super().__init__()
        self.classes = classes
        self.embedding = Hidden(in_features, hidden, dropout=dropout)
        self.classifier = Linear(hidden, classes)
        xavier(self)

    def input_layers(self) -> tuple[Linear, ...]:
        return (self.embedding.linear,)

    def pool(self, logits: Tensor, offsets: Offsets) -> Tensor:
        return bag_mean(logits, offsets)

    def forward(self, features: Tensor, offsets: Offsets | Tensor) -> Prediction:
        offsets = Offsets.of(offsets, features.device)
        z = self.embedding(features)
        logits = self.classifier(z)
        return Prediction(logits=self.pool(logits, offsets), offsets=offsets, instances=z, instance_logits=logits)


register("mean", MeanMIL, "the mean of the instances' answers; no attention")
