"""carmil reproduce table2, table3, encoders, hyperparameters, weno: the paper's tables of slides."""

from pathlib import Path
from typing import Annotated, Any

import typer

from carmil.cli.findings import of_a_recipe, request_in, show_finding
from carmil.cli.options import OutOption, names_in
from carmil.cli.reproduce import reproduce


@reproduce.command()
@of_a_recipe
def table2(
    words: dict[str, Any],
    models: Annotated[str, typer.Option(help="Some of its models, with commas between.  [default: all]")] = "",
    out: OutOption = Path("table2"),
) -> None:
    """Table 2: five pathology tasks, all methods; CAR beside ABMIL and beside all others, with intervals and tests.

    Runs on the cohorts that are in DATA and says which are missing; without any, on a stand-in made of DATA/crc. Killed and
    started again, it goes on; runs that table3, encoders, hyperparameters or weno left in the same OUT are used again.

    Examples:
      carmil reproduce table2 --data DIR --fast
      carmil reproduce table2 --data DIR --models abmil.gated,car/abmil.gated --out slides
    """
    from carmil.reproduce import table2 as recipe

    request = request_in(out, words)
    show_finding("table2", request, recipe.reproduce(request, models=names_in(models)))


@reproduce.command()
@of_a_recipe
def table3(words: dict[str, Any], out: OutOption = Path("table3")) -> None:
    """Table 3: CAR on ABMIL, DSMIL and TransMIL; its distance is chosen on validation bags.

    Example: carmil reproduce table3 --data DIR --fast
    """
    from carmil.reproduce import table3 as recipe

    request = request_in(out, words)
    show_finding("table3", request, recipe.reproduce(request))


@reproduce.command()
@of_a_recipe
def encoders(words: dict[str, Any], out: OutOption = Path("encoders")) -> None:
    """Table 4: ABMIL and CAR-MIL on features of the encoders that are there: uni, resnet50; of the stand-in: resnet50, pixels.

    Example: carmil reproduce encoders --data DIR --fast
    """
    from carmil.reproduce import encoders as recipe

    request = request_in(out, words)
    show_finding("encoders", request, recipe.reproduce(request))


@reproduce.command()
@of_a_recipe
def hyperparameters(words: dict[str, Any], out: OutOption = Path("hyperparameters")) -> None:
    """Figure 3: how much alpha, lambda and the distance matter; the whole grid is one population.

    Example: carmil reproduce hyperparameters --data DIR --fast
    """
    from carmil.reproduce import hyperparameters as recipe

    request = request_in(out, words)
    show_finding("hyperparameters", request, recipe.reproduce(request))


@reproduce.command()
@of_a_recipe
def weno(words: dict[str, Any], out: OutOption = Path("weno")) -> None:
    """The appendix's comparison with WENO, on two tasks of two classes.

    Example: carmil reproduce weno --data DIR --fast
    """
    from carmil.reproduce import weno as recipe

    request = request_in(out, words)
    show_finding("weno", request, recipe.reproduce(request))
