"""The command line: parses, calls, prints. One file per group of commands, in the order of the help."""

# ruff: noqa: I001
from carmil.cli.app import app, main
from carmil.cli import (
    machine,
    slides,
    slide_maps,
    cohorts,
    datasets,
    studies,
    evidence,
    viewer,
    reproduce,
    reproduce_slides,
    reproduce_figures,
    reproduce_all,
)
from carmil.cli.examples import end_with_examples

end_with_examples(app)

__all__ = [
    "app",
    "cohorts",
    "datasets",
    "evidence",
    "machine",
    "main",
    "reproduce",
    "reproduce_all",
    "reproduce_figures",
    "reproduce_slides",
    "slide_maps",
    "slides",
    "studies",
    "viewer",
]
