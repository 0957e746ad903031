"""TransMIL (Shao et al., 2021): a class token that reads the bag through two layers of Nystrom attention.

H0 = [class token, relu(E x_1), ..., relu(E x_N), the first rows again until S^2 are full],   S = ceil(sqrt N)
H1 = H0 + Nystrom(LN H0),   H2 = H1 + depthwise 7x7, 5x5 and 3x3 convolutions on the S x S map (the class token stays)
H3 = H2 + Nystrom'(LN H2),  F = W LN(H3[class token])

Nystrom(X) = O [A V + depthwise convolution of V along the tokens],   Q, K, V = X W' (h heads of size e)
A = softmax(Q K~'/sqrt e) pinv(softmax(Q~ K~'/sqrt e)) softmax(Q~ K'/sqrt e)
with landmarks Q~, K~: means of m runs of consecutive tokens. As published, zeros in front of the class token pad the tokens
to a multiple of m, without a mask. The pseudo-inverse takes six steps of an iteration whose starting point is scaled per bag
and head, so that a bag's result does not depend on the other bags of the batch. A is never computed explicitly.

The scores u_j are the class token's row of A' of the last layer, averaged over heads, at the bag's own instances. They are
attention weights, not logits, and can be negative. CAR's branch is a second last layer with its own row. Every other learned
branch tilts the row: in each head w_j = A_j e^{delta_j} sum|A| / sum(|A| e^delta), with delta = u_cf - u at the instances and 0
elsewhere. CIA's row is the softmax of its random scores over the instances, the same in all heads.

r models, n instances, b bags, g bags with the same S, t tokens, p zeros in front, d features, k classes, j maps.
Leading axes, such as the models of a population, are carried through.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad

from carmil.errors import CarmilError
from carmil.models.contract import (
    Ability,
    AttendingModel,
    BagModel,
    Counterfactual,
    CounterfactualAttention,
    Prediction,
)
from carmil.models.layers import Hidden, LayerNorm, Linear
from carmil.models.noise import Noise, Noisy
from carmil.models.nystrom import NystromAttention, along_tokens, pseudo_inverse, softmax_of
from carmil.models.pooling import Offsets
from carmil.models.registry import register


class TransMIL(AttendingModel):
    abilities = BagModel.abilities | Ability.ATTENDS | Ability.SCORES_ARE_WEIGHTS | Ability.ROLLOUT
    permutation_invariant = False
    default_branch = "full"

    def __init__(
        self,
        in_features: int,
        classes: int,
        *,
        hidden: int = 512,
        heads: int = 8,
        landmarks: int | None = None,
        pinv_iterations: int = 6,
        dropout: float = 0.1,
        kernel: int = 33,
    ) -> None:
        super().__init__()
        if hidden < heads:
            raise CarmilError(f"hidden is {hidden} with {heads} heads: expected at least one feature per head")
        self.classes, self.trunk_size = classes, hidden
        self._layer: dict[str, Any] = dict(
            features=hidden,
            heads=heads,
            landmarks=hidden // 2 if landmarks is None else landmarks,
            iterations=pinv_iterations,
            dropout=dropout,
            kernel=kernel,
        )
        self.embedding = Hidden(in_features, hidden)
        self.class_token = nn.Parameter(torch.randn(hidden))
        self.first = NystromLayer(**self._layer)
        self.position = PositionEncoding(hidden)
        self.last = NystromLayer(**self._layer)
        self.norm = LayerNorm(hidden)
        self.classifier = Linear(hidden, classes)

    def forward(
        self, features: Tensor, offsets: Offsets | Tensor, branch: CounterfactualAttention | None = None
    ) -> Prediction:
        offsets = Offsets.of(offsets, features.device)
        layout = Layout.of(offsets)
        tokens = self._tokens(features, layout)
        views = [self.last.view(h) for h in tokens]
        u, z = _scores(views, layout), _instances(views, layout)
        maps: list[Tensor] = [view.row for view in views]
        u_cf: Tensor | None = None
        if branch is not None and not getattr(branch, "full", False):
            u_cf = branch(self, z, z, u, offsets)
            u_cf = u_cf.expand(*u.shape[:-1], *u_cf.shape[-2:])
            maps = _with_counterfactual(views, layout, u, u_cf, learned=getattr(branch, "learned", True))
        Z = self._read(self.last, views, maps, layout)
        if branch is not None and u_cf is None:
            second = cast("NystromLayer", cast("Any", branch).attention)
            views = [second.view(h) for h in tokens]
            u_cf = _scores(views, layout).unsqueeze(-2)
            Z = torch.cat([Z, self._read(second, views, [view.row for view in views], layout)], dim=-2)
        F = self.classify(Z.flatten(-3, -2).unsqueeze(-2)).unflatten(-2, Z.shape[-3:-1])
        return Prediction(
            logits=F[..., 0, :],
            offsets=offsets,
            scores=u,
            instances=z,
            pooled=Z[..., :1, :],
            counterfactual=None if u_cf is None else Counterfactual(scores=u_cf, logits=F[..., 1:, :]),
        )

    def rollout(self, features: Tensor, offsets: Offsets | Tensor) -> Tensor:
        """Return attention rollout: the class token's row of a2 a1 at the instances, a = rows of (A + I)/2 divided
        by their sums.

        A is averaged over heads and includes the zeros in front, as in the reference implementation. The
        reference divides column j by the sum of row j, because its normalisation lacks keepdim; this function
        divides each row by its own sum. Returns (..., n, 1).
        """
        layout = Layout.of(Offsets.of(offsets, features.device))
        x = self.embedding(features)
        parts = []
        for group in layout.groups:
            h = self._begin(x, group)
            row = self.last.view(self._next(h, group)).row.mean(-3)  # (..., g, 1, p+t)
            zeros = row.shape[-1] - group.tokens
            row = row + pad(row.new_ones(1), (zeros, group.tokens - 1))
            row = row / row.sum(-1, keepdim=True)
            attention, _ = self.first.attention(h)
            row = row / (attention.row_sums().mean(-2).unsqueeze(-2) + 1)
            row = attention.reach(row.unsqueeze(-3)).mean(-3) + row
            parts.append(row[..., zeros + 1 :].mT)
        return layout.instances(parts)

    def input_layers(self) -> tuple[Linear, ...]:
        return (self.embedding.linear,)

    def embed(self, features: Tensor, offsets: Offsets) -> Tensor:
        """Return the normalised tokens of the instances that enter the last layer: (..., n, in) -> z (..., n, d)."""
        layout = Layout.of(offsets)
        return layout.instances([_each(self.last.norm, h)[..., 1:, :] for h in self._tokens(features, layout)])

    def trunk(self, instances: Tensor, offsets: Offsets) -> Tensor:
        return instances

    def score(self, trunk: Tensor, instances: Tensor, offsets: Offsets) -> Tensor:
        raise CarmilError(
            "TransMIL scores instances by its class token, which is not among the instances: use the scores "
            "that forward returns"
        )

    def classify(self, pooled: Tensor) -> Tensor:
        """Compute logits: class tokens after the last layer (..., b, 1, d) -> F (..., b, k)."""
        return self.classifier(self.norm(pooled.squeeze(-2)))

    def second_attention(self) -> nn.Module:
        return NystromLayer(**self._layer)

    def attend_with(self, attention: nn.Module, instances: Tensor, trunk: Tensor, offsets: Offsets) -> Tensor:
        return self.score(instances, instances, offsets)

    def _tokens(self, features: Tensor, layout: "Layout") -> list[Tensor]:
        """Return H2 of each group, (..., g, t, d)."""
        x = self.embedding(features)
        return [self._next(self._begin(x, group), group) for group in layout.groups]

    def _begin(self, x: Tensor, group: "Group") -> Tensor:
        """Return H0: the class token, then the instances, the first of them repeated to fill the square. (..., n, d)
        -> (..., g, t, d).
        """
        bags, tokens = group.source.shape
        tiles = x.index_select(-2, group.tiles).unflatten(-2, (bags, tokens - 1))
        first = self.class_token.unsqueeze(-2).unsqueeze(-2).expand(*tiles.shape[:-2], 1, -1)
        return torch.cat([first, tiles], dim=-2)

    def _next(self, h: Tensor, group: "Group") -> Tensor:
        return self.position(self.first(h, group), group.side)

    def _read(self, layer: "NystromLayer", views: list["View"], maps: list[Tensor], layout: "Layout") -> Tensor:
        """Return the class tokens after the layer, one per map: -> (..., b, j, d)."""
        read = [layer.read(*three) for three in zip(views, maps, layout.groups, strict=True)]
        return layout.bags(read)


@dataclass(frozen=True)
class Group:
    """Bags whose instances fill a square of the same side S; t = 1 + S^2.

    source (g, t): the instance from which each token is made; the bag's first instance for the class token.
    kind (g, t): 0 an instance, 1 a repeated instance, 2 the class token.
    """

    side: int
    source: Tensor
    kind: Tensor

    @property
    def tokens(self) -> int:
        return self.source.shape[-1]

    @property
    def tiles(self) -> Tensor:
        """Return the instances of the squares, (g S^2)."""
        return self.source[:, 1:].flatten()

    @property
    def own(self) -> Tensor:
        """Return a mask of the tokens that are instances and not repetitions, (g, S^2)."""
        return self.kind[:, 1:] == 0

    def spread(self, x: Tensor) -> Tensor:
        """Copy values of instances to the tokens of their squares: (..., n, j) -> (..., g, j, S^2)."""
        return x.index_select(-2, self.tiles).unflatten(-2, (len(self.source), self.tokens - 1)).mT


class Layout:
    """Grouping of bags for the forward pass, and the mapping from tokens back to instances and bags."""

    def __init__(self, offsets: Offsets) -> None:
        device = offsets.starts.device
        sides: dict[int, list[int]] = {}
        for bag, size in enumerate(offsets.lengths):
            sides.setdefault(math.isqrt(size - 1) + 1, []).append(bag)
        self.groups: list[Group] = []
        order: list[int] = []
        firsts = [0] * offsets.bags  # start of each bag's instances among the squares of all groups
        place = 0
        for side, bags in sides.items():
            self.groups.append(_group(side, torch.tensor(bags, device=device), offsets))
            order += bags
            for bag in bags:
                firsts[bag] = place
                place += side * side
        shift = torch.tensor(firsts, device=device) - offsets.starts[:-1]
        self._instance = torch.arange(offsets.instances, device=device) + shift[offsets.bag_of]
        self._bag = torch.tensor(order, device=device).argsort()

    @classmethod
    def of(cls, offsets: Offsets) -> "Layout":
        return offsets.planned("squares and class tokens", lambda: cls(offsets))

    def instances(self, parts: Sequence[Tensor]) -> Tensor:
        """Merge the tokens of all groups: (..., g, S^2, c) each -> (..., n, c)."""
        return torch.cat([part.flatten(-3, -2) for part in parts], dim=-2).index_select(-2, self._instance)

    def bags(self, parts: Sequence[Tensor]) -> Tensor:
        """Merge the class tokens of all groups: (..., g, j, d) each -> (..., b, j, d)."""
        return torch.cat(list(parts), dim=-3).index_select(-3, self._bag)


def _group(side: int, bags: Tensor, offsets: Offsets) -> Group:
    places = torch.arange(side * side, device=bags.device)
    sizes, starts = offsets.sizes[bags].unsqueeze(-1), offsets.starts[bags].unsqueeze(-1)
    source = torch.cat([starts, starts + places % sizes], dim=-1)
    kind = torch.cat([torch.full_like(starts, 2), (places >= sizes).to(starts.dtype)], dim=-1)
    return Group(side, source, kind)


@dataclass(frozen=True)
class View:
    """Inputs of the class tokens of a group: h (..., g, t, d) and LN h, their row of A (..., g, h, 1, p+t), and the values."""

    entering: Tensor
    normed: Tensor
    row: Tensor
    values: Tensor

    @property
    def zeros(self) -> int:
        return self.row.shape[-1] - self.entering.shape[-2]


class NystromLayer(nn.Module):
    """h + O [A V + convolution of V], computed from LN h."""

    def __init__(
        self, *, features: int, heads: int, landmarks: int, iterations: int, dropout: float, kernel: int
    ) -> None:
        super().__init__()
        self.heads, self.landmarks, self.iterations = heads, landmarks, iterations
        self.inner = heads * (features // heads)
        self.norm = LayerNorm(features)
        self.qkv = Linear(features, 3 * self.inner, bias=False)
        self.residual = Depthwise(heads, (kernel, 1), bias=False)
        self.out = Linear(self.inner, features)
        self.dropout = TokenDropout(dropout)

    def forward(self, h: Tensor, group: Group) -> Tensor:
        """Update all tokens: (..., g, t, d) -> (..., g, t, d)."""
        attention, values = self.attention(h)
        tokens = h.shape[-2]
        mixed = attention.gather(values)[..., -tokens:, :] + along_tokens(
            values[..., -tokens:, :], self.residual.weight
        )
        y = self.out(mixed.transpose(-3, -2).flatten(-2).flatten(-3, -2))
        y = self.dropout(y.unsqueeze(-2), group.source.flatten(), group.kind.flatten())
        return h + y.squeeze(-2).unflatten(-2, h.shape[-3:-1])

    def attention(self, h: Tensor) -> tuple[NystromAttention, Tensor]:
        """Return A with all tokens as queries, and the values."""
        x = self._padded(_each(self.norm, h))
        q, k, v = self._project(x, 0, 3)
        return self._factors(x, q, k), v

    def view(self, h: Tensor) -> View:
        """Return the view of the class token, which is the only query."""
        normed = _each(self.norm, h)
        x = self._padded(normed)
        k, v = self._project(x, 1, 3)
        first = x.shape[-2] - h.shape[-2]
        (q,) = self._project(x[..., first : first + 1, :], 0, 1)
        return View(h, normed, self._factors(x, q, k).reach(q.new_ones(1, 1)), v)

    def read(self, view: View, maps: Tensor, group: Group) -> Tensor:
        """Return the class token after this layer, with `maps` as its rows of A: maps (..., g, h, j, p+t) -> (..., g, j, d)."""
        weight = self.residual.weight[..., 0, :, 0]
        reach = view.values[..., view.zeros :, :][..., : weight.shape[-1] // 2 + 1, :]
        taps = weight[..., weight.shape[-1] // 2 :][..., : reach.shape[-2]].unsqueeze(-3).unsqueeze(-1)
        mixed = maps @ view.values + (taps * reach).sum(-2, keepdim=True)
        y = _each(self.out, mixed.transpose(-3, -2).flatten(-2))
        return view.entering[..., :1, :] + self.dropout(y, group.source[:, 0], group.kind[:, 0])

    def _padded(self, x: Tensor) -> Tensor:
        return pad(x, (0, 0, -x.shape[-2] % self.landmarks, 0))

    def _project(self, x: Tensor, first: int, last: int) -> tuple[Tensor, ...]:
        """Project x to queries, keys and values, thirds 0, 1, 2 of one projection. (..., g, t, d) -> each (..., g, h, t, e)."""
        weight = self.qkv.weight[..., first * self.inner : last * self.inner, :]
        y = (x.flatten(-3, -2) @ weight.mT).unflatten(-2, x.shape[-3:-1])
        return tuple(part.transpose(-3, -2) for part in y.unflatten(-1, (last - first, self.heads, -1)).unbind(-3))

    def _factors(self, x: Tensor, q: Tensor, k: Tensor) -> NystromAttention:
        # The projection has no bias, so projecting the means equals averaging the projections.
        landmarks = x.unflatten(-2, (self.landmarks, -1)).mean(-2)
        q_, k_ = self._project(landmarks, 0, 2)
        return NystromAttention(q, k, q_, k_, pseudo_inverse(softmax_of(q_, k_), self.iterations))


class PositionEncoding(nn.Module):
    """PPEG: x + three depthwise convolutions of the square map, computed as one convolution with the summed kernels."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.wide, self.middle, self.narrow = (Depthwise(features, (size, size)) for size in (7, 5, 3))

    def forward(self, h: Tensor, side: int) -> Tensor:
        """Apply PPEG: (..., g, 1 + side^2, d) -> same shape; the class token is left unchanged."""
        weight = self.wide.weight + pad(self.middle.weight, (1,) * 4) + pad(self.narrow.weight, (2,) * 4)
        biases = [conv.bias for conv in (self.wide, self.middle, self.narrow) if conv.bias is not None]
        tiles = h[..., 1:, :]
        square = depthwise(tiles.mT.unflatten(-1, (side, side)), weight, torch.stack(biases).sum(0))
        return torch.cat([h[..., :1, :], tiles + square.flatten(-2).mT], dim=-2)


