"""The field's training loop, which carmil is compared with: one model, one bag per step, in plain torch.

Written from the paper, without any code of carmil. n instances, d features, k classes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle

import torch
from torch import Tensor, nn
from torch.nn import functional

LEARNING_RATE, WEIGHT_DECAY = 2e-4, 1e-5
ALPHA, LAMBDA = 0.2, 1.0

Loss = Callable[[Tensor, Tensor], Tensor]  # features (n, d) and label (1) of a bag -> its loss


class PlainCAR(nn.Module):
    """Gated ABMIL with CAR's branch: F = phi(sum_j softmax(u)_j z_j), u = w t, u_cf = w_cf t, t = tanh(V z) * sigmoid(U z)."""

    def __init__(self, in_features: int = 1024, classes: int = 2, hidden: int = 512, attention: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Sequential(nn.Linear(in_features, hidden), nn.ReLU(), nn.Dropout(0.25))
        self.V = nn.Sequential(nn.Linear(hidden, attention), nn.Tanh())
        self.U = nn.Sequential(nn.Linear(hidden, attention), nn.Sigmoid())
        self.w = nn.Linear(attention, 1)
        self.w_cf = nn.Linear(attention, 1)
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, bag: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(n, d) -> F, F_cf (1, k), u, u_cf (n, 1)."""
        z = self.embedding(bag)
        t = self.V(z) * self.U(z)
        u, u_cf = self.w(t), self.w_cf(t)
        F, F_cf = (self.classifier(torch.softmax(scores, dim=0).T @ z) for scores in (u, u_cf))
        return F, F_cf, u, u_cf

    def loss(self, bag: Tensor, label: Tensor) -> Tensor:
        """CE(F, y) + alpha CE(F - F_cf, y) + lambda mean |u - u_cf|."""
        F, F_cf, u, u_cf = self(bag)
        differential = functional.cross_entropy(F - F_cf, label)
        return functional.cross_entropy(F, label) + ALPHA * differential + LAMBDA * (u - u_cf).abs().mean()


# Names of the same layers in carmil's car/abmil.gated.
OURS = {
    "embedding.0": "model.embedding",
    "V.0": "model.attention.V",
    "U.0": "model.attention.U",
    "w": "model.attention.score",
    "w_cf": "branch.attention",
    "classifier": "model.classifier",
}


def plain_twin(state: Mapping[str, Tensor]) -> PlainCAR:
    """Return the plain module with the weights of a car/abmil.gated of carmil."""
    weights = {
        f"{plain}.{kind}": next(state[name] for name in state if name.startswith(ours) and name.endswith(kind))
        for plain, ours in OURS.items()
        for kind in ("weight", "bias")
    }
    hidden, in_features = weights["embedding.0.weight"].shape
    twin = PlainCAR(in_features, len(weights["classifier.bias"]), hidden, len(weights["V.0.bias"]))
    twin.load_state_dict(weights)
    return twin


def torchmil_loss(device: str, in_features: int = 1024) -> tuple[nn.Module, Loss]:
    """Return torchmil's gated ABMIL of the same sizes, without a branch, and its own loss."""
    from torchmil.models import ABMIL

    embedding = nn.Sequential(nn.Linear(in_features, 512), nn.ReLU(), nn.Dropout(0.25))
    model = ABMIL(in_shape=(in_features,), att_dim=128, gated=True, feat_ext=embedding).to(device).train()

    def loss(bag: Tensor, label: Tensor) -> Tensor:
        _, losses = model.compute_loss(label, bag.unsqueeze(0))
        return next(iter(losses.values()))

    return model, loss


def one_bag_loop(
    model: nn.Module, loss: Loss, bags: Iterable[tuple[Tensor, Tensor]], device: str
) -> Callable[[], None]:
    """Return a step of the field's loop: copy the next bag to the device, loss, backward, Adam; without waiting for the device."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    queue = cycle(bags)

    def step() -> None:
        bag, label = next(queue)
        optimizer.zero_grad()
        loss(bag.to(device), label.to(device)).backward()
        optimizer.step()

    return step


@contextmanager
def float32_products(*, tf32: bool) -> Iterator[None]:
    """Multiply float32 matrices on a GPU in full precision, or rounded to TF32 (10 bits), in this block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
