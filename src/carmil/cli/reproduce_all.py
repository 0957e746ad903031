"""carmil reproduce list, carmil reproduce all: every recipe there is."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from carmil.cli.options import Device, DeviceOption, EncoderOption, OutOption, device_named, folder_for, names_in, say
from carmil.cli.reproduce import reproduce
from carmil.errors import CarmilError

if TYPE_CHECKING:
    from carmil.reproduce.recipes import Asked


@reproduce.command("list")
def list_() -> None:
    """What there is: every table and figure of the paper with its recipe, and what each runs on.

    Example: carmil reproduce list
    """
    from carmil.report.tables import ResultTable, print_tables
    from carmil.reproduce.recipes import RECIPES, WHAT_THAT_IS

    lines = tuple((one.name, one.of, one.title, one.needs) for one in RECIPES)
    heads = ("recipe", "in the paper", "what", "runs on")
    print_tables([ResultTable("carmil reproduce RECIPE", heads, lines, names=4)])
    for needs, words in WHAT_THAT_IS.items():
        typer.echo(f"{needs}: {words}")


@reproduce.command("all")
def all_(
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with mnist, crc and the cohorts of slides, as far as there are any."),
    ] = None,
    only: Annotated[str, typer.Option(help="Names of recipes with commas between.  [default: all]")] = "",
    fast: Annotated[
        bool, typer.Option("--fast", help="Few bags and epochs, to see that all of it runs; the figures mean nothing.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of bags and folds.")] = 0,
    out: OutOption = Path("paper"),
    encoder: EncoderOption = "uni",
    device: DeviceOption = Device.auto,
) -> None:
    """Every recipe, and one page with all tables and figures: OUT/paper.html.

    Killed and started again, it goes on with what is not there yet. Recipes share their trained models. A fast look is written
    to OUT/fast, and some recipes (--only) to a page of their own, OUT/some.html: neither takes the place of the real one.

    Example: carmil reproduce all --data DIR --fast
    """
    from carmil.reproduce.everything import reproduce_all
    from carmil.reproduce.recipes import RECIPES, Asked, recipe_named

    if data is not None and not data.is_dir():
        raise CarmilError(f"--data {data} is no folder: expected one with mnist, crc or cohorts of slides in it")
    recipes = tuple(recipe_named(name) for name in names_in(only)) or RECIPES
    home = folder_for(out) / "fast" if fast else folder_for(out)
    page = home / ("some.html" if only else "paper.html")
    asked = Asked(home, out, data, device_named(device), fast, seed, encoder)
    sections = reproduce_all(recipes, asked, page, command=_again(asked, only), say=say)
    typer.echo(f"written: {page}")
    troubled = [section.name for section in sections if section.trouble]
    if troubled:
        raise CarmilError(
            f"{len(troubled)} of {len(recipes)} recipes could not run ({', '.join(troubled)}): the page says why"
        )


def _again(asked: "Asked", only: str) -> str:
    """The command that made the page; of a path the last part, since the rest is about the machine."""
    words = ["carmil", "reproduce", "all"]
    words += ["--data", asked.data.name] if asked.data is not None else []
    words += ["--only", only] if only else []
    words += ["--fast"] if asked.fast else []
    words += ["--encoder", asked.encoder] if asked.encoder != "uni" else []
    words += ["--seed", str(asked.seed)] if asked.seed else []
    return shlex.join(words)
