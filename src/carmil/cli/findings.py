"""Options shared by the recipes, and printing of their results."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from carmil.cli.options import (
    DeviceOption,
    EncoderOption,
    SeedOption,
    device_named,
    folder_for,
    print_results,
    shared_options,
)
from carmil.errors import CarmilError

if TYPE_CHECKING:
    from carmil.reproduce.recipes import Finding, Request


def _parse_recipe(
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with any of mnist, crc and the cohorts of slides."),
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Few bags and epochs, to see that it runs; the figures mean nothing.")
    ] = False,
    seed: SeedOption = 0,
    encoder: EncoderOption = "uni",
    device: DeviceOption = "auto",
) -> tuple[dict[str, Any]]:
    """Return the fields of a Request other than its folders."""
    if data is not None and not data.is_dir():
        raise CarmilError(f"--data {data} is not a folder: expected one that contains mnist, crc or cohorts of slides")
    return ({"data": data, "fast": fast, "seed": seed, "encoder": encoder, "device": device_named(device)},)


# The command is called with `words`, for request_in.
of_a_recipe = shared_options(_parse_recipe, "words")


def request_in(out: Path, words: dict[str, Any]) -> "Request":
    """Return the request of a single recipe, whose trained models and results are in the same folder."""
    from carmil.reproduce.recipes import Request

    out = folder_for(out)
    return Request(out=out, shared=out, **words)


def show_finding(name: str, request: "Request", finding: "Finding") -> None:
    files = [request.out / f"{name}.md", request.out / f"{name}.json", *(picture.path for picture in finding.pictures)]
    print_results(finding.tables, (*finding.lines, *finding.conditions), files)
