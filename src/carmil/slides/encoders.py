"""Encoders: networks that make a vector of numbers of a tile. One is asked for by its name:

resnet50              torchvision's, up to its third stage, 1024 features, as CLAM
resnet50.caffe        the original of it, from a file of weights
timm/NAME             any model of timm
hf-hub:OWNER/NAME     UNI and others on the Hugging Face hub, with the user's own token

b tiles of h x w tile pixels, d features.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from carmil.errors import CarmilError
from carmil.slides import resnet
from carmil.weights import fingerprint


@dataclass(frozen=True, eq=False)
class Encoder:
    """`name` is what a store keeps: what was asked for, and a fingerprint of the weights. `network` sees squares of
    `pixels` tile pixels, red, green and blue from 0 to 1 less `mean`, divided by `std`; it gives `width` features.
    """

    name: str
    network: nn.Module
    width: int
    pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str = "bilinear"
    pooling: str | None = None

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


@lru_cache
def _colour(colour: tuple[float, float, float], device: torch.device) -> Tensor:
    """(3, 1, 1), of 255. Sent to the device once: nothing can be sent while a GPU's work is recorded."""
    return torch.tensor(colour, device=device).view(3, 1, 1) * 255


def load_encoder(name: str, *, weights: Path | None = None) -> Encoder:
    """The encoder of that name, ready to use on a CPU. weights: a file of them; without it they are downloaded."""
    for needed in ("torchvision", "timm"):
        if find_spec(needed) is None:
            raise CarmilError(f"encoders need {needed}: pip install 'carmil[slides]'")
    if name == "resnet50":
        encoder = _resnet50(name, weights)
    elif name == "resnet50.caffe":
        encoder = _caffe(name, weights)
    elif re.match(r"(timm/|hf-hub:).", name):
        encoder = _timm(name, weights)
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
    return Encoder(named, resnet.fused(network), 1024, 224, resnet.IMAGENET_MEAN, resnet.IMAGENET_STD)


def _caffe(name: str, weights: Path | None) -> Encoder:
    if weights is None:
        raise CarmilError("resnet50.caffe cannot be downloaded: give a file of its weights with --weights FILE")
    network = resnet.resnet50(weights, caffe=True)
    named = stored_name(name, network)
    return Encoder(named, resnet.in_rgb(resnet.fused(network)), 1024, 224, resnet.CAFFE_MEAN, resnet.CAFFE_STD)


def _timm(name: str, weights: Path | None) -> Encoder:
    from carmil.slides.timm_models import load_timm

    network, seen = load_timm(name, weights)
    network.eval()
    encoder = Encoder(stored_name(name, network), network, 0, seen.pixels, seen.mean, seen.std, seen.interpolation)
    return _measured(encoder, name)


def _measured(encoder: Encoder, name: str) -> Encoder:
    """With the width that one tile shows; networks say it in many ways."""
    with torch.inference_mode():
        shape = encoder(torch.zeros(1, encoder.pixels, encoder.pixels, 3, dtype=torch.uint8)).shape
    if len(shape) != 2:
        raise CarmilError(f"{name} gives {tuple(shape[1:])} numbers for a tile: expected one row of features")
    return replace(encoder, width=shape[1])
