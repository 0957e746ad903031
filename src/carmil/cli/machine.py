"""carmil demo, benchmark, models, doctor: what there is, and what it does on this machine."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from carmil.cli.app import app
from carmil.cli.options import Device, DeviceOption, OutOption, device_named, folder_for, names_in, numbers_in, say
from carmil.cli.viewer import viewed


@app.command()
def demo(
    fast: Annotated[bool, typer.Option("--fast", help="Fewer bags and epochs: a look at the machinery.")] = False,
    view: Annotated[bool, typer.Option("--view", help="Open what was trained in the browser.")] = False,
    out: OutOption = Path("demo"),
    device: DeviceOption = Device.auto,
) -> None:
    """Train on digit bags and write a report that shows the evidence for and against each answer.

    Needs no data: real handwritten digits come with a package. Some two minutes on two CPU cores. Writes OUT/report.html and the
    trained models, OUT/runs; killed and started again, it goes on.

    Examples:
      carmil demo
      carmil demo --fast --view --out look
    """
    from carmil.reproduce.demo import run_demo
    from carmil.reproduce.table1 import tables
    from carmil.tables import print_tables

    report, rows = run_demo(folder_for(out), fast=fast, device=device_named(device))
    print_tables(tables(rows))
    typer.echo(f"\nreport: {report}")
    if view:
        viewed(out)
    else:
        typer.echo(f"to look into every bag, and take digits out of it: carmil view {shlex.quote(str(out))}")


@app.command()
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
        typer.Option(help="Instances a bag in the section models, with commas between.  [default: 1000,10000,50000]"),
    ] = "",
    bag: Annotated[int | None, typer.Option(help="Instances a bag in the other sections.  [default: 10000]")] = None,
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
      carmil benchmark --quick
      carmil benchmark --only models --models abmil.gated,car/abmil.gated --instances 1000,10000 --device cpu
    """
    from carmil.benchmark.plan import changed, planned
    from carmil.benchmark.report import CONDITIONS, tables, write_plot
    from carmil.benchmark.run import run_benchmark
    from carmil.tables import print_tables

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


@app.command()
def models() -> None:
    """The models there are. A counterfactual branch goes in front of the name: car/abmil.

    Prints a table; any of these names can be given to --model.

    Example: carmil models
    """
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


@app.command()
def doctor() -> None:
    """What is installed, which slides can be read, which device is seen, and what to do about what is missing.

    Prints a table and changes nothing.

    Example: carmil doctor
    """
    from rich.console import Console
    from rich.table import Table

    from carmil.doctor import examine

    findings = examine()
    table = Table(box=None, pad_edge=False)
    for head in ("what", "", "seen"):
        table.add_column(head, no_wrap=head == "what")
    for found in findings:
        table.add_row(found.what, "" if found.well else "missing", found.seen)
    Console().print(table)
    missing: dict[str, list[str]] = {}
    for found in findings:
        if not found.well:
            missing.setdefault(found.advice, []).append(found.what)
    for advice, names in missing.items():
        typer.echo(f"{', '.join(names)}: {advice}")
    if not missing:
        typer.echo("nothing is missing")
