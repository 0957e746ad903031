"""The command line: parses, calls, prints."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from inspect import Signature, signature
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
cohort = typer.Typer(
    help="Cohorts of features: pack them into a store, look at them, write them for other tools.", no_args_is_help=True
)
app.add_typer(cohort, name="cohort")


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


class Precision(StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"


class StoreType(StrEnum):
    float16 = "float16"
    float32 = "float32"
    bfloat16 = "bfloat16"


class Layout(StrEnum):
    clam = "clam"
    trident = "trident"


class SplitForm(StrEnum):
    carmil = "carmil"
    clam = "clam"
    patho_bench = "patho-bench"
    stamp = "stamp"


ColumnOption = Annotated[str | None, typer.Option(help="Name of that column.  [default: found by looking]")]
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
        str, typer.Option(help="Weights of the counterfactual term, with commas between.  [default: the branch's own]")
    ] = "",
    lambda_: Annotated[
        str, typer.Option("--lambda", help="Weights of the distance; every combination.  [default: the branch's own]")
    ] = "",
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
    from carmil.errors import unknown
    from carmil.report.tables import print_tables
    from carmil.reproduce.digit_data import load_digits
    from carmil.reproduce.table1 import ALL_MODELS, Settings, run_table1, tables

    settings = Settings(
        models=ALL_MODELS if models == "all" else tuple(name.strip() for name in models.split(",") if name.strip()),
        repetitions=repetitions,
        lr=lr,
        epochs=epochs,
        alpha=_numbers("--alpha", alpha, float),
        lambda_=_numbers("--lambda", lambda_, float),
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


@cohort.command("build")
def cohort_build(
    source: Annotated[
        Path, typer.Argument(help="Folder (or file) of features, as CLAM, TRIDENT, STAMP, ... wrote it.")
    ],
    out: Annotated[Path, typer.Option(help="The store to make.")],
    dtype: Annotated[StoreType, typer.Option(help="How features are kept.")] = StoreType.float16,
    truth: Annotated[
        str | None, typer.Option(help="Column (or array) that knows which instances are positive.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that read.  [default: one a core]")] = None,
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Leave out what cannot be read, and say so.")
    ] = False,
) -> None:
    """Pack a cohort into one memory-mapped store: read once, then ready at once.

    The layout is found by looking. Killed and started again, it goes on and ends with the same bytes.

    Example: carmil cohort build features_uni_v2 --out cohort
    """
    from carmil.bags.store import build_store
    from carmil.progress import counted

    with counted(f"packing {source.name}", "bags") as on_bag:
        store = build_store(
            source,
            _folder(out),
            dtype=dtype.value,
            truth=truth,
            workers=workers,
            skip_broken=skip_broken,
            say=_say,
            on_bag=on_bag,
        )
    typer.echo(
        f"written: {out}, {len(store.entries)} bags of {store.rows:,} instances x {store.width} features, {store.dtype}"
    )
    if store.labels is not None:
        typer.echo(f"labels that came with the cohort: {store.labels}")


@cohort.command("info")
def cohort_info(store: Annotated[Path, typer.Argument(help="A store.")]) -> None:
    """What is in a store.

    Example: carmil cohort info cohort
    """
    from carmil.bags.store import open_store
    from carmil.report.tables import ResultTable, print_tables

    found = open_store(store)
    sizes = sorted(entry.rows for entry in found.entries)
    units = {entry.unit for entry in found.entries}
    lines = (
        ("bags", f"{len(found.entries):,}"),
        ("instances", f"{found.rows:,}; a bag {sizes[0]:,} to {sizes[-1]:,}, median {sizes[len(sizes) // 2]:,}"),
        ("features", f"{found.width} wide, {found.dtype}"),
        ("encoder", found.encoder or "not known"),
        ("coordinates", ", ".join(sorted(unit or "none" for unit in units))),
        ("instance labels", "yes" if all(entry.truth for entry in found.entries) else "no"),
        ("labels", "labels.csv" if found.labels else "none"),
        ("packed from", found.origin),
        ("empty slides", ", ".join(found.empty) or "none"),
        ("left out", ", ".join(found.left_out) or "none"),
        ("fingerprint", found.fingerprint),
    )
    print_tables([ResultTable(str(store), ("what", "value"), lines, names=2)])


@cohort.command("check")
def cohort_check(
    source: Annotated[Path, typer.Argument(help="A store, or a folder of features.")],
    labels: Annotated[Path | None, typer.Option(help="Table of labels to compare with.")] = None,
    truth: Annotated[str | None, typer.Option(help="Column that knows which instances are positive.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that read.  [default: one a core]")] = None,
) -> None:
    """Read everything once and list what is wrong; status 1 if anything is.

    Missing, truncated or not finite features, another width or encoder than most, slides without labels, labels without slides.

    Example: carmil cohort check features_uni_v2 --labels labels.csv
    """
    from carmil.bags.finding import find_bags
    from carmil.bags.store import Problem, check_bags, check_store, is_store, open_store
    from carmil.bags.tables import match, read_labels
    from carmil.progress import counted
    from carmil.report.tables import ResultTable, print_tables

    with counted(f"checking {source.name}", "bags") as on_bag:
        if is_store(source):
            store = open_store(source)
            ids, problems = store.ids, check_store(store, on_bag=on_bag)
        else:
            found = find_bags(source, truth=truth)
            for line in found.said:
                _say(line)
            ids = tuple(bag.id for bag in found.sources)
            problems = check_bags(found, workers=workers, on_bag=on_bag)
    if labels is not None:
        table = read_labels(labels)
        matched = match(table, ids)
        for line in (*table.said, *matched.said):
            _say(line)
        problems += [Problem(name, "no label", f"not in {labels.name}") for name in matched.unlabelled]
        problems += [Problem(name, "no features", f"in {labels.name}, no such bag") for name in matched.missing]
    if not problems:
        typer.echo(f"{len(ids)} bags, nothing wrong")
        return
    lines = tuple((problem.bag or "all", problem.kind, problem.what) for problem in problems)
    print_tables([ResultTable(f"{len(problems)} problems in {len(ids)} bags", ("bag", "kind", "what"), lines, names=2)])
    raise typer.Exit(1)


@cohort.command("export")
def cohort_export(
    store: Annotated[Path, typer.Argument(help="A store.")],
    out: OutOption,
    layout: Annotated[Layout, typer.Option(help="Whose files to write.")] = Layout.trident,
) -> None:
    """Write a store's bags as files that other tools read.

    Example: carmil cohort export cohort --out features --layout trident
    """
    from carmil.bags.store import open_store
    from carmil.bags.writers import write_bag
    from carmil.progress import tracked

    found = open_store(store)
    for i in tracked(range(len(found.entries)), f"writing {layout.value}"):
        write_bag(found.bag(i), _folder(out), layout.value)
    typer.echo(f"written: {len(found.entries)} bags as {layout.value} under {out}")


@app.command()
def split(
    labels: Annotated[Path, typer.Option(help="Table with slide, patient and label.")],
    out: Annotated[Path, typer.Option(help="File (clam: folder) to write.")] = Path("splits.tsv"),
    audit_only: Annotated[Path | None, typer.Option("--audit", help="Audit this split instead of making one.")] = None,
    folds: Annotated[int, typer.Option(min=2, help="How many.")] = 5,
    inner: Annotated[int, typer.Option(min=1, help="Inner folds, for nested cross-validation.")] = 1,
    validation: Annotated[float, typer.Option(help="Share of the training patients that validate.")] = 0.15,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    form: Annotated[SplitForm, typer.Option(help="Whose files to write.")] = SplitForm.carmil,
    slide: ColumnOption = None,
    patient: ColumnOption = None,
    label: ColumnOption = None,
    site: Annotated[str | None, typer.Option(help="Column of the site (or 'tcga'): no site in two folds.")] = None,
) -> None:
    """Divide patients into folds, stratified by label, or audit a split that there is.

    A patient in two parts of a fold is an error.

    Examples: carmil split --labels labels.csv --folds 5 --out splits.tsv
    carmil split --labels labels.csv --audit splits_0.csv
    """
    from carmil.bags.splits import audit, make_splits, read_splits, write_splits
    from carmil.bags.tables import read_labels

    table = read_labels(labels, slide=slide, patient=patient, label=label, site=site)
    for line in table.said:
        _say(line)
    numbers = [table.classes.index(name) for name in table.labels]
    who = (table.slides, table.patients, numbers)
    if audit_only is not None:
        splits = read_splits(audit_only, *who, validation=validation, seed=seed)
    else:
        sites = table.sites if site is not None else None
        splits = make_splits(*who, folds=folds, inner=inner, validation=validation, seed=seed, sites=sites)
    errors, remarks = audit(splits, numbers, table.classes)
    for line in (*splits.said, *remarks):
        _say(line)
    if errors:
        raise CarmilError(f"{errors[0]}{f' (and {len(errors) - 1} more)' if len(errors) > 1 else ''}")
    if audit_only is None:
        write_splits(out, splits, form=form.value, labels=numbers, classes=table.classes)
        typer.echo(f"written: {out}")
    typer.echo(f"{splits.folds} folds of {len(set(splits.patients))} patients, {len(splits.slides)} slides: sound")


def _words_of_a_study(
    config: Annotated[Path | None, typer.Option(help="YAML with any of these settings; the command line wins.")] = None,
    bags: Annotated[Path | None, typer.Option(help="A store, or a folder of features.")] = None,
    labels: Annotated[
        Path | None,
        typer.Option(help="CSV, TSV or Parquet: slide, patient, label. Without it: those that came with the bags."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the run.")] = None,
    model: Annotated[str | None, typer.Option(help="See `carmil models`.  [default: car/abmil.gated]")] = None,
    folds: Annotated[int | None, typer.Option(help="By patient, stratified.  [default: 5]")] = None,
    seeds: Annotated[int | None, typer.Option(help="Initialisations a fold.  [default: 1]")] = None,
    inner: Annotated[int | None, typer.Option(help="Inner folds (nested).  [default: 1]")] = None,
    reshuffle: Annotated[bool | None, typer.Option("--reshuffle", help="Other folds for every seed.")] = None,
    splits: Annotated[
        Path | None, typer.Option(help="A split that there is: ours, CLAM's, Patho-Bench's, STAMP's.")
    ] = None,
    official: Annotated[bool | None, typer.Option("--official", help="The table's own train/val/test column.")] = None,
    patients: Annotated[
        str | None, typer.Option(help="Slides of a patient: mean, max or one-bag.  [default: mean]")
    ] = None,
    slide: ColumnOption = None,
    patient: ColumnOption = None,
    label: ColumnOption = None,
    site: Annotated[str | None, typer.Option(help="Column of the site (or 'tcga'): no site in two folds.")] = None,
    split: Annotated[str | None, typer.Option(help="Column with the official train/val/test.")] = None,
    positive: Annotated[str | None, typer.Option(help="The class that counts as positive.")] = None,
    truth: Annotated[str | None, typer.Option(help="Column that knows which instances are positive.")] = None,
    epochs: Annotated[int | None, typer.Option(help="At most.  [default: 50]")] = None,
    patience: Annotated[int | None, typer.Option(help="Epochs without a better one.  [default: 20]")] = None,
    batch: Annotated[int | None, typer.Option(help="Bags a step.  [default: 1]")] = None,
    lr: Annotated[
        str | None, typer.Option(help="Or several with commas: the best on validation.  [default: 2e-4]")
    ] = None,
    alpha: Annotated[str | None, typer.Option(help="Weight(s) of the counterfactual term.")] = None,
    lambda_: Annotated[str | None, typer.Option("--lambda", help="Weight(s) of the distance.")] = None,
    distance: Annotated[Distance | None, typer.Option(help="Between the two maps (CAR).")] = None,
    class_weights: Annotated[str | None, typer.Option(help="none or balanced.  [default: none]")] = None,
    standardise: Annotated[
        bool | None, typer.Option("--standardise", help="Scale features by each fold's training bags.")
    ] = None,
    precision: Annotated[
        Precision | None, typer.Option(help="Of products on a GPU; a CPU computes in float32.  [default: bfloat16]")
    ] = None,
    warm_start: Annotated[Path | None, typer.Option(help="Run of the model without its branch, same folds.")] = None,
    threshold: Annotated[
        str | None, typer.Option(help="balanced, f1, 0.5, sensitivity=0.95, specificity=0.9.  [default: balanced]")
    ] = None,
    abstain: Annotated[
        float | None, typer.Option(help="Share of validation cases too close to call.  [default: 0]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of folds and initialisations.  [default: 0]")] = None,
    device: Annotated[Device | None, typer.Option(help="Where to compute.  [default: auto]")] = None,
    models_at_once: Annotated[
        int | None, typer.Option(help="How many models are trained at once.  [default: all that fit]")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Train on a Ray cluster: host:port, auto or local. See docs/cluster.md.")
    ] = None,
) -> tuple[dict[str, Any], str]:
    """What is asked of a study, and where that was said: the file's words, and the command line's, which win."""
    from carmil.studies.settings import Settings, read_settings

    words = {
        name: value
        for name, value in locals().copy().items()
        if name in Settings.__dataclass_fields__ and value is not None
    }
    for name in ("lr", "alpha", "lambda_"):
        if name in words and "," in words[name]:
            words[name] = [part.strip() for part in words[name].split(",")]
    given = {} if config is None else read_settings(config)
    return {**given, **words}, "command line" if config is None else str(config)


def _of_a_study(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of a study. It is called with `given`, what they say, and `where` that was said."""
    shared = signature(_words_of_a_study).parameters
    own = [parameter for name, parameter in signature(command).parameters.items() if name not in ("given", "where")]
    options = [*shared.values(), *own]

    def called(**values: Any) -> None:
        given, where = _words_of_a_study(**{name: values.pop(name) for name in shared})
        command(given=given, where=where, **values)

    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in options}
    called.__signature__ = Signature(options)  # type: ignore[attr-defined]
    return called


