"""Published encoders that libraries other than timm load: transformers (Phikon) and conch (CONCH).

Neither library is needed to install carmil. Code that comes with a model of the hub is never executed.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor, nn

from carmil.errors import CarmilError
from carmil.slides.published_encoders import PublishedEncoder

_INSTALL = {
    "transformers": "pip install transformers",
    "conch": "pip install git+https://github.com/Mahmoodlab/CONCH.git",
}


class ClassToken(nn.Module):
    """The class token of a model of transformers, after its last normalisation."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pictures: Tensor) -> Tensor:
        """(b, 3, p, p) -> (b, d)"""
        return self.network(pixel_values=pictures).last_hidden_state[:, 0]


class ConchImage(nn.Module):
    """CONCH's picture of a tile, before the projection that is compared with text."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pictures: Tensor) -> Tensor:
        """(b, 3, p, p) -> (b, d)"""
        return self.network.encode_image(pictures, proj_contrast=False, normalize=False)  # type: ignore[operator]


def load_hub_model(row: PublishedEncoder, weights: Path | None) -> tuple[nn.Module, nn.Module]:
    """The network with its weights, and the module that makes one vector per tile of what it gives."""
    check_library(row)
    try:
        if row.library == "conch":
            return _conch(row, weights)
        return _transformers(row, weights)
    except CarmilError:
        raise
    except Exception as error:  # neither library lists what it raises
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        page = f"https://huggingface.co/{row.name.removeprefix('hf-hub:')}"
        raise CarmilError(
            f"{row.library} could not load {row.name} ({reason}): is there a network, and are its terms accepted at {page} "
            "and HF_TOKEN set?"
        ) from error


def check_library(row: PublishedEncoder) -> None:
    """Refuse a model that cannot be loaded here, before anything is fetched."""
    if row.library == "its own code":
        raise CarmilError(
            f"{row.name} is loaded by code that comes with it, which carmil does not execute: make its features with "
            "TRIDENT, then `carmil cohort build`"
        )
    if row.library in _INSTALL and find_spec(row.library) is None:
        raise CarmilError(f"{row.name} is loaded by {row.library}, which is not installed: {_INSTALL[row.library]}")


def _transformers(row: PublishedEncoder, weights: Path | None) -> tuple[nn.Module, nn.Module]:
    if weights is not None:
        raise CarmilError(
            f"--weights cannot be used with {row.name}: transformers takes it from the hub, or from its cache (HF_HOME) offline"
        )
    kind = getattr(import_module("transformers"), row.architecture)
    network = kind.from_pretrained(row.name.removeprefix("hf-hub:"), **row.options)
    return network, ClassToken(network)


def _conch(row: PublishedEncoder, weights: Path | None) -> tuple[nn.Module, nn.Module]:
    create = import_module("conch.open_clip_custom").create_model_from_pretrained
    place = "hf_hub:MahmoodLab/conch" if weights is None else str(weights)
    network = create("conch_ViT-B-16", checkpoint_path=place, return_transform=False)
    return network, ConchImage(network)
