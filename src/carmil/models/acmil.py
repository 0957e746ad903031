"""ACMIL (Zhang et al., 2024) with gated attention: several maps, trained to differ and to spread over many instances.

z_j = relu(E x_j),   u_jh = w_h' (tanh(V z_j) * sigmoid(U z_j)),   Z_h = sum_j softmax(u_h)_j z_j
F   = W mean_h Z_h + c,    F_h = W_h Z_h + c_h
L   = CE(F, y) + mean_h CE(F_h, y) + mean over pairs of maps of cos(softmax(u_h), softmax(u_h'))
In training, a random 6 of the top 10 instances of each map are masked.

n instances, b bags, d features, k classes, h heads.
"""

from collections.abc import Container

import torch
from torch import Tensor

from carmil.models.attention import Attention, WithAttention
from carmil.models.contract import Ability, Prediction
from carmil.models.layers import HeadLinear, Hidden, Linear
from carmil.models.noise import Noisy
from carmil.models.pooling import Offsets, bag_sum, bag_topk
from carmil.models.registry import register


class ACMIL(WithAttention):
    coefficients = {"cls": 1.0, "branch": 1.0, "diversity": 1.0}  # noqa: RUF012
    abilities = WithAttention.abilities | Ability.INSTANCE_WISE
    inert_parameters = ("score.bias",)

    def __init__(
        self,
        in_features: int,
        classes: int,
        *,
        heads: int = 5,
        hidden: int = 512,
        attention: int = 128,
        masked_among: int = 10,
        masked_share: float = 0.6,
    ) -> None:
        super().__init__()
        self.classes, self.heads = classes, heads
        self.embedding = Hidden(in_features, hidden, bias=False)
        self.attention = Attention(hidden, attention, gated=True, heads=heads)
        self.classifier = Linear(hidden, classes)
        self.head_classifiers = HeadLinear(heads, hidden, classes)
        self.mask = TopMask(masked_among, masked_share)

    def embed(self, features: Tensor, offsets: Offsets) -> Tensor:
        return self.embedding(features)

    def input_layers(self) -> tuple[Linear, ...]:
        return (self.embedding.linear,)

    def classify(self, pooled: Tensor) -> Tensor:
        return self.classifier(pooled.mean(-2))

    def mask_scores(self, scores: Tensor, offsets: Offsets) -> Tensor:
        return self.mask(scores, offsets)

    def losses(self, prediction: Prediction, labels: Tensor, terms: Container[str]) -> dict[str, Tensor]:
        losses = super().losses(prediction, labels, terms)
        if self.training:
            assert prediction.pooled is not None
            assert prediction.weights is not None
            head_logits = self.head_classifiers(prediction.pooled)
            losses["branch"] = self.bag_loss(head_logits.transpose(-3, -2), labels).mean(-2)
            if self.heads > 1:
                losses["diversity"] = _mean_cosine(prediction.weights, prediction.offsets)
        return losses


class TopMask(Noisy):
    """Mask that sets a random share of the top `among` scores of every bag and map to -inf in training."""

    def __init__(self, among: int, share: float) -> None:
        super().__init__()
        self.among, self.share = among, share

    def forward(self, scores: Tensor, offsets: Offsets) -> Tensor:
        if not self.training or self.share == 0:
            return scores
        _, rows = bag_topk(scores.detach(), offsets, self.among)  # (..., b, among, h)
        draws = self.draw((scores.shape[-2], scores.shape[-1]), scores).expand(scores.shape)
        drawn = draws.gather(-2, rows.flatten(-3, -2)).unflatten(-2, rows.shape[-3:-1])
        candidates = offsets.sizes.clamp_max(self.among)
        missing = torch.arange(self.among, device=scores.device) >= candidates.unsqueeze(-1)  # (b, among)
        rank = drawn.masked_fill(missing.unsqueeze(-1), 2.0).argsort(-2).argsort(-2)
        masked = rank < (candidates * self.share).long()[:, None, None]
        hits = torch.zeros_like(scores).scatter_reduce(
            -2, rows.flatten(-3, -2), masked.to(scores.dtype).flatten(-3, -2), "amax"
        )
        return scores.masked_fill(hits > 0, float("-inf"))


def _mean_cosine(weights: Tensor, offsets: Offsets) -> Tensor:
    """Return the mean cosine similarity between the maps of a bag, over all pairs. (..., n, h) -> (..., b)."""
    heads = weights.shape[-1]
    products = bag_sum((weights.unsqueeze(-1) * weights.unsqueeze(-2)).flatten(-2), offsets).unflatten(
        -1, (heads, heads)
    )
    norms = products.diagonal(dim1=-2, dim2=-1).clamp_min(1e-16).sqrt()
    cosines = products / (norms.unsqueeze(-1) * norms.unsqueeze(-2))
    return (cosines.sum((-2, -1)) - heads) / (heads * (heads - 1))


register("acmil", ACMIL, "ACMIL: five maps trained to differ, top instances masked at random in training")
