"""Coalition evidence: the effect of adding an instance to small random groups of other instances of its bag.

    v_c(S) = F_c of the bag that consists of S alone          v_c(nothing) = F_c of one reference instance
    e_cj   = mean over |S| = 0 .. s-1, and over random groups S of this size, of v_c(S + j) - v_c(S)

It is the Shapley value of j in a random group of s, averaged over the groups. The evidence of a group sums to
v(group) - v(nothing). The evidence of a bag of n instances sums to n/s times the mean of this difference over groups,
and to F - v(nothing) if s reaches n. The zero is set by the reference, which is the mean training instance of a model
with scaled features (otherwise zeros), and not by the bag: all tiles of a slide may be evidence against a class. Small
groups probe the model where its prediction is not yet decided, and no attention weight is a factor, so that single
instances do not dominate a map.

Groups are runs on a random circle of the bag. With j' the instance before j, and V_q[j] the value of the run of q
that ends at j,

    e_cj = 1/s sum_q  V_(q+1)[j] - V_q[j']          V_0 = v(nothing)

so that every instance is in s groups, once at each position, and the sum above holds exactly for the sampled groups.

n instances, b bags, d features, h heads, k outputs, such as classes.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from carmil.evidence.gradients import class_logits
from carmil.evidence.pooling_pass import PoolingPass, pooling_pass
from carmil.models.contract import Ability, BagModel
from carmil.models.pooling import Offsets

DRAWS = 16  # random circles per bag
NUMBERS = 2**23  # values of pools or features that are classified together
ALONE = 512  # small bags per pass: some models lay out each as a large square

# The predecessor of each instance, (n) -> V_1, V_2, ... (n, k).
Runs = Callable[[Tensor], Iterator[Tensor]]


@torch.no_grad()
def coalition_evidence(
    model: BagModel, features: Tensor, offsets: Offsets | Tensor, *, size: int = 2, draws: int = DRAWS
) -> Tensor:
    """Return signed evidence (n, k) from groups of `size`; a smaller bag is one group.

    Every call draws the same circles; the evidence of a bag does not depend on other bags.
    """
    offsets = Offsets.of(offsets, features.device)
    nothing = class_logits(model, model.reference(features).unsqueeze(0), torch.tensor([0, 1]))  # (1, k)
    values = _values(model, features, offsets, size)
    group_sizes = offsets.sizes.clamp(max=size)[offsets.bag_of].unsqueeze(-1)  # (n, 1) size of its groups
    total = features.new_zeros(len(features), model.classes)
    for draw in range(draws):
        before = _circle(offsets, draw)
        shorter = nothing.expand_as(total)
        for q, longer in zip(range(size), values(before), strict=False):
            total += torch.where(q < group_sizes, longer - shorter[before], 0.0)
            shorter = longer
    return total / (draws * group_sizes)


def _circle(offsets: Offsets, draw: int) -> Tensor:
    """Return (n) the predecessor of each instance on a random circle of its bag; the circle depends on the size of the bag only."""
    before = torch.empty(offsets.instances, dtype=torch.long)
    first = 0
    for size in offsets.lengths:
        order = first + torch.randperm(size, generator=torch.Generator().manual_seed(draw))
        before[order] = order.roll(1)
        first += size
    return before.to(offsets.starts.device)


def _values(model: BagModel, features: Tensor, offsets: Offsets, size: int) -> Runs:
    """Return a function that computes V_1 .. V_size: by pooling again after one pass, or with every run as a separate bag."""
    if Ability.POOLS_BY_ATTENTION | Ability.INSTANCE_WISE in model.abilities:
        state = pooling_pass(model, features, offsets, "coalition evidence")
        return lambda before: _pooled_runs(state, before, size)
    singles = _logits(model, features, torch.arange(len(features), device=features.device).unsqueeze(-1))

    def runs_as_bags(before: Tensor) -> Iterator[Tensor]:
        yield singles
        run = torch.arange(len(features), device=features.device).unsqueeze(-1)
        for _ in range(size - 1):
            run = torch.cat([before[run[:, :1]], run], dim=1)
            yield _logits(model, features, run)

    return runs_as_bags


def _pooled_runs(whole: PoolingPass, before: Tensor, size: int) -> Iterator[Tensor]:
    """Yield V_q of every instance, from pools of runs that grow by one instance each time.

    Z = A / w with A = sum exp(u - m) z and w = sum exp(u - m), m the largest u so far, so that nothing overflows or
    vanishes.
    """
    z, u = whole.instances, whole.scores
    at = torch.arange(len(z), device=z.device)
    m, w, pool = u, torch.ones_like(u), z.unsqueeze(1).expand(-1, u.shape[1], -1)
    for q in range(size):
        if q:
            at = before[at]
            top = torch.maximum(m, u[at])
            kept, added = (m - top).exp() * w, (u[at] - top).exp()
            m, w = top, kept + added
            share = (added / w).unsqueeze(-1)
            pool = pool + share * (z[at].unsqueeze(1) - pool)
        yield torch.cat([whole.model.classify(part) for part in pool.split(max(1, NUMBERS // pool[0].numel()))])


def _logits(model: BagModel, features: Tensor, runs: Tensor) -> Tensor:
    """Return F (n, k) of bags made of the instances `runs` (n, q)."""
    count = runs.shape[1]
    at_once = max(1, min(ALONE, NUMBERS // (count * features.shape[1])))
    parts = []
    for some in runs.split(at_once):
        offsets = torch.arange(len(some) + 1) * count
        parts.append(class_logits(model, features[some.flatten()], offsets))
    return torch.cat(parts)
