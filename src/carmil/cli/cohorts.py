"""carmil cohort ..., carmil split: stores of features, and splits into folds."""

from pathlib import Path
from typing import Annotated

import typer

from carmil.cli.app import app
from carmil.cli.options import (
    LabelColumn,
    Layout,
    OutOption,
    PatientColumn,
    SkipBrokenOption,
    SlideColumn,
    SplitForm,
    StoreType,
    file_for,
    folder_for,
    log,
)
from carmil.errors import CarmilError
from carmil.words import examples, plural

AllowDuplicates = Annotated[
    bool,
    typer.Option(
        "--allow-duplicates", help="Accept the same features under two patients, which are refused otherwise."
    ),
]

cohort = typer.Typer(
    help="""Cohorts of features: pack them into a store, inspect them, export them for other tools.

    Examples:
      carmil cohort check features_uni_v2 --labels labels.csv
      carmil cohort build features_uni_v2 --out cohort
    """,
    no_args_is_help=True,
)
app.add_typer(cohort, name="cohort")


@cohort.command("build")
def cohort_build(
    source: Annotated[Path, typer.Argument(help="Folder or file of features, as written by CLAM, TRIDENT, STAMP, ...")],
    out: Annotated[Path, typer.Option(help="The store to create.")],
    dtype: Annotated[StoreType, typer.Option(help="Type of the stored features.")] = "float16",
    truth: Annotated[str | None, typer.Option(help="Column or array with the instances that are positive.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of processes for reading.  [default: one per core]")
    ] = None,
    skip_broken: SkipBrokenOption = False,
) -> None:
    """Pack a cohort into one memory-mapped store, which is then opened without reading it.

    The layout is detected. Writes the folder OUT. If interrupted, run the same command again to resume; the store has the same
    bytes.

    Examples:
      carmil cohort build features_uni_v2 --out cohort
      carmil cohort build features.npy --out cohort --dtype float32 --skip-broken
    """
    from carmil.bags.building import build_store
    from carmil.progress import count_progress

    with count_progress(f"packing {source.name}", "bags") as on_bag:
        store = build_store(
            source,
            folder_for(out),
            dtype=dtype,
            truth=truth,
            workers=workers,
            skip_broken=skip_broken,
            log=log,
            on_bag=on_bag,
        )
    typer.echo(
        f"written: {out}, {plural(len(store.entries), 'bag')} of {plural(store.rows, 'instance')} x "
        f"{plural(store.width, 'feature')}, {store.dtype}"
    )
    if store.labels is not None:
        typer.echo(f"labels that came with the cohort: {store.labels}")


@cohort.command("info")
def cohort_info(store: Annotated[Path, typer.Argument(help="A store.")]) -> None:
    """Show the contents of a store: bags, instances, features, encoder, tile geometry, labels, and what was left out.

    Prints a table and changes nothing.

    Example: carmil cohort info cohort
    """
    from collections import Counter
    from statistics import median

    from carmil.bags.store import open_store
    from carmil.tables import ResultTable, print_tables

    opened_store = open_store(store)
    sizes = [entry.rows for entry in opened_store.entries]
    middle = f"{median(sizes):,.1f}".removesuffix(".0")
    units = Counter(entry.unit for entry in opened_store.entries)
    without = examples((entry.id for entry in opened_store.entries if entry.unit is None), 6)
    coordinates = (
        next(iter(units)) or "none"
        if len(units) == 1
        else ", ".join(
            f"{unit or 'none'} ({plural(n, 'bag')}{'' if unit else f': {without}'})" for unit, n in units.most_common()
        )
    )
    labelled = sum(entry.truth for entry in opened_store.entries)
    truth = {0: "no", len(opened_store.entries): "yes"}.get(
        labelled, f"of {labelled} of {plural(len(opened_store.entries), 'bag')}"
    )
    lines = (
        ("bags", f"{len(opened_store.entries):,}"),
        ("instances", f"{opened_store.rows:,}; {min(sizes):,} to {max(sizes):,} per bag, median {middle}"),
        ("features", f"{opened_store.width} per instance, {opened_store.dtype}"),
        ("encoder", opened_store.encoder or "not known"),
        ("pooling", opened_store.pooling or "not known"),
        ("tiles", str(opened_store.geometry)),
        *(("tiles chosen by", tiling) for tiling in opened_store.tilings),
        ("coordinates", coordinates),
        ("instance labels", truth),
        ("labels", "labels.csv" if opened_store.labels else "none"),
        ("packed from", opened_store.index.origin),
        ("empty slides", ", ".join(opened_store.index.empty) or "none"),
        ("left out", ", ".join(opened_store.index.left_out) or "none"),
        ("fingerprint", opened_store.fingerprint),
    )
    print_tables([ResultTable(str(store), ("what", "value"), lines, names=2)])


