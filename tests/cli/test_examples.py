"""The help of every command: its text, and that its examples are valid commands."""

import shlex

import pytest
import typer

from carmil.cli import app
from carmil.cli.app import end_with_examples, examples_in


def walk(command, *path):
    """Yield this command and every command and group below it, with the words that call them."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from walk(below, *path, name)


COMMANDS = dict(walk(typer.main.get_command(app), "carmil"))


def command_of(words):
    """Return the longest prefix that names a command, and the remaining words."""
    known = max(i for i in range(1, len(words) + 1) if tuple(words[:i]) in COMMANDS)
    return tuple(words[:known]), words[known:]


@pytest.fixture(params=COMMANDS, ids=" ".join)
def path(request):
    return request.param


@pytest.fixture
def command(path):
    return COMMANDS[path]


def test_every_command_has_a_description_and_examples(path, command):
    assert command.help.strip().endswith(".")
    assert command.examples
    for line in command.examples:
        assert line.startswith(("carmil ", "# ")), line


def test_every_example_calls_its_command_with_valid_arguments(path, command):
    for line in command.examples:
        if line.startswith("#"):
            continue
        result, words = command_of(shlex.split(line))
        assert result[: len(path)] == path
        called = COMMANDS[result]
        assert not hasattr(called, "commands"), f"{line} names a group and no command of it"
        called.make_context(" ".join(result), words)


def test_every_option_and_argument_has_a_help_text(command):
    undocumented = [parameter.name for parameter in command.params if not (parameter.help or "").strip()]
    assert not undocumented


def test_help_shows_examples_after_the_options(path, command, run_cli):
    status, out, _ = run_cli(*path[1:], "--help")
    prose, options, examples = (out.find(part) for part in ("Usage: carmil", "Options:", "\nExamples:\n"))
    assert status == 0 and 0 == prose < options < examples
    assert out[examples:].splitlines()[2:] == [f"  {line}" for line in command.examples]


def test_command_list_shows_whole_sentences(run_cli):
    _, out, _ = run_cli("--help")
    assert "..." not in out.partition("Commands:")[2]
    assert "  evaluate      Evaluate a run on an external cohort.\n" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("Does it.", ("Does it.", ())),
        ("Does it.\n\nExample: carmil it", ("Does it.", ("carmil it",))),
        ("Does it.\n\nExamples: carmil it\ncarmil it --twice", ("Does it.", ("carmil it", "carmil it --twice"))),
        ("Does it.\n\nExamples:\n  # once\n  carmil it\n", ("Does it.", ("# once", "carmil it"))),
        ("An Example: of prose.", ("An Example: of prose.", ())),
    ],
)
def test_help_text_is_split_into_prose_and_examples(words, expected):
    assert examples_in(words) == expected


def test_summary_is_the_first_sentence_of_the_help_text():
    some = typer.Typer()
    some.command("cut")(_cut)
    some.command("ask")(_ask)
    end_with_examples(some)
    commands = typer.main.get_command(some).commands
    assert commands["cut"].get_short_help_str() == "Cut a slide at 0.5 um into a .csv of tiles."
    assert commands["ask"].get_short_help_str() == "Is it so?"


def _cut() -> None:
    """Cut a slide at 0.5 um
    into a .csv of tiles. Then more. And more.

    Example: carmil cut
    """


def _ask() -> None:
    """Is it so? One line says."""
