"""Test of the theory in the paper's appendix that delta = u_cf - u follows -g.

    g = d(F_y - F_k)/du          the margin's sensitivity, y the bag's class, k its rival (or the mean of several)
    m = (F_y - F_k)(u) - (F_y - F_k)(u_cf), to first order -g . delta; the largest m of all delta with the same |delta|_1 is
    m = |delta|_1 max|g|, with all of delta on the instance with the largest |g|

A constant added to all of a bag's scores changes no softmax: g sums to zero by itself. The mean is subtracted from
delta for correlations, and the median for its L1 length, which thereby becomes minimal. n instances, b bags, k
classes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.evidence.branch_outputs import BranchOutputs, TestedModel, predict_branches
from carmil.evidence.rank_correlation import bag_places, pearson, spearman
from carmil.evidence.sensitivity import logit_sensitivity
from carmil.models.contract import BagModel, one_hot
from carmil.models.pooling import Offsets, bag_max, bag_sum
from carmil.statistics.bootstrap import mean_intervals

Floats = NDArray[np.float64]

MEASURES = ("pearson", "spearman", "on_largest", "efficiency", "with_u")
SHUFFLED = "_shuffled"  # added to the name of a measure
TENTH = 10  # one instance in this many, and at least one, counts as having the largest |g|


@dataclass(frozen=True, eq=False)
class Followed:
    """Results of r models in b bags: MEASURES (r, b) of delta as it is, and shuffled within its bag; margins m and -g .
    delta (r, b).

    instances (r, n, 2): -g and delta of every instance, each centred and scaled to unit length in its bag.
    """

    measures: dict[str, Floats]
    margin: Floats
    promised: Floats
    instances: Floats

    @cached_property
    def intervals(self) -> dict[str, tuple[float, float, float]]:
        """Return the mean of every measure, and its 95 % interval over jointly resampled bags and models, from the
        same resamples.
        """
        columns = np.stack([*self.measures.values()], axis=-1)
        models, bags = np.indices(columns.shape[:2])
        means = mean_intervals(columns.reshape(-1, len(self.measures)), bags.ravel(), models.ravel())
        return dict(zip(self.measures, zip(*(column.tolist() for column in means), strict=True), strict=True))

    @property
    def r2(self) -> list[float]:
        """Return, for each model, R2 of -g . delta as a prediction of m; NaN if m is constant."""
        left, spread = ((self.margin - self.promised) ** 2).sum(1), _deviations(self.margin)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(spread.any(1), 1 - left / (spread**2).sum(1), np.nan).tolist()

    @property
    def slope(self) -> list[float]:
        """Return, for each model, the slope of m on -g . delta; NaN if -g . delta is constant."""
        away, spread = _deviations(self.promised), _deviations(self.margin)
        with np.errstate(invalid="ignore"):
            return ((away * spread).sum(1) / (away**2).sum(1)).tolist()


def _deviations(values: Floats) -> Floats:
    return values - values.mean(1, keepdims=True)


def followed(cohort: Bags, models: Iterable[TestedModel], *, rival: str = "all others", seed: int = 0) -> Followed:
    """Measure how delta, and a shuffled delta, follow -g on the test bags of the models, which are the same for all."""
    generator = torch.Generator().manual_seed(seed)
    parts: dict[str, list[Tensor]] = {name: [] for name in ("measures", "margin", "promised", "instances")}
    for one in models:
        bags, labels, model = cohort[one.places], one.labels, one.model
        outputs = predict_branches(model, bags)
        offsets, against = outputs.offsets, margins(outputs, labels, rival)
        g = margin_gradient(model, bags, outputs, against)
        u = outputs.scores.double()
        delta = (outputs.counterfactual_scores - outputs.scores).double()
        parts["margin"].append(((outputs.logits - outputs.counterfactual_logits).double() * against).sum(1))
        parts["promised"].append(-bag_sum((g * delta).unsqueeze(-1), offsets)[:, 0])
        shuffled = _shuffled(delta, offsets, generator)
        parts["measures"].append(torch.cat([_measured(g, each, u, offsets) for each in (delta, shuffled)], dim=-1))
        parts["instances"].append(torch.stack([_unit(-g, offsets), _unit(delta, offsets)], dim=-1))
    measures, margin, promised, instances = (torch.stack(values).numpy() for values in parts.values())
    names = [*MEASURES, *(name + SHUFFLED for name in MEASURES)]
    return Followed(dict(zip(names, np.moveaxis(measures, -1, 0), strict=True)), margin, promised, instances)


def margin_gradient(model: BagModel, bags: Bags, seen: BranchOutputs, margin: Tensor) -> Tensor:
    """Return g (n) of the margin of each bag."""
    first = next(model.parameters())
    s = logit_sensitivity(model, bags.features.to(first), Offsets(bags.offsets, first.device)).double().cpu()
    return (s * margin[seen.offsets.bag_of]).sum(1)


def margins(seen: BranchOutputs, labels: Tensor, rival: str) -> Tensor:
    """Return (b, k) the coefficients of the logits in the margin: 1 for the bag's class, -1 shared by its rivals."""
    classes = seen.logits.shape[1]
    own = one_hot(labels, classes).double()
    if rival == "all others":
        return own - (1 - own) / (classes - 1)
    of = seen.logits if rival == "runner-up" else seen.logits - seen.counterfactual_logits
    return own - one_hot(of.masked_fill(own.bool(), -torch.inf).argmax(1), classes).double()


def _measured(g: Tensor, delta: Tensor, u: Tensor, offsets: Offsets) -> Tensor:
    """Return the measures (b, measures), in the order of MEASURES."""
    column, against = delta.unsqueeze(-1), -g.unsqueeze(-1)
    medians = torch.tensor([np.median(part) for part in delta.split(offsets.sizes.tolist())])
    length = (column - medians[offsets.bag_of].unsqueeze(-1)).abs()
    total, largest = bag_sum(length, offsets), bag_max(against.abs(), offsets)
    counted = (offsets.sizes // TENTH).clamp_min(1)[offsets.bag_of].unsqueeze(-1)
    on_largest = bag_sum(length * (bag_places(against.abs(), offsets) < counted), offsets) / total
    gained = bag_sum(against * column, offsets) / (total * largest)
    alike = [pearson(column, against, offsets), spearman(column, against, offsets)]
    return torch.cat([*alike, on_largest, gained, pearson(column, u.unsqueeze(-1), offsets)], dim=-1)


def _unit(values: Tensor, offsets: Offsets) -> Tensor:
    """Return the values, centred and with a mean square of 1 in each bag."""
    column, sizes = values.unsqueeze(-1), offsets.sizes.unsqueeze(-1)
    centred = column - (bag_sum(column, offsets) / sizes)[offsets.bag_of]
    return (centred / (bag_sum(centred**2, offsets) / sizes).sqrt()[offsets.bag_of]).squeeze(-1)


def _shuffled(values: Tensor, offsets: Offsets, generator: torch.Generator) -> Tensor:
    """Return the values in random order within each bag."""
    keys = torch.rand(len(values), generator=generator, dtype=torch.float64) + offsets.bag_of
    return values[keys.argsort()]
