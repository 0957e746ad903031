"""The application to which each file adds its commands, and `main`, which turns errors into one line."""

import io
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

import typer

from carmil import __version__
from carmil.errors import CarmilError, one_line

app = typer.Typer(
    name="carmil",
    help="""Attention-based multiple-instance learning that shows the evidence for and against each prediction.

    The --help of a command tells what it does, what it writes and how to call it. Errors are one line, with status 2.

    Examples:
      carmil demo --view
      carmil train --bags features --labels labels.csv --out run
      carmil explain run
      carmil view run
    """,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"carmil {__version__}")
        raise typer.Exit


@app.callback()
def _carmil(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def main(commands: typer.Typer = app, program: str = "carmil") -> None:
    """Run the command line. Bad input prints one line and exits with status 2, never with a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an ASCII terminal gets escapes, not a traceback
    try:
        _check_paths(sys.argv)
        sys.exit(
            commands(prog_name=program, standalone_mode=False)
        )  # the name for completion, also of python -m carmil
    except CarmilError as error:
        _fail(str(error), 2)
    except OSError as error:
        what = "the output cannot be written" if error.filename is None else f"{error.filename} cannot be used"
        reason = error.strerror or str(error) or type(error).__name__
        _fail(one_line(f"{what} ({reason}): check free space and permissions"), 2)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted; finished parts are kept", 130)
    except _ClickError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            sys.exit(2)
        message = error.format_message().rstrip(".").replace("Value error, ", "")
        _fail(f"{message}; --help lists the options", 2)


def _check_paths(words: Sequence[str]) -> None:
    """Refuse an empty path, which the parser would take for the current folder."""
    for option, value in pairwise(words):
        if option in ("--out", "--bags", "--labels", "--config", "--splits", "--tiles") and not value:
            raise CarmilError(f"{option} is empty: expected a path; check that the shell variable is set")


# The parser's errors: typer has its own copy of click, of which only this subclass is public.
_ClickError: Any = typer.BadParameter.__mro__[2]


def _fail(message: str, status: int) -> None:
    typer.echo(f"carmil: {message}", err=True)
    sys.exit(status)