@app.command()
@_of_a_study
def train(given: dict[str, Any], where: str) -> None:
    """Cross-validate a model on your features and labels; figures, predictions of every slide, a report.

    Epoch, hyper-parameters and threshold are chosen on validation bags; a test fold is looked at once, at the end.
    Killed and started again with the same words, it goes on.

    Example: carmil train --bags cohort --labels labels.csv --model car/abmil.gated --folds 5 --seeds 5 --out run
    """
    from carmil.report.run import write_report
    from carmil.report.tables import print_tables
    from carmil.studies.settings import Settings
    from carmil.studies.shown import figures_lines, figures_table
    from carmil.studies.train import run_study

    settings = Settings.of(given, where=where)
    _folder(settings.out)
    _check_device(settings.device)
    run = run_study(settings, say=_say)
    write_report(run, settings.out / "report.html")
    print_tables([figures_table([run])])
    for line in figures_lines(run):
        typer.echo(f"- {line}")
    typer.echo(f"\nwritten: {settings.out / 'report.html'}, predictions.parquet, metrics.json, card.md")


@app.command()
@_of_a_study
def sweep(
    given: dict[str, Any],
    where: str,
    over: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE,VALUE,... of any setting; again for each. Also `sweep:` in the YAML."),
    ] = None,
) -> None:
    """Train a study at every point of a grid over any of its settings; a table, a picture, and a run a point.

    Points that differ in learning rate, alpha, lambda or distance are trained together as one population.
    Killed and started again with the same words, it goes on.

    Example: carmil sweep --config study.yaml --over alpha=0,0.2,0.8,1 --over lambda=0,0.2,0.8,1 --over distance=l1,cosine
    """
    from carmil.report.sweep import write_sweep
    from carmil.report.tables import print_tables
    from carmil.studies.sweep import parse_over, run_sweep, sweep_of

    asked = sweep_of(given, parse_over(over or []), where=where)
    _folder(asked.out)
    _check_device(asked.points[0].study.device)
    table, lines = write_sweep(run_sweep(asked, say=_say))
    print_tables([table])
    for line in lines:
        typer.echo(f"- {line}")
    typer.echo(f"\nwritten: {asked.out / 'report.html'}, sweep.md, sweep.png, sweep.json, points")


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="A run that `carmil train` wrote.")],
    bags: Annotated[Path, typer.Option(help="New slides: a store, or a folder of features of the same encoder.")],
    out: OutOption = Path("predictions"),
    device: DeviceOption = Device.auto,
) -> None:
    """Answers for new slides, by the mean of a run's models.

    Features of another encoder or width than the run was trained on are refused.

    Example: carmil predict run --bags new_features --out predictions
    """
    from carmil.studies.external import predict_bags

    frame = predict_bags(run, bags, _folder(out), truth=None, device=_device(device), say=_say)
    typer.echo(frame.head(10).to_string(index=False))
    if len(frame) > 10:
        typer.echo(f"... and {len(frame) - 10} more")
    typer.echo(f"\nwritten: {out / 'predictions.csv'}, predictions.parquet ({len(frame)} slides)")


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run that `carmil train` wrote.")],
    bags: Annotated[Path, typer.Option(help="Another cohort: a store, or a folder of features of the same encoder.")],
    labels: Annotated[Path, typer.Option(help="Its table of labels, with the run's classes.")],
    out: OutOption = Path("evaluation"),
    slide: ColumnOption = None,
    patient: ColumnOption = None,
    label: ColumnOption = None,
    device: DeviceOption = Device.auto,
) -> None:
    """A run's figures on an external cohort. Nothing is fitted: thresholds are those of the run's validation bags.

    Example: carmil evaluate run --bags other_cohort --labels other.csv --out evaluation
    """
    from carmil.report.tables import print_tables
    from carmil.studies import external
    from carmil.studies.shown import evaluation_table

    named = {"slide": slide, "patient": patient, "label": label}
    found = external.evaluate(run, bags, labels, _folder(out), named=named, device=_device(device), say=_say)
    print_tables([evaluation_table(found)])
    typer.echo(f"\nwritten: {out / 'evaluation.json'}, predictions.parquet")


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more runs on the same cases.")],
    out: Annotated[Path | None, typer.Option(help="Also write the table as markdown.")] = None,
) -> None:
    """Compare runs pair by pair: paired t-test over folds, bootstrap and DeLong over cases, Holm's correction.

    Example: carmil compare run_abmil run_car
    """
    from carmil.files import write_text
    from carmil.report.tables import print_tables
    from carmil.studies.compare import compare_runs, comparison_table
    from carmil.studies.run_folder import read_run
    from carmil.studies.shown import figures_table

    read = [read_run(run) for run in runs]
    tables = [figures_table(read), comparison_table(compare_runs(read))]
    print_tables(tables)
    if out is not None:
        write_text(out, "\n".join(table.markdown() for table in tables))
        typer.echo(f"written: {out}")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run that `carmil train` wrote.")],
    out: Annotated[Path | None, typer.Option(help="The page.  [default: RUN/report.html]")] = None,
) -> None:
    """Write a run's report again, as one HTML file, from what is in its folder.

    Example: carmil report run
    """
    from carmil.report.run import write_report
    from carmil.studies.run_folder import read_run

    page = out or run / "report.html"
    write_report(read_run(run), page)
    typer.echo(f"written: {page}")


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

    Slides/s, TFLOP/s and memory of each model, and how fast a store is read; as tables, JSON and a plot.

    Example: carmil benchmark --quick --out benchmark
    """
    from carmil.benchmark.plan import changed, planned
    from carmil.benchmark.report import CONDITIONS, tables, write_plot
    from carmil.benchmark.run import run_benchmark
    from carmil.report.tables import print_tables

    where = _device(device)
    given = {
        "sections": _names(only),
        "models": _names(models),
        "instances": _numbers("--instances", instances),
        "bag": bag,
        "population": population,
        "crc": crc,
        "study_epochs": study_epochs,
    }
    plan = changed(
        planned(where, quick=quick), {name: value for name, value in given.items() if value not in (None, ())}
    )
    results = run_benchmark(plan, _folder(out), device=where, say=_say)
    print_tables(tables(results))
    for line in (f"measured on {results.machine}", *CONDITIONS):
        typer.echo(f"- {line}")
    drawn = write_plot(results, out / "benchmark.png")
    typer.echo(f"\nwritten: {out / 'benchmark.json'}, benchmark.md" + (", benchmark.png" if drawn else ""))
    if not drawn:
        typer.echo("no plot: matplotlib is not installed, or nothing was timed")


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


def _say(line: str) -> None:
    """What was guessed or left out, for the person at the terminal."""
    typer.echo(f"  {line}", err=True)


def _fail(message: str, status: int) -> None:
    typer.echo(f"carmil: {message}", err=True)
    sys.exit(status)


def _names(words: str) -> tuple[str, ...]:
    """Words with commas between."""
    return tuple(word.strip() for word in words.split(",") if word.strip())


def _numbers(option: str, words: str, kind: type[Any] = int) -> tuple[Any, ...]:
    try:
        return tuple(kind(word) for word in _names(words))
    except ValueError:
        expected = "whole numbers" if kind is int else "numbers"
        raise CarmilError(f"{option} {words}: expected {expected} with commas between") from None


def _device(device: Device) -> str:
    import torch

    available = torch.cuda.is_available()
    if device is Device.auto:
        return "cuda" if available else "cpu"
    if device is Device.cuda and not available:
        raise CarmilError("--device cuda: torch sees no GPU here; use --device cpu or auto")
    return device.value


def _check_device(asked: str) -> None:
    if asked == "cuda":
        _device(Device.cuda)


def _folder(out: Path) -> Path:
    if out.exists() and not out.is_dir():
        raise CarmilError(f"--out {out} is a file: expected a folder, or a name that is free")
    there = next(parent for parent in (out.absolute(), *out.absolute().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise CarmilError(f"--out {out} cannot be written: {there} is not a folder one may write to")
    return out
