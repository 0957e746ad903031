"""Faithfulness: delete instances in the order of a map, and follow the model's prediction.

One number per bag is followed, which should fall as the most relevant instances are removed: the probability of a class
or label, or F of another target (`Link.per_output`). `Target.followed` defines the number that `carmil faithfulness`
follows.

At step s of S the floor(s n / S) most relevant of a bag's n instances are removed; at the last step, where none is
left, the bag is a bag of zeros of the same size, as in the paper and xMIL. The remaining instances keep their order;
equally relevant instances are removed in the order of the bag. Insertion of the most relevant first is deletion of
the least relevant first, read backwards. Equal steps are too coarse to count the few instances that suffice for an
answer; with `ends`, single instances are removed first and last (see `removal_counts`). With `regions`, groups of
neighbouring instances are removed together, in the order of their mean relevance, and all counts are of regions.

Where z_j and u_j do not depend on the bag (Ability.INSTANCE_WISE), one pass is enough for all steps and maps. Group
t, which is removed between steps t and t+1, is pooled by itself, Z_t with l_t = log sum exp(u_j); the instances
remaining at step s are group s and those remaining at s+1:

    R_s = r_s Z_s + (1 - r_s) R_(s+1),    r_s = exp(l_s - log sum over t >= s of exp(l_t)),    F_s = classify(R_s)

a cumulative sum that never subtracts, so that no precision is lost when the instances with all the weight are removed
first. Other models (DSMIL, RRT, TransMIL, ...) predict every reduced bag, many per pass.

e maps, n instances of all bags together, b bags, S equal steps, T steps in all, d features, h heads, k classes, r random
orders.
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
from carmil.models.pooling import Offsets, bag_max, bag_mean, bag_ranking, bag_softmax, bag_sum, bag_weighted_sum
from carmil.targets.links import Softmax

ROWS = 2**17  # instances, over all maps, that are sorted at once
SINGLE, GROWTH = 10, 1.25  # single instances at each end; after them, each count is this many times the one before
FRACTION = 0.1  # of the instances, for necessity and sufficiency
CONFIDENCE = 0.9  # tau, at which the smallest number of instances must keep the answer
DROPPED = 0.5  # of the instances, for robustness
ROUNDING = 1e-6  # of p; smaller changes are rounding errors of single precision, neither falls nor rises


@dataclass(frozen=True)
class Faithfulness:
    """The number p that is followed for each bag, such as the probability of its class, as instances are removed step
    by step.

    most_first, least_first (e, b, S+1): the most or the least relevant are removed first, in equal steps
    at_random (r, b, S+1): in random orders
    unchanged (r, b, S+1): whether the answer is the same as for the whole bag, in random orders
    kept_counts (b, T), kept (e, b, T): p of the 1, 2, ..., n most relevant instances alone; counts may repeat
    right (b): whether the model predicts that class for the whole bag; for other targets, true for every bag
    """

    most_first: Tensor
    least_first: Tensor
    at_random: Tensor
    unchanged: Tensor
    kept_counts: Tensor
    kept: Tensor
    right: Tensor

    def over(self, bags: Tensor) -> "Faithfulness":
        """Return the curves of some bags, a mask or positions; the paper reports `over(right)`."""
        by_bag = {name: getattr(self, name)[bags] for name in ("kept_counts", "right")}
        curves = ("most_first", "least_first", "at_random", "unchanged", "kept")
        return replace(self, **by_bag, **{name: getattr(self, name)[:, bags] for name in curves})

    @property
    def insertion(self) -> Tensor:
        """Return (e, b, S+1) p as the most relevant are inserted first, from the bag of zeros to the complete bag."""
        return self.least_first.flip(-1)

    @property
    def deletion_area(self) -> Tensor:
        """Return (e, b) the mean of the S+1 values of p, the most relevant removed first (xMIL's AUPC): lower is better."""
        return self.most_first.mean(-1)

    @property
    def insertion_area(self) -> Tensor:
        """Return (e, b) the mean of the S+1 values of p, the most relevant inserted first: higher is better."""
        return self.least_first.mean(-1)

    @property
    def srg(self) -> Tensor:
        """Return (e, b) the area between the two curves, the least and the most relevant removed first (xMIL's SRG): higher
        is better, and 0 is expected of a random order.

        Both curves begin and end at the same two values of p, whatever the map.
        """
        return self.insertion_area - self.deletion_area

    @property
    def aopc(self) -> Tensor:
        """Return (e, b) the mean over the steps of p_0 - p_s, the most relevant removed first: higher is better."""
        return (self.most_first[..., :1] - self.most_first).mean(-1)

    @property
    def aopc_over_random(self) -> Tensor:
        """Return (e, b) AOPC minus the mean AOPC of the random orders: 0 is chance."""
        return self.at_random.mean((0, -1)) - self.deletion_area

    @property
    def monotonicity(self) -> Tensor:
        """Return (e, b) falls / (falls + rises) of p, the most relevant removed first: 1 if p never rises; NaN if p
        is constant, up to rounding.

        The step to the bag of zeros is left out: it depends on how the model treats zeros, not on the map.
        """
        p = self.most_first[..., :-1]
        steps = p.diff(dim=-1)
        steps = steps.where(steps.abs() > ROUNDING * p.abs().amax(-1, keepdim=True), 0.0)
        return -steps.clamp_max(0).sum(-1) / steps.abs().sum(-1)

    def necessity(self, fraction: float) -> Tensor:
        """Return (e, b) p of the bag minus p without its most relevant `fraction`: high if these instances are
        necessary; NaN for bags so small that this fraction is less than one instance.
        """
        step, steps = self._step(fraction), self.most_first.shape[-1] - 1
        some = self.kept_counts[:, -1] * step >= steps
        return (self.most_first[..., 0] - self.most_first[..., step]).where(some, torch.nan)

    def sufficiency(self, fraction: float) -> Tensor:
        """Return (e, b) p of the most relevant `fraction` alone minus p of the bag: 0 or more if these instances suffice."""
        return self.insertion[..., self._step(fraction)] - self.insertion[..., -1]

    def msk(self, confidence: float = CONFIDENCE, *, relative: bool = False) -> Tensor:
        """Return (e, b) the smallest number of instances, the most relevant, for which p is at least `confidence`
        (ReaMIL's minimal sufficient K): lower is better.

        NaN where p of the whole bag is below it: these bags are the same for all maps. relative: as a share of p of the
        whole bag, for numbers that are not probabilities; NaN where that is not positive.
        """
        whole = self.kept[..., -1:]
        least = confidence * whole if relative else torch.full_like(whole, confidence)
        first = (self.kept >= least).to(torch.int8).argmax(-1)
        counts = self.kept_counts.expand(self.kept.shape).gather(-1, first.unsqueeze(-1)).squeeze(-1)
        defined = whole > 0 if relative else whole >= least
        return counts.double().where(defined.squeeze(-1), torch.nan)

    @property
    def aukc(self) -> Tensor:
        """Return (e, b) the mean of p over the number of most relevant instances kept, on a logarithmic axis from 1 to n
        (after ReaMIL's area under the kept-K curve): higher is better.

        On this axis the first ten instances count as much as the next ninety; the insertion area counts all the same.
        """
        places = self.kept_counts.double().log()
        area = torch.trapezoid(self.kept.double(), places.expand(self.kept.shape), dim=-1)
        return torch.where(places[:, -1] > 0, area / places[:, -1], self.kept[..., -1].double())

    def robustness(self, fraction: float = DROPPED) -> Tensor:
        """Return (b) the share of random orders in which the answer is unchanged without the first `fraction` of the
        instances. It is a property of the model, not of a map.
        """
        return self.unchanged[..., self._step(fraction)].double().mean(0)

    def figures(self, *, confidence: float = CONFIDENCE, relative: bool = False) -> dict[str, Tensor]:
        """Return the figures of each map and bag by name, (e, b) each. confidence, relative: see `msk`."""
        return {
            "deletion_area": self.deletion_area,
            "insertion_area": self.insertion_area,
            "srg": self.srg,
            "aopc_over_random": self.aopc_over_random,
            "monotonicity": self.monotonicity,
            "necessity": self.necessity(FRACTION),
            "sufficiency": self.sufficiency(FRACTION),
            "msk": self.msk(confidence, relative=relative),
            "aukc": self.aukc,
        }

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
    regions: Tensor | None = None,
) -> Faithfulness:
    """Return deletion and insertion curves in the order of maps (e, n): of the probability of `classes` (b), one per
    bag; for other targets, of the output with this number, as `Link.per_output` returns it.

    regions (n): removed together, see `evidence.regions`. The answer is the most probable class; for other targets, the
    side of 0 that F is on.
    """
    maps, classes = _checked(maps, bags).cpu(), classes.cpu()
    orders = deletion_orders(maps, random_orders=random_orders, seed=seed)
    by_maps, by_chance = orders.split([2 * len(maps), random_orders])
    logits = deletion_logits(model, bags, by_maps, steps=steps, ends=True, regions=regions)
    at_random = deletion_logits(model, bags, by_chance, steps=steps, regions=regions)
    follow = model.link.per_output
    if isinstance(model.link, Softmax):
        right = logits[0, :, 0].argmax(-1) == classes
        answers = at_random.argmax(-1)
    else:
        right = torch.ones(len(bags), dtype=torch.bool)
        answers = of_outputs(at_random, classes) > 0
    return faithfulness_from_curves(
        of_outputs(follow(logits), classes),
        at_random=of_outputs(follow(at_random), classes),
        unchanged=answers == answers[..., :1],
        right=right,
        removed=removal_counts(unit_counts(bags, regions), steps, ends=True),
    )


