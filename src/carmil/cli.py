"""The command line: parses, calls, prints."""

import os
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from carmil import __version__
from carmil.errors import CarmilError

app = typer.Typer(
    name="carmil",
    help="Attention-based multiple-instance learning that shows what speaks for a prediction, and what speaks against it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
reproduce = typer.Typer(help="The paper's tables and figures, one recipe each.", no_args_is_help=True)
app.add_typer(reproduce, name="reproduce")


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Pool(StrEnum):
    disjoint = "disjoint"
    shared = "shared"


class Distance(StrEnum):
    l1 = "l1"
    cosine = "cosine"


OutOption = Annotated[Path, typer.Option("--out", help="Folder for everything that is written.")]
DeviceOption = Annotated[Device, typer.Option(help="Where to compute; auto takes a GPU if there is one.")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"carmil {__version__}")
        raise typer.Exit


@app.callback()
def _carmil(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    fast: Annotated[bool, typer.Option("--fast", help="Fewer bags and epochs: a look at the machinery.")] = False,
    out: OutOption = Path("demo"),
    device: DeviceOption = Device.auto,
) -> None:
    """Train on digit bags and write a report that shows the evidence for and against each answer.

    Needs no data: real handwritten digits come with a package. Some two minutes on two CPU cores.

    Example: carmil demo --out demo
    """
    from carmil.report.tables import print_tables
    from carmil.reproduce.demo import run_demo
    from carmil.reproduce.table1 import tables

    report, rows = run_demo(_folder(out), fast=fast, device=_device(device))
    print_tables(tables(rows))
    typer.echo(f"\nreport: {report}")


@reproduce.command()
def table1(
    mnist: Annotated[
        str | None,
        typer.Option(help="Folder with MNIST's idx files, or 'download'. Without it: 5,000 bundled MNIST images."),
    ] = None,
    features: Annotated[
        Path | None, typer.Option(help="A .npy of features, one row an image (train, then test) in the same order.")
    ] = None,
    encoder: Annotated[str, typer.Option(help="pixels (principal components) or resnet18 (as the paper).")] = "pixels",
    weights: Annotated[
        Path | None, typer.Option(help="ResNet18's weights; without it torchvision downloads them.")
    ] = None,
    pool: Annotated[Pool, typer.Option(help="disjoint: no image in two splits; shared: as the paper.")] = Pool.disjoint,
    models: Annotated[
        str,
        typer.Option(
            help="Names with commas between, or 'all' for every row of the paper (TransMIL is slow on a CPU)."
        ),
    ] = "abmil,car/abmil,targeted/abmil",
    tasks: Annotated[str, typer.Option(help="Digit tasks with commas between.")] = "adjacent_pairs,four_bags",
    repetitions: Annotated[int, typer.Option(help="Initialisations of each model, trained together.")] = 10,
    lr: Annotated[float, typer.Option(help="Learning rate; the paper's is 2e-4, slower to the same place.")] = 1e-3,
    epochs: Annotated[int, typer.Option(help="At most this many; patience is 100.")] = 1000,
    alpha: Annotated[
        float | None, typer.Option(help="Weight of the counterfactual term.  [default: the branch's own]")
    ] = None,
    lambda_: Annotated[
        float | None, typer.Option("--lambda", help="Weight of the distance.  [default: the branch's own]")
    ] = None,
    distance: Annotated[Distance, typer.Option(help="Between factual and counterfactual scores (CAR).")] = Distance.l1,
    seed: Annotated[int, typer.Option(min=0, help="Of the bags.")] = 0,
    out: OutOption = Path("table1"),
    device: DeviceOption = Device.auto,
) -> None:
    """Table 1: digit bags with known truth; our figures beside the paper's, every negative rule named.

    Killed and started again, it goes on with the populations that are not there yet.

    Example: carmil reproduce table1 --mnist DIR --features FILE.npy --pool shared
    """
    from carmil.bags.digits import TASKS
    from carmil.models.registry import unknown
    from carmil.report.tables import print_tables
    from carmil.reproduce.digit_data import load_digits
    from carmil.reproduce.table1 import ALL_MODELS, Settings, run_table1, tables

    settings = Settings(
        models=ALL_MODELS if models == "all" else tuple(name.strip() for name in models.split(",") if name.strip()),
        repetitions=repetitions,
        lr=lr,
        epochs=epochs,
        alpha=alpha,
        lambda_=lambda_,
        distance=distance.value,
    )
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    for name in names:
        if name not in TASKS:
            raise CarmilError(unknown("task", name, TASKS))
    where = _device(device)
    out = _folder(out)
    data = load_digits(
        names,
        mnist=mnist,
        features=features,
        encoder=encoder,
        weights=weights,
        pool=pool.value,
        seed=seed,
        device=where,
    )
    rows, lines = run_table1(data.studies, settings, data.about, out, device=where)
    print_tables(tables(rows))
    for line in lines:
        typer.echo(f"- {line}")
    typer.echo(f"\nwritten: {out / 'table1.md'}, {out / 'table1.json'}, {out / 'runs'}")


@reproduce.command()
def crc(
    data: Annotated[Path, typer.Option(help="Folder with crc's features.npy and instances.csv.")],
    models: Annotated[str, typer.Option(help="Names with commas between.  [default: all methods]")] = "",
    epochs: Annotated[int, typer.Option(help="At most this many; patience is 50.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Of the folds.")] = 0,
    out: OutOption = Path("crc"),
    device: DeviceOption = Device.auto,
) -> None:
    """All methods on nuclei of colorectal cancer, a bag a patient, with known instances; five folds.

    Killed and started again, it goes on with the models that are not there yet.

    Example: carmil reproduce crc --data DIR --models abmil.gated,car/abmil.gated
    """
    from carmil.report.tables import print_tables
    from carmil.reproduce.crc import MODELS, RECIPE, conditions, run_crc, table

    names = [name.strip() for name in (models or MODELS).split(",") if name.strip()]
    if not names:
        raise CarmilError("no model named: expected for example --models abmil.gated,car/abmil.gated")
    where = _device(device)
    recipe = replace(RECIPE, epochs=epochs)
    rows = run_crc(data, names, _folder(out), device=where, seed=seed, recipe=recipe)
    print_tables([table(rows)])
    for line in conditions(seed, recipe):
        typer.echo(f"- {line}")
    typer.echo(f"\nwritten: {out / 'crc.md'}, {out / 'crc.json'}")


@reproduce.command()
def complexity(out: OutOption = Path("complexity")) -> None:
    """Parameters and multiply-adds of all models, ours and the paper's, and what explains the difference.

    Example: carmil reproduce complexity --out complexity
    """
    from carmil.report.tables import print_tables
    from carmil.reproduce.complexity import EXPLANATION, run_complexity, table

    lines = run_complexity(_folder(out))
    print_tables([table(lines)])
    typer.echo(EXPLANATION)
    typer.echo(f"\nwritten: {out / 'complexity.md'}, {out / 'complexity.json'}")


@app.command()
def models() -> None:
    """The models there are. A counterfactual branch goes in front of the name: car/abmil."""
    from rich.console import Console
    from rich.table import Table

    from carmil.counterfactual.branches import BRANCHES
    from carmil.models import entries

    table = Table(box=None, pad_edge=False)
    table.add_column("model", style="bold", no_wrap=True)
    table.add_column("what it is")
    for name, entry in entries().items():
        table.add_row(name, entry.description)
    table.add_section()
    for prefix, (_, about) in BRANCHES.items():
        table.add_row(f"{prefix}/…", about)
    Console().print(table)


def main() -> None:
    """Runs the command line; bad input is one line and exit status 2, never a traceback."""
    try:
        sys.exit(app(standalone_mode=False))
    except CarmilError as error:
        _fail(str(error), 2)
    except OSError as error:
        _fail(f"{error}: is there room, and may one write there?", 2)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted; what was finished is kept", 130)
    except _ClickError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            sys.exit(2)
        _fail(f"{error.format_message().rstrip('.')}; --help says what there is", 2)


# The parser's errors; typer brings its own copy of click and shows only this one by name.
_ClickError: Any = typer.BadParameter.__mro__[2]


def _fail(message: str, status: int) -> None:
    typer.echo(f"carmil: {message}", err=True)
    sys.exit(status)


def _device(device: Device) -> str:
    import torch

    available = torch.cuda.is_available()
    if device is Device.auto:
        return "cuda" if available else "cpu"
    if device is Device.cuda and not available:
        raise CarmilError("--device cuda: torch sees no GPU here; use --device cpu or auto")
    return device.value


def _folder(out: Path) -> Path:
    if out.exists() and not out.is_dir():
        raise CarmilError(f"--out {out} is a file: expected a folder, or a name that is free")
    there = next(parent for parent in (out.absolute(), *out.absolute().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise CarmilError(f"--out {out} cannot be written: {there} is not a folder one may write to")
    return out
