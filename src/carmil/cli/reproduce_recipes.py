"""carmil reproduce table2, shift, theory, heat-maps, list, all, and the recipes without further options.

These are table3, encoders, hyperparameters, weno, overview and correlations."""

import shlex
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from carmil.cli.options import (
    OutOption,
    log,
    names_in,
    numbers_in,
    of_a_recipe,
    request_in,
    show_finding,
    tasks_in,
)
from carmil.cli.reproduce import reproduce
from carmil.errors import CarmilError, unknown

if TYPE_CHECKING:
    from carmil.reproduce.recipes import Request


PLAIN_RECIPES = {
    "table3": """Table 3: CAR on ABMIL, DSMIL and TransMIL; its distance is chosen on validation bags.

    Example: carmil reproduce table3 --data DIR --fast
    """,
    "encoders": """Table 4: ABMIL and CAR-MIL on features of other encoders: uni, resnet50; of the stand-in: resnet50, pixels.

    Example: carmil reproduce encoders --data DIR --fast
    """,
    "hyperparameters": """Figure 3: how much alpha, lambda and the distance matter; the whole grid is one population.

    Example: carmil reproduce hyperparameters --data DIR --fast
    """,
    "weno": """The appendix's comparison with WENO, on two tasks of two classes.

    Example: carmil reproduce weno --data DIR --fast
    """,
    "overview": """Figure 2: the method, drawn from our own architecture, and a bag of digits with both attentions.

    Needs no data. Writes OUT/overview.md, overview.json and overview.png.

    Example: carmil reproduce overview --out overview
    """,
    "correlations": """Section 6 and Figure 6: how similar ABMIL's, the factual and the counterfactual attention are.

    On a cohort of slides with several classes if there is one, and on Four Bags. Writes OUT/correlations.md,
    correlations.json and correlations.png.

    Example: carmil reproduce correlations --data DIR --fast
    """,
}


@reproduce.command()
@of_a_recipe
def table2(
    words: dict[str, Any],
    models: Annotated[str, typer.Option(help="Some of its models, separated by commas.  [default: all]")] = "",
    out: OutOption = Path("table2"),
) -> None:
    """Table 2: five pathology tasks, all methods; CAR compared with ABMIL and with all others, with intervals and
    tests.

    Runs on the cohorts in DATA and names the missing ones; without any, on a stand-in made from DATA/crc. If
    interrupted, run the same command again to resume; runs of table3, encoders, hyperparameters or weno in the
    same OUT are used again.

    Examples:
      carmil reproduce table2 --data DIR --fast
      carmil reproduce table2 --data DIR --models abmil.gated,car/abmil.gated --out slides
    """
    from carmil.reproduce import table2 as recipe

    request = request_in(out, words)
    show_finding("table2", request, recipe.reproduce(request, models=names_in(models)))


def _add_command(name: str, text: str) -> None:
    def command(words: dict[str, Any], out: OutOption = Path(name)) -> None:
        from carmil.reproduce.recipes import recipe_named

        request = request_in(out, words)
        show_finding(name, request, recipe_named(name).reproduce(request))

    command.__name__, command.__doc__ = name, text
    reproduce.command()(of_a_recipe(command))


for _name, _text in PLAIN_RECIPES.items():
    _add_command(_name, _text)


@reproduce.command()
@of_a_recipe
def shift(
    words: dict[str, Any],
    alpha: Annotated[str, typer.Option(help="Weights of the counterfactual term, separated by commas.")] = "0.2",
    lambda_: Annotated[str, typer.Option("--lambda", help="Weights of the distance; every combination.")] = "1",
    distance: Annotated[str, typer.Option(help="l1, cosine, or both separated by a comma.")] = "l1",
    out: OutOption = Path("shift"),
) -> None:
    """Section 5: which class's logit grows most under the counterfactual attention, and why.

    On Four Bags, and on a cohort of slides with several classes if there is one. With several weights and distances,
    the first is analysed in detail, and each has one row. Writes OUT/shift.md, shift.json, shift.png and
    shift_change.png. Models that table1 trained in OUT are used again.

    Examples:
      carmil reproduce shift --data DIR --fast
      carmil reproduce shift --data DIR --alpha 0.2,1 --lambda 1,0.2,0.01 --distance l1,cosine
    """
    from carmil.counterfactual.objective import DISTANCES
    from carmil.reproduce import shift as recipe
    from carmil.reproduce.digits import Point

    for name in names_in(distance):
        if name not in DISTANCES:
            raise CarmilError(f"--distance: {unknown('distance', name, DISTANCES)}")
    values = (numbers_in("--alpha", alpha, float), numbers_in("--lambda", lambda_, float), names_in(distance))
    points = [Point(*one) for one in product(*values)]
    if not points:
        raise CarmilError("nothing to train: expected at least one --alpha, one --lambda and one --distance")
    request = request_in(out, words)
    show_finding("shift", request, recipe.reproduce(request, points=points))


