"""The start of a benchmark script. Imports no torch, so that the memory of a task can be measured without it."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import typer


def run_script(main: Callable[..., None]) -> None:
    """Run `main` as a command: its parameters are the options, and the docstring of its file is the help text."""

    @wraps(main)
    def measure(**options: Any) -> None:
        main(**options)
        from carmil.provenance import machine_line

        print(f"measured on {machine_line()}")

    text = (sys.modules[main.__module__].__doc__ or "").replace("\n\n", "\n\n\b\n")
    script = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    script.command(help=text)(measure)
    script()
