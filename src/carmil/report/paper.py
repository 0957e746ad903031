"""One page with every table and figure of the paper that was reproduced: pictures are in it, nothing is asked of a network."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from carmil.files import write_text
from carmil.report.tables import ResultTable


@dataclass(frozen=True)
class Section:
    """One recipe on the page. pictures: (file, caption). trouble: why it could not run, if so; pending: not run yet."""

    name: str
    of: str
    title: str
    needs: str
    tables: tuple[ResultTable, ...] = ()
    pictures: tuple[tuple[Path, str], ...] = ()
    lines: tuple[str, ...] = ()
    took: str = ""
    trouble: str = ""

    @property
    def state(self) -> str:
        return "could not run" if self.trouble else self.took or "not run yet"


def write_paper(path: Path, sections: Sequence[Section], *, fast: bool, command: str, facts: dict[str, str]) -> None:
    from jinja2 import Environment, PackageLoader

    page = Environment(
        loader=PackageLoader("carmil.report", "pages"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    page.filters["embedded"] = _embedded
    html = page.get_template("paper.html").render(sections=sections, fast=fast, command=command, facts=facts)
    write_text(path, html)


def _embedded(picture: Path) -> str:
    """A PNG as the page holds it."""
    return f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
