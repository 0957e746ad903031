"""Concentration of maps, and their stability between seeds.

n instances of all bags together, b bags, c columns (heads, classes), r models. Leading axes are carried through.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from carmil.errors import CarmilError
from carmil.evidence.rank_correlation import bag_ranks, pearson, spearman, top_overlap
from carmil.models.pooling import Offsets, bag_sum

UNIFORM = 0.9  # attention spread over more than this share of the instances (see `effective_share`) is nearly uniform


@dataclass(frozen=True)
class Concentration:
    """Concentration of the shares a_j = w_j / sum w in each bag and column, (..., b, c); NaN for a bag whose weights
    are all zero.

    entropy             -sum a log a
    normalised_entropy  entropy / log N: 1 is uniform; NaN for a bag of one instance
    gini                0 is uniform, 1 - 1/N is all on one instance
    effective           exp(entropy): the number of uniformly weighted instances with this entropy
    effective_squares   1 / sum a^2: a similar number from squares, in which small shares count for less
    """

    entropy: Tensor
    normalised_entropy: Tensor
    gini: Tensor
    effective: Tensor
    effective_squares: Tensor


@dataclass(frozen=True)
class Stability:
    """Similarity of the maps of two models, for every pair of models p, bag and column: (p, b, c) each.

    pairs (p, 2): the models; overlap: the share of top instances common to both maps. NaN if a map is constant.
    """

    pairs: Tensor
    spearman: Tensor
    pearson: Tensor
    overlap: Tensor


def concentration_of(weights: Tensor, offsets: Offsets | Tensor) -> Concentration:
    """Return the concentration of weights (..., n, c), none negative: softmax(u), or |e| of a signed map."""
    offsets = Offsets.of(offsets, weights.device)
    if (weights < 0).any():
        raise CarmilError(
            "a negative weight: expected attention after its softmax, or the absolute values of a signed map"
        )
    weights = weights.double()
    a = weights / bag_sum(weights, offsets).index_select(-2, offsets.bag_of)
    sizes = offsets.sizes.unsqueeze(-1).double()
    entropy = -bag_sum(torch.special.xlogy(a, a), offsets)
    place = 2 * bag_ranks(a, offsets) - sizes[offsets.bag_of] - 1
    return Concentration(
        entropy=entropy,
        normalised_entropy=entropy / sizes.log().where(sizes > 1, torch.nan),
        gini=bag_sum(place * a, offsets) / sizes,
        effective=entropy.exp(),
        effective_squares=1 / bag_sum(a * a, offsets),
    )


def effective_share(weights: Tensor, offsets: Offsets) -> Tensor:
    """Return exp(entropy) / N of each bag and column, (..., n, c) -> (..., b, c): 1 is uniform, 1/N all on one
    instance.

    weights: attention weights, after the softmax. NaN for a bag of one instance.
    """
    entropy = -bag_sum(torch.special.xlogy(weights, weights), offsets)
    sizes = offsets.sizes.unsqueeze(-1)
    return (entropy.exp() / sizes).where(sizes > 1, torch.nan)


def uniform_caution(share: float, attention: str, *, where: str, maps: str) -> str:
    """Return the caution that attention is nearly uniform; empty if it is not, or if the share is NaN.

    share: see `effective_share`; attention: the name of the attention; where: words such as "on this slide"; maps: the
    name of the maps that show it.
    """
    if not share >= UNIFORM:
        return ""
    return f"{attention} is nearly uniform: {where} it is spread over {100 * share:.0f} % of the instances, so {maps} point nowhere"


def stability(maps: Tensor, offsets: Offsets | Tensor, *, count: int = 10) -> Stability:
    """Compare every pair of the models' maps (r, n, c), bag by bag; overlap is that of the `count` top instances."""
    offsets = Offsets.of(offsets, maps.device)
    models = len(maps)
    if models < 2:
        raise CarmilError(
            f"stability of the maps of {models} model: expected at least two, for example trained with different seeds"
        )
    # One model is compared with all later models at a time, so that memory grows with models and not with pairs.
    against = [(maps[i], maps[i + 1 :]) for i in range(models - 1)]
    return Stability(
        pairs=torch.combinations(torch.arange(models, device=maps.device)),
        spearman=torch.cat([spearman(first, others, offsets) for first, others in against]),
        pearson=torch.cat([pearson(first, others, offsets) for first, others in against]),
        overlap=torch.cat(
            [top_overlap(first.expand_as(others), others, offsets, count=count) for first, others in against]
        ),
    )
