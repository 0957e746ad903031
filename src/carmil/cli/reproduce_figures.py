"""carmil reproduce shift, theory, heat-maps: the paper's figures of attention."""

from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from carmil.cli.findings import of_a_recipe, request_in, show_finding
from carmil.cli.options import (
    OutOption,
    names_in,
    numbers_in,
    tasks_in,
)
from carmil.cli.reproduce import reproduce
from carmil.errors import CarmilError, unknown


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

    On Four Bags, and on a cohort of slides with several classes if there is one. Of several weights and distances, the first is
    analysed in detail, and each has one row. Writes OUT/shift.md, shift.json, shift.png and shift_change.png. Models
    that table1 trained in OUT are used again.

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

    Uses BRACS if DATA has it, else another cohort whose tiles have coordinates, else a stand-in made of DATA/crc.
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
