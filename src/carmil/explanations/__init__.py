"""Explanations of a finished run or of any model, answers for new slides, and tests of whether maps can be trusted."""
