"""timm's models as encoders, with its own weights, from the Hugging Face hub, or from a file.

Nothing that comes with weights is executed: timm reads safetensors, or torch's files with weights_only.
"""

import difflib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from carmil.errors import CarmilError
from carmil.slides.pooling import Pooled, class_and_mean_token
from carmil.slides.published_encoders import CLASS, CLASS_AND_MEAN, PublishedEncoder
from carmil.untrusted import short_message
from carmil.weights import fingerprint, read_weights


def load_timm(name: str, row: PublishedEncoder | None, weights: Path | None) -> tuple[PublishedEncoder, str, nn.Module]:
    """Load `timm/NAME` or `hf-hub:OWNER/NAME` without its classifier.

    Return how it is used, the fingerprint of its weights, and the module that gives one vector per tile. Without an entry in the
    table (`row`) it is used as timm's configuration says; the width is then unknown, 0.
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
    """Return the options of an entry as timm takes them: layers by their class."""
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
    """Create timm's network; its errors become one line that says what to do."""
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
    """Load all weights of the network from a file, which may hold a classifier besides."""
    state = read_weights(weights)
    classifier = getattr(network, "pretrained_cfg", {}).get("classifier") or "head"
    heads = tuple(f"{layer}." for layer in ([classifier] if isinstance(classifier, str) else classifier))
    state = {key: value for key, value in state.items() if key in network.state_dict() or not key.startswith(heads)}
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise CarmilError(f"{weights} does not hold {name}: {str(error).splitlines()[-1].strip()[:200]}") from error
