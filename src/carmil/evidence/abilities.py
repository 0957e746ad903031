"""What a model can be asked, by what it is: does it attend, pool by its attention, carry a branch, answer for instances?

A model may be wrapped: a branch in front of it, a scale of its features before both.
"""

from carmil.counterfactual.branches import CAR, Branch, CounterfactualModel, Targeted
from carmil.models.additive import AdditiveMIL
from carmil.models.contract import AttendingModel, BagModel
from carmil.models.dsmil import DSMIL
from carmil.models.mean import MeanMIL
from carmil.models.scaled import Scaled
from carmil.models.weno import WENO


def bare(model: BagModel) -> BagModel:
    """The model itself, without what it is wrapped in."""
    while isinstance(model, CounterfactualModel | Scaled):
        model = model.model
    return model


def branch_of(model: BagModel) -> Branch | None:
    """The counterfactual branch in front of the model."""
    model = model.model if isinstance(model, Scaled) else model
    return model.branch if isinstance(model, CounterfactualModel) else None


def answers(model: BagModel) -> bool:
    """Every model does."""
    return True


def attends(model: BagModel) -> bool:
    return isinstance(bare(model), AttendingModel | AdditiveMIL | WENO)


def pools_by_attention(model: BagModel) -> bool:
    """Is Z the sum of softmax(u)_j z_j, and F a function of Z?"""
    return isinstance(model, AttendingModel) and model.softmax_pooling


def scores_are_weights(model: BagModel) -> bool:
    """Are its scores u shares of attention already, as TransMIL's, so that no softmax follows?"""
    return not getattr(bare(model), "softmax_pooling", True)


def scores_instances(model: BagModel) -> bool:
    """Does it say what each instance answers by itself?"""
    return isinstance(bare(model), MeanMIL | AdditiveMIL | DSMIL | WENO)


def rolls_out(model: BagModel) -> bool:
    """Has it layers of self-attention?"""
    return hasattr(bare(model), "rollout")


def has_counterfactual(model: BagModel) -> bool:
    """Has it learned one counterfactual attention, as CAR does?"""
    return isinstance(branch_of(model), CAR)


def pools_counterfactually(model: BagModel) -> bool:
    return has_counterfactual(model) and pools_by_attention(model)


def has_targets(model: BagModel) -> bool:
    """Has it learned an attention for every class to win by?"""
    return isinstance(branch_of(model), Targeted)
