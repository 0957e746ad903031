"""Outputs of both branches of a CAR model: attention scores and logits. n instances of all bags together, b bags, k classes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.models.contract import BagModel
from carmil.models.pooling import Offsets

AT_ONCE = 2**16  # instances in memory


@dataclass(frozen=True, eq=False)
class BranchOutputs:
    """u (n), F(u) (b, k), u_cf (n) and F(u_cf) (b, k), the last two empty without CAR's branch. On the CPU."""

    scores: Tensor
    logits: Tensor
    counterfactual_scores: Tensor
    counterfactual_logits: Tensor
    offsets: Offsets


@dataclass(frozen=True, eq=False)
class TestedModel:
    """A model of a run, with the bags it was tested on: their positions in the cohort and labels (b)."""

    model: BagModel
    fold: int
    seed: int
    places: Tensor
    labels: Tensor


@torch.no_grad()
def predict_branches(model: BagModel, bags: Bags, chosen: Tensor | None = None) -> BranchOutputs:
    """Return the scores and logits of a model with one attention map for all bags, or the chosen ones (positions)."""
    first = next(model.parameters())
    columns: tuple[list[Tensor], ...] = ([], [], [], [])
    sizes = []
    model.eval()
    for part in bags.parts(AT_ONCE, chosen):
        prediction = model(part.features.to(first.device).to(first), Offsets(part.offsets, first.device))
        outputs = [prediction.scores[:, 0], prediction.logits]
        if (cf := prediction.counterfactual) is not None:
            outputs += [cf.scores[:, 0, 0], cf.logits[:, 0]]
        for column, values in zip(columns, outputs, strict=False):
            column.append(values.cpu())
        sizes.append(part.sizes)
    ends = torch.cat(sizes).cumsum(0)
    u, logits, u_cf, cf_logits = (torch.cat(column) if column else torch.empty(0) for column in columns)
    return BranchOutputs(u, logits, u_cf, cf_logits, Offsets(torch.cat([ends.new_zeros(1), ends])))
