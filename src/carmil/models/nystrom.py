"""Nystrom attention, used by TransMIL: softmax attention through m landmarks, whose matrix is never computed
explicitly.

i matrices, h heads of size e, s query tokens, p+t key tokens, m landmarks.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

_BLOCK = 64  # tokens
_KEPT = 2**24  # a softmax with more elements is recomputed for its gradient instead of being stored


@dataclass(frozen=True)
class NystromAttention:
    """A = softmax(q k~'/sqrt e) inverse softmax(q~ k'/sqrt e) of each head, stored as its factors, for s queries.

    queries (..., h, s, e), keys (..., h, p+t, e), landmarks q~ and k~ (..., h, m, e), inverse (..., h, m, m).
    """

    queries: Tensor
    keys: Tensor
    query_landmarks: Tensor
    key_landmarks: Tensor
    inverse: Tensor

    def gather(self, values: Tensor) -> Tensor:
        """Compute A v: (..., h, p+t, e) -> (..., h, s, e)."""
        summaries = _attend(self.query_landmarks, self.keys, values)
        return _attend(self.queries, self.key_landmarks, self.inverse @ summaries)

    def reach(self, weights: Tensor) -> Tensor:
        """Compute w A: (..., h, i, s) -> (..., h, i, p+t)."""
        landmarks = weigh_softmax(weights, self.queries, self.key_landmarks) @ self.inverse
        return weigh_softmax(landmarks, self.query_landmarks, self.keys)

    def row_sums(self) -> Tensor:
        """Compute the row sums of A, (..., h, s); the rows of the last factor sum to one."""
        sums = self.inverse.sum(-1, keepdim=True).expand_as(self.key_landmarks)
        return _attend(self.queries, self.key_landmarks, sums)[..., 0]


def softmax_of(queries: Tensor, keys: Tensor) -> Tensor:
    """Compute softmax(q k'/sqrt e)."""
    return (queries / math.sqrt(queries.shape[-1]) @ keys.mT).softmax(-1)


def _weigh(weights: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    return weights @ softmax_of(queries, keys)


def _attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute softmax(q k'/sqrt e) v, without storing the whole softmax."""
    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (queries, keys, values))
    return scaled_dot_product_attention(q, k, v).reshape(*queries.shape[:-1], values.shape[-1])


def along_tokens(values: Tensor, weight: Tensor) -> Tensor:
    """Convolve each head along its tokens, zero-padded: values (..., g, h, t, e), weight (..., h, 1, taps, 1) ->
    shape of values.

    Computed as a matrix product: every block of tokens is the same band matrix times the block's receptive field.
    Two of three multiply-adds are redundant, but GPUs have no fast gradient for a convolution with few kernels.
    """
    taps, tokens = weight.shape[-2], values.shape[-2]
    blocks, field_size = -(-tokens // _BLOCK), _BLOCK + taps - 1
    padded = pad(values, (0, 0, taps // 2, blocks * _BLOCK - tokens + taps // 2))
    windows = padded.unfold(-2, field_size, _BLOCK)  # (..., g, h, blocks, e, seen)
    # Row i of the band starts i columns further right: the kernel plus its zeros is one element longer than a row.
    kernel = pad(weight[..., 0, :, 0], (0, _BLOCK))
    band = torch.cat([kernel] * _BLOCK, dim=-1)[..., : _BLOCK * field_size].unflatten(-1, (_BLOCK, field_size))
    y = torch.einsum("...ghbes,...hcs->...ghbce", windows, band)
    return y.flatten(-3, -2)[..., :tokens, :]


def pseudo_inverse(a: Tensor, iterations: int) -> Tensor:
    """Compute z = a' / (largest row sum |a| * largest column sum |a|), then iterate z <- z (13 - az (15 - az (7 -
    az))) / 4.

    a and the result are (..., m, m).
    """
    size = a.abs()
    z = a.mT / (size.sum(-1).amax(-1) * size.sum(-2).amax(-1))[..., None, None]
    refined: Tensor = _Refined.apply(a.flatten(0, -3), z.flatten(0, -3), iterations)
    return refined.reshape(a.shape)


class _Refined(torch.autograd.Function):
    """The steps of `pseudo_inverse` and their gradient: p = az, x = 7 - p, y = 15 - px, w = 13 - py, z <- zw / 4.

    One operation per product: as plain torch operations, they would be half of all operations of TransMIL.
    a, z (i, m, m).
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, z: Tensor, iterations: int) -> Tensor:
        ctx.type, kind = a.dtype, a.device.type
        products = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else a.dtype
        steps = []
        with torch.autocast(kind, enabled=False):
            a, z = a.to(products), z.to(products)
            one = torch.eye(a.shape[-1], device=a.device, dtype=products)
            seven, fifteen, thirteen = 7 * one, 15 * one, 13 * one
            for _ in range(iterations):
                p = torch.bmm(a, z)
                x = seven - p
                y = torch.baddbmm(fifteen, p, x, alpha=-1)
                w = torch.baddbmm(thirteen, p, y, alpha=-1)
                if any(ctx.needs_input_grad):
                    steps += [z, p, x, y, w]
                z = torch.baddbmm(z, z, w, beta=0, alpha=0.25)
        ctx.save_for_backward(a, *steps)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, for_z: Tensor) -> tuple[Tensor, Tensor, None]:
        a, *steps = ctx.saved_tensors
        for_a, for_z = torch.zeros_like(a, dtype=ctx.type), for_z.to(a.dtype)
        with torch.autocast(a.device.type, enabled=False):
            for last in range(len(steps), 0, -5):
                z, p, x, y, w = steps[last - 5 : last]
                for_w = torch.baddbmm(z, z.mT, for_z, beta=0, alpha=0.25)
                for_y = torch.baddbmm(z, p.mT, for_w, beta=0, alpha=-1)
                for_p = torch.baddbmm(torch.bmm(p.mT, for_y), for_y, x.mT, alpha=-1)
                for_p = torch.baddbmm(for_p, for_w, y.mT, alpha=-1)
                for_a += torch.bmm(for_p, z.mT)
                for_z = torch.baddbmm(torch.bmm(a.mT, for_p), for_z, w.mT, alpha=0.25)
        return for_a, for_z.to(ctx.type), None


def weigh_softmax(weights: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Compute w softmax(q k'/sqrt e), a few heads at a time: (..., h, i, s), (..., h, s, e), (..., h, t, e) -> (..., h, i, t)."""
    heads = queries.shape[-3]
    weights = weights.expand(*queries.shape[:-2], *weights.shape[-2:])
    of_a_head = queries[..., 0, :, 0].numel() * keys.shape[-2]
    if of_a_head * heads <= _KEPT:
        return _weigh(weights, queries, keys)
    at_once = max(1, _KEPT // of_a_head)
    parts = zip(*(x.split(at_once, dim=-3) for x in (weights, queries, keys)), strict=True)
    return torch.cat([checkpoint(_weigh, *part, use_reentrant=False, preserve_rng_state=False) for part in parts], -3)
