"""carmil reproduce list, carmil reproduce all: all recipes."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from carmil.cli.findings import of_a_recipe, request_in
from carmil.cli.options import OutOption, log, names_in
from carmil.cli.reproduce import reproduce
from carmil.errors import CarmilError

if TYPE_CHECKING:
    from carmil.reproduce.recipes import Request


@reproduce.command("list")
def list_() -> None:
    """List every table and figure of the paper with its recipe, and the data each runs on.

    Example: carmil reproduce list
    """
    from carmil.reproduce.recipes import RECIPES, WHAT_THAT_IS
    from carmil.tables import ResultTable, print_tables

    lines = tuple((one.name, one.of, one.title, one.needs) for one in RECIPES)
    heads = ("recipe", "in the paper", "what", "runs on")
    print_tables([ResultTable("carmil reproduce RECIPE", heads, lines, names=4)])
    for needs, words in WHAT_THAT_IS.items():
        typer.echo(f"{needs}: {words}")


@reproduce.command("all")
@of_a_recipe
def all_(
    words: dict[str, Any],
    only: Annotated[str, typer.Option(help="Names of recipes, separated by commas.  [default: all]")] = "",
    out: OutOption = Path("paper"),
) -> None:
    """Run every recipe, and write one page with all tables and figures: OUT/paper.html.

    If interrupted, run the same command again to resume. Recipes share their trained models. With --fast the page is in OUT/fast,
    and with --only it is OUT/some.html, so that neither replaces the complete page.

    Example: carmil reproduce all --data DIR --fast
    """
    from carmil.reproduce.everything import reproduce_all
    from carmil.reproduce.recipes import RECIPES, recipe_named

    if only and not names_in(only):
        raise CarmilError("no recipe named: expected for example --only table1,shift")
    recipes = tuple(recipe_named(name) for name in dict.fromkeys(names_in(only))) or RECIPES
    request = request_in(out, words)
    if request.fast:
        request = replace(request, out=out / "fast")
    page = request.out / ("some.html" if only else "paper.html")
    sections = reproduce_all(recipes, request, page, command=_command_line(request, only), say=log)
    typer.echo(f"written: {page}")
    troubled = [section.name for section in sections if section.trouble]
    if troubled:
        raise CarmilError(
            f"{len(troubled)} of {len(recipes)} recipes failed ({', '.join(troubled)}): the page says why"
        )


def _command_line(request: "Request", only: str) -> str:
    """Return the command that wrote the page, with the last part of each path, since the rest depends on the machine."""
    words = ["carmil", "reproduce", "all"]
    words += ["--data", request.data.resolve().name] if request.data is not None else []
    words += ["--only", only] if only else []
    words += ["--fast"] if request.fast else []
    words += ["--encoder", request.encoder] if request.encoder != "uni" else []
    words += ["--seed", str(request.seed)] if request.seed else []
    return shlex.join(words)
