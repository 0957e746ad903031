"""python -m benchmarks.speed, in the repository's root: how fast this machine trains."""

from pathlib import Path
from typing import Annotated

import typer

from carmil.cli.app import main
from carmil.cli.options import Device, DeviceOption, OutOption, device_named, folder_for, names_in, numbers_in, say
from carmil.tables import print_tables

from .plan import changed, planned
from .report import CONDITIONS, tables, write_plot
from .run import run_benchmark

commands = typer.Typer(rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})


@commands.command()
def benchmark(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller: a minute or two.")] = False,
    only: Annotated[
        str,
        typer.Option(
            help="Sections with commas between: population, one-bag, agreement, trained, models, "
            "linearity, crc, store, study.  "
            "[default: all]"
        ),
    ] = "",
    models: Annotated[str, typer.Option(help="Models of the section models.  [default: one of each kind]")] = "",
    instances: Annotated[
        str,
        typer.Option(help="Instances per bag in the section models, with commas between.  [default: 1000,10000,50000]"),
    ] = "",
    bag: Annotated[int | None, typer.Option(help="Instances per bag in the other sections.  [default: 10000]")] = None,
    population: Annotated[
        int | None, typer.Option(help="Models trained at once.  [default: 50 on a GPU, 25 on a CPU; quick: 4]")
    ] = None,
    crc: Annotated[
        Path | None, typer.Option(help="Folder with crc's features. Without it: noise in bags of such sizes.")
    ] = None,
    study_epochs: Annotated[int | None, typer.Option(help="Epochs of the study, if not all of its 20.")] = None,
    out: OutOption = Path("benchmark"),
    device: DeviceOption = Device.auto,
) -> None:
    """How fast this machine trains: ours beside the one-bag loop of the field, and beside what the machine could do at best.

    Slides/s, TFLOP/s and memory of each model, and how fast a store is read. Prints tables, and writes OUT/benchmark.json,
    benchmark.md and benchmark.png.

    Examples:
      python -m benchmarks.speed --quick
      python -m benchmarks.speed --only models --models abmil.gated,car/abmil.gated --instances 1000,10000 --device cpu
    """
    where = device_named(device)
    given = {
        "sections": names_in(only),
        "models": names_in(models),
        "instances": numbers_in("--instances", instances),
        "bag": bag,
        "population": population,
        "crc": crc,
        "study_epochs": study_epochs,
    }
    plan = changed(
        planned(where, quick=quick), {name: value for name, value in given.items() if value not in (None, ())}
    )
    results = run_benchmark(plan, folder_for(out), device=where, say=say)
    print_tables(tables(results))
    for line in (f"measured on {results.machine}", *CONDITIONS):
        typer.echo(f"- {line}")
    drawn = write_plot(results, out / "benchmark.png")
    typer.echo(f"\nwritten: {out / 'benchmark.json'}, benchmark.md" + (", benchmark.png" if drawn else ""))
    if not drawn:
        typer.echo("no plot: matplotlib is not installed, or nothing was timed")


if __name__ == "__main__":
    main(commands, "python -m benchmarks.speed")
