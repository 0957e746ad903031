"""The help of every command there is: what it says, and that its examples can be typed."""

import shlex

import pytest
import typer

from carmil.cli import app
from carmil.cli.examples import end_with_examples, examples_in


def walk(command, *path):
    """Every command and group below this one, this one first, by the words that call it."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from walk(below, *path, name)


COMMANDS = dict(walk(typer.main.get_command(app), "carmil"))


def command_of(words):
    """The longest run of words that names a command, and the words after it."""
    known = max(i for i in range(1, len(words) + 1) if tuple(words[:i]) in COMMANDS)
    return tuple(words[:known]), words[known:]


@pytest.fixture(params=COMMANDS, ids=" ".join)
def path(request):
    return request.param


@pytest.fixture
def command(path):
    return COMMANDS[path]


def test_every_command_says_what_it_does_and_how_it_is_called(path, command):
    assert command.help.strip().endswith(".")
    assert command.examples
    for line in command.examples:
        assert line.startswith(("carmil ", "# ")), line


def test_an_example_is_one_of_its_command_and_its_words_parse(path, command):
    for line in command.examples:
        if line.startswith("#"):
            continue
        found, words = command_of(shlex.split(line))
        assert found[: len(path)] == path
        asked = COMMANDS[found]
        assert not hasattr(asked, "commands"), f"{line} names a group and no command of it"
        asked.make_context(" ".join(found), words)


def test_every_option_and_argument_says_what_it_is(command):
    silent = [parameter.name for parameter in command.params if not (parameter.help or "").strip()]
    assert not silent


def test_examples_are_shown_after_the_options_line_by_line_as_written(path, command, said):
    status, out, _ = said(*path[1:], "--help")
    prose, options, examples = (out.find(part) for part in ("Usage: carmil", "Options:", "\nExamples:\n"))
    assert status == 0 and 0 == prose < options < examples
    assert out[examples:].splitlines()[2:] == [f"  {line}" for line in command.examples]


def test_a_list_of_commands_breaks_lines_and_no_sentence(said):
    _, out, _ = said("--help")
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
def test_a_help_text_is_prose_and_then_examples(words, expected):
    assert examples_in(words) == expected


def test_the_first_sentence_is_the_summary_and_a_dot_within_a_word_does_not_end_it():
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
