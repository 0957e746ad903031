"""timm's models as encoders, from its own weights, from the Hugging Face hub, or from a file.

Nothing is executed that comes with weights: timm reads safetensors, or torch's files with weights_only.
"""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from carmil.errors import CarmilError
from carmil.slides.published_encoders import CLASS, Colour, PublishedEncoder, published
from carmil.weights import read_weights


@dataclass(frozen=True)
class Seen:
    """What a network wants to see."""

    pixels: int
    mean: Colour
    std: Colour
    interpolation: str


class TokenPooled(nn.Module):
    """A vision transformer of timm whose features are its class token, followed by the mean of its patch tokens."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pictures: Tensor) -> Tensor:
        """(b, 3, p, p) -> (b, 2 d). Prefix tokens are the class token and, behind it, registers."""
        tokens = self.network.forward_features(pictures)  # type: ignore[operator]
        patches = tokens[:, self.network.num_prefix_tokens :]
        return torch.cat([tokens[:, 0], patches.mean(1)], dim=-1)


def load_timm(name: str, weights: Path | None) -> tuple[nn.Module, Seen]:
    """The network of `timm/NAME` or `hf-hub:OWNER/NAME`, without its classifier."""
    import timm

    known = published(name)
    asked = name.removeprefix("timm/") if weights is None or known is None else known.architecture
    options = {} if known is None else _options(known)
    if not asked.startswith("hf-hub:") and not timm.is_model(asked):
        close = difflib.get_close_matches(asked.split(".")[0], timm.list_models(), n=1)
        hint = f"did you mean timm/{close[0]}?" if close else "`timm.list_models()` lists them"
        raise CarmilError(f"timm has no model {asked!r}: {hint}")
    network = _created(name, asked, options, pretrained=weights is None)
    if weights is not None:
        _load(network, weights, name)
    if known is not None and known.mean is not None and known.std is not None:
        return network, Seen(known.pixels, known.mean, known.std, known.interpolation)
    config = timm.data.resolve_data_config(model=network)
    interpolation = config["interpolation"] if config["interpolation"] == "bicubic" else "bilinear"
    return network, Seen(config["input_size"][-1], tuple(config["mean"]), tuple(config["std"]), interpolation)


def timms_pooling(network: nn.Module) -> str:
    """How timm itself makes one vector of what this network gives, in words."""
    rule = getattr(network, "global_pool", None)
    rule = rule if isinstance(rule, str) else getattr(rule, "pool_type", None)
    words = {"token": "class token", "avg": "mean", "map": "attention pooling"}
    return f"timm's default, {words.get(rule, rule)}" if isinstance(rule, str) and rule else "timm's default"


def _created(name: str, asked: str, options: dict[str, Any], *, pretrained: bool) -> nn.Module:
    """timm's own words about what went wrong become one line, with what to do."""
    import timm
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return timm.create_model(asked, pretrained=pretrained, num_classes=0, **options)
    except GatedRepoError as error:
        page = f"https://huggingface.co/{asked.removeprefix('hf-hub:')}"
        raise CarmilError(
            f"{name} is gated: accept its terms at {page}, then set HF_TOKEN to a token of yours "
            "(or run `hf auth login`)"
        ) from error
    except RepositoryNotFoundError as error:
        raise CarmilError(
            f"{name} is not on the hub, or you have no access: check the name, and set HF_TOKEN if it is private"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise CarmilError(
            f"could not download {name} ({_first_line(error)}): is there a network? Or give a file with --weights FILE"
        ) from error
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise CarmilError(f"timm cannot create {name} ({_first_line(error)})") from error


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


def _options(known: PublishedEncoder) -> dict[str, Any]:
    """Options as timm wants them: layers by their class."""
    from timm.layers import SwiGLUPacked

    layers = {"SwiGLUPacked": SwiGLUPacked, "SiLU": torch.nn.SiLU}
    pool = {"global_pool": "token" if known.pooling == CLASS else ""}
    return pool | {
        name: layers.get(value, value) if isinstance(value, str) else value for name, value in known.options.items()
    }


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
