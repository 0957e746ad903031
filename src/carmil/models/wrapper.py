"""Base class of wrappers: a counterfactual branch, or a scaling of features, around a model."""

from collections.abc import Container, Hashable

from torch import Tensor, nn

from carmil.models.contract import BagModel, Prediction
from carmil.models.layers import Linear
from carmil.models.pooling import Offsets
from carmil.targets.links import Link


class Wrapper(BagModel):
    """A model around another model, from which it takes everything that it does not override, including its abilities."""

    def __init__(self, model: BagModel) -> None:
        nn.Module.__init__(self)  # the link is the model's
        self.model = model
        self.classes, self.heads, self.abilities = model.classes, model.heads, model.abilities
        self.coefficients, self.phases = model.coefficients, model.phases

    @property
    def link(self) -> Link:  # type: ignore[override]
        return self.model.link

    @property
    def method(self) -> str:
        return self.model.method

    def forward(self, features: Tensor, offsets: Offsets | Tensor) -> Prediction:
        return self.model(features, offsets)

    def embed(self, features: Tensor, offsets: Offsets) -> Tensor:
        return self.model.embed(features, offsets)

    def attend(self, instances: Tensor, offsets: Offsets) -> Tensor:
        return self.model.attend(instances, offsets)

    def classify(self, pooled: Tensor) -> Tensor:
        return self.model.classify(pooled)

    def rollout(self, features: Tensor, offsets: Offsets | Tensor) -> Tensor:
        return self.model.rollout(features, offsets)

    def input_layers(self) -> tuple[Linear, ...]:
        return self.model.input_layers()

    def reference(self, features: Tensor) -> Tensor:
        return self.model.reference(features)

    def bag_loss(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        return self.model.bag_loss(logits, labels, smoothing)

    def losses(self, prediction: Prediction, labels: Tensor, terms: Container[str]) -> dict[str, Tensor]:
        return self.model.losses(prediction, labels, terms)

    def begin(self, phase: str, epoch: int) -> Hashable:
        return self.model.begin(phase, epoch)
