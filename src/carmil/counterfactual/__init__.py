"""Counterfactual branches, their objective, and the closed forms behind them."""

from carmil.counterfactual.branches import BRANCHES, CounterfactualModel, create_model, list_models

__all__ = ["BRANCHES", "CounterfactualModel", "create_model", "list_models"]
