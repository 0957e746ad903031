"""Networks with their own pooling: how the outputs of a vision transformer become one vector per tile.

b tiles of p x p pixels, d features.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Pooled(nn.Module):
    """A network, and the function that turns it and pictures (b, 3, p, p) into features (b, d)."""

    def __init__(self, network: nn.Module, pool: Callable[..., Tensor]) -> None:
        super().__init__()
        self.network, self.pool = network, pool

    def forward(self, pictures: Tensor) -> Tensor:
        return self.pool(self.network, pictures)


def class_token(network: Callable[..., Tensor], pictures: Tensor) -> Tensor:
    """The class token of a model of transformers, after its last normalisation."""
    return network(pixel_values=pictures).last_hidden_state[:, 0]  # type: ignore[attr-defined]


def class_and_mean_token(network: "nn.Module", pictures: Tensor) -> Tensor:
    """The class token of a model of timm, followed by the mean of its patch tokens; register tokens are left out."""
    tokens = network.forward_features(pictures)  # type: ignore[operator]
    patches = tokens[:, network.num_prefix_tokens :]
    return torch.cat([tokens[:, 0], patches.mean(1)], dim=-1)


def conch_embedding(network: nn.Module, pictures: Tensor) -> Tensor:
    """CONCH's embedding of a tile, before the projection that is compared with text."""
    return network.encode_image(pictures, proj_contrast=False, normalize=False)  # type: ignore[operator]
