"""Triton kernels of the fast path on GPUs: the operations between the matrix products of a population, in few passes.

r models, n instances, d features, a columns of the attention's trunk, m maps. Sums over instances are written as one
partial sum per block of rows and added afterwards: without atomic additions, results have the same bits every time.
The noise is that of `carmil.models.noise`, drawn again wherever it is needed instead of being stored.
"""

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    """Compute `noise._mix` on uint32."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def _stream(seeds, steps, model, site):
    """Return the key of a model's noise at this step and site of the network."""
    seed = tl.load(seeds + model).to(tl.uint32)
    step = tl.load(steps + model).to(tl.uint32)
    return _mix(_mix(_mix(seed) ^ step) ^ site.to(tl.uint32))


@triton.jit
def _kept(key, rows, threshold, COLUMNS: tl.constexpr):
    """Return a mask (rows, COLUMNS), true where an element is kept; two columns share 32 random bits."""
    halves = tl.arange(0, COLUMNS // 2).to(tl.uint32)
    bits = (_mix(_mix(rows.to(tl.uint32))[:, None] ^ halves[None, :]) ^ key) * 0x7FEB352D
    bits ^= bits >> 15
    bits *= 0x846CA68B
    drawn = tl.interleave((bits & 0xFFFF).to(tl.int32), (bits >> 16).to(tl.int32))
    return (drawn ^ 0x8000) < threshold


@triton.jit(do_not_specialize=["n", "site"])
def hidden_forward(
    y, bias, seeds, steps, rows, n, d, site, threshold, scale,
    BIAS: tl.constexpr, DROP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Replace y (r, n, d) by dropout(relu(y + bias)), in place."""
    model = tl.program_id(1)
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (at < n)[:, None] & (column < d)[None, :]
    place = y + (model.to(tl.int64) * n + at)[:, None] * d + column[None, :]
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias + model * d + column, mask=column < d, other=0.0)[None, :]
    x = tl.maximum(x, 0.0)
    if DROP:
        key = _stream(seeds, steps, model, site)
        own = tl.load(rows + at, mask=at < n, other=0)
        x = tl.where(_kept(key, own, threshold, COLUMNS), x * scale, 0.0)
    tl.store(place, x.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n", "blocks"])
def hidden_backward(
    gradient, y, passed, for_bias, n, d, blocks, scale,
    BIAS: tl.constexpr, ROWS: tl.constexpr, LOOPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write passed = gradient where y > 0, scaled, and its sums over each block of rows, for_bias (r, blocks, d)."""
    model, block = tl.program_id(1), tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for i in range(LOOPS):
        at = (block * LOOPS + i) * ROWS + tl.arange(0, ROWS)
        inside = (at < n)[:, None] & (column < d)[None, :]
        place = (model.to(tl.int64) * n + at)[:, None] * d + column[None, :]
        g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        g = tl.where(tl.load(y + place, mask=inside, other=0.0) > 0, g * scale, 0.0)
        tl.store(passed + place, g.to(passed.dtype.element_ty), mask=inside)
        if BIAS:
            total += g
    if BIAS:
        tl.store(for_bias + (model * blocks + block) * d + column, tl.sum(total, 0), mask=column < d)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _opened(
    h, bias, seeds, steps, rows, model, at, n, a, site_v, site_u, threshold, scale,
    GATED: tl.constexpr, RELU: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the factors v and u of the trunk of some instances, and their derivatives with respect to their inputs,
    each (ROWS, COLUMNS).
    """
    column = tl.arange(0, COLUMNS)
    inside = (at < n)[:, None] & (column < a)[None, :]
    width = a * 2 if GATED else a
    place = h + (model.to(tl.int64) * n + at)[:, None] * width + column[None, :]
    v = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        v += tl.load(bias + model * width + column, mask=column < a, other=0.0)[None, :]
    if RELU:
        slope_v = tl.where(v > 0, 1.0, 0.0)
        v = tl.maximum(v, 0.0)
    else:
        v = 2.0 * _sigmoid(2.0 * v) - 1.0
        slope_v = 1.0 - v * v
    if DROP:
        own = tl.load(rows + at, mask=at < n, other=0)
        kept = _kept(_stream(seeds, steps, model, site_v), own, threshold, COLUMNS)
        v = tl.where(kept, v * scale, 0.0)
        slope_v = tl.where(kept, slope_v * scale, 0.0)
    u = tl.full(v.shape, 1.0, tl.float32)
    slope_u = tl.zeros(v.shape, tl.float32)
    if GATED:
        u = tl.load(place + a, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            u += tl.load(bias + model * width + a + column, mask=column < a, other=0.0)[None, :]
        u = _sigmoid(u)
        slope_u = u * (1.0 - u)
        if DROP:
            kept = _kept(_stream(seeds, steps, model, site_u), own, threshold, COLUMNS)
            u = tl.where(kept, u * scale, 0.0)
            slope_u = tl.where(kept, slope_u * scale, 0.0)
    return v, u, slope_v, slope_u


@triton.jit(do_not_specialize=["n", "site_v", "site_u"])
def scores_forward(
    h, bias, reads, offset, scores, seeds, steps, rows, n, a, site_v, site_u, threshold, scale,
    MAPS: tl.constexpr, GATED: tl.constexpr, RELU: tl.constexpr, BIAS: tl.constexpr, OFFSET: tl.constexpr,
    DROP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write scores (r, n, m) = trunk(h) reads' + offset.  h (r, n, a or 2a), reads (r, m, a), offset (r, m)."""
    model = tl.program_id(1)
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    v, u, _, _ = _opened(h, bias, seeds, steps, rows, model, at, n, a, site_v, site_u, threshold, scale,
                         GATED, RELU, BIAS, DROP, COLUMNS)  # fmt: skip
    trunk = v * u
    for i in tl.static_range(MAPS):
        read = tl.load(reads + (model * MAPS + i) * a + column, mask=column < a, other=0.0)
        score = tl.sum(trunk * read[None, :], 1)
        if OFFSET:
            score += tl.load(offset + model * MAPS + i)
        tl.store(scores + (model.to(tl.int64) * n + at) * MAPS + i, score, mask=at < n)


@triton.jit(do_not_specialize=["n", "blocks", "site_v", "site_u"])
def scores_backward(
    h, bias, reads, for_scores, weights, bag_of, for_h, for_reads, for_bias,
    seeds, steps, rows, n, a, width, blocks, site_v, site_u, threshold, scale,
    MAPS: tl.constexpr, GATED: tl.constexpr, RELU: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr,
    ROWS: tl.constexpr, LOOPS: tl.constexpr, COLUMNS: tl.constexpr, BEHIND: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Compute gradients from for_scores (r, n, m).

    Writes for_h in the first columns of (r, n, width), for_reads (r, blocks, m, a), and for_bias (r, blocks, a or
    2a). The columns after for_h get each instance's attention weights (r, n, m) in the columns of its bag."""
    model, block = tl.program_id(1), tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    which = tl.arange(0, PADDED)
    own = a * 2 if GATED else a
    sums_of_reads = tl.zeros((PADDED, ROWS, COLUMNS), tl.float32)
    sums_of_v = tl.zeros((ROWS, COLUMNS), tl.float32)
    sums_of_u = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(LOOPS):
        at = (block * LOOPS + i) * ROWS + tl.arange(0, ROWS)
        inside = (at < n)[:, None] & (column < a)[None, :]
        row = model.to(tl.int64) * n + at
        v, u, slope_v, slope_u = _opened(h, bias, seeds, steps, rows, model, at, n, a, site_v, site_u, threshold, scale,
                                         GATED, RELU, BIAS, DROP, COLUMNS)  # fmt: skip
        valid = (at < n)[:, None] & (which < MAPS)[None, :]
        all_maps = tl.load(for_scores + row[:, None] * MAPS + which[None, :], mask=valid, other=0.0)
        sums_of_reads += tl.trans(all_maps)[:, :, None] * (v * u)[None, :, :]
        for_trunk = tl.zeros((ROWS, COLUMNS), tl.float32)
        for j in tl.static_range(MAPS):
            read = tl.load(reads + (model * MAPS + j) * a + column, mask=column < a, other=0.0)
            g = tl.load(for_scores + row * MAPS + j, mask=at < n, other=0.0)
            for_trunk += g[:, None] * read[None, :]
        place = for_h + row[:, None] * width + column[None, :]
        for_v = for_trunk * u * slope_v
        tl.store(place, for_v.to(for_h.dtype.element_ty), mask=inside)
        sums_of_v += for_v
        if GATED:
            for_u = for_trunk * v * slope_u
            tl.store(place + a, for_u.to(for_h.dtype.element_ty), mask=inside)
            sums_of_u += for_u
        if BEHIND > 0:
            extra = tl.arange(0, BEHIND)
            bag = tl.load(bag_of + at, mask=at < n, other=-1)
            own_bag = (bag[:, None] == (extra // MAPS)[None, :]) & (at < n)[:, None]
            attention = tl.load(weights + row[:, None] * MAPS + (extra % MAPS)[None, :], mask=own_bag, other=0.0)
            behind = for_h + row[:, None] * width + own + extra[None, :]
            fits = (at < n)[:, None] & (own + extra < width)[None, :]
            tl.store(behind, attention.to(for_h.dtype.element_ty), mask=fits)
    part = model * blocks + block
    kept = (which < MAPS)[:, None] & (column < a)[None, :]
    tl.store(for_reads + (part * MAPS + which)[:, None] * a + column[None, :], tl.sum(sums_of_reads, 1), mask=kept)
    if BIAS:
        tl.store(for_bias + part * own + column, tl.sum(sums_of_v, 0), mask=column < a)
        if GATED:
            tl.store(for_bias + part * own + a + column, tl.sum(sums_of_u, 0), mask=column < a)


@triton.jit(do_not_specialize=["n", "chunks", "m"])
def pool_forward(
    weights, z, starts, ends, partial, n, d, chunks, m,
    SECOND: tl.constexpr, ROWS: tl.constexpr, LOOPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write partial (r, chunks, m, d): sums of weights (r, n, m) times z (r, n, d) over each chunk of rows; two maps
    per program.
    """
    model, chunk, first = tl.program_id(1), tl.program_id(0), tl.program_id(2) * 2
    begin, end = tl.load(starts + chunk), tl.load(ends + chunk)
    second_end = tl.where(first + 1 < m, end, begin)  # a missing second map has no rows
    column = tl.arange(0, COLUMNS)
    one = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    two = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for i in tl.range(0, LOOPS, num_stages=3):
        at = begin + i * ROWS + tl.arange(0, ROWS)
        row = model.to(tl.int64) * n + at
        inside = (at < end)[:, None] & (column < d)[None, :]
        x = tl.load(z + row[:, None] * d + column[None, :], mask=inside, other=0.0).to(tl.float32)
        one += tl.load(weights + row * m + first, mask=at < end, other=0.0)[:, None] * x
        if SECOND:
            two += tl.load(weights + row * m + first + 1, mask=at < second_end, other=0.0)[:, None] * x
    place = partial + ((model * chunks + chunk).to(tl.int64) * m + first) * d + column
    tl.store(place, tl.sum(one, 0), mask=column < d)
    if SECOND:
        tl.store(place + d, tl.sum(two, 0), mask=column < tl.where(first + 1 < m, d, 0))


@triton.jit(do_not_specialize=["n", "count", "m"])
def pool_backward(
    z, for_pooled, starts, ends, bags, for_weights, n, d, count, m,
    SECOND: tl.constexpr, ROWS: tl.constexpr, LOOPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write for_weights (r, n, m): each instance projected onto the gradient of its bag's pool, for_pooled (r, b, m, d)."""
    model, chunk, first = tl.program_id(1), tl.program_id(0), tl.program_id(2) * 2
    begin, end, bag = tl.load(starts + chunk), tl.load(ends + chunk), tl.load(bags + chunk)
    column = tl.arange(0, COLUMNS)
    place = for_pooled + ((model * count + bag).to(tl.int64) * m + first) * d + column
    one = tl.load(place, mask=column < d, other=0.0)
    two = tl.load(place + d, mask=column < tl.where(first + 1 < m, d, 0), other=0.0)
    second_end = tl.where(first + 1 < m, end, begin)
    for i in tl.range(0, LOOPS, num_stages=3):
        at = begin + i * ROWS + tl.arange(0, ROWS)
        row = model.to(tl.int64) * n + at
        inside = (at < end)[:, None] & (column < d)[None, :]
        x = tl.load(z + row[:, None] * d + column[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(for_weights + row * m + first, tl.sum(x * one[None, :], 1), mask=at < end)
        if SECOND:
            tl.store(for_weights + row * m + first + 1, tl.sum(x * two[None, :], 1), mask=at < second_end)
