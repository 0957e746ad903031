"""Many models at once: the population, its optimizers, the loop, the folder a run leaves behind."""

from carmil.training.loop import History, fit
from carmil.training.population import Member, Population
from carmil.training.recipe import TRAIN, UNUSED, VALIDATION, Recipe

__all__ = ["TRAIN", "UNUSED", "VALIDATION", "History", "Member", "Population", "Recipe", "fit"]
