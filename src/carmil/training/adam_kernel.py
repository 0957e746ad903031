"""The Adam step of a population as one Triton kernel, which reads and writes every number once."""

import triton
import triton.language as tl


@triton.jit
def adam(
    weights, mean, square, gradient, rows, steps, rates, active, first, count, width, gradient_stride,
    beta1, beta2, log_beta1, log_beta2, eps, decay,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Update columns first:first+count of these rows of weights, mean and square (r, width) from their gradient, in
    place.

    gradient (rows, count). Each row has its own learning rate and step count; a row that is not active is left
    unchanged.
    """
    given = tl.program_id(1)
    model = tl.load(rows + given)
    if tl.load(active + model) != 0:
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = column < count
        place = model.to(tl.int64) * width + first + column
        w = tl.load(weights + place, mask=inside)
        g = tl.load(gradient + given.to(tl.int64) * gradient_stride + column, mask=inside, other=0.0).to(tl.float32)
        g += decay * w
        m = tl.load(mean + place, mask=inside)
        v = tl.load(square + place, mask=inside)
        m += (g - m) * (1.0 - beta1)
        v += (g * g - v) * (1.0 - beta2)
        step = tl.load(steps + model) + 1.0
        unbiased = m / (1.0 - tl.exp(step * log_beta1))
        scale = tl.sqrt(v / (1.0 - tl.exp(step * log_beta2))) + eps
        tl.store(weights + place, w - tl.load(rates + model) * unbiased / scale, mask=inside)
        tl.store(mean + place, m, mask=inside)
        tl.store(square + place, v, mask=inside)
