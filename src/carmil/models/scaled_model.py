"""Input scaling as part of a model: x' = (x - mean) / deviation, with the mean and deviation of its own training bags.

Encoders' features are rectified and share a large common vector. A first layer must compensate for this vector before
it can use the differences between tiles, and if few tiles differ, training does not achieve this.

    none      x' = x
    common    centred; all features divided by one number c, the root of their mean variance
    halfway   centred; feature i divided by sqrt(c s_i), s_i its own deviation
    own       centred; feature i divided by s_i

The zero of a scaled feature is the mean training tile. Nothing is computed per instance: the scale is folded into the
linear layers that read the features (`Linear.folded`). If other layers read them too (ABMIL with feature dropout,
`dsmil.official`, which pools them), the features are scaled before they enter the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from carmil.models.contract import BagModel, Prediction
from carmil.models.pooling import Offsets
from carmil.models.wrapper import Wrapper

SCALES = ("none", "common", "halfway", "own")


class ScaledModel(Wrapper):
    """A model and the scale of its d features. The scale is not learned: it is computed from the training bags.

    shift (d): a vector that was subtracted from the features before, so that 16 bits are enough for their
    differences.
    """

    mean: Tensor
    deviation: Tensor
    shift: Tensor | None = None

    def __init__(self, model: BagModel, features: int) -> None:
        super().__init__(model)
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("deviation", torch.ones(features))

    @contextmanager
    def scaled_input(self, features: Tensor) -> Iterator[Tensor]:
        """Return the input of the inner model within the block: the raw features if its first layers do the scaling."""
        # Copies: the buffers of a population are one tensor, and batch normalisation changes its part of it in each
        # pass.
        mean = self.mean.clone() if self.shift is None else self.mean - self.shift
        deviation = self.deviation.clone()
        layers = self.model.input_layers()
        if not layers:
            yield (features - mean.unsqueeze(-2)) / deviation.unsqueeze(-2)
            return
        for layer in layers:
            layer.scale = mean, deviation
        try:
            yield features
        finally:
            for layer in layers:
                layer.scale = None

    def reference(self, features: Tensor) -> Tensor:
        """Return the mean training instance, which is zero after scaling."""
        return self.mean.to(features)

    def forward(self, features: Tensor, offsets: Offsets | Tensor) -> Prediction:
        with self.scaled_input(features) as x:
            return self.model(x, offsets)

    def embed(self, features: Tensor, offsets: Offsets) -> Tensor:
        with self.scaled_input(features) as x:
            return self.model.embed(x, offsets)

    def rollout(self, features: Tensor, offsets: Offsets | Tensor) -> Tensor:
        with self.scaled_input(features) as x:
            return self.model.rollout(x, offsets)


def deviation_of(variance: Tensor, scale: str) -> Tensor:
    """Return the divisors of features with these variances (..., d).

    A constant feature has the average divisor of the others.
    """
    common = variance.mean(-1, keepdim=True).sqrt()
    common = torch.where(common > 0, common, 1.0)
    own = torch.where(variance > 0, variance.sqrt(), common)
    match scale:
        case "common":
            return common.expand_as(variance)
        case "halfway":
            return (common * own).sqrt()
        case "own":
            return own
    raise ValueError(f"no deviation for the scale {scale!r}")
