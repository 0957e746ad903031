"""timm's models as encoders, from its own weights, from the Hugging Face hub, or from a file.

Nothing is executed that comes with weights: timm reads safetensors, or torch's files with weights_only.
"""

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from carmil.errors import CarmilError
from carmil.slides.resnet import IMAGENET_MEAN, IMAGENET_STD
from carmil.weights import read_weights

Colour = tuple[float, float, float]
_OPTIMUS = (0.707223, 0.578729, 0.703617), (0.211883, 0.230117, 0.177517)


@dataclass(frozen=True)
class Seen:
    """What a network wants to see."""

    pixels: int
    mean: Colour
    std: Colour
    interpolation: str


@dataclass(frozen=True)
class Published:
    """A model of the hub whose card asks for options that its files do not tell."""

    architecture: str
    options: dict[str, Any] = field(default_factory=dict)
    mean: Colour = IMAGENET_MEAN
    std: Colour = IMAGENET_STD


def load_timm(name: str, weights: Path | None) -> tuple[nn.Module, Seen]:
    """The network of `timm/NAME` or `hf-hub:OWNER/NAME`, without its classifier."""
    import timm

    known = _PUBLISHED.get(name.lower())
    asked = name.removeprefix("timm/") if weights is None or known is None else known.architecture
    options = {} if known is None else _options(known)
    if not asked.startswith("hf-hub:") and not timm.is_model(asked):
        close = difflib.get_close_matches(asked.split(".")[0], timm.list_models(), n=1)
        hint = f"did you mean timm/{close[0]}?" if close else "`timm.list_models()` lists them"
        raise CarmilError(f"timm has no model {asked!r}: {hint}")
    network = _created(name, asked, options, pretrained=weights is None)
    if weights is not None:
        _load(network, weights, name)
    config = timm.data.resolve_data_config(model=network)
    mean, std = (config["mean"], config["std"]) if known is None else (known.mean, known.std)
    interpolation = config["interpolation"] if config["interpolation"] == "bicubic" else "bilinear"
    return network, Seen(config["input_size"][-1], tuple(mean), tuple(std), interpolation)


def _created(name: str, asked: str, options: dict[str, Any], *, pretrained: bool) -> nn.Module:
    """timm's own words about what went wrong become one line, with what to do."""
    import timm
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return timm.create_model(asked, pretrained=pretrained, num_classes=0, **options)
    except GatedRepoError as error:
        page = f"https://huggingface.co/{asked.removeprefix('hf-hub:')}"
        raise CarmilError(
            f"{name} is given to those who asked for it: accept its terms at {page}, then set HF_TOKEN to a token of yours "
            "(or run `hf auth login`)"
        ) from error
    except RepositoryNotFoundError as error:
        raise CarmilError(
            f"{name} is not on the hub, or not for you: look at the name, and set HF_TOKEN to a token of yours if it is private"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise CarmilError(
            f"could not download {name} ({_first_line(error)}): is there a network? Or give a file with --weights FILE"
        ) from error
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise CarmilError(f"timm cannot make {name} ({_first_line(error)})") from error


def _load(network: nn.Module, weights: Path, name: str) -> None:
    """All of the network's weights are in the file; the file may hold a classifier besides."""
    state = read_weights(weights)
    classifier = getattr(network, "pretrained_cfg", {}).get("classifier") or "head"
    ends = tuple(f"{one}." for one in ([classifier] if isinstance(classifier, str) else classifier))
    state = {key: value for key, value in state.items() if key in network.state_dict() or not key.startswith(ends)}
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise CarmilError(f"{weights} does not hold {name}: {str(error).splitlines()[-1].strip()[:200]}") from error


def _options(known: Published) -> dict[str, Any]:
    """Options as timm wants them: layers by their class."""
    from timm.layers import SwiGLUPacked

    layers = {"SwiGLUPacked": SwiGLUPacked, "SiLU": torch.nn.SiLU}
    return {
        name: layers.get(value, value) if isinstance(value, str) else value for name, value in known.options.items()
    }


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__


_SCALED = {"init_values": 1e-5}
_UNI2 = {
    **_SCALED,
    "img_size": 224,
    "patch_size": 14,
    "depth": 24,
    "num_heads": 24,
    "embed_dim": 1536,
    "mlp_ratio": 2.66667 * 2,
    "no_embed_class": True,
    "mlp_layer": "SwiGLUPacked",
    "act_layer": "SiLU",
    "reg_tokens": 8,
}
_PUBLISHED = {
    "hf-hub:mahmoodlab/uni": Published("vit_large_patch16_224", _SCALED),
    "hf-hub:mahmoodlab/uni2-h": Published("vit_giant_patch14_224", _UNI2),
    "hf-hub:bioptimus/h-optimus-0": Published("vit_giant_patch14_reg4_dinov2", {**_SCALED, "img_size": 224}, *_OPTIMUS),
    "hf-hub:bioptimus/h-optimus-1": Published("vit_giant_patch14_reg4_dinov2", {**_SCALED, "img_size": 224}, *_OPTIMUS),
}
