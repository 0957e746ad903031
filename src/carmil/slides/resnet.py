"""ResNet50 up to its third stage, mean pooled to 1024 features, as CLAM has it; torchvision's, and Caffe's original."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from carmil.errors import CarmilError
from carmil.weights import read_weights

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CAFFE_MEAN, CAFFE_STD = (123.68 / 255, 116.779 / 255, 103.939 / 255), (1 / 255, 1 / 255, 1 / 255)
_LEFT_OUT = ("layer4.", "fc.")


def resnet50(weights: Path | None, *, caffe: bool) -> nn.Module:
    """(b, 3, height, width) -> (b, 1024). Without weights torchvision downloads ImageNet's.

    Caffe's has its strides in the first convolution of a stage, and saw BGR of 0 to 255.
    """
    from torchvision.models import resnet50 as torchvisions

    state = _downloaded() if weights is None else read_weights(weights)
    state = {name: value for name, value in state.items() if not name.startswith(_LEFT_OUT)}
    network: Any = torchvisions()
    network.layer4, network.fc = nn.Identity(), nn.Identity()
    if caffe:
        for stage in (network.layer2, network.layer3):
            stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise CarmilError(
            f"{weights} does not hold torchvision's ResNet50: {str(error).splitlines()[-1].strip()}"
        ) from error
    _right_kind(state, weights, caffe)
    return network.eval()


def fused(network: nn.Module) -> nn.Module:
    """The same answers, faster: every normalisation becomes part of the convolution before it."""
    children = list(network.named_children())
    for (name, one), (after, other) in pairwise(children):
        if isinstance(one, nn.Conv2d) and isinstance(other, nn.BatchNorm2d):
            setattr(network, name, fuse_conv_bn_eval(one, other))
            setattr(network, after, nn.Identity())
    for child in network.children():
        fused(child)
    return network


def in_rgb(network: nn.Module) -> nn.Module:
    """A network that saw BGR, changed to see RGB."""
    first: Any = network.conv1
    first.weight.data = first.weight.data.flip(1)
    return network


def _downloaded() -> dict[str, Tensor]:
    from torchvision.models import ResNet50_Weights

    try:
        return dict(ResNet50_Weights.IMAGENET1K_V1.get_state_dict(progress=True, check_hash=True))
    except (OSError, RuntimeError) as error:
        raise CarmilError(
            f"could not download ResNet50's weights ({error}): give a file of them with --weights FILE"
        ) from error


def _right_kind(state: dict[str, Tensor], weights: Path | None, caffe: bool) -> None:
    """The variances after the first convolution tell whether it saw 0 to 255, as Caffe's, or about -2 to 2."""
    seen = torch.median(state["bn1.running_var"].float()).item() > 100
    if seen != caffe:
        whose, other = ("Caffe's", "resnet50.caffe") if seen else ("torchvision's", "resnet50")
        raise CarmilError(
            f"{weights or 'torchvision'} has weights of {whose} ResNet50, by their scale: use --encoder {other}"
        )
