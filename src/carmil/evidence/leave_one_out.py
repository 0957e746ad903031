"""Leave-one-out: the drop of each logit without an instance, for all instances of a bag at once.

    Z_-j = (Z - a_j z_j) / (1 - a_j) = Z - a_j / (1 - a_j) (z_j - Z)          e_cj = F_c(Z) - F_c(Z_-j)

The other instances keep their embeddings and scores. Where these do not depend on the removed instance (ABMIL, CLAM,
ACMIL; DSMIL unless the instance is critical) this is exactly the prediction for the bag without it; RRT would embed
the others again. A bag of one instance has an empty pool, which is zero: e_c = F_c(Z) - F_c(0).

n instances, b bags, d features, h heads, k outputs, such as classes.
"""

import torch
from torch import Tensor

from carmil.evidence.pooling_pass import PoolingPass, in_double, pooling_pass
from carmil.models.contract import BagModel
from carmil.models.pooling import Offsets, bag_argmax, bag_softmax, bag_weighted_sum

NUMBERS = 2**22  # values of the pools that are classified together


@torch.no_grad()
def leave_one_out(model: BagModel, features: Tensor, offsets: Offsets | Tensor) -> Tensor:
    """Return F(Z) - F(Z_-j), (n, k). In double precision, as one instance hardly changes the logits of a large bag."""
    state = pooling_pass(model, features, offsets, "leave-one-out")
    classify = in_double(state.model).classify
    top = _most_attended(state)
    beside_top = _pool_without(state, top).double()
    pool, whole = state.pool.double(), classify(state.pool.double())
    rows = torch.arange(len(features), device=features.device)
    parts = []
    for some in rows.split(max(1, NUMBERS // pool[0].numel())):
        bag, a, z = state.offsets.bag_of[some], state.attention[some].double(), state.instances[some].double()
        without = pool[bag] - (a / (1 - a)).unsqueeze(-1) * (z.unsqueeze(1) - pool[bag])
        # If one attention weight is almost 1, the difference Z - a_j z_j would be lost in rounding.
        without = torch.where(top[some].unsqueeze(-1), beside_top[bag], without)
        parts.append(whole[bag] - classify(without))
    return torch.cat(parts).to(state.pool.dtype)


def _most_attended(state: PoolingPass) -> Tensor:
    """Return a mask (n, h), true for the instance of each bag with the largest attention weight in the head."""
    best = bag_argmax(state.scores, state.offsets).index_select(0, state.offsets.bag_of)
    return best == torch.arange(len(best), device=best.device).unsqueeze(-1)


def _pool_without(state: PoolingPass, left_out: Tensor) -> Tensor:
    """Return the pool of the other instances: left_out (n, h) -> (b, h, d); zero if there are none."""
    others = bag_softmax(state.scores.masked_fill(left_out, -torch.inf), state.offsets).masked_fill(left_out, 0.0)
    return bag_weighted_sum(others, state.instances, state.offsets)
