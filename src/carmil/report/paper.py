"""One self-contained page with every table and figure of the paper that was reproduced."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from carmil.report.page import write_page
from carmil.tables import ResultTable


@dataclass(frozen=True)
class Picture:
    """A picture file with its caption."""

    path: Path
    caption: str


@dataclass(frozen=True)
class Finding:
    """The result of a recipe. `lines`: the result in words; `conditions`: the conditions under which it holds, with
    every deviation from the paper.
    """

    tables: tuple[ResultTable, ...] = ()
    pictures: tuple[Picture, ...] = ()
    lines: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """One recipe on the page. took: the time, if it ran; trouble: why it could not run, if so."""

    name: str
    of: str
    title: str
    needs: str
    finding: Finding = Finding()
    took: str = ""
    trouble: str = ""

    @property
    def state(self) -> str:
        return "could not run" if self.trouble else self.took or "not run yet"


TITLE = "The paper's tables and figures, reproduced"
ABOUT = (
    "Counterfactual attention regularization (CAR-MIL): each table and figure by its own recipe, on the data that were there. "
    "Where the paper's own figures are shown, a heading or a column says so; figures on other data never share a column with them."
)


def write_paper(
    path: Path,
    sections: Sequence[Section],
    *,
    fast: bool,
    command: str,
    facts: dict[str, str],
    title: str = TITLE,
    about: str = ABOUT,
) -> None:
    write_page(path, "paper.html", sections=sections, fast=fast, command=command, facts=facts, title=title, about=about)
