"""Random numbers that belong to a model.

A draw depends only on the model's seed, its step, the site in the network, the instance and the column. A model
therefore draws the same numbers by itself and in a population, on any device, whatever the other models and bags are
and whenever they stop.
"""

import torch
from torch import Tensor, nn


class Noise:
    """The noise streams of r models: `seeds` (r), and `steps` (r), the number of steps that each has taken.

    `rows` (n) holds the current instances' indices in the cohort; without it they are numbered from 0.
    """

    def __init__(self, seeds: Tensor, steps: Tensor | None = None) -> None:
        self.seeds = seeds
        self.steps = torch.zeros_like(seeds) if steps is None else steps
        self.rows: Tensor | None = None

    def uniform(self, shape: tuple[int, int], site: int) -> Tensor:
        """Draw numbers (r, *shape) in [0, 1), new at every step and site; with shape[0] = n, each row belongs to its instance."""
        rows = self.rows_for(shape[0])
        return (self._bits(rows, shape[1], site) >> 8 & 0xFFFFFF).float() * 2.0**-24

    def kept(self, shape: tuple[int, int], share: float, site: int, part: slice = slice(None)) -> Tensor:
        """Draw a mask (r, *shape), true with probability `share` (in steps of 2^-16), at half the cost of `uniform`.

        part: return only these rows.
        """
        rows = self.rows_for(shape[0])[part]
        halves = self._bits(rows, (shape[1] + 1) // 2, site).view(torch.int16)
        return halves[..., : shape[1]] < round(share * 2**16) - 2**15

    def rows_for(self, count: int) -> Tensor:
        """Return the indices in the cohort of the instances for which numbers are drawn, (count)."""
        if self.rows is not None and len(self.rows) == count:
            return self.rows
        return torch.arange(count, device=self.seeds.device)

    def _bits(self, rows: Tensor, columns: int, site: int) -> Tensor:
        """Draw int32 numbers (r, rows, columns), all 32 bits random."""
        key = _mix(_mix(_mix(self.seeds) ^ self.steps.int()) ^ site)
        place = _mix(_mix(rows).unsqueeze(-1) ^ torch.arange(columns, device=key.device, dtype=torch.int32))
        # Position and key are random already; two rounds are needed to decorrelate the models too.
        bits = place ^ key[:, None, None]
        bits *= 0x7FEB352D
        bits ^= (bits >> 15) & 0x1FFFF
        bits *= 0x846CA68B - 2**32
        return bits


class Noisy(nn.Module):
    """Base class of layers with random draws: from torch's generator, or from the `noise` of a population and a unique `site`."""

    noise: Noise | None = None
    site: int = 0

    def draw(self, shape: tuple[int, int], like: Tensor) -> Tensor:
        """Draw numbers in [0, 1): (*shape) by itself, (r, *shape) in a population."""
        if self.noise is None:
            return torch.rand(shape, device=like.device)
        return self.noise.uniform(shape, self.site)

    def kept(self, shape: tuple[int, int], share: float, like: Tensor, part: slice = slice(None)) -> Tensor:
        """Draw a mask, true with probability `share`: (*shape) by itself, (r, *shape) in a population; only the rows of `part`."""
        if self.noise is None:
            return torch.rand(shape, device=like.device)[part] < share
        return self.noise.kept(shape, share, self.site, part)


class Dropout(Noisy):
    """Dropout of each element with probability p in training; the others are scaled by 1 / (1-p)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    @property
    def scale(self) -> float:
        """Return the factor by which kept elements are multiplied."""
        return 1 / (1 - self.p) if self.training else 1.0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        dropped = self.kept((x.shape[-2], x.shape[-1]), 1 - self.p, x).logical_not_()
        return x.masked_fill(dropped, 0.0).mul_(self.scale)

    def drop_(self, x: Tensor, rows: slice, count: int) -> Tensor:
        """Apply dropout in place to these rows of a population's (r, count, d)."""
        if self.training and self.p > 0:
            x.mul_(self.kept((count, x.shape[-1]), 1 - self.p, x, rows)).mul_(self.scale)
        return x


def _mix(x: Tensor) -> Tensor:
    """Map 32-bit integers one-to-one so that neighbours become uncorrelated (two rounds of xor-shift-multiply)."""
    x = x.to(torch.int32, copy=True)
    x ^= (x >> 16) & 0xFFFF  # do not shift the sign in
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16) & 0xFFFF
    return x
