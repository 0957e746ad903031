"""Which class grows under the counterfactual attention, and why: counted over the bags that a model answers rightly.

r models, b bags, n instances, k classes, d groups of digits; one row per true class.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.evidence import explain
from carmil.evidence.counterfactual_change import class_shift, count_choices
from carmil.models.pooling import bag_softmax, bag_sum
from carmil.reproduce.branch_outputs import BranchOutputs, TestedModel, predict_branches

Floats = NDArray[np.float64]

READINGS = {
    "grows most": "argmax of F(u_cf) - F(u) over all classes: the paper's words, and what its authors' code counts",
    "is answered": "argmax of F(u_cf): what the counterfactual attention answers",
    "strongest other": "argmax of F(u_cf) over the classes that are not the bag's",
    "falls most beside": "argmax of F(u) - F(u_cf) over the classes that are not the bag's: the competitor that the paper's "
    "appendix says the loss is governed by",
    "runner-up": "argmax of F(u) over the classes that are not the bag's: no counterfactual at all, a control",
}
CONTROL = "runner-up"
DIGITS = ("8", "9", "others")
EIGHT, NINE = (-1, 1, -1, 1), (-1, -1, 1, 1)  # what they say about the classes


@dataclass(frozen=True, eq=False)
class Shift:
    """counts (r, k, k) under each of READINGS; change (r, k, k), the mean F_c(u_cf) - F_c(u) of a true class's bags."""

    counts: dict[str, Floats]
    change: Floats

    @property
    def right(self) -> Floats:
        """(r, k) rightly answered bags of each class."""
        return self.counts["grows most"].sum(-1)

    def shares(self, reading: str = "grows most") -> Floats:
        """(r, k, k) of the rightly answered bags of a class; NaN where there are none."""
        with np.errstate(invalid="ignore"):
            return self.counts[reading] / self.right[..., None]


@dataclass(frozen=True, eq=False)
class Reasons:
    """On Four Bags, by true class of rightly answered bags: how much attention each group of digits has, before (a) and under
    the counterfactual (a_cf), (r, k, d); and path evidence (r, d, k) of all instances of a group in a bag, for each class."""

    attention: Floats
    counterfactual: Floats
    evidence: Floats


def shift_of(looked: Iterable[tuple[BranchOutputs, Tensor]]) -> Shift:
    """looked: what each model sees in its bags, and their labels (b)."""
    counts: dict[str, list[Tensor]] = {name: [] for name in READINGS}
    changes = []
    for seen, labels in looked:
        _, after = seen.branch
        for name, matrix in _readings(seen.logits, after, labels).items():
            counts[name].append(matrix)
        changes.append(_by_class(after - seen.logits, seen.logits, labels))
    return Shift({name: torch.stack(one).double().numpy() for name, one in counts.items()}, _stacked(changes))


def pooled(shift: Shift, groups: Sequence[int]) -> Shift:
    """Models of one group (folds of a seed) counted together: their bags are different ones."""
    which = np.asarray(groups)
    keys = list(dict.fromkeys(groups))
    counts = {name: np.stack([one[which == key].sum(0) for key in keys]) for name, one in shift.counts.items()}
    weights = shift.right[..., None]
    summed = np.where(weights > 0, shift.change * weights, 0.0)
    with np.errstate(invalid="ignore"):
        change = [summed[which == key].sum(0) / weights[which == key].sum(0) for key in keys]
    return Shift(counts, np.stack(change))


def reasons_of(bags: Bags, models: Iterable[TestedModel]) -> Reasons:
    """Where attention goes, by digit, and what each digit says for each class. On Four Bags the truth tells the digits apart."""
    before: list[Tensor] = []
    after: list[Tensor] = []
    evidence: list[Tensor] = []
    for one in models:
        tested, labels = bags[one.places], one.labels
        assert tested.instance_labels is not None
        eight, nine = ((tested.instance_labels == torch.tensor(signs)).all(1) for signs in (EIGHT, NINE))
        groups = torch.stack([eight, nine, ~eight & ~nine], dim=1)  # (n, d)
        path = explain(one.model, tested, "path").cpu()
        seen = predict_branches(one.model, tested)
        u_cf, _ = seen.branch
        for u, kept in ((seen.scores, before), (u_cf, after)):
            weights = bag_softmax(u.unsqueeze(-1), seen.offsets)
            kept.append(_by_class(bag_sum(weights * groups, seen.offsets), seen.logits, labels))
        right = (seen.logits.argmax(-1) == labels).unsqueeze(-1)
        present = (bag_sum(groups.double(), seen.offsets) > 0) & right  # (b, d)
        sums = torch.stack([bag_sum(path * group.unsqueeze(-1), seen.offsets) for group in groups.unbind(1)], dim=1)
        evidence.append((sums * present.unsqueeze(-1)).sum(0) / present.sum(0).unsqueeze(-1))
    return Reasons(_stacked(before), _stacked(after), _stacked(evidence))


def _readings(before: Tensor, after: Tensor, labels: Tensor) -> dict[str, Tensor]:
    own = torch.nn.functional.one_hot(labels, before.shape[-1]).bool()
    picks = {
        "is answered": after.argmax(-1),
        "strongest other": after.masked_fill(own, -torch.inf).argmax(-1),
        "runner-up": before.masked_fill(own, -torch.inf).argmax(-1),
        "falls most beside": (before - after).masked_fill(own, -torch.inf).argmax(-1),
    }
    return {
        "grows most": class_shift(before, after, labels),
        **{name: count_choices(picked, before, labels) for name, picked in picks.items()},
    }


def _by_class(values: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """The mean of (b, c) over the rightly answered bags of each class, (k, c)."""
    right = logits.argmax(-1) == labels
    members = torch.stack([right & (labels == y) for y in range(logits.shape[-1])]).double()
    return (members @ values.double()) / members.sum(1, keepdim=True)


def _stacked(rows: Sequence[Tensor]) -> Floats:
    return torch.stack([row.double() for row in rows]).numpy()
