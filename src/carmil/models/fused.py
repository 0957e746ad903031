"""The fast path on GPUs, in bfloat16: the first layer as one operation, attention and pooling as another.

r models, n instances, b bags, d features, a columns of the attention's trunk, m maps (factual and counterfactual).
Matrix products use torch; the operations between them are in `carmil.models.kernels`. Sums, softmax and scores are float32.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from carmil.models.noise import Dropout, Noise
from carmil.models.pooling import Offsets, bag_softmax, bag_sum

CHUNK = 512  # rows of one bag that one program pools


@functools.cache
def available() -> bool:
    """Return whether Triton is installed; without it the plain operations run in bfloat16."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def bfloat16_enabled(x: Tensor) -> bool:
    """Return whether autocast selects bfloat16 on the device of x."""
    return x.is_cuda and torch.is_autocast_enabled("cuda")


def enabled(x: Tensor) -> bool:
    """Return whether the fast path applies to x: bfloat16 on a GPU, with Triton installed."""
    return bfloat16_enabled(x) and available()


@dataclass(frozen=True)
class _Draws:
    """The arguments with which kernels draw a dropout mask: the noise streams, the sites in the network and the probability."""

    noise: Noise | None
    sites: tuple[int, ...]
    p: float
    rows: Tensor

    @classmethod
    def by(cls, dropouts: tuple[Dropout, ...], count: int, device: torch.device) -> "_Draws":
        first = dropouts[0]
        noise = first.noise if first.training and first.p > 0 else None
        rows = torch.arange(count, device=device) if noise is None else noise.rows_for(count)
        return cls(noise, tuple(dropout.site for dropout in dropouts), first.p if noise is not None else 0.0, rows)

    @property
    def scale(self) -> float:
        return 1 / (1 - self.p)

    @property
    def threshold(self) -> int:
        return round((1 - self.p) * 2**16)

    def streams(self, spare: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return seeds, steps and rows; `spare` replaces each if nothing is drawn."""
        return (spare, spare, spare) if self.noise is None else (self.noise.seeds, self.noise.steps, self.rows)


def hidden(x: Tensor, weight: Tensor, bias: Tensor | None, dropout: Dropout) -> Tensor:
    """Compute dropout(relu(x W' + b)) of every model. x (n, in) or (r, n, in), W (r, d, in), b (r, d) -> (r, n, d)."""
    x = x.expand(len(weight), -1, -1) if x.ndim == 2 else x
    bias = None if bias is None else bias.contiguous()
    return _Hidden.apply(x, weight, bias, _Draws.by((dropout,), x.shape[-2], x.device))


class _Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, draws: _Draws) -> Tensor:
        from carmil.models import kernels

        y = torch.bmm(x, weight.mT)
        (r, n, d), columns = y.shape, _padded(y.shape[-1])
        rows = _rows_of(d)
        kernels.hidden_forward[_blocks(n, rows), r](
            y, y if bias is None else bias, *draws.streams(y), n, d, draws.sites[0], draws.threshold, draws.scale,
            BIAS=bias is not None, DROP=draws.noise is not None, ROWS=rows, COLUMNS=columns, num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, y)
        ctx.scale = draws.scale
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from carmil.models import kernels

        x, weight, y = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        (r, n, d), columns, loops = y.shape, _padded(y.shape[-1]), 8
        rows = _rows_of(d)
        blocks = _blocks(n, rows * loops)
        passed = torch.empty_like(y)
        for_bias = torch.empty(r, blocks, d, device=y.device) if of_bias else passed
        kernels.hidden_backward[blocks, r](
            gradient.contiguous(), y, passed, for_bias, n, d, blocks, ctx.scale,
            BIAS=of_bias, ROWS=rows, LOOPS=loops, COLUMNS=columns, num_warps=4,
        )  # fmt: skip
        return (
            torch.bmm(passed, weight) if of_x else None,
            torch.bmm(passed.mT, x) if of_weight else None,
            for_bias.sum(1) if of_bias else None,
            None,
        )


@dataclass(frozen=True)
class FusedMaps:
    """Scores and attention weights (r, n, m), float32, and the pools (r, b, m, d), float32."""

    scores: Tensor
    weights: Tensor
    pooled: Tensor


def attend_and_pool(
    z: Tensor,
    trunk: tuple[Tensor, Tensor | None],
    projections: tuple[Tensor, Tensor | None],
    offsets: Offsets,
    *,
    gated: bool,
    relu: bool,
    dropouts: tuple[Dropout, Dropout],
    mask: Callable[[Tensor], Tensor],
) -> FusedMaps:
    """Compute u = projections(trunk(z)), the softmax over each bag, and Z = sum_j a_j z_j, for all maps at once.

    z (r, n, d). trunk: V, or V over U, (r, a or 2a, d), and their bias; projections (r, m, a) and their bias.
    mask: sets the scores of masked instances to -inf.
    """
    draws = _Draws.by(dropouts, z.shape[-2], z.device)
    return FusedMaps(
        *_AttendAndPool.apply(z.contiguous(), *trunk, *projections, _Options(offsets, gated, relu, draws, mask))
    )


@dataclass(frozen=True)
class _Options:
    offsets: Offsets
    gated: bool
    relu: bool
    draws: _Draws
    mask: Callable[[Tensor], Tensor]


class _AttendAndPool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        trunk: Tensor,
        bias: Tensor | None,
        projections: Tensor,
        offset: Tensor | None,
        options: _Options,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from carmil.models import kernels

        h = torch.bmm(z, trunk.mT)
        (r, n, _), (m, a) = z.shape, projections.shape[1:]
        scores = torch.empty(r, n, m, device=z.device)
        rows = _rows_of(a)
        kernels.scores_forward[_blocks(n, rows), r](
            h, h if bias is None else bias, projections, h if offset is None else offset, scores, *options.draws.streams(h),
            n, a, *options.draws.sites, options.draws.threshold, options.draws.scale,
            MAPS=m, OFFSET=offset is not None, **_kind(options, bias), ROWS=rows, COLUMNS=_padded(a), num_warps=4,
        )  # fmt: skip
        weights = bag_softmax(options.mask(scores), options.offsets).contiguous()
        pooled = pool(weights, z, options.offsets)
        ctx.save_for_backward(z, trunk, bias, projections, h, weights)
        ctx.options, ctx.has_offset = options, offset is not None
        return scores, weights, pooled

    @staticmethod
    def backward(ctx: Any, for_scores: Tensor, for_weights: Tensor, for_pooled: Tensor) -> tuple[Tensor | None, ...]:
        from carmil.models import kernels

        z, trunk, bias, projections, h, weights = ctx.saved_tensors
        options, offsets = ctx.options, ctx.options.offsets
        (r, n, d), (m, a) = z.shape, projections.shape[1:]
        for_pooled = for_pooled.contiguous()
        for_weights = for_weights + project(z, for_pooled, offsets)
        inner = bag_sum(weights * for_weights, offsets).index_select(-2, offsets.bag_of)
        for_scores = torch.addcmul(for_scores, weights, for_weights - inner)
        # The gradient of z has two parts, from the attention's trunk and from the pools. The weights are appended as columns to
        # the gradient of the trunk, and the gradients of the pools as rows to the trunk's matrix, so that one product
        # computes both.
        columns = trunk.shape[1]
        pools = offsets.bags * m if offsets.bags * m <= 64 else 0
        width = columns + -(-pools // 16) * 16
        for_h = torch.empty(r, n, width, dtype=z.dtype, device=z.device)
        rows, loops = _rows_of(a), 8
        blocks = _blocks(n, rows * loops)
        for_reads = torch.empty(r, blocks, m, a, device=z.device)
        for_bias = for_reads if bias is None else torch.empty(r, blocks, columns, device=z.device)
        kernels.scores_backward[blocks, r](
            h, h if bias is None else bias, projections, for_scores, weights, offsets.bag_of, for_h, for_reads, for_bias,
            *options.draws.streams(h), n, a, width, blocks, *options.draws.sites, options.draws.threshold, options.draws.scale,
            MAPS=m, **_kind(options, bias), ROWS=rows, LOOPS=loops, COLUMNS=_padded(a),
            BEHIND=_padded(width - columns), PADDED=1 if m == 1 else _padded(m), num_warps=8,
        )  # fmt: skip
        below = for_pooled.flatten(1, 2).to(z.dtype)[:, :pools]
        empty = below.new_zeros(r, width - columns - pools, d)
        for_z = torch.bmm(for_h, torch.cat([trunk, below, empty], 1))
        if not pools:
            for_z += _spread(weights, for_pooled, offsets)
        return (
            for_z,
            torch.bmm(for_h[..., :columns].mT, z),
            None if bias is None else for_bias.sum(1),
            for_reads.sum(1),
            for_scores.sum(1) if ctx.has_offset else None,
            None,
        )


def pool(weights: Tensor, z: Tensor, offsets: Offsets) -> Tensor:
    """Compute Z = sum_j a_j z_j. weights (r, n, m), z (r, n, d) -> (r, b, m, d) float32."""
    from carmil.models import kernels

    (r, n, d), m = z.shape, weights.shape[-1]
    chunks = offsets.planned("chunks", lambda: _Chunks.of(offsets))
    partial = torch.empty(r, len(chunks.starts), m, d, device=z.device)
    rows = _rows_of(d)
    kernels.pool_forward[len(chunks.starts), r, -(-m // 2)](
        weights, z, chunks.starts, chunks.ends, partial, n, d, len(chunks.starts), m,
        SECOND=m > 1, ROWS=rows, LOOPS=-(-CHUNK // rows), COLUMNS=_padded(d), num_warps=4,
    )  # fmt: skip
    return bag_sum(partial.flatten(-2), chunks.of_bags).unflatten(-1, (m, d))


def project(z: Tensor, directions: Tensor, offsets: Offsets) -> Tensor:
    """Project each instance onto the m directions of its bag. z (r, n, d), directions (r, b, m, d) float32 -> (r, n, m) float32."""
    from carmil.models import kernels

    (r, n, d), m = z.shape, directions.shape[-2]
    chunks = offsets.planned("chunks", lambda: _Chunks.of(offsets))
    out = torch.empty(r, n, m, device=z.device)
    rows = _rows_of(d)
    kernels.pool_backward[len(chunks.starts), r, -(-m // 2)](
        z, directions, chunks.starts, chunks.ends, chunks.bags, out, n, d, offsets.bags, m,
        SECOND=m > 1, ROWS=rows, LOOPS=-(-CHUNK // rows), COLUMNS=_padded(d), num_warps=4,
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class _Chunks:
    """Bags divided into runs of at most CHUNK rows: the start, end and bag of each."""

    starts: Tensor
    ends: Tensor
    bags: Tensor
    of_bags: Offsets

    @classmethod
    def of(cls, offsets: Offsets) -> "_Chunks":
        cuts: list[tuple[int, int, int]] = []
        first = 0
        for bag, length in enumerate(offsets.lengths):
            cuts += [(begin, min(begin + CHUNK, first + length), bag) for begin in range(first, first + length, CHUNK)]
            first += length
        counts = torch.tensor([0, *(-(-length // CHUNK) for length in offsets.lengths)])
        table = torch.tensor(cuts, dtype=torch.int32).to(offsets.starts.device, non_blocking=True)
        starts, ends, bags = (table[:, i].contiguous() for i in range(3))
        return cls(starts, ends, bags, Offsets(counts.cumsum(0), offsets.starts.device))


def _spread(weights: Tensor, for_pooled: Tensor, offsets: Offsets) -> Tensor:
    """Compute the sum of a_j dZ over the maps, for many small bags. -> (r, n, d)."""
    spread = torch.zeros(*weights.shape[:2], for_pooled.shape[-1], device=weights.device)
    for i in range(weights.shape[-1]):
        spread.addcmul_(weights[..., i, None], for_pooled[:, :, i].index_select(1, offsets.bag_of))
    return spread


def _kind(options: _Options, bias: Tensor | None) -> dict[str, bool]:
    return {
        "GATED": options.gated,
        "RELU": options.relu,
        "BIAS": bias is not None,
        "DROP": options.draws.noise is not None,
    }


def _padded(count: int) -> int:
    """Return the next power of two, at least 2, which kernel blocks require; 0 for 0."""
    return 0 if count == 0 else max(2, 1 << (count - 1).bit_length())


def _rows_of(columns: int) -> int:
    """Return the rows per program: 32 numbers per thread with four warps, or 16 with eight; fast on an H200."""
    return max(1, 4096 // _padded(columns))


def _blocks(n: int, rows: int) -> int:
    return -(-n // rows)
