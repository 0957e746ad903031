"""WENO (Qu et al., 2022): a bag-level teacher and an instance-level student that teach each other. Two classes only.

z_j = BN(E x_j),   t_j = teacher(z_j),   u_j = w' tanh(V t_j),   F = W sum_j softmax(u)_j t_j,   s_j = student(z_j)
teacher's pass:  -log p_y of the bag; after `smooth_epochs`, attention in positive bags is restricted to hard instances
                 (s_j <= 1/2; if there is none, the instance with the largest s_j)
student's pass:  p_j = u_j scaled to (0, 1) by the smallest and largest score of the pass, 0 in negative bags;
                 -mean_j [0.1 (1 - p_j) log(1 - s_j) + 0.9 p_j log s_j]
Both passes train the shared encoder E. The original uses 512 instances per step of the student's pass; this one uses whole bags.
"""

from collections.abc import Container, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from carmil.errors import CarmilError
from carmil.models.attention import Attention
from carmil.models.contract import Ability, BagModel, Prediction
from carmil.models.layers import BatchNorm, Linear
from carmil.models.noise import Dropout
from carmil.models.pooling import Offsets, bag_max, bag_mean, bag_softmax, bag_weighted_sum
from carmil.models.registry import register


class WENO(BagModel):
    """init_std: standard deviation of the initial linear weights, as in the original; None for torch's default."""

    abilities = BagModel.abilities | Ability.ATTENDS | Ability.INSTANCE_LOGITS
    coefficients = {"cls": 1.0, "student": 1.0}  # noqa: RUF012
    inert_parameters = ("score.bias", "encoder.bias")
    phases = ("teacher", "student")
    lowest: Tensor
    highest: Tensor

    def __init__(
        self,
        in_features: int,
        classes: int,
        *,
        hidden: int = 512,
        teacher: int = 1024,
        attention: int = 512,
        student: int = 4096,
        dropout: float = 0.5,
        smooth_epochs: int = 10,
        init_std: float | None = 0.01,
    ) -> None:
        super().__init__()
        if classes != 2:
            raise CarmilError(f"weno separates positive from negative bags: expected 2 classes, not {classes}")
        self.classes, self.smooth_epochs = classes, smooth_epochs
        self.encoder, self.normalised = Linear(in_features, hidden), BatchNorm(hidden)
        self.teacher = nn.Sequential(
            Dropout(dropout), Linear(hidden, teacher), nn.ReLU(), Dropout(dropout), Linear(teacher, teacher), nn.ReLU()
        )
        self.attention = Attention(teacher, attention, gated=False)
        self.classifier = Linear(teacher, classes)
        self.student = nn.Sequential(
            Linear(hidden, student), nn.ReLU(), Linear(student, student), nn.ReLU(), Linear(student, classes)
        )
        # Smallest and largest attention score of this epoch's teacher pass.
        self.register_buffer("lowest", torch.full((1,), float("inf")))
        self.register_buffer("highest", torch.full((1,), float("-inf")))
        self.phase, self.mining = "teacher", False
        if init_std is not None:
            for module in self.modules():
                if isinstance(module, Linear):
                    nn.init.normal_(module.weight, std=init_std)
                    nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    @classmethod
    def needs_classes(cls, options: Mapping[str, Any]) -> str:
        return "instance loss"

    def input_layers(self) -> tuple[Linear, ...]:
        return (self.encoder,)

    def begin(self, phase: str, epoch: int) -> Hashable:
        self.phase, self.mining = phase, epoch > self.smooth_epochs
        if phase == "teacher":
            self.lowest.fill_(float("inf"))
            self.highest.fill_(float("-inf"))
        return self.mining

    def forward(self, features: Tensor, offsets: Offsets | Tensor) -> Prediction:
        offsets = Offsets.of(offsets, features.device)
        z = self.normalised(self.encoder(features))
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.phase != "student"):
            t = self.teacher(z)
            u = self.attention(t)
        student_logits = None
        alone = self.training and self.phase == "teacher" and not self.mining
        if not alone:  # the student is most of the cost, and its output is unused while only the teacher learns
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.phase == "student"):
                student_logits = self.student(z)
        maps = u
        if self.training and self.mining:
            assert student_logits is not None
            maps = torch.cat([u, self._mask_easy(u, student_logits.detach().softmax(-1)[..., 1:], offsets)], dim=-1)
        weights = bag_softmax(maps, offsets)
        pooled = bag_weighted_sum(weights, t, offsets)
        F = self.classifier(pooled.flatten(-3, -2)).unflatten(-2, pooled.shape[-3:-1])
        if self.training and self.phase == "teacher":
            self._update_range(u.detach())
        return Prediction(
            logits=F[..., 0, :],
            offsets=offsets,
            scores=u,
            instances=t,
            weights=weights[..., :1],
            instance_logits=student_logits,
            extras={"mined_logits": F[..., -1, :]},
        )

    def losses(self, prediction: Prediction, labels: Tensor, terms: Container[str]) -> dict[str, Tensor]:
        assert prediction.scores is not None
        if not self.training or self.phase != "student":
            positive = labels.bool().unsqueeze(-1)
            logits = torch.where(positive, prediction.extras["mined_logits"], prediction.logits)
            own = logits.softmax(-1).gather(-1, labels.expand(logits.shape[:-1]).unsqueeze(-1)).squeeze(-1)
            return {"cls": -(own + 1e-5).log()}
        assert prediction.instance_logits is not None
        low, high = self.lowest.unsqueeze(-2), self.highest.unsqueeze(-2)
        p = ((prediction.scores.detach() - low) / (high - low).clamp_min(1e-12)).clamp(1e-5, 1 - 1e-5).squeeze(-1)
        p = p * labels[prediction.offsets.bag_of]
        log_p = prediction.instance_logits.log_softmax(-1)
        loss = -(0.1 * (1 - p) * log_p[..., 0] + 0.9 * p * log_p[..., 1])
        return {"student": bag_mean(loss.unsqueeze(-1), prediction.offsets).squeeze(-1)}

    def _mask_easy(self, u: Tensor, student_p: Tensor, offsets: Offsets) -> Tensor:
        """Return u with -inf at easy instances (s_j > 1/2); if all of a bag are easy, keep the one with the largest s_j."""
        hard = student_p <= 0.5
        any_hard = bag_max(hard.to(u.dtype), offsets).index_select(-2, offsets.bag_of) > 0
        most = student_p == bag_max(student_p, offsets).index_select(-2, offsets.bag_of)
        return u.masked_fill(~torch.where(any_hard, hard, most), float("-inf"))

    def _update_range(self, u: Tensor) -> None:
        """Update the range of the scores (..., n, 1) over each model's own training bags."""
        counted = self.normalised.counted
        low, high = (u, u) if counted is None else (u.where(counted, torch.inf), u.where(counted, -torch.inf))
        self.lowest.copy_(torch.minimum(self.lowest, low.amin(-2)))
        self.highest.copy_(torch.maximum(self.highest, high.amax(-2)))


register("weno", WENO, "WENO: a bag-level teacher and an instance-level student (two classes only)")
