"""One page with every table and figure of the paper that was reproduced: pictures are in it, nothing is asked of a network."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from carmil.report.page import write_page
from carmil.tables import ResultTable


@dataclass(frozen=True)
class Section:
    """One recipe on the page. lines: what came out; conditions: what it depends on. pictures: (file, caption).

    took: how long, if it ran; trouble: why it could not run, if so.
    """

    name: str
    of: str
    title: str
    needs: str
    tables: tuple[ResultTable, ...] = ()
    pictures: tuple[tuple[Path, str], ...] = ()
    lines: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()
    took: str = ""
    trouble: str = ""

    @property
    def state(self) -> str:
        return "could not run" if self.trouble else self.took or "not run yet"


def write_paper(path: Path, sections: Sequence[Section], *, fast: bool, command: str, facts: dict[str, str]) -> None:
    write_page(path, "paper.html", sections=sections, fast=fast, command=command, facts=facts)
