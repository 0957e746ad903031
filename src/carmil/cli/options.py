"""Options that several commands have, and what is made of their words."""

import os
from collections.abc import Callable
from enum import StrEnum
from fnmatch import fnmatch
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from carmil.errors import CarmilError, unknown


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Pool(StrEnum):
    disjoint = "disjoint"
    shared = "shared"


class Distance(StrEnum):
    relative = "relative"
    l1 = "l1"
    cosine = "cosine"


class Precision(StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"


class Init(StrEnum):
    xavier = "xavier"
    own = "own"


class Scale(StrEnum):
    none = "none"
    common = "common"
    halfway = "halfway"
    own = "own"


class StoreType(StrEnum):
    float16 = "float16"
    float32 = "float32"
    bfloat16 = "bfloat16"


class Layout(StrEnum):
    clam = "clam"
    trident = "trident"


class SplitForm(StrEnum):
    carmil = "carmil"
    clam = "clam"
    patho_bench = "patho-bench"
    stamp = "stamp"


FILES_OF_A_RUN = (
    *("run.json", "models.json", "metrics.json", "history.json", "weights.safetensors", "card.md"),
    *("predictions.*", "splits*.tsv"),
)
SlideColumn = Annotated[str | None, typer.Option(help="Column with the names of slides.  [default: guessed]")]
PatientColumn = Annotated[str | None, typer.Option(help="Column with the patients.  [default: guessed]")]
LabelColumn = Annotated[str | None, typer.Option(help="Column with the classes.  [default: guessed]")]
SkipBrokenOption = Annotated[
    bool, typer.Option("--skip-broken", help="Leave out what cannot be read or packed, and say so.")
]
OutOption = Annotated[Path, typer.Option("--out", help="Folder for everything that is written.")]
EncoderOption = Annotated[str, typer.Option(help="Whose features of slides: DATA/COHORT/ENCODER.")]
SeedOption = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of bags, folds and initialisations.")]
DeviceOption = Annotated[Device, typer.Option(help="Where to compute; auto takes a GPU if there is one.")]


def options_of(
    words: Callable[..., tuple[Any, ...]], *names: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options of `words` before its own. It is called with what `words` makes of them, by these names."""
    shared = signature(words).parameters

    def given(command: Callable[..., None]) -> Callable[..., None]:
        own = [parameter for name, parameter in signature(command).parameters.items() if name not in names]
        options = [*shared.values(), *own]

        def called(**values: Any) -> None:
            made = words(**{name: values.pop(name) for name in shared})
            command(**dict(zip(names, made, strict=True)), **values)

        called.__name__, called.__doc__ = command.__name__, command.__doc__
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in options}
        called.__signature__ = Signature(options)  # type: ignore[attr-defined]
        return called

    return given


def say(line: str) -> None:
    """What was guessed or left out, for the person at the terminal."""
    typer.echo(f"  {line}", err=True)


def names_in(words: str) -> tuple[str, ...]:
    """Words with commas between."""
    return tuple(word.strip() for word in words.split(",") if word.strip())


def tasks_in(words: str) -> tuple[str, ...]:
    """Digit tasks with commas between, one at least."""
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
        raise CarmilError(f"{option} {words}: expected {expected} with commas between") from None


def device_named(device: Device) -> str:
    import torch

    available = torch.cuda.is_available()
    if device is Device.auto:
        return "cuda" if available else "cpu"
    if device is Device.cuda and not available:
        raise CarmilError("--device cuda: torch sees no GPU here; use --device cpu or auto")
    return device.value


def check_device(asked: str) -> None:
    if asked == "cuda":
        device_named(Device.cuda)


def folder_for(out: Path) -> Path:
    if out.exists() and not out.is_dir():
        raise CarmilError(f"--out {out} is a file: expected a folder, or a name that is free")
    parents = (out.absolute(), *out.absolute().parents)
    if (link := next((parent for parent in parents if parent.is_symlink() and not parent.exists()), None)) is not None:
        raise CarmilError(f"--out {out}: {link} is a link that leads nowhere: remove the link or choose another --out")
    there = next(parent for parent in parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise CarmilError(f"--out {out} cannot be written: {there} is not a folder one may write to")
    return out


def file_for(out: Path, *inputs: Path | None) -> Path:
    """The one file that a command writes: none of those that it reads, and none that a run consists of."""
    if out.is_dir():
        raise CarmilError(f"--out {out} is a folder: expected the name of a file")
    for given in inputs:
        if given is not None and given.exists() and out.exists() and out.samefile(given):
            raise CarmilError(f"--out {out} is {given}, which is read: expected another file; choose another name")
    if (out.parent / "run.json").exists() and any(fnmatch(out.name, name) for name in FILES_OF_A_RUN):
        raise CarmilError(f"--out {out} is a file of the run in {out.parent}: choose another name")
    return out
