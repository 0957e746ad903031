"""Models by name."""

import inspect
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from carmil.errors import CarmilError, unknown
from carmil.models.contract import AttendingModel, BagModel


@dataclass(frozen=True)
class RegisteredModel:
    """A model class, a short description of it, and the options that its name fixes."""

    build: type[BagModel]
    description: str
    options: Mapping[str, Any]

    @property
    def carries_branch(self) -> bool:
        """Whether a counterfactual branch can be put in front of it."""
        return issubclass(self.build, AttendingModel)


_MODELS: dict[str, RegisteredModel] = {}

# Initial weights come from torch's global generator: whoever seeds it holds this lock until its models are built.
seed_lock = threading.RLock()


def register(name: str, build: type[BagModel], description: str, **options: Any) -> None:
    """Make `build(in_features, classes, **options)` known as `name`."""
    _MODELS[name] = RegisteredModel(build, description, options)


def registered_models() -> dict[str, RegisteredModel]:
    return dict(sorted(_MODELS.items()))


def create(name: str, in_features: int, classes: int, **options: Any) -> BagModel:
    """Build a fresh model; `options` of its class override those that the name fixes."""
    registered = _MODELS.get(name)
    if registered is None:
        raise CarmilError(unknown("model", name, _MODELS))
    if in_features < 1 or classes < 2:
        raise CarmilError(
            f"a model of {in_features} features and {classes} classes: expected at least one feature and two classes"
        )
    known = inspect.signature(registered.build).parameters
    for option in options:
        if option not in known:
            accepted = sorted(set(known) - {"in_features", "classes"})
            raise CarmilError(f"{name!r}: {unknown('option', option, accepted)}")
    build: Any = registered.build
    with seed_lock:
        return build(in_features, classes, **{**registered.options, **options})
