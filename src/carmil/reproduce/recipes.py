"""The paper's tables and figures, one recipe each: its place in the paper, the data it needs, and its result for the
page.

A recipe is a module of this package with `reproduce(request) -> Finding`, imported when needed. Trained models
are kept: an interrupted recipe resumes when run again, and so does `carmil reproduce all`.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from carmil.errors import CarmilError, unknown
from carmil.files import write_text
from carmil.provenance import to_json
from carmil.report.paper import Finding, Picture
from carmil.tables import ResultTable

FAST = "--fast: few bags and epochs, for a quick trial; the figures are meaningless"


@dataclass(frozen=True)
class Request:
    """The input of a recipe.

    data: the user's folder, if any: `mnist`, `crc` and a folder for each cohort of slides (`slide_cohorts`)
    out: the folder for the results; shared: the folder for runs and cohorts that several recipes use
    fast: a quick trial whose figures are meaningless
    encoder: that of the slides' features
    """

    out: Path
    shared: Path
    data: Path | None = None
    device: str = "cpu"
    fast: bool = False
    seed: int = 0
    encoder: str = "uni"

    def folder(self, name: str) -> Path | None:
        """Return the folder of this name in the user's data, if it exists."""
        path = None if self.data is None else self.data / name
        return path if path is not None and path.is_dir() else None


@dataclass(frozen=True)
class Recipe:
    """name: its command; of: its place in the paper; needs: the data it runs on, and the substitute without them."""

    name: str
    of: str
    title: str
    needs: str

    @property
    def heading(self) -> str:
        return f"{self.title} ({self.of})"

    @property
    def reproduce(self) -> Callable[[Request], Finding]:
        return import_module(f"carmil.reproduce.{self.name.replace('-', '_')}").reproduce


DIGITS, SLIDES = "digits", "slides"
WHAT_THAT_IS = {
    DIGITS: "MNIST in DATA/mnist, with features of it; else the bundled digits",
    SLIDES: "the paper's cohorts in DATA, as `carmil dataset` has them; else a stand-in made of DATA/crc",
}

RECIPES = (
    Recipe("overview", "Figure 2", "The method, drawn from our own architecture", "nothing"),
    Recipe("table1", "Table 1", "Digit bags with known truth", DIGITS),
    Recipe("table2", "Table 2", "Five pathology tasks, all methods", SLIDES),
    Recipe("table3", "Table 3", "CAR on ABMIL, DSMIL and TransMIL", SLIDES),
    Recipe("encoders", "Table 4", "ABMIL and CAR-MIL on other features", SLIDES),
    Recipe("hyperparameters", "Figure 3", "How much alpha, lambda and the distance matter", SLIDES),
    Recipe("interpretability", "Table 5", "Attention as an explanation, every explainer beside it", DIGITS),
    Recipe("faithfulness", "Figures 1a and 4", "Deletion curves", DIGITS),
    Recipe("heat-maps", "Figures 1b, 5 and 7", "Maps of several methods on one slide", SLIDES),
    Recipe("correlations", "Section 6 and Figure 6", "Factual, counterfactual and ABMIL's attention", SLIDES),
    Recipe("shift", "Section 5", "Which class grows under the counterfactual attention", f"{DIGITS}, {SLIDES}"),
    Recipe("theory", "Appendix, theory", "Does u_cf - u follow -g on trained models?", DIGITS),
    Recipe("weno", "Appendix, WENO", "Beside weakly supervised distillation", SLIDES),
    Recipe("complexity", "Appendix, complexity", "Parameters and multiply-adds", "nothing"),
)


def recipe_named(name: str) -> Recipe:
    for recipe in RECIPES:
        if recipe.name == name:
            return recipe
    raise CarmilError(unknown("recipe", name, [recipe.name for recipe in RECIPES]))


def write_finding(
    name: str,
    request: Request,
    facts: Mapping[str, object],
    *,
    tables: Sequence[ResultTable],
    pictures: Sequence[Picture] = (),
    lines: Sequence[str] = (),
    conditions: Sequence[str] = (),
    heading: str = "",
) -> Finding:
    """Write NAME.md for people and NAME.json for programs to request.out.

    facts: additional contents of the JSON file. heading: title of the page, by default that of the recipe of this name.
    """
    finding = Finding(tuple(tables), tuple(pictures), tuple(lines), tuple(conditions))
    lines = [*([FAST] if request.fast else []), *lines]
    parts = [f"# {heading or recipe_named(name).heading}", "", *(f"- {line}" for line in lines), ""]
    for picture in pictures:
        where = os.path.relpath(picture.path, request.out)
        parts += [f"![{picture.caption}]({where})", "", picture.caption, ""]
    parts += [table.markdown() for table in tables]
    if conditions:
        parts += ["## How this was measured", "", *(f"- {line}" for line in conditions), ""]
    write_text(request.out / f"{name}.md", "\n".join(parts))
    content = {"tables": [{"title": one.title, "heads": one.heads, "lines": one.lines} for one in tables], **facts}
    write_text(
        request.out / f"{name}.json",
        json.dumps(to_json({"lines": lines, "conditions": conditions, **content}), indent=2),
    )
    return finding
