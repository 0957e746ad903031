"""What a bag is, and where bags come from."""

from carmil.bags.bags import Bags
from carmil.bags.digits import TASKS, DigitBags, DigitStudy, sample_study
from carmil.bags.sources import Bag, register_reader

__all__ = ["TASKS", "Bag", "Bags", "DigitBags", "DigitStudy", "register_reader", "sample_study"]
