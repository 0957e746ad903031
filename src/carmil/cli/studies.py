"""carmil train, sweep, predict, evaluate, compare, report: studies of one's own cohort."""

from pathlib import Path
from typing import Annotated, Any

import typer

from carmil.cli.app import app
from carmil.cli.options import (
    Device,
    DeviceOption,
    Distance,
    Init,
    LabelColumn,
    OutOption,
    PatientColumn,
    Precision,
    Scale,
    SkipBrokenOption,
    SlideColumn,
    check_device,
    device_named,
    file_for,
    folder_for,
    options_of,
    say,
)
from carmil.words import plural


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
        Path | None, typer.Option(help="An existing split: ours, CLAM's, Patho-Bench's, STAMP's.")
    ] = None,
    official: Annotated[bool | None, typer.Option("--official", help="The table's own train/val/test column.")] = None,
    patients: Annotated[
        str | None, typer.Option(help="Slides of a patient: mean, max or one-bag.  [default: mean]")
    ] = None,
    allow_duplicates: Annotated[
        bool | None,
        typer.Option("--allow-duplicates", help="Take the same features under two patients; else they are refused."),
    ] = None,
    skip_broken: Annotated[
        bool | None, typer.Option("--skip-broken", help="Leave out bags that cannot be read or packed, and say so.")
    ] = None,
    slide: SlideColumn = None,
    patient: PatientColumn = None,
    label: LabelColumn = None,
    site: Annotated[str | None, typer.Option(help="Column of the site (or 'tcga'): no site in two folds.")] = None,
    split: Annotated[str | None, typer.Option(help="Column with the official train/val/test.")] = None,
    positive: Annotated[str | None, typer.Option(help="The class that counts as positive.")] = None,
    truth: Annotated[str | None, typer.Option(help="Column that knows which instances are positive.")] = None,
    epochs: Annotated[int | None, typer.Option(help="At most.  [default: 100]")] = None,
    patience: Annotated[int | None, typer.Option(help="Epochs without a better one.  [default: 20]")] = None,
    batch: Annotated[int | None, typer.Option(help="Bags a step.  [default: 1]")] = None,
    lr: Annotated[
        str | None, typer.Option(help="Or several with commas: the best on validation.  [default: 5e-4]")
    ] = None,
    alpha: Annotated[str | None, typer.Option(help="Weight(s) of the counterfactual term.")] = None,
    lambda_: Annotated[str | None, typer.Option("--lambda", help="Weight(s) of the distance.")] = None,
    distance: Annotated[Distance | None, typer.Option(help="Between the two maps (CAR).")] = None,
    class_weights: Annotated[str | None, typer.Option(help="none or balanced.  [default: none]")] = None,
    scale: Annotated[
        Scale | None,
        typer.Option(
            help="Centre features by each fold's training bags and divide them: all alike (common), each by its own deviation "
            "(own), between the two (halfway), or not at all (none).  [default: halfway]"
        ),
    ] = None,
    standardise: Annotated[
        bool | None, typer.Option("--standardise", hidden=True, help="What 0.1.0 called --scale own.")
    ] = None,
    init: Annotated[
        Init | None,
        typer.Option(help="Initial weights: Xavier-normal with zero biases, or the model's own.  [default: xavier]"),
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(help="L2 penalty of the weights.  [default: 1e-2]")] = None,
    label_smoothing: Annotated[
        float | None, typer.Option(help="Share of a label that is spread over all classes.  [default: 0.1]")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Settings of an earlier version as defaults: 0.1 (the paper's objective).")
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
    from carmil.runs.settings import Settings, read_settings

    words = {
        name: value
        for name, value in locals().copy().items()
        if name in (*Settings.__dataclass_fields__, "preset", "standardise") and value is not None
    }
    for name in ("lr", "alpha", "lambda_"):
        if name in words and "," in words[name]:
            words[name] = [part.strip() for part in words[name].split(",")]
    given = {} if config is None else read_settings(config)
    return {**given, **words}, "command line" if config is None else str(config)


# A command of a study is called with `given`, what the options say, and `where` that was said.
_of_a_study = options_of(_words_of_a_study, "given", "where")


@app.command()
@_of_a_study
def train(given: dict[str, Any], where: str) -> None:
    """Cross-validate a model on your features and labels; figures, predictions of every slide, a report.

    Epoch, hyper-parameters and threshold are chosen on validation bags; a test fold is looked at once, at the end. Writes
    OUT/report.html, predictions.csv and .parquet, metrics.json, card.md, the folds and the models. If interrupted, run the same
    command again to resume.

    Examples:
      carmil train --bags cohort --labels labels.csv --out run
      carmil train --bags cohort --labels labels.csv --model car/abmil.gated --folds 5 --seeds 5 --out run
      carmil train --bags cohort --labels labels.csv --lr 1e-4,2e-4 --alpha 0.2,0.8 --inner 3 --out nested
      carmil train --config study.yaml --device cpu
    """
    from carmil.report.run import write_report
    from carmil.runs.settings import Settings
    from carmil.studies.figures import run_table
    from carmil.studies.tables import figures_lines
    from carmil.studies.train import run_study
    from carmil.tables import print_tables

    settings = Settings.of(given, where=where)
    folder_for(settings.out)
    check_device(settings.device)
    run = run_study(settings, log=say)
    write_report(run, settings.out / "report.html")
    print_tables([run_table(run)])
    for line in figures_lines(run):
        typer.echo(f"- {line}")
    typer.echo(
        f"\nwritten: {settings.out / 'report.html'}, predictions.csv, predictions.parquet, metrics.json, card.md"
    )


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

    Points that differ in learning rate, alpha, lambda or distance are trained together as one population. Writes OUT/report.html,
    sweep.md, sweep.png, sweep.json and OUT/points, a run each. If interrupted, run the same command again to resume.

    Examples:
      carmil sweep --config study.yaml --over alpha=0,0.2,0.8,1 --over lambda=0,0.2,0.8,1 --over distance=l1,cosine
      carmil sweep --bags cohort --labels labels.csv --over model=abmil.gated,car/abmil.gated --out sweep
    """
    from carmil.report.sweep import write_sweep
    from carmil.studies.sweep import parse_over, run_sweep, sweep_of
    from carmil.tables import print_tables

    asked = sweep_of(given, parse_over(over or []), where=where)
    folder_for(asked.out)
    check_device(asked.points[0].study.device)
    table, lines = write_sweep(run_sweep(asked, log=say))
    print_tables([table])
    for line in lines:
        typer.echo(f"- {line}")
    typer.echo(f"\nwritten: {asked.out / 'report.html'}, sweep.md, sweep.png, sweep.json, points")


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="A run that `carmil train` wrote.")],
    bags: Annotated[Path, typer.Option(help="New slides: a store, or a folder of features of the same encoder.")],
    out: OutOption = Path("predictions"),
    skip_broken: SkipBrokenOption = False,
    device: DeviceOption = Device.auto,
) -> None:
    """Answers for new slides, by the mean of a run's models and its decision rule.

    Slides of the run's own cohort are answered by the models that were tested on them. Features of another encoder, width or
    tile geometry than the run was trained on are refused. Writes OUT/predictions.csv and predictions.parquet, with the rule of
    each answer.

    Example: carmil predict run --bags new_features --out predictions
    """
    from carmil.studies.decisions import RULE, distinct_rules, rule_lines
    from carmil.studies.evaluate import predict_bags

    frame = predict_bags(run, bags, folder_for(out), device=device_named(device), log=say, skip_broken=skip_broken)
    typer.echo(frame.drop(columns=RULE).head(10).to_string(index=False))
    if len(frame) > 10:
        typer.echo(f"... and {len(frame) - 10} more")
    for line in rule_lines(distinct_rules(frame)):
        typer.echo(f"- {line}")
    typer.echo(f"\nwritten: {out / 'predictions.csv'}, predictions.parquet ({plural(len(frame), 'slide')})")


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run that `carmil train` wrote.")],
    bags: Annotated[Path, typer.Option(help="Another cohort: a store, or a folder of features of the same encoder.")],
    labels: Annotated[Path, typer.Option(help="Its table of labels.")],
    out: OutOption = Path("evaluation"),
    slide: SlideColumn = None,
    patient: PatientColumn = None,
    label: LabelColumn = None,
    map_: Annotated[
        list[str] | None,
        typer.Option("--map", help="LABEL=CLASS of the run, or LABEL= to leave its slides out; again for each."),
    ] = None,
    skip_broken: SkipBrokenOption = False,
    device: DeviceOption = Device.auto,
) -> None:
    """A run's figures on an external cohort. Nothing is fitted: thresholds are those of the run's validation bags.

    Writes OUT/evaluation.json, predictions.csv and predictions.parquet.

    Examples:
      carmil evaluate run --bags other_cohort --labels other.csv --out evaluation
      carmil evaluate run --bags other_cohort --labels other.csv --map tumor=carcinoma --map normal=benign --map unknown=
    """
    from carmil.studies.decisions import rule_lines
    from carmil.studies.evaluate import evaluate_run, parse_map
    from carmil.studies.tables import evaluation_lines, evaluation_table
    from carmil.tables import print_tables

    named = {"slide": slide, "patient": patient, "label": label}
    found = evaluate_run(
        run,
        bags,
        labels,
        folder_for(out),
        named=named,
        device=device_named(device),
        log=say,
        mapping=parse_map(map_ or []),
        skip_broken=skip_broken,
    )
    print_tables([evaluation_table(found)])
    for line in [*evaluation_lines(found), *rule_lines(found.rules)]:
        typer.echo(f"- {line}")
    typer.echo(f"\nwritten: {out / 'evaluation.json'}, predictions.csv, predictions.parquet")


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more runs on the same cases.")],
    out: Annotated[Path | None, typer.Option(help="Also write the table as markdown.")] = None,
) -> None:
    """Compare runs pair by pair: difference of the means over folds, its interval over patients, tests with Holm's correction.

    Prints the tables, and writes them to OUT if it is named.

    Examples:
      carmil compare run_abmil run_car
      carmil compare run_abmil run_clam run_car --out comparison.md
    """
    from carmil.files import write_text
    from carmil.runs.run import read_run
    from carmil.studies.compare import compare_runs, comparison_table
    from carmil.studies.tables import figures_table
    from carmil.tables import print_tables

    if out is not None:
        file_for(out)
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

    Examples:
      carmil report run
      carmil report run --out page.html
    """
    from carmil.report.run import write_report
    from carmil.runs.run import read_run

    page = file_for(out or run / "report.html")
    write_report(read_run(run), page)
    typer.echo(f"written: {page}")
