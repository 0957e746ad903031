"""carmil explain, faithfulness: the evidence behind a run's predictions, and whether its maps can be trusted."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from carmil.cli.app import app
from carmil.cli.options import DeviceOption, device_named, folder_for, log, names_in, print_results
from carmil.errors import CarmilError
from carmil.words import plural


@app.command()
def explain(
    run: Annotated[Path, typer.Argument(help="A run that `carmil train` wrote.")],
    bags: Annotated[
        Path | None,
        typer.Option(
            help="New slides, explained by all models.  [default: the run's own, by the models tested on them]"
        ),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(help="More maps, separated by commas: attention, leave_one_out, lrp, ... See docs/explain.md."),
    ] = "",
    searched: Annotated[
        bool, typer.Option("--searched", help="Also search for a counterfactual attention of every slide.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the evidence.  [default: RUN/evidence; evidence for new slides]")
    ] = None,
    device: DeviceOption = "auto",
) -> None:
    """Write the evidence of every tile for every class, one table per slide, and a summary.

    A slide of the run is explained by the models that were tested on it. Writes OUT/SLIDE.parquet, summary.csv, summary.parquet
    and summary.json. If interrupted, run the same command again to resume.

    Examples:
      carmil explain run
      carmil explain run --methods attention,leave_one_out --searched
      carmil explain run --bags new_features --out new_evidence
    """
    from carmil.explanations.explain import agreement_table, explain_run, summary_lines

    if out is not None:
        folder_for(out)
    evidence = explain_run(
        run,
        out,
        bags=bags,
        methods=names_in(methods),
        searched=searched,
        device=device_named(device),
        log=log,
    )
    table = agreement_table(evidence.summary)
    before = len(evidence.frame) - evidence.written
    slides = f"{plural(evidence.written, 'slide')} to {evidence.folder}" + f" ({before} already there)" * (before > 0)
    print_results([] if table is None else [table], summary_lines(evidence.summary), [slides])
    typer.echo(f"         {evidence.folder / 'summary.csv'}, summary.parquet, summary.json")
    _mention_report(run, evidence.folder)


@app.command()
def faithfulness(
    runs: Annotated[list[Path], typer.Argument(help="One or more runs that `carmil train` wrote.")],
    methods: Annotated[
        str, typer.Option(help="Maps, separated by commas.  [default: the model's default evidence, attention]")
    ] = "",
    steps: Annotated[int, typer.Option(help="Number of steps in which all tiles are removed.")] = 100,
    random_orders: Annotated[int, typer.Option(help="Random orders to compare with.")] = 10,
    confidence: Annotated[
        float, typer.Option(help="Confidence at which the smallest number of tiles must keep the answer (MSK).")
    ] = 0.9,
    regions: Annotated[
        bool, typer.Option("--regions", help="Also remove regions of neighbouring tiles; needs coordinates.")
    ] = False,
    region_tiles: Annotated[
        int | None, typer.Option(min=1, help="Largest number of tiles in a region.  [default: 16]")
    ] = None,
    bags: Annotated[
        Path | None, typer.Option(help="Present path of the runs' cohort, if it was moved.  [default: as recorded]")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results.  [default: RUN/faithfulness for one run; faithfulness for several]"),
    ] = None,
    device: DeviceOption = "auto",
) -> None:
    """Measure whether the models rely on what their maps show: curves and figures of several runs and maps.

    Tiles are removed, or added, in the order of each map; and the weights are shuffled, to test whether the map
    changes. Writes OUT/faithfulness.html, faithfulness.png, faithfulness.md and faithfulness.json. If interrupted,
    run the same command again to resume.

    Examples:
      carmil faithfulness run_abmil run_car --methods path,attention,random
      carmil faithfulness run --regions
    """
    from carmil.evidence.regions import TILES
    from carmil.explanations.faithfulness import measure_faithfulness
    from carmil.report.faithfulness import remarks, write_faithfulness

    if region_tiles is not None and not regions:
        raise CarmilError(f"--region-tiles {region_tiles} needs --regions: without it no region is removed")
    if regions and region_tiles is None:
        region_tiles = TILES
    if out is None:
        out = runs[0] / "faithfulness" if len(runs) == 1 else Path("faithfulness")
    else:
        folder_for(out)
    results = measure_faithfulness(
        runs,
        out,
        bags=bags,
        methods=names_in(methods),
        steps=steps,
        random_orders=random_orders,
        confidence=confidence,
        region_tiles=region_tiles or 0,
        device=device_named(device),
        log=log,
    )
    words = [*(run.name for run in results), "--steps", str(steps), "--random-orders", str(random_orders)]
    words += ["--methods", methods] if methods else []
    words += ["--confidence", str(confidence)] if confidence != 0.9 else []
    words += ["--regions", "--region-tiles", str(region_tiles)] if regions else []
    tables = write_faithfulness(results, out, command=shlex.join(["carmil", "faithfulness", *words]))
    written = (out / "faithfulness.html", "faithfulness.png", "faithfulness.md", "faithfulness.json")
    print_results(tables, remarks(results), written)
    _mention_report(runs[0], out)


def _mention_report(run: Path, folder: Path) -> None:
    """Note that the report of a run shows only results in the run's folder."""
    if folder.parent == run:
        typer.echo(f"{shlex.join(['carmil', 'report', str(run)])} shows it in {run / 'report.html'}")
