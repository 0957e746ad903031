"""How far a trained counterfactual attention does what the appendix derives: delta = u_cf - u against -g.

    g = d(F_y - F_k)/du          the margin's sensitivity, y the bag's class, k its rival (or the mean of several)
    m = (F_y - F_k)(u) - (F_y - F_k)(u_cf), to first order -g . delta; of all delta with the same |delta|_1 the best has
    m = |delta|_1 max|g|, all of it on the instance of largest |g|

A constant added to all of a bag's scores changes no softmax: g sums to zero by itself; delta is taken less its mean where it is
correlated and less its median where its L1 length counts, which is the shortest it can be. n instances, b bags, k classes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.evidence.rank_correlation import bag_places, pearson, spearman
from carmil.evidence.sensitivity import logit_sensitivity
from carmil.models.contract import BagModel, one_hot
from carmil.models.pooling import Offsets, bag_max, bag_ranking, bag_sum
from carmil.reproduce.branch_outputs import BranchOutputs, TestedModel, predict_branches
from carmil.statistics.bootstrap import mean_intervals

Floats = NDArray[np.float64]

RIVALS = {
    "all others": "the mean of all other classes: -g is then the way that the loss L_diff falls steepest from u_cf = u",
    "runner-up": "the class with the next largest F(u), known before u_cf is looked at",
    "weighed most": "the class whose logit fell most beside the bag's own, which the appendix calls the most competitive; chosen "
    "after u_cf is known, as the one with the smallest margin",
}
MEASURES = {
    "pearson": "Pearson",
    "spearman": "Spearman",
    "on_largest": "share on the largest g",
    "efficiency": "share of the best gain",
    "with_u": "Pearson with u",
}
TENTH = 10  # one instance of so many counts as of the largest |g|, one at least


@dataclass(frozen=True, eq=False)
class Followed:
    """Of r models in b bags: measures (r, b) of delta as it is, and shuffled within its bag; margins m and -g . delta (r, b).

    instances (r, n, 2): -g and delta of every instance, each centred and of unit length in its bag.
    """

    measures: dict[str, Floats]
    shuffled: dict[str, Floats]
    margin: Floats
    promised: Floats
    instances: Floats

    def interval(self, name: str, *, shuffled: bool = False) -> tuple[float, float, float]:
        """Mean, and its 95 % interval over bags and models resampled together."""
        return self._intervals[name, shuffled]

    @cached_property
    def _intervals(self) -> dict[tuple[str, bool], tuple[float, float, float]]:
        """Of every measure as it is and shuffled, on the same resamples."""
        names = [(name, shuffled) for shuffled in (False, True) for name in self.measures]
        columns = np.stack([(self.shuffled if shuffled else self.measures)[name] for name, shuffled in names], axis=-1)
        models, bags = np.indices(columns.shape[:2])
        found = mean_intervals(columns.reshape(-1, len(names)), bags.ravel(), models.ravel())
        return dict(zip(names, np.transpose(found).tolist(), strict=True))

    def explained(self) -> tuple[list[float], list[float]]:
        """Of each model R2 of -g . delta as a prediction of m, and the slope of m on it; NaN where nothing varies."""
        found: tuple[list[float], list[float]] = ([], [])
        for m, p in zip(self.margin, self.promised, strict=True):
            spread, away = m - m.mean(), p - p.mean()
            found[0].append(float(1 - ((m - p) ** 2).sum() / (spread**2).sum()) if spread.any() else float("nan"))
            found[1].append(float((away * spread).sum() / (away**2).sum()) if away.any() else float("nan"))
        return found


def followed(cohort: Bags, models: Iterable[TestedModel], *, rival: str = "all others", seed: int = 0) -> Followed:
    """How delta follows -g on the test bags of the models, the same for all, and how a shuffled delta does."""
    generator = torch.Generator().manual_seed(seed)
    parts: dict[str, list[Tensor]] = {name: [] for name in ("real", "shuffled", "margin", "promised", "instances")}
    for one in models:
        bags, labels, model = cohort[one.places], one.labels, one.model
        seen = predict_branches(model, bags)
        against = margins(seen, labels, rival)
        g = margin_gradient(model, bags, seen, against)
        u_cf, after = seen.branch
        delta = (u_cf - seen.scores).double()
        parts["margin"].append(((seen.logits - after).double() * against).sum(1))
        parts["promised"].append(-bag_sum((g * delta).unsqueeze(-1), seen.offsets)[:, 0])
        parts["real"].append(_measured(g, delta, seen.scores.double(), seen.offsets))
        parts["shuffled"].append(
            _measured(g, _shuffled(delta, seen.offsets, generator), seen.scores.double(), seen.offsets)
        )
        parts["instances"].append(torch.stack([_unit(-g, seen.offsets), _unit(delta, seen.offsets)], dim=-1))
    stacked = {name: torch.stack(values).numpy() for name, values in parts.items()}
    real, shuffled = ({name: stacked[of][..., i] for i, name in enumerate(MEASURES)} for of in ("real", "shuffled"))
    return Followed(real, shuffled, stacked["margin"], stacked["promised"], stacked["instances"])


def margin_gradient(model: BagModel, bags: Bags, seen: BranchOutputs, margin: Tensor) -> Tensor:
    """g (n) of the margin of each bag."""
    first = next(model.parameters())
    s = logit_sensitivity(model, bags.features.to(first), Offsets(bags.offsets, first.device)).double().cpu()
    return (s * margin[seen.offsets.bag_of]).sum(1)


def margins(seen: BranchOutputs, labels: Tensor, rival: str) -> Tensor:
    """(b, k) how the logits make up the margin: 1 for the bag's class, -1 shared by its rivals."""
    classes = seen.logits.shape[1]
    own = one_hot(labels, classes).double()
    if rival == "all others":
        return own - (1 - own) / (classes - 1)
    of = seen.logits if rival == "runner-up" else seen.logits - seen.branch[1]
    return own - one_hot(of.masked_fill(own.bool(), -torch.inf).argmax(1), classes).double()


