"""Whole-slide images: open them, find tissue, cut tiles, encode them, and draw maps back onto them.

Needs `pip install carmil[slides]`. No room that every run needs imports this one.
"""
