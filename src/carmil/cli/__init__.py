"""The command line: parses, calls, prints. A file a group of commands; the order here is that of the help."""

# ruff: noqa: I001
from carmil.cli.app import app, main
from carmil.cli import machine, slides, slide_maps, cohorts, studies, evidence, viewer, reproduce

__all__ = ["app", "cohorts", "evidence", "machine", "main", "reproduce", "slide_maps", "slides", "studies", "viewer"]
