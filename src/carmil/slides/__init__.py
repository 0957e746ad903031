"""Whole-slide images, for reading: open them, find tissue, cut tiles, encode them.

Needs `pip install carmil[slides]`. No room that every run needs imports this one, but for the types of a slide and its tiles.
"""
