"""Means and mean squares of the instances of bags, in one pass over the features. b bags, d features."""

import numpy as np
import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.statistics.scope import BagMoments
from carmil.training.scaling import ROWS


def bag_moments(bags: Bags, chosen: Tensor, *, device: torch.device | str = "cpu") -> BagMoments:
    """Return the moments of the bags at the positions `chosen`. Three vectors per bag are kept; device: where sums are computed."""
    # In single precision, since a cohort has many bags; the sums are in double precision.
    means, squares, halves = (np.zeros((len(chosen), bags.width), dtype=np.float32) for _ in range(3))
    done = 0
    for part in bags.parts(ROWS, chosen):
        for x in part.features.to(device).double().split(part.sizes.tolist()):
            means[done], squares[done] = x.mean(0).cpu(), x.square().mean(0).cpu()
            if len(x) > 1:
                halves[done] = (x[::2].mean(0) - x[1::2].mean(0)).cpu()
            done += 1
    return BagMoments(bags.sizes[chosen].double().numpy(), means, squares, halves)
