"""carmil demo, models, unit-test, doctor: a first trial, the list of models, what they learn, and the installation."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from carmil.cli.app import app
from carmil.cli.options import DeviceOption, OutOption, device_named, file_for, folder_for, print_results
from carmil.cli.viewer import serve_run
from carmil.errors import CarmilError


@app.command()
def demo(
    fast: Annotated[bool, typer.Option("--fast", help="Use fewer bags and epochs, for a quick trial.")] = False,
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

    output = run_demo(folder_for(out), fast=fast, device=device_named(device))
    print_tables(output.tables)
    typer.echo(f"\nreports: {', '.join(map(str, output.reports))}")
    if view:
        serve_run(out)
    else:
        typer.echo(f"to look into each bag, and to remove digits from it: carmil view {shlex.quote(str(out))}")


@app.command()
def models() -> None:
    """List the models, and the unit tests that they pass. A counterfactual branch is written before the name: car/abmil.

    Prints a table; --model takes any of these names. The tests are those of `carmil unit-test`.

    Example: carmil models
    """
    from rich.console import Console
    from rich.table import Table

    from carmil.counterfactual.branches import BRANCHES
    from carmil.models import registered_models
    from carmil.runs.unit_tests import passed_words

    table = Table(box=None, pad_edge=False)
    table.add_column("model", style="bold", no_wrap=True)
    table.add_column("what it is")
    table.add_column("unit tests")
    for name, entry in registered_models().items():
        table.add_row(name, entry.description, passed_words(name))
    table.add_section()
    for prefix, (_, about) in BRANCHES.items():
        table.add_row(f"{prefix}/…", about)
    Console().print(table)


@app.command("unit-test")
def unit_test(
    model: Annotated[str, typer.Argument(help="A model, as in `carmil train --model`.")] = "",
    every: Annotated[bool, typer.Option("--all", help="Test every model.")] = False,
    seeds: Annotated[int, typer.Option(help="Initialisations of each model.")] = 5,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
) -> None:
    """Test what a model learns: train it on bags with a shortcut, and test it where the shortcut is reversed.

    Five small tests, each trained with the defaults of `carmil train` on bags drawn at random: a model that takes the shortcut
    answers well on bags drawn as in training, and worse than chance (AUC below 0.5) in the test. Prints one table per model.
    A failed test is a property of the method, not an error: the exit status is 0. With --out, an interrupted command resumes.

    Examples:
      carmil unit-test abmil.gated
      carmil unit-test --all --out unit_tests.json
    """
    from carmil.explanations.unit_tests import models_under_test, unit_test_results, unit_test_tables, verdicts_table
    from carmil.runs.unit_tests import read_unit_tests, write_unit_tests

    if every == bool(model):
        raise CarmilError("expected the name of one model, or --all; `carmil models` lists them")
    words = ["carmil", "unit-test", "--all" if every else model, "--seeds", str(seeds)]
    command, names = shlex.join(words), models_under_test() if every else [model]
    results = [] if out is None else [*read_unit_tests(file_for(out), command=command)]
    for name in names:
        if all(one.model != name for one in results):
            results += unit_test_results(name, seeds=seeds)
            results.sort(key=lambda one: names.index(one.model))
            if out is not None:
                write_unit_tests(results, out, command=command)
    together = [verdicts_table(results)] if every else []
    print_results([*unit_test_tables(results), *together], (), [] if out is None else [out])


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
    for finding in findings:
        table.add_row(finding.what, "" if finding.well else "missing", finding.seen)
    Console().print(table)
    missing: dict[str, list[str]] = {}
    for finding in findings:
        if not finding.well:
            missing.setdefault(finding.advice, []).append(finding.what)
    for advice, names in missing.items():
        typer.echo(f"{', '.join(names)}: {advice}")
    if not missing:
        typer.echo("nothing is missing")
