"""Help that ends as a man page does: with examples, line by line as they were written.

A command's docstring (a group's help) is prose, and from a line `Example:` or `Examples:` on lines that can be typed.
"""

import re
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_BEGIN = re.compile(r"^Examples?:[ \t]*", re.MULTILINE)
_NEXT_SENTENCE = re.compile(r"(?<=[.?]) (?=[A-Z])")


def examples_in(words: str) -> tuple[str, tuple[str, ...]]:
    """The prose of a help text, and the lines of its examples."""
    found = _BEGIN.search(words)
    if found is None:
        return words, ()
    lines = (line.strip() for line in words[found.end() :].splitlines())
    return words[: found.start()].rstrip(), tuple(line for line in lines if line)


class _EndsWithExamples:
    help: str | None

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.help, self.examples = examples_in(self.help or "")

    def get_short_help_str(self, limit: int = 45) -> str:
        """The first sentence, whole: a list of commands breaks the line rather than the sentence."""
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
    """Has every command and group of this command line show its examples so."""
    app.info.cls = _Group
    for command in app.registered_commands:
        command.cls = _Command
    for group in app.registered_groups:
        if group.typer_instance is not None:
            end_with_examples(group.typer_instance)
