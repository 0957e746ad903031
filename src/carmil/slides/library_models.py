"""Encoders loaded by other libraries.

These are timm's models, with timm's own weights, from the Hugging Face hub or from a file; and Phikon (transformers)
and CONCH (conch), whose libraries are optional.

Code that comes with weights is never executed: timm reads safetensors, or torch's files with weights_only.

b tiles of p x p pixels, d features.
"""

import difflib
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from carmil.errors import CarmilError
from carmil.slides.published_encoders import CLASS, CLASS_AND_MEAN, PublishedEncoder
from carmil.untrusted import short_message
from carmil.weights import fill_network, fingerprint, read_weights

_INSTALL = {
    "transformers": "pip install transformers",
    "conch": "pip install git+https://github.com/Mahmoodlab/CONCH.git",
}


class Pooled(nn.Module):
    """A network, and the function that computes features (b, d) from the network and pictures (b, 3, p, p)."""

    def __init__(self, network: nn.Module, pool: Callable[..., Tensor]) -> None:
        super().__init__()
        self.network, self.pool = network, pool

    def forward(self, pictures: Tensor) -> Tensor:
        return self.pool(self.network, pictures)


def class_token(network: Callable[..., Tensor], pictures: Tensor) -> Tensor:
    """Return the class token of a model of transformers, after its last normalisation."""
    return network(pixel_values=pictures).last_hidden_state[:, 0]  # type: ignore[attr-defined]


def class_and_mean_token(network: "nn.Module", pictures: Tensor) -> Tensor:
    """Return the class token of a model of timm, followed by the mean of its patch tokens; register tokens are left out."""
    tokens = network.forward_features(pictures)  # type: ignore[operator]
    patches = tokens[:, network.num_prefix_tokens :]
    return torch.cat([tokens[:, 0], patches.mean(1)], dim=-1)


def conch_embedding(network: nn.Module, pictures: Tensor) -> Tensor:
    """Return CONCH's embedding of a tile, before the projection that is compared with text."""
    return network.encode_image(pictures, proj_contrast=False, normalize=False)  # type: ignore[operator]


def load_timm(name: str, row: PublishedEncoder | None, weights: Path | None) -> tuple[PublishedEncoder, str, nn.Module]:
    """Load `timm/NAME` or `hf-hub:OWNER/NAME` without its classifier.

    Return its table entry, the fingerprint of its weights, and the module that returns one vector per tile. Without
    an entry in the table (`row`), the entry is made from timm's configuration; the width is then unknown, 0.
    """
    import timm

    model = name.removeprefix("timm/") if weights is None or row is None else row.architecture
    if not model.startswith("hf-hub:") and not timm.is_model(model):
        close = difflib.get_close_matches(model.split(".")[0], timm.list_models(), n=1)
        hint = f"did you mean timm/{close[0]}?" if close else "`timm.list_models()` lists them"
        raise CarmilError(f"timm has no model {model!r}: {hint}")
    network = _create(name, model, {} if row is None else timm_options(row), pretrained=weights is None)
    if weights is not None:
        _load_weights(network, weights, name)
    if row is None:
        row = _row_from_timm(name, network)
    module = Pooled(network, class_and_mean_token) if row.pooling == CLASS_AND_MEAN else network
    return row, fingerprint(network), module


def timm_options(row: PublishedEncoder) -> dict[str, Any]:
    """Return the options of an entry in timm's form, in which layers are classes instead of names."""
    from timm.layers import SwiGLUPacked

    layers = {"SwiGLUPacked": SwiGLUPacked, "SiLU": torch.nn.SiLU}
    options = {"global_pool": "token" if row.pooling == CLASS else ""} | dict(row.options)
    return {name: layers.get(value, value) if isinstance(value, str) else value for name, value in options.items()}


def _row_from_timm(name: str, network: nn.Module) -> PublishedEncoder:
    """Describe a network by timm's own configuration and pooling."""
    import timm

    config = timm.data.resolve_data_config(model=network)
    rule = getattr(network, "global_pool", None)
    rule = rule if isinstance(rule, str) else getattr(rule, "pool_type", None)
    words = {"token": "class token", "avg": "mean", "map": "attention pooling"}
    return PublishedEncoder(
        name=name,
        library="timm",
        width=0,
        pixels=config["input_size"][-1],
        pooling=f"timm's default, {words.get(rule, rule)}" if isinstance(rule, str) and rule else "timm's default",
        mpps=(),
        source="timm",
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        interpolation="bicubic" if config["interpolation"] == "bicubic" else "bilinear",
    )


def _create(name: str, model: str, options: dict[str, Any], *, pretrained: bool) -> nn.Module:
    """Create timm's network; convert its errors into one line with advice."""
    import timm
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return timm.create_model(model, pretrained=pretrained, num_classes=0, **options)
    except GatedRepoError as error:
        page = f"https://huggingface.co/{model.removeprefix('hf-hub:')}"
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
            f"could not download {name} ({short_message(error)}): check the network connection, or give a file with --weights FILE"
        ) from error
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise CarmilError(f"timm cannot create {name} ({short_message(error)})") from error


def _load_weights(network: nn.Module, weights: Path, name: str) -> None:
    """Load all weights of the network from a file, which may also contain a classifier."""
    state = read_weights(weights)
    classifier = getattr(network, "pretrained_cfg", {}).get("classifier") or "head"
    heads = tuple(f"{layer}." for layer in ([classifier] if isinstance(classifier, str) else classifier))
    state = {key: value for key, value in state.items() if key in network.state_dict() or not key.startswith(heads)}
    fill_network(network, state, weights, name)


def load_hub_model(row: PublishedEncoder, weights: Path | None) -> tuple[str, nn.Module]:
    """Return the fingerprint of the weights, and the module that returns one vector per tile."""
    check_library(row)
    try:
        network = _load_conch(weights) if row.library == "conch" else _load_transformers(row, weights)
    except CarmilError:
        raise
    except Exception as error:  # neither library documents its exceptions
        page = f"https://huggingface.co/{row.name.removeprefix('hf-hub:')}"
        raise CarmilError(
            f"{row.library} could not load {row.name} ({short_message(error)}): check the network connection, accept the "
            f"terms at {page} and set HF_TOKEN"
        ) from error
    return fingerprint(network), Pooled(network, conch_embedding if row.library == "conch" else class_token)


def check_library(row: PublishedEncoder) -> None:
    """Refuse a model that cannot be loaded, before anything is downloaded."""
    if row.library == "its own code":
        raise CarmilError(
            f"{row.name} comes with its own code, which carmil does not execute: extract its features with "
            "TRIDENT, then run `carmil cohort build`"
        )
    if row.library in _INSTALL and find_spec(row.library) is None:
        raise CarmilError(f"{row.name} is loaded by {row.library}, which is not installed: {_INSTALL[row.library]}")


def _load_transformers(row: PublishedEncoder, weights: Path | None) -> nn.Module:
    if weights is not None:
        raise CarmilError(
            f"--weights cannot be used with {row.name}: transformers loads it from the hub, or offline from its cache (HF_HOME)"
        )
    kind = getattr(import_module("transformers"), row.architecture)
    return kind.from_pretrained(row.name.removeprefix("hf-hub:"), **row.options)


def _load_conch(weights: Path | None) -> nn.Module:
    create = import_module("conch.open_clip_custom").create_model_from_pretrained
    place = "hf_hub:MahmoodLab/conch" if weights is None else str(weights)
    return create("conch_ViT-B-16", checkpoint_path=place, return_transform=False)