def deletion_orders(maps: Tensor, *, random_orders: int = 10, seed: int = 0) -> Tensor:
    """Return the orders of deletion: by maps (e, n), by their negatives, and at random: (e + e + r, n)."""
    generator = torch.Generator().manual_seed(seed)
    chance = torch.rand(random_orders, maps.shape[1], generator=generator).to(maps.dtype)
    return torch.cat([maps, -maps, chance])


def of_outputs(values: Tensor, outputs: Tensor) -> Tensor:
    """Select one output of each bag. values (e, b, T, k), outputs (b) -> (e, b, T)."""
    return values.gather(-1, outputs[None, :, None, None].expand(*values.shape[:-1], 1)).squeeze(-1)


def faithfulness_from_curves(
    by_maps: Tensor, *, at_random: Tensor, unchanged: Tensor, right: Tensor, removed: Tensor
) -> Faithfulness:
    """Return the curves as one object.

    by_maps (2 e, b, T+1): the number that was followed as `removed` (b, T+1, see `removal_counts`) instances or regions
    were removed by e maps, then by their negatives. at_random, unchanged (r, b, S+1): in equal steps. right (b).
    """
    most_first, least_first = at_equal_steps(by_maps, removed, at_random.shape[-1] - 1).chunk(2)
    return Faithfulness(
        most_first,
        least_first,
        at_random,
        unchanged=unchanged,
        kept_counts=removed[:, -1:] - removed[:, :-1].flip(-1),
        kept=by_maps[len(most_first) :, :, :-1].flip(-1),
        right=right,
    )


