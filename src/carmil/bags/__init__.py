"""The representation of bags, and readers and writers of the files that contain them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carmil.bags.bags import Bags
    from carmil.bags.sources import Bag, register_reader

# Imported on first use, so that a process that only reads files does not import torch.
_HOMES = {
    "Bags": "bags",
    "Bag": "sources",
    "register_reader": "sources",
}

__all__ = ["Bag", "Bags", "register_reader"]


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'carmil.bags' has no attribute {name!r}")
        return getattr(import_module(f"carmil.bags.{_HOMES[name]}"), name)
