"""carmil import: a trained model of another tool as a run."""

from pathlib import Path
from typing import Annotated

import typer

from carmil.cli.app import app
from carmil.cli.options import (
    DeviceOption,
    LabelColumn,
    PatientColumn,
    SlideColumn,
    device_named,
    folder_for,
    log,
    names_in,
    print_results,
)


@app.command("import")
def import_(
    checkpoint: Annotated[Path, typer.Argument(help="The file with the weights of one trained model (.pt, .pth).")],
    tool: Annotated[str, typer.Option("--from", help="The tool that trained the model: clam or xmil.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the run.")],
    classes: Annotated[
        str,
        typer.Option(
            help="Names of the classes, separated by commas, in the order of the outputs.  [default: class_0,...]"
        ),
    ] = "",
    config: Annotated[
        Path | None,
        typer.Option(
            help="The tool's JSON file of settings, which must agree with the weights.  [default: looked for beside them]"
        ),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(help="Encoder of the features that the model was trained on; others are refused later."),
    ] = None,
    bags: Annotated[
        Path | None, typer.Option(help="Slides to measure the model on: a store, or a folder of features.")
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(help="The table of their labels.  [default: the labels that came with the bags]")
    ] = None,
    slide: SlideColumn = None,
    patient: PatientColumn = None,
    label: LabelColumn = None,
    map_: Annotated[
        list[str] | None,
        typer.Option("--map", help="LABEL=CLASS, or LABEL= to leave its slides out; repeat for each label."),
    ] = None,
    device: DeviceOption = "auto",
) -> None:
    """Import a model that CLAM or xMIL trained, as a run for predict, evaluate, explain, faithfulness, report and view.

    The architecture is recognised from the names and shapes of the weights. Nothing in the checkpoint is executed. With --bags
    the run gets figures and a report of these slides, and `explain`, `faithfulness` and `view` show them; without, give
    slides to `predict`, `evaluate`, `explain` and `slides run`.

    Examples:
      carmil import s_0_checkpoint.pt --from clam --classes normal,tumor --out imported
      carmil import best_model.pt --from xmil --classes normal,tumor --bags features --labels labels.csv --out imported
    """
    from carmil.report.run import write_report
    from carmil.studies.evaluate import parse_map
    from carmil.studies.figures import run_table
    from carmil.studies.import_checkpoint import import_checkpoint
    from carmil.studies.tables import figures_lines

    run = import_checkpoint(
        checkpoint,
        tool,
        folder_for(out),
        classes=names_in(classes),
        config=config,
        bags=bags,
        labels=labels,
        named={"slide": slide, "patient": patient, "label": label},
        mapping=parse_map(map_ or []),
        encoder=encoder,
        device=device_named(device),
        log=log,
    )
    if not run.data.splits:
        print_results((), figures_lines(run), (out / "weights.safetensors", "run.json", "card.md"))
        return
    write_report(run, out / "report.html")
    written = (out / "report.html", "predictions.csv", "predictions.parquet", "metrics.json", "card.md")
    print_results([run_table(run)], figures_lines(run), written)
