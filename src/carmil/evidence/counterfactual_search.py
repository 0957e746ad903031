"""Search for a counterfactual attention of a frozen model, after Wachter et al. (the paper's appendix A.1).

    minimise over u_cf    alpha CE(F(u_cf), y_cf) + 1/N sum_j |u_cf_j - u_j|

by proximal gradient descent from u_cf = u: a step against the gradient of the first term, then a shrinkage of every
change towards zero, so that instances whose change reduces the first term too little keep their score:

    delta <- S(delta - eta alpha g, eta / N),    g = dCE/du_cf,    S(x, t) = sign(x) max(|x| - t, 0),    u_cf = u + delta

eta is such that the score with the largest gradient moves by `step`. alpha grows by the share `growth` per step, in
place of Wachter's maximum over alpha: at first only the most influential instances change, later more of them. The
search in a bag ends when the model predicts y_cf with a probability of at least `confidence`, and its result is that
u_cf. All searches end after `steps` steps, when no score has moved by more than step x steps: a class that attention
alone cannot reach, or only with a larger change, is reported as not reached. The search is deterministic.

Cost: one pass of embed and attend; each step pools the instances and computes one gradient, O(n d m h), for all bags
at once.

n instances of all bags together, b bags, d features, k classes, h heads, m counterfactual maps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from carmil.errors import CarmilError
from carmil.models.contract import Ability, BagModel, Counterfactual
from carmil.models.pooling import Offsets, bag_max, bag_softmax, bag_weighted_sum
from carmil.targets.links import Softmax, cross_entropy


@dataclass(frozen=True)
class SearchResult:
    """u_cf and F(u_cf), like those of a learned branch.

    For each map, (b, m): the target class, whether the model predicts it with the requested confidence, and the
    number of steps."""

    counterfactual: Counterfactual
    targets: Tensor
    reached: Tensor
    steps: Tensor


def search_counterfactual(
    model: BagModel,
    features: Tensor,
    offsets: Offsets | Tensor,
    targets: Tensor | None = None,
    *,
    confidence: float = 0.0,
    alpha: float = 1.0,
    growth: float = 0.05,
    step: float = 0.1,
    steps: int = 300,
) -> SearchResult:
    """Search, for every bag, for the attention that predicts `targets` (b) or (b, m), by default the second most
    probable class.
    """
    model.require(Ability.POOLS_BY_ATTENTION, "a counterfactual search")
    if not isinstance(model.link, Softmax):
        raise CarmilError("a counterfactual search needs another class to search for: this model predicts no classes")
    _check(confidence=confidence, alpha=alpha, growth=growth, step=step, steps=steps)
    offsets = Offsets.of(offsets, features.device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            z = model.embed(features, offsets)
            u = model.attend(z, offsets).unsqueeze(-2)  # (n, 1, h)
            wanted = _check_targets(targets, _logits(model, z, u, offsets).squeeze(1))
            u_cf, taken = u.repeat(1, wanted.shape[1], 1), torch.zeros_like(wanted)
            for i in range(steps):
                logits, gradient = _gradient(model, z, u_cf, offsets, wanted)
                searching = ~_reached(logits, wanted, confidence)  # (b, m)
                if not searching.any():
                    break
                next_cf = _proximal_step(u, u_cf, gradient, offsets, alpha * (1 + growth) ** i, step)
                u_cf = torch.where(searching[offsets.bag_of].unsqueeze(-1), next_cf, u_cf)
                taken += searching
            logits = _logits(model, z, u_cf, offsets)
    finally:
        model.train(was_training)
    return SearchResult(Counterfactual(u_cf, logits), wanted, _reached(logits, wanted, confidence), taken)


def _proximal_step(u: Tensor, u_cf: Tensor, gradient: Tensor, offsets: Offsets, alpha: float, step: float) -> Tensor:
    """Take one step of the proximal gradient; u is (n, 1, h), all other tensors are (n, m, h)."""
    steepest = bag_max(gradient.abs().amax(-1), offsets)[offsets.bag_of].unsqueeze(-1)  # (n, m, 1)
    steepest = steepest.clamp_min(torch.finfo(u.dtype).tiny)
    scores = offsets.sizes[offsets.bag_of][:, None, None] * u.shape[-1]  # the distance is also a mean over the heads
    delta = u_cf - u - step * (gradient / steepest)
    return u + delta.sign() * (delta.abs() - step / (alpha * steepest * scores)).clamp_min(0)


def _logits(model: BagModel, z: Tensor, scores: Tensor, offsets: Offsets) -> Tensor:
    """Compute logits from scores: (n, m, h) -> F (b, m, k)."""
    Z = bag_weighted_sum(bag_softmax(scores.flatten(1), offsets), z, offsets).unflatten(1, scores.shape[1:])
    return model.classify(Z.flatten(0, 1)).unflatten(0, Z.shape[:2])


def _gradient(model: BagModel, z: Tensor, scores: Tensor, offsets: Offsets, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return F (b, m, k), and dCE(F, targets)/d scores (n, m, h) of every bag and map."""
    with torch.enable_grad():
        scores = scores.detach().requires_grad_()
        logits = _logits(model, z, scores, offsets)
        (gradient,) = torch.autograd.grad(cross_entropy(logits, targets).sum(), scores)
    return logits.detach(), gradient


def _reached(logits: Tensor, targets: Tensor, confidence: float) -> Tensor:
    """Return (b, m) whether the target is predicted with the requested confidence."""
    p, answer = logits.softmax(-1).max(-1)
    return (answer == targets) & (p >= confidence)


def _check_targets(given: Tensor | None, logits: Tensor) -> Tensor:
    """Return the targets as (b, m), by default the second most probable class."""
    if given is None:
        return logits.topk(2, dim=-1).indices[:, 1:]
    targets = given.to(logits.device).long()
    targets = targets.unsqueeze(-1) if targets.ndim == 1 else targets
    bags, classes = logits.shape
    if targets.ndim != 2 or len(targets) != bags or not ((targets >= 0) & (targets < classes)).all():
        raise CarmilError(
            f"targets of shape {tuple(given.shape)} for {bags} bags: expected (bags) or (bags, maps), each from 0 to {classes - 1}"
        )
    return targets


def _check(*, confidence: float, alpha: float, growth: float, step: float, steps: int) -> None:
    if not 0 <= confidence < 1:
        raise CarmilError(f"a confidence of {confidence:g}: expected a probability from 0 to below 1")
    for name, value in (("alpha", alpha), ("step", step), ("steps", steps)):
        if not value > 0:
            raise CarmilError(f"{name} is {value:g}: expected a number > 0")
    if growth < 0:
        raise CarmilError(f"growth is {growth:g}: expected a number >= 0")
