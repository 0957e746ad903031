"""What a bag is, and where bags come from."""

from carmil.bags.bags import Bags
from carmil.bags.digits import TASKS, DigitBags, DigitStudy, sample_study

__all__ = ["TASKS", "Bags", "DigitBags", "DigitStudy", "sample_study"]
