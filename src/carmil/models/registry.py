"""Registry of models by name."""

import inspect
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from carmil.errors import CarmilError, unknown
from carmil.models.contract import AttendingModel, BagModel
from carmil.targets.links import Link, Softmax


@dataclass(frozen=True)
class RegisteredModel:
    """A model class, a short description, and the options that the name implies."""

    build: type[BagModel]
    description: str
    options: Mapping[str, Any]

    @property
    def carries_branch(self) -> bool:
        """Return whether the model supports a counterfactual branch."""
        return issubclass(self.build, AttendingModel)


_MODELS: dict[str, RegisteredModel] = {}

# Initial weights come from torch's global generator: hold this lock from seeding until the models are built.
seed_lock = threading.RLock()


def register(name: str, build: type[BagModel], description: str, **options: Any) -> None:
    """Register `build(in_features, classes, **options)` under `name`."""
    _MODELS[name] = RegisteredModel(build, description, options)


def registered_models() -> dict[str, RegisteredModel]:
    return dict(sorted(_MODELS.items()))


def create(name: str, in_features: int, classes: int, *, link: Link | None = None, **options: Any) -> BagModel:
    """Build a new model; `options` override those that the name implies. link: that of a target, by default of classes."""
    registered = _MODELS.get(name)
    if registered is None:
        raise CarmilError(unknown("model", name, _MODELS))
    link = Softmax() if link is None else link
    if in_features < 1 or classes < (2 if isinstance(link, Softmax) else 1):
        raise CarmilError(
            f"a model of {in_features} features and {classes} classes: expected at least one feature and two classes"
        )
    known = inspect.signature(registered.build).parameters
    for option in options:
        if option not in known:
            accepted = sorted(set(known) - {"in_features", "classes"})
            raise CarmilError(f"{name!r}: {unknown('option', option, accepted)}")
    build: Any = registered.build
    options = {**registered.options, **options}
    part = registered.build.needs_classes(options)
    if part and not isinstance(link, Softmax):
        raise CarmilError(f"{name!r} predicts classes only, as its {part} needs them: use abmil.gated or another model")
    with seed_lock:
        model: BagModel = build(in_features, classes, **options)
    model.link = link
    return model
