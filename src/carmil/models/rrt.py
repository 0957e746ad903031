"""Re-embedded regional transformer, RRT-MIL (Tang et al., 2024).

e = relu(E x)                                each bag laid out, row by row, as a square of 8 x 8 regions
f = e + P attend(Q + EPEG(Q), K, V)          R-MSA, each region's tokens among themselves; Q, K, V linear in LN e
y = f + sum_k c_k m_k r_k                    CR-MSA, each token receives from k representatives of its region:
    l   = phi' LN f                              k logits per token
    p_k = sum_j softmax_j(l_k)_j LN f_j          a representative, pooled over the region's tokens j
    r_k = P attend(Q, K, V)                      after attending to the k-th representatives of all regions; Q, K, V linear in p_k
    c_k = softmax_k(l)_k,  m_k = (l_k - min_j l_k) / (max_j l_k - min_j l_k + 1e-8)
z = LN y                                     LN (y + e) with `all_shortcut`
u = w' tanh(V z),  F = linear(sum_j softmax(u)_j z_j)

The side of a square is the smallest multiple of 8 for which the bag fits; zeros pad the square and are attended to like
instances. A bag of up to 64 instances has regions of one token, for which m is zero, so CR-MSA does not change it.

EPEG is published as a convolution over the query axis of the attention logits Q K', added to them. It is linear, so it is
applied to Q instead, (Q + EPEG(Q)) K', and no logits have to be stored. Its bias shifts all logits of a head equally, and the
softmax cancels it; the parameter exists to match published weights and parameter counts.

n instances of all bags together, d features, h heads of c features, k representatives; g bags with squares of the
same side, s regions per bag, t tokens per region. Leading axes, such as the models of a population, are carried
through.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from carmil.errors import CarmilError
from carmil.models.attention import Attention, WithAttention
from carmil.models.layers import Hidden, LayerNorm, Linear, xavier
from carmil.models.noise import Dropout
from carmil.models.pooling import Offsets
from carmil.models.registry import register

_SEQUENCES = 2**15  # sequences per call of the attention kernel: CUDA grids end at 2**16


class RRT(WithAttention):
    permutation_invariant = False
    inert_parameters = ("epeg.bias",)

    def __init__(
        self,
        in_features: int,
        classes: int,
        *,
        hidden: int = 512,
        heads: int = 8,
        epeg_k: int = 15,
        crmsa_k: int = 3,
        regions: int = 8,
        attention: int = 128,
        activation: str = "tanh",
        dropout: float = 0.25,
        projection_dropout: float = 0.1,
        all_shortcut: bool = False,
    ) -> None:
        super().__init__()
        if hidden % heads:
            raise CarmilError(f"{hidden} hidden features for {heads} heads: expected a multiple of {heads}")
        if epeg_k % 2 == 0:
            raise CarmilError(f"an EPEG kernel of {epeg_k}: expected an odd number, since its centre must be a token")
        self.classes, self.regions, self.all_shortcut = classes, regions, all_shortcut
        self.embedding = Hidden(in_features, hidden, dropout=dropout)
        self.within = WithinRegions(hidden, heads, epeg_k=epeg_k, dropout=projection_dropout)
        self.across = AcrossRegions(hidden, heads, representatives=crmsa_k, dropout=projection_dropout)
        self.norm = LayerNorm(hidden)
        self.attention = Attention(hidden, attention, gated=False, activation=activation, bias=False)
        self.classifier = Linear(hidden, classes)
        xavier(self)

    def input_layers(self) -> tuple[Linear, ...]:
        return (self.embedding.linear,)

    def embed(self, features: Tensor, offsets: Offsets) -> Tensor:
        squares = offsets.planned(("squares", self.regions), lambda: Squares.of(offsets, self.regions))
        embedded = self.embedding(features)
        x = embedded + self.within(embedded, squares)
        x = x + self.across(x, squares)
        return self.norm(x + embedded if self.all_shortcut else x)

    def classify(self, pooled: Tensor) -> Tensor:
        return self.classifier(pooled.squeeze(-2))


@dataclass(frozen=True)
class Squares:
    """Positions of the instances in the squares; bags with squares of the same side are grouped.

    cells, for each side (g, s, t): the row of the instance in each cell, n where the cell is empty.
    places (n): the index of each instance's cell among all cells.
    """

    cells: list[Tensor]
    places: Tensor

    @classmethod
    def of(cls, offsets: Offsets, regions: int) -> "Squares":
        bags_by_side = defaultdict(list)
        for bag, length in enumerate(offsets.lengths):
            root = math.isqrt(max(length, 1) - 1) + 1
            bags_by_side[math.ceil(root / regions) * regions].append(bag)
        cells = [_cells(side, bags, offsets, regions) for side, bags in bags_by_side.items()]
        rows = torch.cat([part.flatten() for part in cells])
        places = rows.new_empty(offsets.instances + 1).scatter(0, rows, torch.arange(len(rows), device=rows.device))
        return cls(cells, places[:-1])

    def gather(self, rows: Tensor) -> list[Tensor]:
        """Gather tokens: (..., n+1, d), whose last row pads the squares -> for each side (..., g, s, t, d)."""
        return [rows.index_select(-2, cells.flatten()).unflatten(-2, cells.shape) for cells in self.cells]

    def scatter(self, tokens: list[Tensor]) -> Tensor:
        """Scatter tokens: for each side (..., g, s, t, d) -> (..., n, d)."""
        return torch.cat([part.flatten(-4, -2) for part in tokens], dim=-2).index_select(-2, self.places)


def _cells(side: int, bags: list[int], offsets: Offsets, regions: int) -> Tensor:
    """Return the cells (g, s, t) of bags arranged row by row in their squares; regions are windows of the squares."""
    chosen = torch.tensor(bags, device=offsets.starts.device)
    size = side // regions
    places = torch.arange(side * side, device=chosen.device).view(regions, size, regions, size)
    places = places.transpose(1, 2).reshape(regions * regions, size * size)
    filled = places < offsets.sizes[chosen, None, None]
    return torch.where(filled, offsets.starts[chosen, None, None] + places, offsets.instances)


class WithinRegions(nn.Module):
    """R-MSA: attention within regions, a term that is added to x."""

    def __init__(self, features: int, heads: int, *, epeg_k: int, dropout: float) -> None:
        super().__init__()
        self.norm = LayerNorm(features)
        self.qkv, self.proj = Linear(features, 3 * features), Linear(features, features)
        self.epeg = EPEG(heads, epeg_k)
        self.drop = Dropout(dropout)
        self.heads = heads

    def forward(self, x: Tensor, squares: Squares) -> Tensor:
        """Compute the term: (..., n, d) -> (..., n, d)."""
        qkv = self.qkv(_with_zero_row(self.norm(x)))
        attended = [self._attend(tokens) for tokens in squares.gather(qkv)]
        return self.drop(self.proj(squares.scatter(attended)))

    def _attend(self, qkv: Tensor) -> Tensor:
        """Attend within regions: (..., g, s, t, 3d) -> (..., g, s, t, d)."""
        q, k, v = _heads(qkv.flatten(-4, -3), self.heads)
        return _attended(q + self.epeg(q), k, v).reshape(*qkv.shape[:-1], -1)


class AcrossRegions(nn.Module):
    """CR-MSA: attention across regions, a term that is added to x."""

    def __init__(self, features: int, heads: int, *, representatives: int, dropout: float) -> None:
        super().__init__()
        self.norm = LayerNorm(features)
        self.phi = nn.Parameter(torch.empty(features, representatives))
        nn.init.kaiming_uniform_(self.phi, a=math.sqrt(5))
        self.qkv, self.proj = Linear(features, 3 * features), Linear(features, features)
        self.drop = Dropout(dropout)
        self.heads = heads

    def forward(self, x: Tensor, squares: Squares) -> Tensor:
        """Compute the term: (..., n, d) -> (..., n, d)."""
        rows = _with_zero_row(self.norm(x))
        logits = squares.gather(rows @ self.phi)
        pooled = [
            scores.softmax(dim=-2).mT @ tokens for scores, tokens in zip(logits, squares.gather(rows), strict=True)
        ]
        attended = self._attend(torch.cat(pooled, dim=-4)).split([part.shape[-4] for part in pooled], dim=-4)
        dispatched = [_dispatch(scores) @ part for scores, part in zip(logits, attended, strict=True)]
        return self.drop(squares.scatter(dispatched))

    def _attend(self, pooled: Tensor) -> Tensor:
        """Attend among the k-th representatives of a bag's regions, for each k. (..., b, s, k, d) -> same."""
        sequences = pooled.transpose(-3, -2)
        qkv = self.qkv(sequences.flatten(-4, -2)).unflatten(-2, sequences.shape[-4:-1])
        attended = _attended(*_heads(qkv.flatten(-4, -3), self.heads))
        rows = attended.reshape(*pooled.shape[:-4], -1, pooled.shape[-1])
        return self.proj(rows).reshape(sequences.shape).transpose(-3, -2)


