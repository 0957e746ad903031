"""carmil: multiple-instance learning that shows the evidence for and against each prediction."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carmil.bags import Bags
    from carmil.bags.store import open_store
    from carmil.counterfactual import create_model, list_models
    from carmil.datasets.digits import TASKS, sample_study
    from carmil.errors import CarmilError
    from carmil.estimators.classifier import MILClassifier
    from carmil.estimators.regressor import MILRegressor
    from carmil.estimators.survival import MILSurvival
    from carmil.evidence import EXPLAINERS, bag_performance, evidence_agreement, explain
    from carmil.explanations.audit import Audit, audit
    from carmil.models import BagModel, Prediction
    from carmil.training import Member, Population, Recipe, fit

__version__ = "0.2.0.dev0"

# Imported on first use, so that `import carmil` does not import torch.
_HOMES = {
    "Bags": "bags",
    "TASKS": "datasets.digits",
    "sample_study": "datasets.digits",
    "create_model": "counterfactual",
    "list_models": "counterfactual",
    "CarmilError": "errors",
    "EXPLAINERS": "evidence",
    "bag_performance": "evidence",
    "evidence_agreement": "evidence",
    "explain": "evidence",
    "MILClassifier": "estimators.classifier",
    "MILRegressor": "estimators.regressor",
    "MILSurvival": "estimators.survival",
    "open_store": "bags.store",
    "BagModel": "models",
    "Prediction": "models",
    "Audit": "explanations.audit",
    "audit": "explanations.audit",
    "Member": "training",
    "Population": "training",
    "Recipe": "training",
    "fit": "training",
}

__all__ = [
    "EXPLAINERS",
    "TASKS",
    "Audit",
    "BagModel",
    "Bags",
    "CarmilError",
    "MILClassifier",
    "MILRegressor",
    "MILSurvival",
    "Member",
    "Population",
    "Prediction",
    "Recipe",
    "audit",
    "bag_performance",
    "create_model",
    "evidence_agreement",
    "explain",
    "fit",
    "list_models",
    "open_store",
    "sample_study",
]


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'carmil' has no attribute {name!r}")
        return getattr(import_module(f"carmil.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
