"""One file per model, a registry, and the pooling that all models share."""

from carmil.models import abmil, acmil, additive, clam, dsmil, max, mean, rrt, transmil, weno  # noqa: F401  importing a file registers it
from carmil.models.contract import Ability, AttendingModel, BagModel, Counterfactual, Prediction
from carmil.models.pooling import Offsets
from carmil.models.registry import create, register, registered_models

__all__ = [
    "Ability",
    "AttendingModel",
    "BagModel",
    "Counterfactual",
    "Offsets",
    "Prediction",
    "create",
    "register",
    "registered_models",
]
