"""carmil reproduce list, carmil reproduce all: every recipe there is."""

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
    """What there is: every table and figure of the paper with its recipe, and what each runs on.

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
    """Every recipe, and one page with all tables and figures: OUT/paper.html.

    Killed and started again, it goes on with what is not there yet. Recipes share their trained models. A fast look is written
    to OUT/fast, and some recipes (--only) to a page of their own, OUT/some.html: neither takes the place of the real one.

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
    sections = reproduce_all(recipes, request, page, command=_again(request, only), say=log)
    typer.echo(f"written: {page}")
    troubled = [section.name for section in sections if section.trouble]
    if troubled:
        raise CarmilError(
            f"{len(troubled)} of {len(recipes)} recipes could not run ({', '.join(troubled)}): the page says why"
        )


def _again(request: "Request", only: str) -> str:
    """The command that made the page; of a path the last part, since the rest is about the machine."""
    words = ["carmil", "reproduce", "all"]
    words += ["--data", request.data.resolve().name] if request.data is not None else []
    words += ["--only", only] if only else []
    words += ["--fast"] if request.fast else []
    words += ["--encoder", request.encoder] if request.encoder != "uni" else []
    words += ["--seed", str(request.seed)] if request.seed else []
    return shlex.join(words)
