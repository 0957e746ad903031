"""carmil demo, models, doctor: a first look, the list of models, and the state of the installation."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from carmil.cli.app import app
from carmil.cli.options import DeviceOption, OutOption, device_named, folder_for
from carmil.cli.viewer import serve_run


@app.command()
def demo(
    fast: Annotated[bool, typer.Option("--fast", help="Fewer bags and epochs, to see that it runs.")] = False,
    view: Annotated[bool, typer.Option("--view", help="Open the trained models in the browser.")] = False,
    out: OutOption = Path("demo"),
    device: DeviceOption = "auto",
) -> None:
    """Train on digit bags and write a report that shows the evidence for and against each prediction.

    Needs no data: handwritten digits come with a dependency. Takes about two minutes on two CPU cores. Writes OUT/report.html and
    ordinary runs in OUT/runs. If interrupted, run the same command again to resume.

    Examples:
      carmil demo
      carmil demo --fast --view --out look
    """
    from carmil.reproduce.demo import run_demo
    from carmil.tables import print_tables

    found = run_demo(folder_for(out), fast=fast, device=device_named(device))
    print_tables(found.tables)
    typer.echo(f"\nreports: {', '.join(map(str, found.reports))}")
    if view:
        serve_run(out)
    else:
        typer.echo(f"to look into each bag, and to remove digits from it: carmil view {shlex.quote(str(out))}")


@app.command()
def models() -> None:
    """List the models. A counterfactual branch is written before the name: car/abmil.

    Prints a table; --model takes any of these names.

    Example: carmil models
    """
    from rich.console import Console
    from rich.table import Table

    from carmil.counterfactual.branches import BRANCHES
    from carmil.models import registered_models

    table = Table(box=None, pad_edge=False)
    table.add_column("model", style="bold", no_wrap=True)
    table.add_column("what it is")
    for name, entry in registered_models().items():
        table.add_row(name, entry.description)
    table.add_section()
    for prefix, (_, about) in BRANCHES.items():
        table.add_row(f"{prefix}/…", about)
    Console().print(table)


@app.command()
def doctor() -> None:
    """Check the installation: packages, readable slide formats, devices, and how to install what is missing.

    Prints a table and changes nothing.

    Example: carmil doctor
    """
    from rich.console import Console
    from rich.table import Table

    from carmil.doctor import examine

    findings = examine()
    table = Table(box=None, pad_edge=False)
    for head in ("what", "", "version or device"):
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
