"""Targets of prediction, and everything that differs between their kinds."""

from carmil.targets.labels import Labels
from carmil.targets.ordinal import Ordinal
from carmil.targets.survival import Survival
from carmil.targets.target import Classes, Target
from carmil.targets.value import Value

__all__ = ["Classes", "Labels", "Ordinal", "Survival", "Target", "Value"]
