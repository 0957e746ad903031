"""Random numbers that belong to a model.

A draw is a function of (the model's seed, its step, the place in the network, the instance, the column), nothing else. So
a model draws the same numbers in a population as alone, whichever other models and bags there are and whenever they stop, on
any device.
"""

import torch
from torch import Tensor, nn


class Noise:
    """The streams of r models: `seeds` (r) and how many steps each has taken, `steps` (r).

    `rows` (n) says which instances of the cohort the current ones are; without it they are counted from 0.
    """

    def __init__(self, seeds: Tensor, steps: Tensor | None = None) -> None:
        self.seeds = seeds
        self.steps = torch.zeros_like(seeds) if steps is None else steps
        self.rows: Tensor | None = None

    def uniform(self, shape: tuple[int, int], site: int) -> Tensor:
        """(r, *shape) numbers in [0, 1), fresh for every step and site; a first axis of n follows the instances."""
        rows = self.rows_for(shape[0])
        return (self._bits(rows, shape[1], site) >> 8 & 0xFFFFFF).float() * 2.0**-24

    def kept(self, shape: tuple[int, int], share: float, site: int, part: slice = slice(None)) -> Tensor:
        """(r, *shape) true where an element is kept, with probability `share` (in steps of 2^-16): half the work of `uniform`.

        part: only these rows of it.
        """
        rows = self.rows_for(shape[0])[part]
        halves = self._bits(rows, (shape[1] + 1) // 2, site).view(torch.int16)
        return halves[..., : shape[1]] < round(share * 2**16) - 2**15

    def rows_for(self, count: int) -> Tensor:
        """(count) the instances of the cohort that draw."""
        if self.rows is not None and len(self.rows) == count:
            return self.rows
        return torch.arange(count, device=self.seeds.device)

    def _bits(self, rows: Tensor, columns: int, site: int) -> Tensor:
        """(r, rows, columns) int32, all 32 bits random."""
        key = _mix(_mix(_mix(self.seeds) ^ self.steps.int()) ^ site)
        place = _mix(_mix(rows).unsqueeze(-1) ^ torch.arange(columns, device=key.device, dtype=torch.int32))
        # Place and key are random already; this much more makes models unrelated, and one multiplication does not.
        bits = place ^ key[:, None, None]
        bits *= 0x7FEB352D
        bits ^= (bits >> 15) & 0x1FFFF
        bits *= 0x846CA68B - 2**32
        return bits


class Noisy(nn.Module):
    """A layer that draws. Alone it uses torch's generator; a population gives it `noise`, and a `site` of its own."""

    noise: Noise | None = None
    site: int = 0

    def draw(self, shape: tuple[int, int], like: Tensor) -> Tensor:
        """Numbers in [0, 1): (*shape) alone, (r, *shape) in a population."""
        if self.noise is None:
            return torch.rand(shape, device=like.device)
        return self.noise.uniform(shape, self.site)

    def kept(self, shape: tuple[int, int], share: float, like: Tensor, part: slice = slice(None)) -> Tensor:
        """True with probability `share`: (*shape) alone, (r, *shape) in a population; of these rows only."""
        if self.noise is None:
            return torch.rand(shape, device=like.device)[part] < share
        return self.noise.kept(shape, share, self.site, part)


class Dropout(Noisy):
    """Each element is dropped with probability p while training, the others scaled by 1 / (1-p)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    @property
    def scale(self) -> float:
        """What is kept is multiplied by this."""
        return 1 / (1 - self.p) if self.training else 1.0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        dropped = self.kept((x.shape[-2], x.shape[-1]), 1 - self.p, x).logical_not_()
        return x.masked_fill(dropped, 0.0).mul_(self.scale)

    def drop_(self, x: Tensor, rows: slice, count: int) -> Tensor:
        """The same in place, for these rows of a population's (r, count, d)."""
        if self.training and self.p > 0:
            x.mul_(self.kept((count, x.shape[-1]), 1 - self.p, x, rows)).mul_(self.scale)
        return x


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers under which neighbours become unrelated (two rounds of xor-shift-multiply)."""
    x = x.to(torch.int32, copy=True)
    x ^= (x >> 16) & 0xFFFF  # the sign is not to be shifted in
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16) & 0xFFFF
    return x
