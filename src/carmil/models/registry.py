"""Models by name."""

import inspect
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from carmil.errors import CarmilError, unknown
from carmil.models.contract import AttendingModel, BagModel


@dataclass(frozen=True)
class Entry:
    """A registered model: how to build it, in a few words what it is, and what its name fixes."""

    build: type[BagModel]
    description: str
    options: Mapping[str, Any]
    permutation_invariant: bool = True
    inert: tuple[str, ...] = ()  # parameters that the answer does not depend on, by the end of their names

    @property
    def attends(self) -> bool:
        """Can it carry a counterfactual branch?"""
        return issubclass(self.build, AttendingModel)


_ENTRIES: dict[str, Entry] = {}

# Weights begin as numbers of torch's one generator: who seeds it holds this until its models are made, and nobody makes one
# meanwhile in another thread.
making = threading.RLock()


def register(
    name: str,
    build: type[BagModel],
    description: str,
    *,
    permutation_invariant: bool = True,
    inert: tuple[str, ...] = (),
    **options: Any,
) -> None:
    """Makes `build(in_features, classes, **options)` known as `name`."""
    _ENTRIES[name] = Entry(build, description, options, permutation_invariant, inert)


def entries() -> dict[str, Entry]:
    return dict(sorted(_ENTRIES.items()))


def create(name: str, in_features: int, classes: int, **options: Any) -> BagModel:
    """A fresh model. `options` are those of its class, on top of what the name fixes."""
    entry = _ENTRIES.get(name)
    if entry is None:
        raise CarmilError(unknown("model", name, _ENTRIES))
    if in_features < 1 or classes < 2:
        raise CarmilError(
            f"a model of {in_features} features and {classes} classes: expected at least one feature and two classes"
        )
    known = inspect.signature(entry.build).parameters
    for option in options:
        if option not in known:
            takes = sorted(set(known) - {"in_features", "classes"})
            raise CarmilError(f"{name!r}: {unknown('option', option, takes)}")
    build: Any = entry.build
    with making:
        return build(in_features, classes, **{**entry.options, **options})
