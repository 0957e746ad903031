"""The application to which each file adds its commands, and `main`, which prints errors as one line.

Help texts end with examples, like a man page: the docstring of a command (or the help of a group) is prose, followed
by `Example:` or `Examples:` and one command per line.
"""

import io
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

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
_BEGIN = re.compile(r"^Examples?:[ \t]*", re.MULTILINE)
_NEXT_SENTENCE = re.compile(r"(?<=[.?]) (?=[A-Z])")


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
        )  # the name for completion, also for python -m carmil
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


def examples_in(text: str) -> tuple[str, tuple[str, ...]]:
    """Split a help text into its prose and the lines of its examples."""
    begin = _BEGIN.search(text)
    if begin is None:
        return text, ()
    lines = (line.strip() for line in text[begin.end() :].splitlines())
    return text[: begin.start()].rstrip(), tuple(line for line in lines if line)


class _EndsWithExamples:
    help: str | None

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.help, self.examples = examples_in(self.help or "")

    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the complete first sentence, which wraps in a list of commands instead of being cut."""
        words = " ".join((self.help or "").partition("\n\n")[0].split())
        return _NEXT_SENTENCE.split(words, maxsplit=1)[0]

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"{' ' * formatter.current_indent}{line}\n")


class _Command(_EndsWithExamples, TyperCommand):
    pass


class _Group(_EndsWithExamples, TyperGroup):
    pass


def end_with_examples(app: typer.Typer) -> None:
    """Add the examples to the help of every command and group."""
    app.info.cls = _Group
    for command in app.registered_commands:
        command.cls = _Command
    for group in app.registered_groups:
        if group.typer_instance is not None:
            end_with_examples(group.typer_instance)
