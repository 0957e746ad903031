"""Features on a common scale before a model looks at them: x' = (x - mean) / deviation, of its own training bags.

Encoders' features need none of it; measurements in units of their own, such as the classical MIL data, do.
"""

from collections.abc import Container, Hashable

import torch
from torch import Tensor

from carmil.models.contract import AttendingModel, BagModel, Branch, Prediction
from carmil.models.pooling import Offsets


class Standardised(AttendingModel):
    """A model and the scale of its d features. The scale is no parameter: whoever trains sets it, from training bags alone."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, model: BagModel, features: int) -> None:
        super().__init__()
        self.model = model
        self.classes, self.phases, self.coefficients = model.classes, model.phases, model.coefficients
        self.heads = getattr(model, "heads", 1)
        self.heads_are_classes = getattr(model, "heads_are_classes", False)
        self.softmax_pooling = getattr(model, "softmax_pooling", False)
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("deviation", torch.ones(features))

    def scaled(self, features: Tensor) -> Tensor:
        return (features - self.mean.unsqueeze(-2)) / self.deviation.unsqueeze(-2)

    def forward(self, features: Tensor, offsets: Offsets | Tensor, branch: Branch | None = None) -> Prediction:
        return self.model(self.scaled(features), offsets)

    def embed(self, features: Tensor, offsets: Offsets) -> Tensor:
        return self._attending().embed(self.scaled(features), offsets)

    def attend(self, instances: Tensor, offsets: Offsets) -> Tensor:
        return self._attending().attend(instances, offsets)

    def classify(self, pooled: Tensor) -> Tensor:
        return self._attending().classify(pooled)

    def begin(self, phase: str, epoch: int) -> Hashable:
        return self.model.begin(phase, epoch)

    def losses(self, prediction: Prediction, labels: Tensor, terms: Container[str]) -> dict[str, Tensor]:
        return self.model.losses(prediction, labels, terms)

    def _attending(self) -> AttendingModel:
        assert isinstance(self.model, AttendingModel)
        return self.model