class EPEG(nn.Module):
    """A convolution over the tokens, with one kernel per head."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.xavier_normal_(torch.empty(heads, 1, size, 1)))
        self.bias = nn.Parameter(torch.zeros(heads))

    def forward(self, q: Tensor) -> Tensor:
        """Convolve: (..., g s, h, t, c) -> same."""
        models = q.shape[:-4]
        channels = q.transpose(0, 1).flatten(1, 2) if models else q
        kernels = self.weight.flatten(0, -4)
        y = nn.functional.conv2d(channels, kernels, padding=(kernels.shape[-2] // 2, 0), groups=len(kernels))
        return y.unflatten(1, (*models, -1)).transpose(0, 1) if models else y


def _with_zero_row(x: Tensor) -> Tensor:
    """Append a row of zeros: (..., n, d) -> (..., n+1, d)."""
    return nn.functional.pad(x, (0, 0, 0, 1))


def _heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split (..., t, 3d) into Q, K and V, each (..., h, t, c)."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).transpose(-4, -2).unbind(-3)
    return q, k, v


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute softmax(Q K' / sqrt(c)) V, with the heads side by side. (..., h, t, c) -> (all sequences, t, d)."""
    parts = [part.flatten(0, -4).split(_SEQUENCES) for part in (q, k, v)]
    attended = [nn.functional.scaled_dot_product_attention(*part) for part in zip(*parts, strict=True)]
    return torch.cat([part.transpose(-3, -2).flatten(-2) for part in attended])


def _dispatch(logits: Tensor) -> Tensor:
    """Return the weight of each representative of the region for each token. (..., t, k) -> same."""
    lowest, highest = logits.amin(-2, keepdim=True), logits.amax(-2, keepdim=True)
    return logits.softmax(dim=-1) * (logits - lowest) / (highest - lowest + 1e-8)


register("rrt", RRT, "attention pooling of instances re-embedded by attention within and across regions")