def removal_counts(sizes: Tensor, steps: int, *, ends: bool = False) -> Tensor:
    """Return the number of removed instances of each bag (b, T+1), which increases from none to all in S equal steps.

    ends: also the first and the last 1, 2, ..., 10 instances, then 1.25 times as many at each step, until equal steps
    are finer. Bags with fewer different counts have repeated ones.
    """
    sizes = sizes.unsqueeze(-1)
    equal = sizes * torch.arange(steps + 1, device=sizes.device) // steps
    if not ends:
        return equal
    counts = list(range(1, SINGLE + 1))
    while (grown := int(counts[-1] * GROWTH)) - counts[-1] <= int(sizes.max()) / steps:
        counts.append(grown)
    some = torch.tensor(counts, device=sizes.device)
    finer = (some <= SINGLE) | (some - some.roll(1) <= sizes / steps)
    some = torch.where(finer & (some < sizes), some, 0)
    return torch.cat([equal, some, torch.where(some > 0, sizes - some, 0)], dim=-1).sort(-1).values


def at_equal_steps(values: Tensor, removed: Tensor, steps: int) -> Tensor:
    """Select the S equal steps from values (e, b, T+1, ...) at all of `removal_counts` -> (e, b, S+1, ...)."""
    columns = torch.searchsorted(removed, removal_counts(removed[:, -1], steps))
    return values[:, torch.arange(len(removed)).unsqueeze(-1), columns]


