"""Faithfulness: delete instances in the order of a map, and follow the model's prediction.

Step s of S has the floor(s n / S) most relevant of a bag's n instances removed; the last step, where none is left, is a bag of
zeros of the same size, as in the paper and xMIL. The remaining instances keep their order; equally relevant ones are removed in
the order of the bag. Insertion of the most relevant first is deletion of the least relevant first, read backwards.

Where z_j and u_j do not depend on the bag (Ability.INSTANCE_WISE), one pass is enough for all steps and maps. Group t, which is
removed between steps t and t+1, is pooled by itself, Z_t with l_t = log sum exp(u_j); what remains at step s is group s and what
remains at s+1:

    R_s = r_s Z_s + (1 - r_s) R_(s+1),    r_s = exp(l_s - log sum over t >= s of exp(l_t)),    F_s = classify(R_s)

a cumulative sum that never subtracts, so that no precision is lost when the instances with all the weight are removed first.
Other models (DSMIL, RRT, TransMIL, ...) predict every reduced bag, many per pass.

e maps, n instances of all bags together, b bags, S steps, d features, h heads, k classes, r random orders.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from carmil.bags.bags import Bags, rows_of, runs_of
from carmil.errors import CarmilError
from carmil.evidence.localisation import auroc
from carmil.evidence.rank_correlation import bag_places
from carmil.models.contract import Ability, BagModel, one_hot
from carmil.models.pooling import Offsets, bag_max, bag_ranking, bag_softmax, bag_sum, bag_weighted_sum

ROWS = 2**17  # instances, over all maps, that are sorted at once


@dataclass(frozen=True)
class Faithfulness:
    """The probability p of each bag's class as instances are removed, step by step.

    most_first, least_first (e, b, S+1): the most or the least relevant are removed first
    at_random (r, b, S+1): in random orders
    right (b): whether the model predicts that class for the whole bag
    """

    most_first: Tensor
    least_first: Tensor
    at_random: Tensor
    right: Tensor

    def over(self, bags: Tensor) -> "Faithfulness":
        """The same for some bags, a mask or positions; the paper reports `over(right)`."""
        names = ("most_first", "least_first", "at_random")
        return replace(self, **{name: getattr(self, name)[:, bags] for name in names}, right=self.right[bags])

    @property
    def insertion(self) -> Tensor:
        """(e, b, S+1) p as the most relevant are inserted first, from the bag of zeros to the whole bag."""
        return self.least_first.flip(-1)

    @property
    def deletion_area(self) -> Tensor:
        """(e, b) mean of the S+1 probabilities, the most relevant removed first (xMIL's AUPC): lower is better."""
        return self.most_first.mean(-1)

    @property
    def insertion_area(self) -> Tensor:
        """(e, b) the same, the most relevant inserted first: higher is better."""
        return self.least_first.mean(-1)

    @property
    def aopc(self) -> Tensor:
        """(e, b) mean over the steps of p_0 - p_s, the most relevant removed first: higher is better."""
        return (self.most_first[..., :1] - self.most_first).mean(-1)

    @property
    def aopc_over_random(self) -> Tensor:
        """(e, b) AOPC minus the mean AOPC of the random orders: 0 is chance."""
        return self.at_random.mean((0, -1)) - self.deletion_area

    @property
    def monotonicity(self) -> Tensor:
        """(e, b) falls / (falls + rises) of p, the most relevant removed first: 1 never rises; NaN if nothing moves.

        The step to the bag of zeros is left out: it depends on how the model treats zeros, not on the map.
        """
        steps = self.most_first[..., :-1].diff(dim=-1)
        return -steps.clamp_max(0).sum(-1) / steps.abs().sum(-1)

    def necessity(self, fraction: float) -> Tensor:
        """(e, b) p of the bag minus p without its most relevant `fraction`: high if they were needed."""
        return self.most_first[..., 0] - self.most_first[..., self._step(fraction)]

    def sufficiency(self, fraction: float) -> Tensor:
        """(e, b) p of the most relevant `fraction` alone minus p of the bag: 0 or more if they are enough."""
        return self.insertion[..., self._step(fraction)] - self.insertion[..., -1]

    def _step(self, fraction: float) -> int:
        steps = self.most_first.shape[-1] - 1
        step = round(fraction * steps)
        if not 0 <= step <= steps or abs(step - fraction * steps) > 1e-6:
            raise CarmilError(
                f"a fraction of {fraction:g} at {steps} steps: expected a multiple of {1 / steps:g} up to 1"
            )
        return step


def faithfulness_of(
    model: BagModel,
    bags: Bags,
    maps: Tensor,
    classes: Tensor,
    *,
    steps: int = 100,
    random_orders: int = 10,
    seed: int = 0,
) -> Faithfulness:
    """Deletion and insertion curves of the probability of `classes` (b), one class per bag, in the order of maps (e, n)."""
    maps = _checked(maps, bags).cpu()
    logits = deletion_logits(model, bags, deletion_orders(maps, random_orders=random_orders, seed=seed), steps=steps)
    return faithfulness_from_logits(logits, classes, maps=len(maps))


def deletion_orders(maps: Tensor, *, random_orders: int = 10, seed: int = 0) -> Tensor:
    """The orders of `faithfulness_from_logits`: by maps (e, n), by their negatives, and at random: (e + e + r, n)."""
    generator = torch.Generator().manual_seed(seed)
    chance = torch.rand(random_orders, maps.shape[1], generator=generator).to(maps.dtype)
    return torch.cat([maps, -maps, chance])


def faithfulness_from_logits(
    logits: Tensor, classes: Tensor, *, maps: int, right: Tensor | None = None
) -> Faithfulness:
    """The curves from the `deletion_logits` of `deletion_orders`: (e + e + r, b, S+1, k).

    right (b): whether the prediction counts as correct; by default, whether the most probable class is the bag's.
    """
    classes = classes.cpu()
    p = logits.softmax(-1).gather(-1, classes[None, :, None, None].expand(*logits.shape[:-1], 1)).squeeze(-1)
    most_first, least_first, at_random = p.split([maps, maps, len(p) - 2 * maps])
    if right is None:
        right = logits[0, :, 0].argmax(-1) == classes
    return Faithfulness(most_first, least_first, at_random, right=right)


def deletion_logits(
    model: BagModel, bags: Bags, maps: Tensor, *, steps: int = 100, max_instances: int = 2**17, fast: bool = True
) -> Tensor:
    """Logits (e, b, S+1, k) as instances are removed, the highest of each map (e, n) first, on the CPU.

    `fast=False` predicts every reduced bag, whatever the model declares: for comparison.
    """
    maps = _checked(maps, bags)
    if steps < 1:
        raise CarmilError(f"{steps} steps: expected at least one")
    like = next(model.parameters())
    was_training = model.training
    model.eval()
    parts = []
    try:
        with torch.no_grad():
            for first, last in runs_of([size + steps for size in bags.sizes.tolist()], max_instances):
                rows = slice(int(bags.offsets[first]), int(bags.offsets[last]))
                offsets = Offsets(bags.offsets[first : last + 1] - rows.start, like.device)
                features = bags.features[rows].to(like.device, like.dtype)
                some = maps[:, rows].to(like.device)
                parts.append(_deleted(model, features, offsets, some, steps, max_instances, fast).cpu())
    finally:
        model.train(was_training)
    return torch.cat(parts, dim=1)


def evidence_of_class(evidence: Tensor, classes: Tensor, offsets: Offsets | Tensor) -> Tensor:
    """Each instance's evidence for its bag's class. evidence (..., n, k), classes (b) -> (..., n)."""
    offsets = Offsets.of(offsets, evidence.device)
    column = classes.to(evidence.device)[offsets.bag_of].unsqueeze(-1)
    return evidence.gather(-1, column.expand(*evidence.shape[:-1], 1)).squeeze(-1)


def auc_curve(logits: Tensor, labels: ArrayLike) -> NDArray[np.float64]:
    """The AUC of the cohort as instances are removed: of class 1, or the mean one-vs-rest. Logits (e, b, S+1, k) -> (e, S+1).

    NaN where a class has no bag. Use the maps of the predicted class: an order by the label's map would leak the label.
    """
    p = logits.double().softmax(-1).transpose(1, 2)
    own = one_hot(torch.as_tensor(labels), p.shape[-1]).bool()
    cohort = torch.tensor([0, len(own)])  # bags are ranked as the instances of one bag are
    areas = auroc(p, own, cohort).squeeze(-2)  # (e, S+1, k)
    return (areas[..., 1] if p.shape[-1] == 2 else areas.mean(-1)).numpy()


def _deleted(
    model: BagModel, features: Tensor, offsets: Offsets, maps: Tensor, steps: int, max_instances: int, fast: bool
) -> Tensor:
    """Logits (e, b, S+1, k)."""
    removed = offsets.sizes.unsqueeze(-1) * torch.arange(steps + 1, device=features.device) // steps  # (b, S+1)
    if fast and Ability.POOLS_BY_ATTENTION | Ability.INSTANCE_WISE in model.abilities:
        z = model.embed(features, offsets)
        u = model.attend(z, offsets)
        # A bag of zeros is pooled to embed(0), however many there are.
        nothing = model(torch.zeros_like(features[:1]), Offsets(torch.tensor([0, 1]), features.device)).logits
        some = max(1, ROWS // (offsets.instances + steps * offsets.bags))
        parts = [_by_groups(model, z, u, offsets, part, removed) for part in maps.split(some)]
        return _with_end(torch.cat(parts), nothing)
    nothing = model(torch.zeros_like(features), offsets).logits
    return _with_end(_by_passes(model, features, offsets, maps, removed, max_instances), nothing)


def _by_groups(model: BagModel, z: Tensor, u: Tensor, offsets: Offsets, maps: Tensor, removed: Tensor) -> Tensor:
    """Logits (e, b, S, k) of what remains, from instances z (n, d) and scores u (n, h) that do not depend on the bag."""
    steps = removed.shape[1] - 1
    begins = offsets.starts[:-1, None] + removed[:, :-1]
    groups = Offsets(torch.cat([begins.flatten(), offsets.starts[-1:]]))
    order = bag_ranking(maps.unsqueeze(-1), offsets).squeeze(-1)  # (e, n)
    u, z = u[order], z[order]
    pooled = bag_weighted_sum(bag_softmax(u, groups), z, groups)  # (e, b S, h, d)
    pooled = pooled.unflatten(1, (offsets.bags, steps))
    logsum = _bag_logsumexp(u, groups).unflatten(1, (offsets.bags, steps))  # (e, b, S, h)
    share = (logsum - logsum.flip(2).logcumsumexp(2).flip(2)).exp().unsqueeze(-1)
    left = pooled[:, :, -1]  # the last group is never empty
    lefts = [left]
    for s in reversed(range(steps - 1)):
        left = torch.lerp(left, pooled[:, :, s], share[:, :, s])
        lefts.append(left)
    Z = torch.stack(lefts[::-1], dim=2)
    return model.classify(Z.flatten(0, 2)).unflatten(0, Z.shape[:3])


def _by_passes(
    model: BagModel, features: Tensor, offsets: Offsets, maps: Tensor, removed: Tensor, max_instances: int
) -> Tensor:
    """Logits (e, b, S, k) of what remains, with every reduced bag as a bag of its own."""
    shape = (len(maps), offsets.bags, removed.shape[1] - 1)
    places = bag_places(maps.unsqueeze(-1), offsets).squeeze(-1).cpu()
    starts, removed = offsets.starts.cpu(), removed.cpu()
    which = torch.cartesian_prod(*map(torch.arange, shape)).view(-1, 3)  # map, bag and step of every reduced bag
    parts = []
    for first, last in runs_of(starts.diff()[which[:, 1]].tolist(), max_instances):
        of_map, bag, step = which[first:last].unbind(1)
        whole, rows = rows_of(starts, bag)
        reduced = torch.repeat_interleave(torch.arange(last - first), whole.diff())
        kept = places[of_map[reduced], rows] >= removed[bag, step][reduced]
        sizes = reduced[kept].bincount(minlength=last - first)
        left = Offsets(torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]), features.device)
        parts.append(model(features[rows[kept].to(features.device)], left).logits)
    return torch.cat(parts).unflatten(0, shape)


def _with_end(logits: Tensor, nothing: Tensor) -> Tensor:
    """(e, b, S, k) and (b, k) or (1, k) -> (e, b, S+1, k)."""
    return torch.cat([logits, nothing.unsqueeze(1).expand(*logits.shape[:2], 1, -1)], dim=2)


def _bag_logsumexp(u: Tensor, offsets: Offsets) -> Tensor:
    """(..., n, h) -> (..., b, h); -inf for an empty bag."""
    top = bag_max(u, offsets)
    return bag_sum((u - top.index_select(-2, offsets.bag_of)).exp(), offsets).log() + top


def _checked(maps: Tensor, bags: Bags) -> Tensor:
    if maps.ndim != 2 or maps.shape[1] != len(bags.features):
        raise CarmilError(
            f"maps have shape {tuple(maps.shape)} for {len(bags.features)} instances: expected (maps, instances), "
            "one number per instance; evidence_of_class takes the column of each bag's class"
        )
    if maps.isnan().any():
        raise CarmilError("a map holds NaN: expected a number for every instance, to order them by")
    return maps
