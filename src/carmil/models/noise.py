"""Random numbers that belong to a model.

A draw is a function of (the model's seed, its step, the place in the network, the instance, the column), nothing else. So
a model trained in a population sees what it would see alone, whoever its neighbours are, whichever bags they bring along
and whenever they stop, on any device.
"""

import torch
from torch import Tensor, nn

_MASK = 0xFFFFFFFF


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
        rows = self.rows
        if rows is None or len(rows) != shape[0]:
            rows = torch.arange(shape[0], device=self.seeds.device)
        key = _mix(_mix(_mix(self.seeds) ^ self.steps) ^ site)
        columns = torch.arange(shape[1], device=key.device)
        bits = _mix(_mix(_mix(rows).unsqueeze(-1) ^ columns) ^ key[:, None, None])
        return (bits >> 8).float() * 2.0**-24


class Noisy(nn.Module):
    """A layer that draws. Alone it uses torch's generator; a population gives it `noise`, and a `site` of its own."""

    noise: Noise | None = None
    site: int = 0

    def draw(self, shape: tuple[int, int], like: Tensor) -> Tensor:
        """Numbers in [0, 1): (*shape) alone, (r, *shape) in a population."""
        if self.noise is None:
            return torch.rand(shape, device=like.device)
        return self.noise.uniform(shape, self.site)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers under which neighbours become unrelated (two rounds of xor-shift-multiply)."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
