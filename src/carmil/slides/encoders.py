"""Encoders: networks that compute a vector of features from a tile. Their names:

resnet50              torchvision's, up to its third stage, 1024 features, as CLAM
resnet50.caffe        the original Caffe network, from a file of weights
timm/NAME             any model of timm
hf-hub:OWNER/NAME     UNI and others on the Hugging Face hub, with the user's own token; `published_encoders` documents how the
                      well-known ones are used

b tiles of h x w tile pixels, d features.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from carmil.bags.geometry import TileGeometry
from carmil.errors import CarmilError
from carmil.slides.library_models import load_hub_model, load_timm
from carmil.slides.published_encoders import PUBLISHED_ENCODERS, PublishedEncoder, published
from carmil.slides.resnet import RESNETS, load_resnet50

Precision = Literal["float32", "bfloat16"]
_NEAR = 1.25  # ratio; tiles of 256 pixels that are resized to 224 differ by 1.14, as most published features do


@dataclass(frozen=True, eq=False)
class Encoder:
    """A network with its preprocessing.

    `name` is recorded in stores: the encoder's name and a fingerprint of the weights. The inputs of `network` are
    squares of `pixels` tile pixels, red, green and blue from 0 to 1, minus `mean`, divided by `std`; its output has
    `width` features. `pooling` describes how one vector per tile is made. `mpps`: micrometres per pixel that the
    encoder was published for, if known. `precision`: the one in which a CPU computes; it is part of the name, as
    features of another precision differ slightly.
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
    precision: Precision = "float32"

    def magnification_remark(self, tiles: TileGeometry) -> str | None:
        """Return one line if the encoder was published for another magnification than that of the tiles, else None."""
        if not tiles.known or not self.mpps:
            return None
        assert tiles.tile_pixels is not None and tiles.tile_mpp is not None
        input_mpp = tiles.tile_mpp * tiles.tile_pixels / self.pixels
        if any(max(input_mpp / mpp, mpp / input_mpp) <= _NEAR for mpp in self.mpps):
            return None
        known = ", ".join(f"{mpp:g}" for mpp in self.mpps)
        return (
            f"{self.name} was published for {known} um/px and sees {input_mpp:.3g} um/px here (tiles of {tiles}, resized to "
            f"{self.pixels} pixels): its features may be less informative"
        )

    def on(self, device: str) -> "Encoder":
        """Return the encoder on a device, with its weights in the memory format in which convolutions are fastest."""
        return replace(self, network=self.network.to(device).to(memory_format=torch.channels_last))

    def __call__(self, pictures: Tensor) -> Tensor:
        """Encode uint8 pictures (b, h, w, 3) -> (b, d). Tiles are resized, not cropped."""
        inputs = pictures.permute(0, 3, 1, 2).float()
        if inputs.shape[2:] != (self.pixels, self.pixels):
            inputs = functional.interpolate(inputs, (self.pixels,) * 2, mode=self.interpolation, antialias=True)
        mean, std = (_colour(colour, inputs.device) for colour in (self.mean, self.std))
        return self.network((inputs.clamp(0, 255) - mean) / std)


@lru_cache
def _colour(colour: tuple[float, float, float], device: torch.device) -> Tensor:
    """Return a colour (3, 1, 1), scaled to 255. It is copied to the device once, as no copy is possible while a CUDA
    graph is captured.
    """
    return torch.tensor(colour, device=device).view(3, 1, 1) * 255


def load_encoder(
    name: str,
    *,
    weights: Path | None = None,
    precision: Precision = "float32",
    log: Callable[[str], None] = lambda line: None,
) -> Encoder:
    """Return the encoder of that name, ready to use on a CPU. weights: a file of weights; by default they are
    downloaded.

    log: called with one line if the pooling of the encoder has not been verified.
    """
    for library in ("torchvision", "timm"):
        if find_spec(library) is None:
            raise CarmilError(f"encoders need {library}: pip install 'carmil[slides]'")
    if name not in RESNETS and not re.match(r"(timm/|hf-hub:).", name):
        raise CarmilError(
            f"unknown encoder {name!r}: expected resnet50, resnet50.caffe, timm/NAME (any model of timm) or hf-hub:OWNER/NAME"
        )
    known = RESNETS.get(name) or published(name)
    if known is None or known.library == "timm":
        row, weights_name, network = load_timm(name, known, weights)
    else:
        load = load_resnet50 if known.library == "torchvision" else load_hub_model
        row, (weights_name, network) = known, load(known, weights)
    network.eval().requires_grad_(False)
    assert row.mean is not None and row.std is not None  # holds for every entry that can be loaded
    encoder = Encoder(
        f"{_name_in_stores(name, precision)}-{weights_name}",
        network,
        _width(network, row),
        row.pixels,
        row.mean,
        row.std,
        row.interpolation,
        row.pooling,
        row.mpps,
        precision,
    )
    if known is None:
        log(
            f"{name} is not in the table of published encoders (`carmil slides encoders`): it is pooled by {row.pooling}, and "
            "this pooling has not been verified"
        )
    return encoder


def may_be_encoder(stored: str, name: str, precision: Precision = "float32") -> bool:
    """Return whether the encoder recorded in a store can have this name and precision; weights are not compared."""
    return stored.rpartition("-")[0] == _name_in_stores(name, precision)


def encoder_in_store(stored: str) -> tuple[str, Precision] | None:
    """Return the name and precision of the encoder recorded in a store, without its weights; None if the name is not known."""
    names = [*RESNETS, *(row.name for row in PUBLISHED_ENCODERS)]
    if stored.startswith("timm_"):
        names.append(stored.rpartition("-")[0].removesuffix(".bfloat16").replace("timm_", "timm/", 1))
    pairs = ((name, precision) for name in names for precision in get_args(Precision))
    return next((pair for pair in pairs if may_be_encoder(stored, *pair)), None)


def _name_in_stores(name: str, precision: Precision) -> str:
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)
    return plain if precision == "float32" else f"{plain}.{precision}"


def _width(network: nn.Module, row: PublishedEncoder) -> int:
    """Return the number of features, measured with one tile; refuse weights for which it differs from the table."""
    with torch.inference_mode():
        shape = network(torch.zeros(1, 3, row.pixels, row.pixels)).shape
    if len(shape) != 2:
        raise CarmilError(
            f"{row.name} returns an array of shape {tuple(shape[1:])} per tile: expected one vector of "
            "features; carmil cannot pool it"
        )
    if row.width not in (0, shape[1]):
        raise CarmilError(
            f"{row.name} has {shape[1]} features per tile: expected {row.width}; check that these are its weights"
        )
    return shape[1]
