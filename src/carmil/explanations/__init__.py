"""Explanations of a finished run or of any model, new slides answered and explained, and tests of whether maps can be believed."""