@reproduce.command()
@of_a_recipe
def theory(
    words: dict[str, Any],
    tasks: Annotated[str, typer.Option(help="Digit tasks, separated by commas.")] = "adjacent_pairs,four_bags",
    out: OutOption = Path("theory"),
) -> None:
    """The appendix's theory on trained models: does u_cf - u follow -g, and by how much?

    On digit bags and for both distances, with a shuffled control. Writes OUT/theory.md, theory.json and theory.png.

    Example: carmil reproduce theory --data DIR --fast
    """
    from carmil.reproduce import theory as recipe

    chosen, request = tasks_in(tasks), request_in(out, words)
    show_finding("theory", request, recipe.reproduce(request, tasks=chosen))


@reproduce.command()
@of_a_recipe
def heat_maps(
    words: dict[str, Any],
    slides: Annotated[Path | None, typer.Option(help="Folder of the slide files, to draw the maps over them.")] = None,
    out: OutOption = Path("heat_maps"),
) -> None:
    """Figures 1b, 5 and 7: maps of several methods on one slide, chosen by a rule.

    Uses BRACS if DATA has it, else another cohort whose tiles have coordinates, else a stand-in made from DATA/crc.
    Writes OUT/heat-maps.md, heat-maps.json and heat_maps.png, and with --slides a large picture too.

    Examples:
      carmil reproduce heat-maps --data DIR --fast
      carmil reproduce heat-maps --data DIR --slides SLIDES
    """
    from carmil.reproduce import heat_maps as recipe

    if slides is not None and not slides.is_dir():
        raise CarmilError(f"--slides {slides} is not a folder: expected the folder of the slide files")
    request = request_in(out, words)
    show_finding("heat-maps", request, recipe.reproduce(request, slides=slides))


@reproduce.command()
@of_a_recipe
def maps(
    words: dict[str, Any],
    cohorts: Annotated[
        str, typer.Option(help="Cohorts, separated by commas.  [default: all that DATA allows]")
    ] = "four_bags,adjacent_pairs,crc,foci,kinds,planted-hazards",
    models: Annotated[
        str, typer.Option(help="Models, separated by commas.  [default: one or more of every kind]")
    ] = "",
    explainers: Annotated[str, typer.Option(help="Maps, separated by commas.  [default: all that fit a model]")] = "",
    out: OutOption = Path("maps"),
) -> None:
    """A benchmark of maps: every explainer on every model, by truth, faithfulness and cost.

    Not in the paper. Digit bags need no data; the other cohorts are made of DATA/crc. Explainers that are registered from outside
    take part (docs/extending.md). Writes OUT/maps.html, maps.md, maps.json and maps.png. If interrupted, run the same command
    again to resume.

    Examples:
      carmil reproduce maps --fast
      carmil reproduce maps --data DIR --cohorts foci,crc --models abmil.gated,car/abmil.gated
    """
    from carmil.reproduce import maps as recipe

    request = request_in(out, words)
    finding = recipe.reproduce(
        request, cohorts=names_in(cohorts), models=names_in(models), explainers=names_in(explainers)
    )
    show_finding("maps", request, finding)
    typer.echo(f"         {request.out / 'maps.html'}")


@reproduce.command("list")
def list_() -> None:
    """List every table and figure of the paper with its recipe, and the data that each needs.

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
            f"{len(troubled)} of {len(recipes)} recipes failed ({', '.join(troubled)}): see the page for the reasons"
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
