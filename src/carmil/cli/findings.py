"""What a command about a recipe asks of it, and what it says of what was found."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from carmil.cli.options import folder_for

if TYPE_CHECKING:
    from carmil.reproduce.recipes import Asked, Finding


def asked_in(out: Path, words: dict[str, Any]) -> "Asked":
    """A recipe by itself: trained models lie where its findings do."""
    from carmil.reproduce.recipes import Asked

    out = folder_for(out)
    return Asked(out=out, shared=out, **words)


def show_finding(name: str, asked: "Asked", found: "Finding") -> None:
    from carmil.report.tables import print_tables

    print_tables(found.tables)
    for line in found.lines:
        typer.echo(f"- {line}")
    files = [asked.out / f"{name}.md", asked.out / f"{name}.json", *(picture.path for picture in found.pictures)]
    typer.echo(f"\nwritten: {', '.join(map(str, files))}")
