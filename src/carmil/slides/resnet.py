"""ResNet50 up to its third stage, mean pooled to 1024 features, as in CLAM: torchvision's version, and Caffe's original."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from carmil.errors import CarmilError
from carmil.slides.published_encoders import PublishedEncoder
from carmil.weights import download_weights, fill_network, fingerprint, read_weights

IMAGENET = PublishedEncoder(
    name="resnet50",
    library="torchvision",
    width=1024,
    pixels=224,
    pooling="mean over the third stage",
    mpps=(),
    source="torchvision",
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
)
CAFFE = replace(
    IMAGENET,
    name="resnet50.caffe",
    source="He et al. 2016",
    mean=(123.68 / 255, 116.779 / 255, 103.939 / 255),
    std=(1 / 255, 1 / 255, 1 / 255),
)
RESNETS = {row.name: row for row in (IMAGENET, CAFFE)}
_UNUSED = ("layer4.", "fc.")


def load_resnet50(row: PublishedEncoder, weights: Path | None) -> tuple[str, nn.Module]:
    """Return the fingerprint of the weights, and the network, (b, 3, height, width) -> (b, 1024).

    Without weights, torchvision downloads those trained on ImageNet. Caffe's network has its strides in the first
    convolution of a stage, and was trained on BGR of 0 to 255.
    """
    from torchvision.models import ResNet50_Weights, resnet50

    caffe = row is CAFFE
    if caffe and weights is None:
        raise CarmilError("resnet50.caffe cannot be downloaded: give a file of its weights with --weights FILE")
    published = ResNet50_Weights.IMAGENET1K_V1
    state = download_weights(published, "ResNet50") if weights is None else read_weights(weights)
    state = {name: value for name, value in state.items() if not name.startswith(_UNUSED)}
    network: Any = resnet50()
    network.layer4, network.fc = nn.Identity(), nn.Identity()
    if caffe:
        for stage in (network.layer2, network.layer3):
            stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    fill_network(network, state, weights, "torchvision's ResNet50")
    _check_scale(state, weights, caffe)
    name = fingerprint(network)
    fuse_normalisation(network.eval())
    if caffe:
        network.conv1.weight.data = network.conv1.weight.data.flip(1)  # pictures are RGB
    return name, network


def fuse_normalisation(network: nn.Module) -> None:
    """Merge every normalisation into the convolution before it: the same features, faster."""
    for (name, layer), (after, following) in pairwise(list(network.named_children())):
        if isinstance(layer, nn.Conv2d) and isinstance(following, nn.BatchNorm2d):
            setattr(network, name, fuse_conv_bn_eval(layer, following))
            setattr(network, after, nn.Identity())
    for child in network.children():
        fuse_normalisation(child)


def _check_scale(state: dict[str, Tensor], weights: Path | None, caffe: bool) -> None:
    """Refuse weights of the other ResNet50: the first variances reveal inputs of 0 to 255, as Caffe's, or of about -2 to 2."""
    large = torch.median(state["bn1.running_var"].float()).item() > 100
    if large != caffe:
        owner, other = ("Caffe's", "resnet50.caffe") if large else ("torchvision's", "resnet50")
        raise CarmilError(
            f"{weights or 'torchvision'} has weights of {owner} ResNet50, by their scale: use --encoder {other}"
        )