@cohort.command("check")
def cohort_check(
    source: Annotated[Path, typer.Argument(help="A store, or a folder of features.")],
    labels: Annotated[Path | None, typer.Option(help="Table of labels to compare with.")] = None,
    slide: SlideColumn = None,
    patient: PatientColumn = None,
    label: LabelColumn = None,
    truth: Annotated[str | None, typer.Option(help="Column with the instances that are positive.")] = None,
    dtype: Annotated[StoreType, typer.Option(help="Type of the store for which the features are checked.")] = "float16",
    allow_duplicates: AllowDuplicates = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of processes that read.  [default: one per core]")
    ] = None,
) -> None:
    """Read a cohort once and list its problems; status 1 if there are any.

    Checks for missing, truncated or non-finite features, impossible coordinates, values that --dtype cannot hold, bags whose width,
    encoder or tile geometry differs from the rest, slides without labels, labels without slides, and, with labels, the same
    features under two patients. Prints a table of the problems and changes nothing.

    Examples:
      carmil cohort check features_uni_v2
      carmil cohort check cohort --labels labels.csv
    """
    from carmil.bags.checking import (
        check_bags,
        check_labels,
        check_store,
        duplicates_note,
        remarks_on,
    )
    from carmil.bags.finding import find_bags
    from carmil.bags.labels import read_labels
    from carmil.bags.store import is_store, open_store
    from carmil.progress import count_progress
    from carmil.tables import ResultTable, print_tables

    with count_progress(f"checking {source.name}", "bags") as on_bag:
        if is_store(source):
            store = open_store(source)
            ids, problems = store.ids, check_store(store, on_bag=on_bag)
            checksums, remarks = store.checksums, remarks_on(store.entries, store.dtype)
        else:
            files = find_bags(source, truth=truth)
            for line in files.notes:
                log(line)
            ids = tuple(bag.id for bag in files.sources)
            checked = check_bags(files, dtype=dtype, workers=workers, on_bag=on_bag)
            problems, checksums, remarks = list(checked.problems), checked.checksums, list(checked.remarks)
    if labels is not None:
        table = read_labels(labels, slide=slide, patient=patient, label=label)
        of_labels, notes = check_labels(table, ids, checksums, allow_duplicates=allow_duplicates)
        problems, remarks = problems + of_labels, remarks + notes
    elif twins := duplicates_note(checksums):
        remarks.append(twins)
    for line in remarks:
        log(line)
    if not problems:
        typer.echo(f"{plural(len(ids), 'bag')}, no problems")
        return
    lines = tuple((problem.bag or "all", problem.kind, problem.what) for problem in problems)
    print_tables(
        [
            ResultTable(
                f"{plural(len(problems), 'problem')} in {plural(len(ids), 'bag')}",
                ("bag", "kind", "what"),
                lines,
                names=2,
            )
        ]
    )
    raise typer.Exit(1)


