"""What a bag is, and where bags come from."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carmil.bags.bags import Bags
    from carmil.bags.sources import Bag, register_reader

# Looked up when first used: a process that only reads files does not wait for torch.
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
