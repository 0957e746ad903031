"""Leave-one-out: what the answer loses with each instance, for all instances of a bag at once.

    Z_-j = (Z - a_j z_j) / (1 - a_j) = Z - a_j / (1 - a_j) (z_j - Z)          e_cj = F_c(Z) - F_c(Z_-j)

The others keep their embedding and their scores. Where these do not depend on the instance that goes (ABMIL, CLAM, ACMIL; DSMIL
unless it is a critical one) this is the answer for the bag without it, exactly; RRT would embed the others anew.
An instance that was alone leaves nothing behind, and the sum of nothing is zero: e_c = F_c(Z) - F_c(0).

n instances, b bags, d features, h heads, k classes.
"""

import torch
from torch import Tensor

from carmil.evidence.pooling_pass import PoolingPass, in_double, pooling_pass
from carmil.models.contract import BagModel
from carmil.models.pooling import Offsets, bag_argmax, bag_softmax, bag_weighted_sum

NUMBERS = 2**22  # of the pools that are classified together


@torch.no_grad()
def leave_one_out(model: BagModel, features: Tensor, offsets: Offsets | Tensor) -> Tensor:
    """F(Z) - F(Z_-j), (n, k). In double precision: of a large bag one instance hardly changes the answer."""
    seen = pooling_pass(model, features, offsets, "leave-one-out")
    classify = in_double(seen.model).classify
    top = _most_attended(seen)
    beside_top = _pool_without(seen, top).double()
    pool, whole = seen.pool.double(), classify(seen.pool.double())
    rows = torch.arange(len(features), device=features.device)
    parts = []
    for some in rows.split(max(1, NUMBERS // pool[0].numel())):
        bag, a, z = seen.offsets.bag_of[some], seen.attention[some].double(), seen.instances[some].double()
        without = pool[bag] - (a / (1 - a)).unsqueeze(-1) * (z.unsqueeze(1) - pool[bag])
        # Next to an attention of almost 1 the others would be lost in rounding.
        without = torch.where(top[some].unsqueeze(-1), beside_top[bag], without)
        parts.append(whole[bag] - classify(without))
    return torch.cat(parts).to(seen.pool.dtype)


def _most_attended(seen: PoolingPass) -> Tensor:
    """(n, h) is this the instance of its bag that the head attends most?"""
    best = bag_argmax(seen.scores, seen.offsets).index_select(0, seen.offsets.bag_of)
    return best == torch.arange(len(best), device=best.device).unsqueeze(-1)


def _pool_without(seen: PoolingPass, left_out: Tensor) -> Tensor:
    """The pool of the others: left_out (n, h) -> (b, h, d); of nobody else, zero."""
    others = bag_softmax(seen.scores.masked_fill(left_out, -torch.inf), seen.offsets).masked_fill(left_out, 0.0)
    return bag_weighted_sum(others, seen.instances, seen.offsets)
