"""carmil explain, faithfulness: what a run's models rest their answers on, and whether the maps can be trusted."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from carmil.cli.app import app
from carmil.cli.options import Device, DeviceOption, device_named, folder_for, names_in, say
from carmil.words import plural


@app.command()
def explain(
    run: Annotated[Path, typer.Argument(help="A run that `carmil train` wrote.")],
    bags: Annotated[
        Path | None, typer.Option(help="New slides, explained by all models.  [default: the run's own, as tested]")
    ] = None,
    methods: Annotated[
        str,
        typer.Option(help="More maps, with commas between: attention, leave_one_out, lrp, ... See docs/explain.md."),
    ] = "",
    searched: Annotated[
        bool, typer.Option("--searched", help="Also search a counterfactual attention for every slide.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the evidence.  [default: RUN/evidence; evidence for new slides]")
    ] = None,
    device: DeviceOption = Device.auto,
) -> None:
    """Write the evidence of every tile for every class, one table per slide, and a summary.

    A slide of the run is explained by the models that were tested on it. Writes OUT/SLIDE.parquet, summary.csv, summary.parquet
    and summary.json. If interrupted, run the same command again to resume.

    Examples:
      carmil explain run
      carmil explain run --methods attention,leave_one_out --searched
      carmil explain run --bags new_features --out new_evidence
    """
    from carmil.studies.explain import explain_run
    from carmil.studies.summary import agreement_table, summary_lines
    from carmil.tables import print_tables

    if out is not None:
        folder_for(out)
    found = explain_run(
        run,
        out,
        bags=bags,
        methods=names_in(methods),
        searched=searched,
        device=device_named(device),
        log=say,
    )
    table = agreement_table(found.summary)
    if table is not None:
        print_tables([table])
    for line in summary_lines(found.summary):
        typer.echo(f"- {line}")
    here = len(found.frame) - found.written
    typer.echo(f"\nwritten: {plural(found.written, 'slide')} to {found.folder}" + f" ({here} were there)" * (here > 0))
    typer.echo(f"         {found.folder / 'summary.csv'}, summary.parquet, summary.json")
    _tell_of_the_report(run, found.folder)


@app.command()
def faithfulness(
    runs: Annotated[list[Path], typer.Argument(help="One or more runs that `carmil train` wrote.")],
    methods: Annotated[
        str, typer.Option(help="Maps, with commas between.  [default: the model's default evidence, attention]")
    ] = "",
    steps: Annotated[int, typer.Option(help="Number of steps in which all tiles are removed.")] = 100,
    random_orders: Annotated[int, typer.Option(help="Random orders to compare with.")] = 10,
    bags: Annotated[
        Path | None, typer.Option(help="Where the runs' own cohort has moved to.  [default: where it was]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder.  [default: RUN/faithfulness of one run; faithfulness of several]")
    ] = None,
    device: DeviceOption = Device.auto,
) -> None:
    """Measure whether the models rely on what their maps show: curves and figures of several runs and maps.

    Tiles are removed, or added, in each map's order; and the weights are shuffled, to see whether the map changes.
    Writes OUT/faithfulness.html, faithfulness.png, faithfulness.md and faithfulness.json. If interrupted, run the
    same command again to resume.

    Example: carmil faithfulness run_abmil run_car --methods path,attention,random
    """
    from carmil.report.faithfulness import remarks, write_faithfulness
    from carmil.studies.faithfulness import measure_faithfulness
    from carmil.tables import print_tables

    if out is None:
        out = runs[0] / "faithfulness" if len(runs) == 1 else Path("faithfulness")
    else:
        folder_for(out)
    found = measure_faithfulness(
        runs,
        out,
        bags=bags,
        methods=names_in(methods),
        steps=steps,
        random_orders=random_orders,
        device=device_named(device),
        log=say,
    )
    words = [*(run.name for run in found), "--steps", str(steps), "--random-orders", str(random_orders)]
    words += ["--methods", methods] if methods else []
    tables = write_faithfulness(found, out, command=shlex.join(["carmil", "faithfulness", *words]))
    print_tables(tables)
    for line in remarks(found):
        typer.echo(f"- {line}")
    typer.echo(f"\nwritten: {out / 'faithfulness.html'}, faithfulness.png, faithfulness.md, faithfulness.json")
    _tell_of_the_report(runs[0], out)


def _tell_of_the_report(run: Path, written: Path) -> None:
    """Where a run keeps what was found of it, its report looks."""
    if written.parent == run:
        typer.echo(f"{shlex.join(['carmil', 'report', str(run)])} shows it in {run / 'report.html'}")
