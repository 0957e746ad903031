"""Mutations of files, and the readers of carmil that they are tried on. Run it with tools/fuzz.py."""
