"""Encoders: networks that make a vector of numbers of a tile. One is asked for by its name:

resnet50              torchvision's, up to its third stage, 1024 features, as CLAM
resnet50.caffe        the original of it, from a file of weights
timm/NAME             any model of timm
hf-hub:OWNER/NAME     UNI and others on the Hugging Face hub, with the user's own token; `published_encoders` knows how the
                      well-known ones are used

b tiles of h x w tile pixels, d features.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from carmil.bags.geometry import TileGeometry
from carmil.errors import CarmilError
from carmil.slides import resnet
from carmil.slides.hub_models import load_hub_model
from carmil.slides.published_encoders import CLASS_AND_MEAN, published
from carmil.weights import fingerprint

_THIRD_STAGE = "mean over the third stage"


@dataclass(frozen=True, eq=False)
class Encoder:
    """`name` is what a store keeps: what was asked for, and a fingerprint of the weights. `network` sees squares of
    `pixels` tile pixels, red, green and blue from 0 to 1 less `mean`, divided by `std`; it gives `width` features.
    `pooling` says in words how one vector per tile is made, and belongs to the name. `mpps`: micrometres per pixel that the
    encoder was published for, where that is known.
    """

    name: str
    network: nn.Module
    width: int
    pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str = "bilinear"
    pooling: str | None = None
    mpps: tuple[float, ...] = ()

    def magnification_remark(self, tiles: TileGeometry) -> str | None:
        """One line where the network sees tiles at another magnification than it was published for, else None."""
        if not tiles.known or not self.mpps:
            return None
        assert tiles.tile_pixels is not None and tiles.tile_mpp is not None
        shown = tiles.tile_mpp * tiles.tile_pixels / self.pixels
        if any(max(shown / mpp, mpp / shown) <= _NEAR for mpp in self.mpps):
            return None
        known = ", ".join(f"{mpp:g}" for mpp in self.mpps)
        return (
            f"{self.name} was published for {known} um/px and sees {shown:.3g} um/px here (tiles of {tiles}, shown as "
            f"{self.pixels} pixels): its features may be less informative"
        )

    def on(self, device: str) -> "Encoder":
        """The same there, with its weights as convolutions like them best."""
        return replace(self, network=self.network.to(device).to(memory_format=torch.channels_last))

    def __call__(self, pictures: Tensor) -> Tensor:
        """uint8 (b, h, w, 3) -> (b, d). The whole tile is seen, resized and not cropped."""
        seen = pictures.permute(0, 3, 1, 2).float()
        if seen.shape[2:] != (self.pixels, self.pixels):
            seen = functional.interpolate(seen, (self.pixels,) * 2, mode=self.interpolation, antialias=True)
        mean, std = (_colour(colour, seen.device) for colour in (self.mean, self.std))
        return self.network((seen.clamp(0, 255) - mean) / std)


_NEAR = 1.25  # a factor; tiles of 256 pixels that are shown as 224 are off by 1.14, as most published features are


@lru_cache
def _colour(colour: tuple[float, float, float], device: torch.device) -> Tensor:
    """(3, 1, 1), of 255. Sent to the device once: nothing can be sent while a GPU's work is recorded."""
    return torch.tensor(colour, device=device).view(3, 1, 1) * 255


def load_encoder(name: str, *, weights: Path | None = None, log: Callable[[str], None] = lambda line: None) -> Encoder:
    """The encoder of that name, ready to use on a CPU. weights: a file of them; without it they are downloaded.

    log: gets one line where nobody has checked how the encoder is pooled.
    """
    for needed in ("torchvision", "timm"):
        if find_spec(needed) is None:
            raise CarmilError(f"encoders need {needed}: pip install 'carmil[slides]'")
    if name == "resnet50":
        encoder = _resnet50(name, weights)
    elif name == "resnet50.caffe":
        encoder = _caffe(name, weights)
    elif re.match(r"(timm/|hf-hub:).", name):
        encoder = _from_hub(name, weights, log)
    else:
        raise CarmilError(
            f"unknown encoder {name!r}: expected resnet50, resnet50.caffe, timm/NAME (any of timm's) or hf-hub:OWNER/NAME"
        )
    encoder.network.eval().requires_grad_(False)
    return encoder


def stored_name(name: str, network: nn.Module) -> str:
    """As it stands in stores and in names of folders, and comes back from both."""
    return f"{_in_stores(name)}-{fingerprint(network)}"


def may_be(stored: str, name: str) -> bool:
    """Whether an encoder that a store names can be the one of this name; its weights are another question."""
    return stored.rpartition("-")[0] == _in_stores(name)


def _in_stores(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def _resnet50(name: str, weights: Path | None) -> Encoder:
    network = resnet.resnet50(weights, caffe=False)
    named = stored_name(name, network)
    colours = resnet.IMAGENET_MEAN, resnet.IMAGENET_STD
    return Encoder(named, resnet.fused(network), 1024, 224, *colours, pooling=_THIRD_STAGE)


def _caffe(name: str, weights: Path | None) -> Encoder:
    if weights is None:
        raise CarmilError("resnet50.caffe cannot be downloaded: give a file of its weights with --weights FILE")
    network = resnet.resnet50(weights, caffe=True)
    named = stored_name(name, network)
    colours = resnet.CAFFE_MEAN, resnet.CAFFE_STD
    return Encoder(named, resnet.in_rgb(resnet.fused(network)), 1024, 224, *colours, pooling=_THIRD_STAGE)


def _from_hub(name: str, weights: Path | None, log: Callable[[str], None]) -> Encoder:
    """As the table of published encoders has it; else as timm has it, which is said."""
    from carmil.slides.timm_models import TokenPooled, load_timm, timms_pooling

    row = published(name)
    if row is None or row.library == "timm":
        network, seen = load_timm(name, weights)
        pooled = TokenPooled(network) if row is not None and row.pooling == CLASS_AND_MEAN else network
        colours, pixels, interpolation = (seen.mean, seen.std), seen.pixels, seen.interpolation
    else:
        network, pooled = load_hub_model(row, weights)
        assert row.mean is not None and row.std is not None  # of every row that can be loaded
        colours, pixels, interpolation = (row.mean, row.std), row.pixels, row.interpolation
    pooled.eval()
    named, pooling = stored_name(name, network), timms_pooling(network) if row is None else row.pooling
    encoder = Encoder(named, pooled, 0, pixels, *colours, interpolation, pooling, () if row is None else row.mpps)
    encoder = _measured(encoder, name)
    if row is None:
        log(
            f"{name} is not in the table of published encoders (`carmil slides encoders`): it is pooled by {pooling}, and nobody "
            "has checked that this is how its features are meant to be made"
        )
    elif encoder.width != row.width:
        raise CarmilError(
            f"{name} gives {encoder.width} features per tile: expected {row.width}; are these its weights?"
        )
    return encoder


def _measured(encoder: Encoder, name: str) -> Encoder:
    """With the width that one tile shows; networks say it in many ways."""
    with torch.inference_mode():
        shape = encoder(torch.zeros(1, encoder.pixels, encoder.pixels, 3, dtype=torch.uint8)).shape
    if len(shape) != 2:
        raise CarmilError(
            f"{name} gives {tuple(shape[1:])} numbers for a tile: expected one row of features; it has a pooling of its own that "
            "carmil does not know"
        )
    return replace(encoder, width=shape[1])
