"""DSMIL (Li et al., 2021): every class has a critical instance and attends to instances similar to it.

z_j = relu(E x_j)  (official: z_j = x_j),   c_j = W z_j,   m_c = argmax_j c_jc
U_jc = q(z_j) . q(z_{m_c}),   u = U / sqrt(s),   Z_c = sum_j softmax(u_c)_j z_j
F = conv over all classes' Z_c,    L = 0.5 CE(F, y) + 0.5 CE(max_j c_j, y)

For other targets than classes, L has the target's own loss in place of CE: the instances with the largest outputs predict
the bag, as in Max-MIL.

The score of an instance is its similarity to the critical instances of its bag, one map per class. The counterfactual
branch is a second query q_cf with the same critical instances; its distance is computed on U of the predicted class.
CIA draws random instance scores, which select the critical instances.

n instances, b bags, d features, k classes, s the query's size.
"""

import math
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from carmil.models.contract import Ability, AttendingModel, Draw, Prediction, one_hot
from carmil.models.layers import Hidden, Linear, xavier
from carmil.models.pooling import Offsets, bag_argmax, bag_max, bag_project
from carmil.models.registry import register


class DSMIL(AttendingModel):
    """query: "linear" (CAR-MIL paper) or "nonlinear" (original code). loss: "ce", or "bce" on one-hot labels (original code)."""

    coefficients = {"cls": 0.5, "max": 0.5}  # noqa: RUF012
    abilities = AttendingModel.abilities | Ability.MAP_PER_CLASS | Ability.INSTANCE_LOGITS
    default_branch = "full"

    def __init__(
        self,
        in_features: int,
        classes: int,
        *,
        embedding: bool = True,
        hidden: int = 512,
        query: str = "linear",
        query_size: int = 128,
        dropout: float = 0.25,
        loss: str = "ce",
    ) -> None:
        super().__init__()
        self.classes = self.heads = classes
        width = hidden if embedding else in_features
        self.embedding = Hidden(in_features, hidden, dropout=dropout) if embedding else nn.Identity()
        self.instance_classifier = Linear(width, classes)
        self._query = (width, query_size, query)
        self.query = _query(*self._query)
        self.classifier = Linear(classes * width, classes)
        self.query_size, self.loss = query_size, loss
        self.trunk_size = query_size + classes
        xavier(self)

    @classmethod
    def needs_classes(cls, options: Mapping[str, Any]) -> str:
        return "loss on one-hot labels" if options.get("loss") == "bce" else ""

    def embed(self, features: Tensor, offsets: Offsets) -> Tensor:
        return self.embedding(features.to(self.classifier.weight.dtype))

    def input_layers(self) -> tuple[Linear, ...]:
        # Without an embedding, the model pools the features themselves.
        return (self.embedding.linear,) if isinstance(self.embedding, Hidden) else ()

    def trunk(self, instances: Tensor, offsets: Offsets) -> Tensor:
        """Return q(z_j) and the instance logits c_j, concatenated."""
        return torch.cat([self.query(instances), self.instance_classifier(instances)], dim=-1)

    def score(self, trunk: Tensor, instances: Tensor, offsets: Offsets) -> Tensor:
        return self._similarity(trunk[..., : self.query_size], self._instance_logits(trunk), offsets)

    def classify(self, pooled: Tensor) -> Tensor:
        return self.classifier(pooled.flatten(-2))

    def instance_logits(self, trunk: Tensor) -> Tensor:
        return self._instance_logits(trunk)

    def second_attention(self) -> nn.Module:
        second = _query(*self._query)
        xavier(second)
        return second

    def attend_with(self, attention: nn.Module, instances: Tensor, trunk: Tensor, offsets: Offsets) -> Tensor:
        return self._similarity(attention(instances), self._instance_logits(trunk), offsets)

    def attend_at_random(self, trunk: Tensor, u: Tensor, offsets: Offsets, draw: Draw) -> Tensor:
        logits = draw((u.shape[-2], u.shape[-1]), u).expand(u.shape)
        return self._similarity(trunk[..., : self.query_size], logits, offsets)

    def compared_scores(self, scores: Tensor, logits: Tensor, offsets: Offsets) -> Tensor:
        predicted = logits.argmax(-1).index_select(-1, offsets.bag_of)[..., None, None]
        column = scores.gather(-1, predicted.expand(*scores.shape[:-1], 1))
        return column * math.sqrt(self.query_size)

    def losses(self, prediction: Prediction, labels: Tensor, terms: Container[str]) -> dict[str, Tensor]:
        assert prediction.instance_logits is not None
        measure = self.bag_loss if self.loss == "ce" else _one_hot_loss
        largest = bag_max(prediction.instance_logits, prediction.offsets)
        return {"cls": measure(prediction.logits, labels), "max": measure(largest, labels)}

    def _instance_logits(self, trunk: Tensor) -> Tensor:
        return trunk[..., self.query_size :]

    def _similarity(self, queries: Tensor, logits: Tensor, offsets: Offsets) -> Tensor:
        """Return u_jc = q(z_j) . q(z_{m_c}) / sqrt(s). queries (..., n, s), logits (..., n, k) -> (..., n, k)."""
        rows = bag_argmax(logits, offsets)  # (..., b, k)
        index = rows.flatten(-2).unsqueeze(-1)
        critical = queries.gather(-2, index.expand(*index.shape[:-1], self.query_size)).unflatten(-2, rows.shape[-2:])
        return bag_project(queries, critical, offsets) / math.sqrt(self.query_size)


def _query(inputs: int, size: int, kind: str) -> nn.Module:
    if kind == "linear":
        return Linear(inputs, size)
    return nn.Sequential(Linear(inputs, size), nn.ReLU(), Linear(size, size), nn.Tanh())


def _one_hot_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the classes of the binary cross-entropy against the one-hot label. (..., b, k) -> (..., b)."""
    target = one_hot(labels, logits.shape[-1]).expand(logits.shape)
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(-1)


register("dsmil", DSMIL, "DSMIL as the paper ran it: embedding, linear query, cross-entropy")
register(
    "dsmil.official",
    DSMIL,
    "DSMIL as published: raw features, nonlinear query, binary cross-entropy",
    embedding=False,
    query="nonlinear",
    loss="bce",
)
