"""Whole-slide images, reading only: open them, find tissue, cut tiles, encode them.

Needs `pip install carmil[slides]`. Other packages import only the types of a slide and its tiles at load time.
"""
