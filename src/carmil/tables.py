"""A table of results for the terminal, for markdown and for HTML."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ResultTable:
    """A table of text. The first `names` columns name a row, the others are figures."""

    title: str
    heads: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    names: int = 1

    def markdown(self) -> str:
        rule = ["---"] * self.names + ["---:"] * (len(self.heads) - self.names)
        rows = [self.heads, tuple(rule), *self.lines]
        return "\n".join([f"## {self.title}", "", *("| " + " | ".join(row) + " |" for row in rows), ""])


def as_text(table: ResultTable) -> str:
    """Return a table as plain text, as wide as it needs to be."""
    rows = (table.heads, *table.lines)
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.heads))]
    rule = tuple("-" * width for width in widths)
    lines = [
        "  ".join(
            cell.ljust(width) if i < table.names else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (table.heads, rule, *table.lines)
    ]
    return "\n".join([table.title, *lines, ""])


def print_tables(tables: Sequence[ResultTable]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    for table in tables:
        drawn = Table(title=table.title, title_justify="left", header_style="bold")
        for i, head in enumerate(table.heads):
            drawn.add_column(head, justify="left" if i < table.names else "right", no_wrap=i < table.names)
        for line in table.lines:
            drawn.add_row(*line)
        console.print(drawn)