class Depthwise(nn.Module):
    """Parameters of a depthwise convolution. Initialised as in torch: uniform in +-1/sqrt(kernel)."""

    bias: Tensor | None

    def __init__(self, channels: int, kernel: tuple[int, int], *, bias: bool = True) -> None:
        super().__init__()
        if not all(size % 2 for size in kernel):
            raise CarmilError(
                f"a convolution of {kernel[0]} x {kernel[1]}: expected odd sizes, since its centre must be a token"
            )
        bound = 1 / math.sqrt(math.prod(kernel))
        self.weight = nn.Parameter(torch.empty(channels, 1, *kernel).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound)) if bias else None


class TokenDropout(Noisy):
    """Dropout whose draws depend on the kind of token and the instance from which it is made."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor, source: Tensor, kind: Tensor) -> Tensor:
        """Apply dropout: x (..., t, j, d), source and kind (t); the same features are dropped in all j copies of a token."""
        if not self.training or self.p == 0:
            return x
        shape = (x.shape[-3], x.shape[-1])
        if self.noise is None:
            drawn = self.draw(shape, x)
        else:
            own = Noise(self.noise.seeds, self.noise.steps)
            own.rows = 3 * (source if self.noise.rows is None else self.noise.rows[source]) + kind
            drawn = own.uniform(shape, self.site)
        return x * (drawn >= self.p).unsqueeze(-2) / (1 - self.p)


def depthwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve each channel separately. x (..., g, c, height, width), weight (c, 1, ...), or (r, c, 1, ...) for r models."""
    padding = [weight.shape[-2] // 2, weight.shape[-1] // 2]
    if weight.ndim == 4:
        y = conv2d(x.reshape(-1, *x.shape[-3:]), weight, bias, padding=padding, groups=len(weight))
        return y.reshape(x.shape)
    models, channels = weight.shape[:2]
    bias = None if bias is None else bias.flatten()
    side_by_side = x.transpose(0, 1).flatten(1, 2)
    y = conv2d(side_by_side, weight.flatten(0, 1), bias, padding=padding, groups=models * channels)
    return y.unflatten(1, (models, channels)).transpose(0, 1)


def tilt(rows: Tensor, delta: Tensor) -> Tensor:
    """Compute A_j e^{delta_j} sum|A| / sum(|A| e^delta). rows (..., g, h, 1, t), delta (..., g, 1, j, t) -> (..., g, h, j, t)."""
    delta = delta.clamp(-30, 30)
    tilted = rows * (delta - delta.amax(-1, keepdim=True)).exp()
    return tilted * rows.abs().sum(-1, keepdim=True) / tilted.abs().sum(-1, keepdim=True).clamp_min(1e-30)


def _with_counterfactual(views: list[View], layout: Layout, u: Tensor, u_cf: Tensor, *, learned: bool) -> list[Tensor]:
    """Return the factual row followed by the counterfactual rows, (..., g, h, 1+j, p+t) per group."""
    maps = []
    for view, group in zip(views, layout.groups, strict=True):
        own, front = group.own.unsqueeze(-2), (view.zeros + 1, 0)
        if learned:
            delta = group.spread((u_cf - u.unsqueeze(-2)).squeeze(-1)) * own
            other = tilt(view.row, pad(delta, front).unsqueeze(-3))
        else:
            shares = group.spread(u_cf.squeeze(-1)).masked_fill(~own, float("-inf")).softmax(-1)
            other = pad(shares, front).unsqueeze(-3)
        maps.append(torch.cat([view.row, other.expand(*view.row.shape[:-2], *other.shape[-2:])], dim=-2))
    return maps


def _scores(views: list[View], layout: Layout) -> Tensor:
    """Return the scores u (..., n, 1)."""
    return layout.instances([view.row.mean(-3)[..., view.zeros + 1 :].mT for view in views])


def _instances(views: list[View], layout: Layout) -> Tensor:
    """Return the instances z (..., n, d)."""
    return layout.instances([view.normed[..., 1:, :] for view in views])


def _each(layer: nn.Module, x: Tensor) -> Tensor:
    """Apply a layer for rows (..., n, d) to the tokens of bags (..., g, t, d)."""
    return layer(x.flatten(-3, -2)).unflatten(-2, x.shape[-3:-1])


register("transmil", TransMIL, "a class token that reads the bag through two layers of Nystrom attention")
