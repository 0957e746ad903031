"""Options that several commands share, the parsing and validation of their values, and the printing of results."""

import os
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from carmil.errors import CarmilError, unknown

if TYPE_CHECKING:
    from carmil.report.paper import Finding
    from carmil.reproduce.recipes import Request
    from carmil.tables import ResultTable


Device = Literal["auto", "cpu", "cuda"]
Pool = Literal["disjoint", "shared"]
Distance = Literal["relative", "l1", "cosine"]
Precision = Literal["bfloat16", "float32"]
Init = Literal["xavier", "own"]
Scale = Literal["none", "common", "halfway", "own"]
Kind = Literal["classes", "ordinal", "labels", "value", "survival"]
TargetLoss = Literal["cox", "discrete", "squared", "huber"]
StoreType = Literal["float16", "float32", "bfloat16"]
Layout = Literal["clam", "trident"]
SplitForm = Literal["carmil", "clam", "patho-bench", "stamp"]

FILES_OF_A_RUN = (
    *("run.json", "models.json", "metrics.json", "history.json", "weights.safetensors", "card.md"),
    *("scope.safetensors", "calibration.json"),
    *("predictions.*", "splits*.tsv"),
)
SlideColumn = Annotated[str | None, typer.Option(help="Column of the slide names.  [default: guessed]")]
PatientColumn = Annotated[str | None, typer.Option(help="Column of the patients.  [default: guessed]")]
LabelColumn = Annotated[str | None, typer.Option(help="Column of the classes.  [default: guessed]")]
SkipBrokenOption = Annotated[
    bool, typer.Option("--skip-broken", help="Skip bags that cannot be read or packed, and list them.")
]
OutOption = Annotated[Path, typer.Option("--out", help="Folder for the output.")]
EncoderOption = Annotated[str, typer.Option(help="Encoder of the slide features, in DATA/COHORT/ENCODER.")]
SeedOption = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Random seed of bags, folds and initialisations.")]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(help="Output of `carmil evaluate --conformal`, for prediction sets.  [default: those of the run]"),
]
DeviceOption = Annotated[Device, typer.Option(help="Device; auto uses a GPU if there is one.")]


def shared_options(
    parse: Callable[..., tuple[Any, ...]], *names: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command the options of `parse` before its own.

    The command is called with the values that `parse` returns, under these names.
    """
    shared = signature(parse).parameters

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [parameter for name, parameter in signature(command).parameters.items() if name not in names]
        options = [*shared.values(), *own]

        def call(**values: Any) -> None:
            parsed = parse(**{name: values.pop(name) for name in shared})
            command(**dict(zip(names, parsed, strict=True)), **values)

        call.__name__, call.__doc__ = command.__name__, command.__doc__
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in options}
        call.__signature__ = Signature(options)  # type: ignore[attr-defined]
        return call

    return decorate


def log(line: str) -> None:
    """Print a line about progress, guesses or omissions on stderr."""
    typer.echo(f"  {line}", err=True)


def print_results(
    tables: "Sequence[ResultTable]" = (), notes: Iterable[str] = (), written: Sequence[Path | str] = ()
) -> None:
    """Print tables, one line per note, and the files that were written."""
    from carmil.tables import print_tables

    print_tables(tables)
    for note in notes:
        typer.echo(f"- {note}")
    if written:
        typer.echo(f"\nwritten: {', '.join(map(str, written))}")


def names_in(words: str) -> tuple[str, ...]:
    """Return the names in a list separated by commas."""
    return tuple(word.strip() for word in words.split(",") if word.strip())


def tasks_in(words: str) -> tuple[str, ...]:
    """Return the names of digit tasks, at least one, separated by commas."""
    from carmil.datasets.digits import TASKS

    for name in names_in(words):
        if name not in TASKS:
            raise CarmilError(unknown("task", name, TASKS))
    if not names_in(words):
        raise CarmilError("no task named: expected for example --tasks four_bags")
    return names_in(words)


def numbers_in(option: str, words: str, kind: type[Any] = int) -> tuple[Any, ...]:
    try:
        return tuple(kind(word) for word in names_in(words))
    except ValueError:
        expected = "whole numbers" if kind is int else "numbers"
        raise CarmilError(f"{option} {words}: expected {expected}, separated by commas") from None


def device_named(device: Device) -> str:
    import torch

    available = torch.cuda.is_available()
    if device == "auto":
        return "cuda" if available else "cpu"
    if device == "cuda" and not available:
        raise CarmilError("--device cuda: torch finds no GPU; use --device cpu or auto")
    return device


def folder_for(out: Path) -> Path:
    if out.exists() and not out.is_dir():
        raise CarmilError(f"--out {out} is a file: expected a folder, or a new name")
    parents = (out.absolute(), *out.absolute().parents)
    if (link := next((parent for parent in parents if parent.is_symlink() and not parent.exists()), None)) is not None:
        raise CarmilError(f"--out {out}: {link} is a broken link: remove it or choose another --out")
    nearest = next(parent for parent in parents if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise CarmilError(f"--out {out} cannot be written: {nearest} is not a writable folder; choose another --out")
    return out


def file_for(out: Path, *inputs: Path | None) -> Path:
    """Check the one file that a command writes, which must not be one of its inputs or a file of a run."""
    if out.is_dir():
        raise CarmilError(f"--out {out} is a folder: expected the name of a file")
    for path in inputs:
        if path is not None and path.exists() and out.exists() and out.samefile(path):
            raise CarmilError(f"--out {out} is the input {path}: choose another name")
    if (out.parent / "run.json").exists() and any(fnmatch(out.name, name) for name in FILES_OF_A_RUN):
        raise CarmilError(f"--out {out} is a file of the run in {out.parent}: choose another name")
    return out


def _parse_recipe(
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with any of mnist, crc and the cohorts of slides."),
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Use few bags and epochs, for a quick trial; the figures are meaningless.")
    ] = False,
    seed: SeedOption = 0,
    encoder: EncoderOption = "uni",
    device: DeviceOption = "auto",
) -> tuple[dict[str, Any]]:
    """Return the fields of a Request other than its folders."""
    if data is not None and not data.is_dir():
        raise CarmilError(f"--data {data} is not a folder: expected one that contains mnist, crc or cohorts of slides")
    return ({"data": data, "fast": fast, "seed": seed, "encoder": encoder, "device": device_named(device)},)


# The command is called with `words`, the arguments of request_in.
of_a_recipe = shared_options(_parse_recipe, "words")


def request_in(out: Path, words: dict[str, Any]) -> "Request":
    """Return the request of a single recipe, whose trained models and results are in the same folder."""
    from carmil.reproduce.recipes import Request

    out = folder_for(out)
    return Request(out=out, shared=out, **words)


def show_finding(name: str, request: "Request", finding: "Finding") -> None:
    files = [request.out / f"{name}.md", request.out / f"{name}.json", *(picture.path for picture in finding.pictures)]
    print_results(finding.tables, (*finding.lines, *finding.conditions), files)