@cohort.command("export")
def cohort_export(
    store: Annotated[Path, typer.Argument(help="A store.")],
    out: OutOption,
    layout: Annotated[Layout, typer.Option(help="Layout of the files.")] = "trident",
) -> None:
    """Write the bags of a store as files for other tools.

    Writes one file per bag under OUT, in the layout of that tool. A bag whose name is not a valid file name is listed
    in OUT/carmil_names.json. Existing files that were not exported from this store are not replaced.

    Example: carmil cohort export cohort --out features --layout trident
    """
    from carmil.bags.store import open_store
    from carmil.bags.writers import begin_export, write_bag
    from carmil.progress import progress_bar

    opened_store = open_store(store)
    names = begin_export(opened_store, folder_for(out), layout)
    for i in progress_bar(range(len(opened_store.entries)), f"writing {layout}"):
        write_bag(opened_store.bag(i), out, layout, names=names)
    typer.echo(f"written: {plural(len(opened_store.entries), 'bag')} as {layout} under {out}")


@app.command()
def split(
    labels: Annotated[Path, typer.Option(help="Table with slide, patient and label.")],
    out: Annotated[Path, typer.Option(help="File to write; a folder for --form clam.")] = Path("splits.tsv"),
    audit_only: Annotated[
        Path | None, typer.Option("--audit", help="Audit this split instead of creating one.")
    ] = None,
    folds: Annotated[int, typer.Option(min=2, help="Number of folds.")] = 5,
    inner: Annotated[int, typer.Option(min=1, help="Inner folds, for nested cross-validation.")] = 1,
    validation: Annotated[float, typer.Option(help="Share of the training patients for validation.")] = 0.15,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the folds.")] = 0,
    form: Annotated[SplitForm, typer.Option(help="Layout of the files.")] = "carmil",
    slide: SlideColumn = None,
    patient: PatientColumn = None,
    label: LabelColumn = None,
    site: Annotated[
        str | None, typer.Option(help="Column of the site (or 'tcga'), which must not be in two folds.")
    ] = None,
    bags: Annotated[
        Path | None, typer.Option(help="The store, to check for the same features under two patients.")
    ] = None,
    allow_duplicates: AllowDuplicates = False,
) -> None:
    """Divide patients into folds, stratified by label, or audit an existing split.

    A patient in two parts of a fold is an error, and, with --bags, so are the same features under two patients. Writes OUT; an
    audit writes nothing.

    Examples:
      carmil split --labels labels.csv --folds 5 --out splits.tsv
      carmil split --labels tcga.csv --site tcga --form clam --out splits
      carmil split --labels labels.csv --audit splits_0.csv
    """
    from carmil.bags.checking import judge_duplicates, labelled_duplicates
    from carmil.bags.labels import match, read_labels
    from carmil.bags.split_files import read_splits, replaced_files, write_splits
    from carmil.bags.splits import audit, make_splits
    from carmil.bags.store import open_store

    if audit_only is None:
        for file in replaced_files(out, form):
            file_for(file, labels, bags)
    table = read_labels(labels, slide=slide, patient=patient, label=label, site=site)
    for line in table.notes:
        log(line)
    if bags is not None:
        store = open_store(bags)
        pairs = labelled_duplicates(table, match(table, store.ids), store.ids, store.checksums)
        for line in judge_duplicates(pairs, allowed=allow_duplicates):
            log(line)
    numbers = [table.classes.index(name) for name in table.labels]
    cases = (table.slides, table.patients, numbers)
    if audit_only is not None:
        splits = read_splits(audit_only, *cases, validation=validation, seed=seed, classes=table.classes)
    else:
        sites = table.sites if site is not None else None
        splits = make_splits(
            *cases, folds=folds, inner=inner, validation=validation, seed=seed, sites=sites, classes=table.classes
        )
    errors, remarks = audit(splits, numbers, table.classes)
    for line in (*splits.notes, *remarks):
        log(line)
    if errors:
        raise CarmilError(f"{errors[0]}{f' (and {len(errors) - 1} more)' if len(errors) > 1 else ''}")
    if audit_only is None:
        write_splits(out, splits, form=form, labels=numbers, classes=table.classes)
        typer.echo(f"written: {out}")
    patients, slides = plural(len(set(splits.patients)), "patient"), plural(len(splits.slides), "slide")
    typer.echo(f"{plural(splits.folds, 'fold')} of {patients}, {slides}: sound")
