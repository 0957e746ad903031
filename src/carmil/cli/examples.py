"""Help texts that end with examples, like a man page.

The docstring of a command (or the help of a group) is prose, followed by `Example:` or `Examples:` and one command per line.
"""

import re
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_BEGIN = re.compile(r"^Examples?:[ \t]*", re.MULTILINE)
_NEXT_SENTENCE = re.compile(r"(?<=[.?]) (?=[A-Z])")


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
        """The whole first sentence: a list of commands wraps the line and cuts no sentence."""
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
    """Make every command and group show its examples."""
    app.info.cls = _Group
    for command in app.registered_commands:
        command.cls = _Command
    for group in app.registered_groups:
        if group.typer_instance is not None:
            end_with_examples(group.typer_instance)
