"""Weights of networks, read from files of others. No pickle is ever executed."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from carmil.errors import CarmilError
from carmil.files import atomic_file
from carmil.untrusted import short_message

_AROUND = ("state_dict", "model")  # keys that may contain the state dict


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a state dict from a .safetensors file, or from one that torch.save wrote (.pt, .pth, .bin)."""
    if not path.is_file():
        raise CarmilError(f"{path} is not a file: expected weights (.safetensors, .pt, .pth or .bin)")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
        for name in _AROUND:
            state = state[name] if isinstance(state.get(name), dict) else state
        if not state or not all(isinstance(value, Tensor) for value in state.values()):
            raise TypeError("it contains values that are not tensors")
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CarmilError(f"{path} cannot be read as weights ({reason}): expected a state dict of tensors") from error
    return dict(state)


def download_weights(published: Any, what: str) -> dict[str, Tensor]:
    """Download a state dict that torchvision publishes. what: the network, in messages."""
    try:
        return dict(published.get_state_dict(progress=True, check_hash=True))
    except (OSError, RuntimeError) as error:
        raise CarmilError(
            f"could not download {what}'s weights ({short_message(error)}): give a file of them with --weights FILE"
        ) from error


def fill_network(network: nn.Module, state: Mapping[str, Tensor], path: Path | None, what: str) -> None:
    """Load a state dict into a network; refuse one of another network. what: the network, in messages."""
    try:
        network.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise CarmilError(f"{path} does not contain {what}: {str(error).splitlines()[-1].strip()[:200]}") from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor], words: Mapping[str, str] | None = None) -> None:
    """Write a .safetensors file atomically; the only function that writes one. words: its metadata."""
    from safetensors.torch import save_file

    copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_file(path) as aside:
        save_file(copies, aside, metadata=None if words is None else dict(words))


def fingerprint(network: nn.Module) -> str:
    """Return eight characters that identify the weights, independently of their file."""
    digest = hashlib.sha256()
    for name, value in sorted(network.state_dict().items()):
        if not name.endswith("num_batches_tracked"):
            values = value.detach().float() if value.is_floating_point() else value.detach()
            digest.update(f"{name}{tuple(value.shape)}".encode())
            digest.update(values.contiguous().cpu().numpy().data)
    return digest.hexdigest()[:8]
