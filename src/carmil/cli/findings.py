"""What a command about a recipe asks of it, and what it says of what was found."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from carmil.cli.options import DeviceOption, EncoderOption, SeedOption, device_named, folder_for, shared_options
from carmil.errors import CarmilError

if TYPE_CHECKING:
    from carmil.reproduce.recipes import Finding, Request


def _words_of_a_recipe(
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with mnist, crc and the cohorts of slides, as far as there are any."),
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Few bags and epochs, to see that it runs; the figures mean nothing.")
    ] = False,
    seed: SeedOption = 0,
    encoder: EncoderOption = "uni",
    device: DeviceOption = "auto",
) -> tuple[dict[str, Any]]:
    """What a recipe is told beside its folder."""
    if data is not None and not data.is_dir():
        raise CarmilError(f"--data {data} is no folder: expected one with mnist, crc or cohorts of slides in it")
    return ({"data": data, "fast": fast, "seed": seed, "encoder": encoder, "device": device_named(device)},)


# A command about a recipe is called with `words`, for request_in.
of_a_recipe = shared_options(_words_of_a_recipe, "words")


def request_in(out: Path, words: dict[str, Any]) -> "Request":
    """A recipe by itself: trained models lie where its findings do."""
    from carmil.reproduce.recipes import Request

    out = folder_for(out)
    return Request(out=out, shared=out, **words)


def show_finding(name: str, request: "Request", found: "Finding") -> None:
    from carmil.tables import print_tables

    print_tables(found.tables)
    for line in (*found.lines, *found.conditions):
        typer.echo(f"- {line}")
    files = [request.out / f"{name}.md", request.out / f"{name}.json", *(picture.path for picture in found.pictures)]
    typer.echo(f"\nwritten: {', '.join(map(str, files))}")