def unit_counts(bags: Bags, regions: Tensor | None) -> Tensor:
    """Return the number of units in each bag (b) that are removed one by one: instances or, if given, regions (n)."""
    if regions is None:
        return bags.sizes
    numbers = regions.cpu().unsqueeze(-1).double()
    return bag_max(numbers, Offsets(bags.offsets)).squeeze(-1).long() + 1


def deletion_logits(
    model: BagModel,
    bags: Bags,
    maps: Tensor,
    *,
    steps: int = 100,
    ends: bool = False,
    regions: Tensor | None = None,
    max_instances: int = 2**17,
    fast: bool = True,
) -> Tensor:
    """Return the outputs F (e, b, T+1, k) as instances are removed, the highest of each map (e, n) first, on the CPU.

    ends: see `removal_counts`. regions (n): numbers from 0 in each bag, removed together, see `evidence.regions`.
    `fast=False` predicts every reduced bag, whatever the model declares: for comparison.
    """
    maps = _checked(maps, bags)
    if steps < 1:
        raise CarmilError(f"{steps} steps: expected at least one")
    removed = removal_counts(unit_counts(bags, regions), steps, ends=ends)
    like = next(model.parameters())
    was_training = model.training
    model.eval()
    parts = []
    try:
        with torch.no_grad():
            for first, last in runs_of([size + removed.shape[1] for size in bags.sizes.tolist()], max_instances):
                rows = slice(int(bags.offsets[first]), int(bags.offsets[last]))
                offsets = Offsets(bags.offsets[first : last + 1] - rows.start, like.device)
                features = bags.features[rows].to(like.device, like.dtype)
                some, counts = maps[:, rows].to(like.device), removed[first:last].to(like.device)
                distinct, columns = _distinct(counts)
                if regions is None:
                    order = _Order(some, distinct.unsqueeze(0))
                else:
                    order = _by_regions(some, regions[rows].to(like.device), offsets, distinct)
                logits = _deleted(model, features, offsets, order, max_instances, fast)
                parts.append(logits[:, torch.arange(len(counts)).unsqueeze(-1), columns].cpu())
    finally:
        model.train(was_training)
    return torch.cat(parts, dim=1)


def evidence_of_class(evidence: Tensor, classes: Tensor, offsets: Offsets | Tensor) -> Tensor:
    """Select each instance's evidence for its bag's class or other output. evidence (..., n, k), classes (b) -> (..., n)."""
    offsets = Offsets.of(offsets, evidence.device)
    column = classes.to(evidence.device)[offsets.bag_of].unsqueeze(-1)
    return evidence.gather(-1, column.expand(*evidence.shape[:-1], 1)).squeeze(-1)


