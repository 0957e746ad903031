"""Training of many models at once: the population, its optimizers, the loop, and the protocol of folds and seeds."""

from carmil.training.loop import History, fit
from carmil.training.population import Member, Population
from carmil.training.recipe import TRAIN, UNUSED, VALIDATION, Recipe

__all__ = ["TRAIN", "UNUSED", "VALIDATION", "History", "Member", "Population", "Recipe", "fit"]
