"""The command line: parses, calls, prints. One file per group of commands, in the order of the help."""

# ruff: noqa: I001
from carmil.cli.app import app, end_with_examples, main
from carmil.cli import (
    machine,
    slides,
    slide_maps,
    cohorts,
    datasets,
    studies,
    importing,
    evidence,
    viewer,
    reproduce,
    reproduce_recipes,
)

end_with_examples(app)

__all__ = [
    "app",
    "cohorts",
    "datasets",
    "evidence",
    "importing",
    "machine",
    "main",
    "reproduce",
    "reproduce_recipes",
    "slide_maps",
    "slides",
    "studies",
    "viewer",
]
