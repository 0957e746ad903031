"""The effects of a counterfactual attention: on the class, the logits, and the location of the attention.

Learned and searched counterfactuals are treated alike. Leading axes, such as that of a population's models, are
carried through. n instances of all bags together, b bags, k classes, h heads, m counterfactual maps.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from carmil.errors import CarmilError
from carmil.evidence.rank_correlation import pearson, spearman
from carmil.models.contract import Counterfactual, Prediction, one_hot
from carmil.models.pooling import Offsets, bag_ranking, bag_softmax, bag_sum


@dataclass(frozen=True)
class CounterfactualChange:
    """answer (..., b): the class predicted by the factual attention. For each counterfactual map, (..., b, m):

    counterfactual_answer  argmax F(u_cf)
    grown                  argmax F(u_cf) - F(u): the class whose logit grows most, the paper's shift
    distance               |F(u_cf) - F(u)|, Euclidean
    attention_moved        sum_j |a_cf_j - a_j|, from 0 to 2, the mean over the heads
    carriers               the smallest share of the instances with 90 % of attention_moved; NaN if it is zero
    and logit_change (..., b, m, k), F(u_cf) - F(u).
    """

    answer: Tensor
    counterfactual_answer: Tensor
    grown: Tensor
    logit_change: Tensor
    distance: Tensor
    attention_moved: Tensor
    carriers: Tensor

    @property
    def flipped(self) -> Tensor:
        """Return (..., b, m) whether the counterfactual attention predicts another class."""
        return self.counterfactual_answer != self.answer.unsqueeze(-1)


@dataclass(frozen=True)
class Correlation:
    """Correlations of two maps in each bag, (..., b, c); NaN if one of them is constant."""

    spearman: Tensor
    pearson: Tensor


@torch.no_grad()
def counterfactual_change(
    prediction: Prediction, counterfactual: Counterfactual | None = None, *, softmax: bool = True, carried: float = 0.9
) -> CounterfactualChange:
    """Compare a prediction with its own counterfactual, or with a given one.

    softmax: False if scores are attention weights already (Ability.SCORES_ARE_WEIGHTS).
    carried: the share of the moved attention in the definition of `carriers`.
    """
    cf = counterfactual or prediction.counterfactual
    if cf is None or prediction.scores is None:
        raise CarmilError(
            "no counterfactual to compare with: expected a model with a counterfactual branch, or a searched counterfactual"
        )
    change = cf.logits - prediction.logits.unsqueeze(-2)
    moved = _moved(prediction.scores, cf.scores, prediction.offsets, softmax=softmax)
    return CounterfactualChange(
        answer=prediction.logits.argmax(-1),
        counterfactual_answer=cf.logits.argmax(-1),
        grown=change.argmax(-1),
        logit_change=change,
        distance=change.norm(dim=-1),
        attention_moved=bag_sum(moved, prediction.offsets),
        carriers=_carriers(moved, prediction.offsets, carried),
    )


def count_choices(choices: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """Count the chosen classes (..., b) over correctly predicted bags: (..., k, k), one row per true class.

    logits F(u) (..., b, k), labels (b).
    """
    classes = logits.shape[-1]
    right = one_hot(labels, classes) * (logits.argmax(-1) == labels).unsqueeze(-1)
    return (right.mT @ one_hot(choices, classes)).long()


def correlations(maps: Mapping[str, Tensor], offsets: Offsets | Tensor) -> dict[tuple[str, str], Correlation]:
    """Correlate every pair of the named maps (..., n, c), such as the factual, the counterfactual and a baseline's
    attention.

    Spearman's correlation is the same for scores and for their softmax, Pearson's is not.
    """
    pairs = {}
    for (first, x), (second, y) in itertools.combinations(maps.items(), 2):
        offsets = Offsets.of(offsets, x.device)
        pairs[first, second] = Correlation(spearman(x, y, offsets), pearson(x, y, offsets))
    return pairs


def attention_moved(prediction: Prediction, *, softmax: bool = True) -> Tensor:
    """Return (..., b, m) sum_j |a_cf_j - a_j| of the prediction's own counterfactual, from 0 to 2, the mean over the heads."""
    assert prediction.scores is not None and prediction.counterfactual is not None
    u_cf = prediction.counterfactual.scores
    return bag_sum(_moved(prediction.scores, u_cf, prediction.offsets, softmax=softmax), prediction.offsets)


def _moved(u: Tensor, u_cf: Tensor, offsets: Offsets, *, softmax: bool) -> Tensor:
    """Return |a_cf - a| of every instance and map, the mean over the heads: (..., n, h), (..., n, m, h) -> (..., n, m)."""
    maps = u_cf.flatten(-2)
    if softmax:
        u, maps = bag_softmax(u, offsets), bag_softmax(maps, offsets)
    return (maps.unflatten(-1, u_cf.shape[-2:]) - u.unsqueeze(-2)).abs().mean(-1)


def _carriers(moved: Tensor, offsets: Offsets, carried: float) -> Tensor:
    """Return the carriers of each bag and map: (..., n, m) -> (..., b, m)."""
    moved = moved.double()
    ranked = moved.gather(-2, bag_ranking(moved, offsets))
    total = bag_sum(moved, offsets)
    ahead = (
        ranked.cumsum(-2) - ranked
    )  # a sum over all bags so far; its value at the first instance of the bag is subtracted below
    ahead = ahead - ahead.index_select(-2, offsets.starts[offsets.bag_of])
    # An instance is counted if the preceding ranks sum to less than the required share, by more than rounding.
    needed = ahead < (carried - 1e-6) * total.index_select(-2, offsets.bag_of)
    share = bag_sum(needed.double(), offsets) / offsets.sizes.unsqueeze(-1)
    return share.where(total > 0, torch.nan)
