"""carmil dataset ...: the paper's cohorts of slides, their expected files, and their label tables."""

from pathlib import Path
from typing import Annotated

import typer

from carmil.cli.app import app
from carmil.cli.options import folder_for, log
from carmil.errors import CarmilError

dataset = typer.Typer(
    help="""The paper's five cohorts of slides: where to get them, which files are expected, label tables.

    Examples:
      carmil dataset list
      carmil dataset show camelyon16
    """,
    no_args_is_help=True,
)
app.add_typer(dataset, name="dataset")

NameArgument = Annotated[str, typer.Argument(help="brca, nsclc, luad_tp53, bracs or camelyon16.")]
EncoderOption = Annotated[str, typer.Option(help="Encoder of the features: the name of their folder.")]


@dataset.command("list")
def dataset_list() -> None:
    """List the cohorts: numbers of slides in the paper, where to get them, and their terms of use.

    Example: carmil dataset list
    """
    from carmil.datasets.paper_cohorts import DATASETS

    for one in DATASETS:
        typer.echo(f"{one.name}: {one.title}, {one.question}")
        typer.echo(f"  {one.counted}\n  {one.source}\n  {one.terms}")


@dataset.command("show")
def dataset_show(name: NameArgument, encoder: EncoderOption = "uni") -> None:
    """Show which files of a cohort are expected where, and the commands that create them.

    Examples:
      carmil dataset show brca
      carmil dataset show camelyon16 --encoder resnet50
    """
    from carmil.datasets.paper_cohorts import dataset_named
    from carmil.datasets.paper_files import describe_files

    typer.echo(describe_files(dataset_named(name), encoder))


@dataset.command("labels")
def dataset_labels(
    name: NameArgument,
    tables: Annotated[
        list[str],
        typer.Option(
            "--from", metavar="FILE", help="A table, or CLASS=FILE if all of its rows have one class. May be repeated."
        ),
    ],
    out: Annotated[Path, typer.Option(help="DATA, the folder of all cohorts.")],
    label: Annotated[str | None, typer.Option(help="Column of the labels.  [default: detected]")] = None,
) -> None:
    """Create DATA/NAME/labels.csv, with the official split if there is one, from published tables.

    Columns are detected by their content. Omitted rows, and counts that differ from the paper's, are listed.

    Examples:
      carmil dataset labels brca --from tcga_brca.csv --out data
      carmil dataset labels nsclc --from LUAD=luad.tsv --from LUSC=lusc.tsv --out data
      carmil dataset labels luad_tp53 --from luad.maf --out data
    """
    from carmil.datasets.paper_cohorts import dataset_named
    from carmil.datasets.paper_files import LabelledSlides, count_notes
    from carmil.datasets.paper_labels import build_labels, labels_text
    from carmil.files import write_text

    one = dataset_named(name)
    built = build_labels(one, tables, label=label)
    path, text = folder_for(out) / one.name / "labels.csv", labels_text(built.lines)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise CarmilError(f"{path} already exists with other content: remove it, or choose another --out")
    write_text(path, text)
    lines = built.lines
    parts = tuple(line.split for line in lines) if one.official else None
    counted = LabelledSlides(tuple(line.label for line in lines), tuple(line.patient for line in lines), parts)
    for line in (*built.notes, *count_notes(one, counted)):
        log(line)
    typer.echo(f"written: {path}, {len(lines)} rows of {len(set(counted.patients))} patients")


@dataset.command("check")
def dataset_check(
    data: Annotated[Path, typer.Argument(help="DATA, the folder of all cohorts.")], encoder: EncoderOption = "uni"
) -> None:
    """Check which cohorts are present, their counts and those of the paper, and what is missing.

    Differing counts and missing cohorts are reported, but are not errors.

    Example: carmil dataset check data
    """
    from carmil.datasets.paper_files import check_files

    if not data.is_dir():
        raise CarmilError(
            f"{data} is not a folder: expected the folder of the cohorts, with DATA/NAME/labels.csv and DATA/NAME/{encoder}"
        )
    for line in check_files(data, encoder):
        typer.echo(line)
