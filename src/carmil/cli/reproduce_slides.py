"""carmil reproduce table2, and the recipes without options of their own: table3, encoders, hyperparameters, weno, overview,
correlations."""

from pathlib import Path
from typing import Annotated, Any

import typer

from carmil.cli.findings import of_a_recipe, request_in, show_finding
from carmil.cli.options import OutOption, names_in
from carmil.cli.reproduce import reproduce

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
    """Table 2: five pathology tasks, all methods; CAR compared with ABMIL and with all others, with intervals and tests.

    Runs on the cohorts that are in DATA and names the missing ones; without any, on a stand-in made of DATA/crc. If interrupted,
    run the same command again to resume; runs that table3, encoders, hyperparameters or weno left in the same OUT are used again.

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
