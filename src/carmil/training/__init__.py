"""Many models at once: the population, its optimizers, the loop, the folder a run leaves behind."""

from carmil.training.loop import TRAIN, UNUSED, VALIDATION, History, Recipe, fit
from carmil.training.population import Member, Population

__all__ = ["TRAIN", "UNUSED", "VALIDATION", "History", "Member", "Population", "Recipe", "fit"]
