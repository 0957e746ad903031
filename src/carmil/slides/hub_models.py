"""Published encoders that libraries other than timm load: transformers (Phikon) and conch (CONCH).

Neither library is needed to install carmil. Code that comes with a model of the hub is never executed.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from torch import nn

from carmil.errors import CarmilError
from carmil.slides.pooling import Pooled, class_token, conch_embedding
from carmil.slides.published_encoders import PublishedEncoder
from carmil.untrusted import short_message
from carmil.weights import fingerprint

_INSTALL = {
    "transformers": "pip install transformers",
    "conch": "pip install git+https://github.com/Mahmoodlab/CONCH.git",
}


def load_hub_model(row: PublishedEncoder, weights: Path | None) -> tuple[str, nn.Module]:
    """Return the fingerprint of the weights, and the module that gives one vector per tile."""
    check_library(row)
    try:
        network = _load_conch(weights) if row.library == "conch" else _load_transformers(row, weights)
    except CarmilError:
        raise
    except Exception as error:  # neither library lists what it raises
        page = f"https://huggingface.co/{row.name.removeprefix('hf-hub:')}"
        raise CarmilError(
            f"{row.library} could not load {row.name} ({short_message(error)}): check the network connection, accept the "
            f"terms at {page} and set HF_TOKEN"
        ) from error
    return fingerprint(network), Pooled(network, conch_embedding if row.library == "conch" else class_token)


def check_library(row: PublishedEncoder) -> None:
    """Refuse a model that cannot be loaded here, before anything is downloaded."""
    if row.library == "its own code":
        raise CarmilError(
            f"{row.name} is loaded by code that comes with it, which carmil does not execute: make its features with "
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
