"""The paper's tables and figures, one recipe each: what each is of, what it needs, and what it hands to the page.

A recipe is a module here with `reproduce(request) -> Finding`, imported when it is needed. What is trained is found again: an
interrupted recipe resumes when it is run again, and so does `carmil reproduce all`.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from carmil.errors import CarmilError, unknown
from carmil.files import write_text
from carmil.provenance import to_json
from carmil.tables import ResultTable

FAST = "--fast: few bags and epochs, to see that it runs; the figures mean nothing"


@dataclass(frozen=True)
class Request:
    """What a recipe works with.

    data: the user's folder, if any: `mnist`, `crc` and a folder for each cohort of slides (`slide_cohorts`)
    out: where this recipe writes; shared: where runs and cohorts lie that several recipes use
    fast: a look at the machinery; the figures mean nothing
    encoder: whose features of slides
    """

    out: Path
    shared: Path
    data: Path | None = None
    device: str = "cpu"
    fast: bool = False
    seed: int = 0
    encoder: str = "uni"

    def folder(self, name: str) -> Path | None:
        """The folder of this name in the user's data, if it is there."""
        found = None if self.data is None else self.data / name
        return found if found is not None and found.is_dir() else None


@dataclass(frozen=True)
class Picture:
    """A file that was written, and what one sees on it."""

    path: Path
    caption: str


@dataclass(frozen=True)
class Finding:
    """What a recipe found. `lines`: in words what came out; `conditions`: what it depends on, every deviation from the paper."""

    tables: tuple[ResultTable, ...] = ()
    pictures: tuple[Picture, ...] = ()
    lines: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """name: its command; of: where the paper has it; needs: what it runs on, and what without."""

    name: str
    of: str
    title: str
    needs: str

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
    name: str, request: Request, finding: Finding, facts: Mapping[str, object], *, heading: str | None = None
) -> Finding:
    """Write NAME.md for people and NAME.json for programs to request.out.

    facts: what JSON has more than the page. heading: of the page; that of the recipe of this name unless given.
    """
    if heading is None:
        recipe = recipe_named(name)
        heading = f"{recipe.title} ({recipe.of})"
    lines = [*([FAST] if request.fast else []), *finding.lines]
    parts = [f"# {heading}", "", *(f"- {line}" for line in lines), ""]
    for picture in finding.pictures:
        where = os.path.relpath(picture.path, request.out)
        parts += [f"![{picture.caption}]({where})", "", picture.caption, ""]
    parts += [table.markdown() for table in finding.tables]
    if finding.conditions:
        parts += ["## How this was measured", "", *(f"- {line}" for line in finding.conditions), ""]
    write_text(request.out / f"{name}.md", "\n".join(parts))
    tables = [{"title": table.title, "heads": table.heads, "lines": table.lines} for table in finding.tables]
    content = {"lines": lines, "tables": tables, "conditions": finding.conditions, **facts}
    write_text(request.out / f"{name}.json", json.dumps(to_json(content), indent=2))
    return finding