def _measured(g: Tensor, delta: Tensor, u: Tensor, offsets: Offsets) -> Tensor:
    """(b, measures), in the order of MEASURES."""
    column, against = delta.unsqueeze(-1), -g.unsqueeze(-1)
    length = (column - _medians(delta, offsets)[offsets.bag_of].unsqueeze(-1)).abs()
    total, largest = bag_sum(length, offsets), bag_max(against.abs(), offsets)
    counted = (offsets.sizes // TENTH).clamp_min(1)[offsets.bag_of].unsqueeze(-1)
    on_largest = bag_sum(length * (bag_places(against.abs(), offsets) < counted), offsets) / total
    gained = bag_sum(against * column, offsets) / (total * largest)
    alike = [pearson(column, against, offsets), spearman(column, against, offsets)]
    return torch.cat([*alike, on_largest, gained, pearson(column, u.unsqueeze(-1), offsets)], dim=-1)


def _unit(values: Tensor, offsets: Offsets) -> Tensor:
    """Centred, and with a mean square of 1 in each bag."""
    column = values.unsqueeze(-1)
    centred = column - (bag_sum(column, offsets) / offsets.sizes.unsqueeze(-1))[offsets.bag_of]
    size = (bag_sum(centred**2, offsets) / offsets.sizes.unsqueeze(-1)).sqrt()[offsets.bag_of]
    return (centred / size).squeeze(-1)


def _medians(values: Tensor, offsets: Offsets) -> Tensor:
    """(b) the middle value of each bag, of an even number the mean of both."""
    ranked = values[bag_ranking(values.unsqueeze(-1), offsets).squeeze(-1)]
    starts, sizes = offsets.starts[:-1], offsets.sizes
    return (ranked[starts + (sizes - 1) // 2] + ranked[starts + sizes // 2]) / 2


def _shuffled(values: Tensor, offsets: Offsets, generator: torch.Generator) -> Tensor:
    """The same values at other instances of their bag."""
    keys = torch.rand(len(values), generator=generator, dtype=torch.float64) + offsets.bag_of
    return values[keys.argsort()]