def auc_curve(logits: Tensor, labels: ArrayLike) -> NDArray[np.float64]:
    """Return the AUC of the cohort as instances are removed: of class 1, or one-vs-rest. Logits (e, b, S+1, k) ->
    (e, S+1).

    NaN if a class has no bag. Use the maps of the predicted class: an order by the label's map would leak the
    label.
    """
    p = logits.double().softmax(-1).transpose(1, 2)
    own = one_hot(torch.as_tensor(labels), p.shape[-1]).bool()
    cohort = torch.tensor([0, len(own)])  # bags are ranked like the instances of one bag
    areas = auroc(p, own, cohort).squeeze(-2)  # (e, S+1, k)
    return (areas[..., 1] if p.shape[-1] == 2 else areas.mean(-1)).numpy()


@dataclass(frozen=True)
class _Order:
    """An order of removal, the highest of each map (e, n) first; removed (e or 1, b, T+1): number of instances removed
    at each step.
    """

    maps: Tensor
    removed: Tensor

    def split(self, some: int) -> list["_Order"]:
        if len(self.removed) > 1:  # every map has its own counts
            return [_Order(*pair) for pair in zip(self.maps.split(1), self.removed.split(1), strict=True)]
        return [_Order(part, self.removed) for part in self.maps.split(some)]


