"""The command line: parses, calls, prints. A file a group of commands; the order here is that of the help."""

# ruff: noqa: I001
from carmil.cli.app import app, main
from carmil.cli import machine, slides, slide_maps, cohorts, studies, evidence, viewer, reproduce, reproduce_all
from carmil.cli.examples import end_with_examples

end_with_examples(app)

__all__ = [
    "app",
    "cohorts",
    "evidence",
    "machine",
    "main",
    "reproduce",
    "reproduce_all",
    "slide_maps",
    "slides",
    "studies",
    "viewer",
]