def _distinct(removed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the different counts of each bag (b, U), with zeros in front where there are fewer, and the column of each
    of `removed` (b, T+1) among them.
    """
    number = (removed.diff(dim=-1) > 0).long().cumsum(-1)
    number = torch.cat([torch.zeros_like(number[:, :1]), number], dim=-1)
    columns = number - number[:, -1:] + number[:, -1].max()
    distinct = removed.new_zeros(len(removed), int(columns.max()) + 1).scatter_(-1, columns, removed)
    return distinct, columns


def _by_regions(maps: Tensor, regions: Tensor, offsets: Offsets, removed: Tensor) -> _Order:
    """Return the order of instances if regions (n) are removed together, `removed` (b, T+1) of them at each step."""
    counts = bag_max(regions.unsqueeze(-1).double(), offsets).squeeze(-1).long() + 1
    units = Offsets(torch.cat([counts.new_zeros(1), counts.cumsum(0)]))
    unit = regions + units.starts[offsets.bag_of]
    by_unit = unit.argsort(stable=True)
    sizes = unit.bincount(minlength=units.instances)
    within = Offsets(torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))
    relevance = bag_mean(maps[:, by_unit].unsqueeze(-1), within)  # (e, units, 1)
    order = bag_ranking(relevance, units).squeeze(-1)
    before = torch.nn.functional.pad(sizes[order].cumsum(-1), (1, 0))  # instances in the regions ranked before
    starts = units.starts[:-1, None]
    instances = before[:, starts + removed] - before[:, starts]
    places = bag_places(relevance, units).squeeze(-1)
    return _Order(-places[:, unit].to(maps), instances)


def _deleted(
    model: BagModel, features: Tensor, offsets: Offsets, order: _Order, max_instances: int, fast: bool
) -> Tensor:
    """Return the logits (e, b, T+1, k) on the model's device."""
    if fast and Ability.POOLS_BY_ATTENTION | Ability.INSTANCE_WISE in model.abilities:
        z = model.embed(features, offsets)
        u = model.attend(z, offsets)
        # The pool of a bag of zeros is embed(0), whatever its size.
        nothing = model(torch.zeros_like(features[:1]), Offsets(torch.tensor([0, 1]), features.device)).logits
        some = max(1, ROWS // (offsets.instances + order.removed.shape[-1] * offsets.bags))
        return _with_end(torch.cat([_by_groups(model, z, u, offsets, part) for part in order.split(some)]), nothing)
    nothing = model(torch.zeros_like(features), offsets).logits
    return _with_end(_by_passes(model, features, offsets, order, max_instances), nothing)


def _by_groups(model: BagModel, z: Tensor, u: Tensor, offsets: Offsets, order: _Order) -> Tensor:
    """Return logits (e, b, T, k) of the remaining instances, if z (n, d) and u (n, h) do not depend on the bag."""
    removed = order.removed[0]
    steps = removed.shape[1] - 1
    begins = offsets.starts[:-1, None] + removed[:, :-1]
    groups = Offsets(torch.cat([begins.flatten(), offsets.starts[-1:]]))
    rows = bag_ranking(order.maps.unsqueeze(-1), offsets).squeeze(-1)  # (e, n)
    u, z = u[rows], z[rows]
    pooled = bag_weighted_sum(bag_softmax(u, groups), z, groups)  # (e, b T, h, d)
    pooled = pooled.unflatten(1, (offsets.bags, steps))
    logsum = _bag_logsumexp(u, groups).unflatten(1, (offsets.bags, steps))  # (e, b, T, h)
    share = (logsum - logsum.flip(2).logcumsumexp(2).flip(2)).exp().unsqueeze(-1)
    left = pooled[:, :, -1]  # the last group is never empty
    lefts = [left]
    for s in reversed(range(steps - 1)):
        left = torch.lerp(left, pooled[:, :, s], share[:, :, s])
        lefts.append(left)
    Z = torch.stack(lefts[::-1], dim=2)
    return model.classify(Z.flatten(0, 2)).unflatten(0, Z.shape[:3])


def _by_passes(model: BagModel, features: Tensor, offsets: Offsets, order: _Order, max_instances: int) -> Tensor:
    """Return logits (e, b, T, k) of the remaining instances, with every reduced bag as a separate bag; zeros at counts
    that repeat the next.
    """
    removed = order.removed.expand(len(order.maps), -1, -1)
    needed = removed.diff(dim=-1) > 0
    places = bag_places(order.maps.unsqueeze(-1), offsets).squeeze(-1).cpu()
    starts, removed, which = offsets.starts.cpu(), removed.cpu(), needed.nonzero().cpu()
    parts = []
    for first, last in runs_of(starts.diff()[which[:, 1]].tolist(), max_instances):
        of_map, bag, step = which[first:last].unbind(1)
        whole, rows = rows_of(starts, bag)
        reduced = torch.repeat_interleave(torch.arange(last - first), whole.diff())
        kept = places[of_map[reduced], rows] >= removed[of_map, bag, step][reduced]
        sizes = reduced[kept].bincount(minlength=last - first)
        left = Offsets(torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]), features.device)
        parts.append(model(features[rows[kept].to(features.device)], left).logits)
    logits = torch.cat(parts)
    every = logits.new_zeros(*needed.shape, logits.shape[-1])
    every[needed] = logits
    return every


def _with_end(logits: Tensor, nothing: Tensor) -> Tensor:
    """Append the logits of the bag of zeros: (e, b, T, k) and (b, k) or (1, k) -> (e, b, T+1, k)."""
    return torch.cat([logits, nothing.unsqueeze(1).expand(*logits.shape[:2], 1, -1)], dim=2)


def _bag_logsumexp(u: Tensor, offsets: Offsets) -> Tensor:
    """Return log sum exp(u) of each bag: (..., n, h) -> (..., b, h); -inf for an empty bag."""
    top = bag_max(u, offsets)
    return bag_sum((u - top.index_select(-2, offsets.bag_of)).exp(), offsets).log() + top


def _checked(maps: Tensor, bags: Bags) -> Tensor:
    if maps.ndim != 2 or maps.shape[1] != len(bags.features):
        raise CarmilError(
            f"maps have shape {tuple(maps.shape)} for {len(bags.features)} instances: expected (maps, "
            "instances), one number per instance; evidence_of_class selects the column of each bag's class"
        )
    if maps.isnan().any():
        raise CarmilError("a map contains NaN: expected a number for every instance")
    return maps
