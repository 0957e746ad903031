"""carmil train, sweep, predict, evaluate, compare, report: studies of your own cohort."""

from pathlib import Path
from typing import Annotated, Any

import typer

from carmil.cli.app import app
from carmil.cli.options import (
    CalibrationOption,
    Device,
    DeviceOption,
    Distance,
    Init,
    Kind,
    LabelColumn,
    OutOption,
    PatientColumn,
    Precision,
    Scale,
    SkipBrokenOption,
    SlideColumn,
    TargetLoss,
    device_named,
    file_for,
    folder_for,
    log,
    print_results,
    shared_options,
)
from carmil.errors import CarmilError
from carmil.words import plural


def _parse_study(
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file with any of these settings; options of the command line take precedence."),
    ] = None,
    bags: Annotated[Path | None, typer.Option(help="A store, or a folder of features.")] = None,
    labels: Annotated[
        Path | None,
        typer.Option(
            help="CSV, TSV or Parquet with slide, patient and label.  [default: the labels that came with the bags]"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the run.")] = None,
    model: Annotated[str | None, typer.Option(help="See `carmil models`.  [default: car/abmil.gated]")] = None,
    folds: Annotated[
        int | None, typer.Option(help="Number of folds, by patient, stratified by label.  [default: 5]")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Initialisations per fold.  [default: 1]")] = None,
    inner: Annotated[int | None, typer.Option(help="Inner folds, for nested cross-validation.  [default: 1]")] = None,
    reshuffle: Annotated[bool | None, typer.Option("--reshuffle", help="Draw new folds for every seed.")] = None,
    splits: Annotated[
        Path | None, typer.Option(help="An existing split, as written by carmil, CLAM, Patho-Bench or STAMP.")
    ] = None,
    official: Annotated[
        bool | None, typer.Option("--official", help="Use the train/val/test column of the table of labels.")
    ] = None,
    patients: Annotated[
        str | None, typer.Option(help="How to combine the slides of a patient: mean, max or one-bag.  [default: mean]")
    ] = None,
    allow_duplicates: Annotated[
        bool | None,
        typer.Option(
            "--allow-duplicates", help="Accept the same features under two patients, which are refused otherwise."
        ),
    ] = None,
    skip_broken: Annotated[
        bool | None, typer.Option("--skip-broken", help="Skip bags that cannot be read or packed, and list them.")
    ] = None,
    slide: SlideColumn = None,
    patient: PatientColumn = None,
    label: LabelColumn = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Column to predict, in place of --label: a time (with --event), a number, grades, or several labels "
            "separated by commas."
        ),
    ] = None,
    event: Annotated[
        str | None, typer.Option(help="Column of the event, 1 or 0 (censored), if --target is a time.")
    ] = None,
    kind: Annotated[
        Kind | None,
        typer.Option(help="What --target is: classes, ordinal, labels, value, survival.  [default: guessed]"),
    ] = None,
    ordinal: Annotated[
        bool | None, typer.Option("--ordinal", help="The same as --kind ordinal: ordered grades.")
    ] = None,
    grades: Annotated[
        str | None,
        typer.Option(
            help="Ordered grades of --target, the lowest first, such as low,medium,high. Not needed for numbers."
        ),
    ] = None,
    loss: Annotated[
        TargetLoss | None,
        typer.Option(help="Loss of a time: cox or discrete; of a number: squared or huber.  [default: the first]"),
    ] = None,
    adjust: Annotated[
        str | None,
        typer.Option(
            help="Columns known without the slide, separated by commas, such as age,node,grade: what the risk adds to Cox's "
            "model of them."
        ),
    ] = None,
    site: Annotated[
        str | None, typer.Option(help="Column of the site (or 'tcga'), which must not be in two folds.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Column of the official train/val/test split.")] = None,
    positive: Annotated[str | None, typer.Option(help="The class that counts as positive.")] = None,
    truth: Annotated[str | None, typer.Option(help="Column with the instances that are positive.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Maximum number of epochs.  [default: 100]")] = None,
    patience: Annotated[
        int | None, typer.Option(help="Stop after this many epochs without improvement.  [default: 20]")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Bags per step.  [default: 1, of a time 32]")] = None,
    lr: Annotated[
        str | None,
        typer.Option(
            help="Learning rate, or several separated by commas, to choose from on validation bags.  [default: 5e-4]"
        ),
    ] = None,
    alpha: Annotated[str | None, typer.Option(help="Weight(s) of the counterfactual term.")] = None,
    lambda_: Annotated[str | None, typer.Option("--lambda", help="Weight(s) of the distance.")] = None,
    distance: Annotated[Distance | None, typer.Option(help="Distance of the two attentions (CAR).")] = None,
    class_weights: Annotated[str | None, typer.Option(help="none or balanced.  [default: none]")] = None,
    scale: Annotated[
        Scale | None,
        typer.Option(
            help="Scale features by each fold's training bags: all by one deviation (common), each by its own (own), "
            "in between (halfway), or not at all (none).  [default: halfway]"
        ),
    ] = None,
    standardise: Annotated[
        bool | None, typer.Option("--standardise", hidden=True, help="The name of --scale own in version 0.1.0.")
    ] = None,
    init: Annotated[
        Init | None,
        typer.Option(help="Initial weights: Xavier-normal with zero biases, or those of the model.  [default: xavier]"),
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(help="L2 penalty of the weights.  [default: 1e-2]")] = None,
    label_smoothing: Annotated[
        float | None,
        typer.Option(
            help="Share of a label that is spread over all classes.  [default: 0.1, 0 for targets without classes]"
        ),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Use the defaults of an earlier version: 0.1 (the paper's objective).")
    ] = None,
    precision: Annotated[
        Precision | None,
        typer.Option(help="Precision of products on a GPU; a CPU computes in float32.  [default: bfloat16]"),
    ] = None,
    warm_start: Annotated[
        Path | None, typer.Option(help="Run of the model without its branch, on the same folds.")
    ] = None,
    threshold: Annotated[
        str | None, typer.Option(help="balanced, f1, 0.5, sensitivity=0.95, specificity=0.9.  [default: balanced]")
    ] = None,
    abstain: Annotated[
        float | None, typer.Option(help="Share of validation cases on which to abstain.  [default: 0]")
    ] = None,
    conformal: Annotated[
        float | None,
        typer.Option(
            help="Coverage of prediction sets, such as 0.9: they are calibrated on patients set aside from all folds."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed of folds and initialisations.  [default: 0]")] = None,
    device: Annotated[Device | None, typer.Option(help="Device: auto, cpu or cuda.  [default: auto]")] = None,
    models_at_once: Annotated[
        int | None, typer.Option(help="Number of models trained at once.  [default: all that fit]")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Train on a Ray cluster: host:port, auto or local. See docs/cluster.md.")
    ] = None,
) -> tuple[dict[str, Any], str]:
    """Return the settings of a study, those of the file overridden by those of the command line, and their origin."""
    from carmil.runs.settings import Settings, read_settings

    options = {
        name: value
        for name, value in locals().copy().items()
        if name in (*Settings.__dataclass_fields__, "preset", "standardise") and value is not None
    }
    if ordinal:
        if kind not in (None, "ordinal"):
            raise CarmilError(f"--ordinal and --kind {kind}: give one of them")
        options["kind"] = "ordinal"
    for name in ("lr", "alpha", "lambda_"):
        if name in options and "," in options[name]:
            options[name] = [part.strip() for part in options[name].split(",")]
    settings = {} if config is None else read_settings(config)
    return {**settings, **options}, "command line" if config is None else str(config)


# Commands are called with `given`, the settings of the study, and `where`, their origin.
_study_options = shared_options(_parse_study, "given", "where")


@app.command()
@_study_options
def train(given: dict[str, Any], where: str) -> None:
    """Cross-validate a model on your features and labels: metrics, predictions of every slide, and a report.

    Epoch, hyper-parameters and threshold are chosen on validation bags; a test fold is used once, at the end. Writes
    OUT/report.html, predictions.csv and .parquet, metrics.json, card.md, the folds and the models. If interrupted, run the same
    command again to resume.

    Examples:
      carmil train --bags cohort --labels labels.csv --out run
      carmil train --bags cohort --labels labels.csv --model car/abmil.gated --folds 5 --seeds 5 --out run
      carmil train --bags cohort --labels labels.csv --lr 1e-4,2e-4 --alpha 0.2,0.8 --inner 3 --out nested
      carmil train --bags cohort --labels labels.csv --target months --event recurrence --out risk_run
      carmil train --bags cohort --labels labels.csv --target grade --ordinal --out grade_run
      carmil train --bags cohort --labels labels.csv --conformal 0.9 --out set_run
      carmil train --config study.yaml --device cpu
    """
    from carmil.report.run import write_report
    from carmil.runs.settings import Settings
    from carmil.studies.figures import run_table
    from carmil.studies.tables import adjustment_tables, figures_lines, sets_tables
    from carmil.studies.train import run_study

    settings = Settings.of(given, where=where)
    folder_for(settings.out)
    device_named(settings.device)
    run = run_study(settings, log=log)
    write_report(run, settings.out / "report.html")
    written = (settings.out / "report.html", "predictions.csv", "predictions.parquet", "metrics.json", "card.md")
    print_results([run_table(run), *adjustment_tables(run), *sets_tables(run)], figures_lines(run), written)


@app.command()
@_study_options
def sweep(
    given: dict[str, Any],
    where: str,
    over: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE,VALUE,... of any setting; repeat for each setting. Also `sweep:` in the YAML file."
        ),
    ] = None,
) -> None:
    """Train a study at every point of a grid over any of its settings: a table, a picture, and one run per grid point.

    Points that differ in learning rate, alpha, lambda or distance are trained together as one population. Writes OUT/report.html,
    sweep.md, sweep.png, sweep.json and one run per grid point in OUT/points. If interrupted, run the same command again to resume.

    Examples:
      carmil sweep --config study.yaml --over alpha=0,0.2,0.8,1 --over lambda=0,0.2,0.8,1 --over distance=l1,cosine
      carmil sweep --bags cohort --labels labels.csv --over model=abmil.gated,car/abmil.gated --out sweep
    """
    from carmil.report.sweep import write_sweep
    from carmil.studies.sweep import parse_over, run_sweep, sweep_of

    plan = sweep_of(given, parse_over(over or []), where=where)
    folder_for(plan.out)
    device_named(plan.points[0].study.device)
    table, notes = write_sweep(run_sweep(plan, log=log))
    print_results([table], notes, (plan.out / "report.html", "sweep.md", "sweep.png", "sweep.json", "points"))


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="A run that `carmil train` wrote.")],
    bags: Annotated[Path, typer.Option(help="New slides: a store, or a folder of features of the same encoder.")],
    out: OutOption = Path("predictions"),
    calibration: CalibrationOption = None,
    skip_broken: SkipBrokenOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Predict new slides by the mean of a run's models and its decision rule.

    Slides of the run's own cohort are predicted by the models that were tested on them. Features of another encoder, width or
    tile geometry than those of the run are refused. Writes OUT/predictions.csv and predictions.parquet, with the decision rule
    of each prediction.

    Prediction sets are those of the run (`carmil train --conformal`), or of an external cohort with --calibration.

    Examples:
      carmil predict run --bags new_features --out predictions
      carmil predict run --bags new_features --calibration evaluation --out predictions
    """
    from carmil.runs.run import read_run
    from carmil.studies.evaluate import predict_bags
    from carmil.studies.predictions import answers_text
    from carmil.studies.subjects import RULE, distinct_rules, rule_lines

    frame = predict_bags(
        run,
        bags,
        folder_for(out),
        device=device_named(device),
        log=log,
        skip_broken=skip_broken,
        calibration=calibration,
    )
    typer.echo(answers_text(frame.drop(columns=RULE).head(10), read_run(run).target))
    if len(frame) > 10:
        typer.echo(f"... and {len(frame) - 10} more")
    written = (out / "predictions.csv", f"predictions.parquet ({plural(len(frame), 'slide')})")
    print_results((), rule_lines(distinct_rules(frame)), written)


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run that `carmil train` wrote.")],
    bags: Annotated[Path, typer.Option(help="Another cohort: a store, or a folder of features of the same encoder.")],
    labels: Annotated[Path, typer.Option(help="The table of labels of that cohort.")],
    out: OutOption = Path("evaluation"),
    slide: SlideColumn = None,
    patient: PatientColumn = None,
    label: LabelColumn = None,
    map_: Annotated[
        list[str] | None,
        typer.Option("--map", help="LABEL=CLASS of the run, or LABEL= to leave its slides out; repeat for each label."),
    ] = None,
    conformal: Annotated[
        float | None,
        typer.Option(help="Calibrate prediction sets of this coverage, such as 0.9, on this cohort."),
    ] = None,
    skip_broken: SkipBrokenOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Evaluate a run on an external cohort. Nothing is fitted: thresholds are those of the run's validation bags.

    Writes OUT/evaluation.json, predictions.csv and predictions.parquet; with --conformal also OUT/calibration.json, for
    `carmil predict --calibration OUT`.

    Examples:
      carmil evaluate run --bags other_cohort --labels other.csv --out evaluation
      carmil evaluate run --bags other_cohort --labels other.csv --map tumor=carcinoma --map normal=benign --map unknown=
      carmil evaluate run --bags other_cohort --labels other.csv --conformal 0.9 --out evaluation
    """
    from carmil.studies.evaluate import evaluate_run, parse_map
    from carmil.studies.subjects import rule_lines
    from carmil.studies.tables import evaluation_lines, evaluation_table

    named = {"slide": slide, "patient": patient, "label": label}
    evaluation = evaluate_run(
        run,
        bags,
        labels,
        folder_for(out),
        named=named,
        device=device_named(device),
        log=log,
        mapping=parse_map(map_ or []),
        skip_broken=skip_broken,
        conformal=conformal,
    )
    notes = [*evaluation_lines(evaluation), *rule_lines(evaluation.rules)]
    further = () if conformal is None else ("calibration.json",)
    written = (out / "evaluation.json", "predictions.csv", "predictions.parquet", *further)
    print_results([evaluation_table(evaluation)], notes, written)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more runs on the same cases.")],
    out: Annotated[Path | None, typer.Option(help="Also write the tables as markdown to this file.")] = None,
) -> None:
    """Compare runs pair by pair: difference of the means over folds, its interval over patients, tests with Holm's correction.

    Prints the tables, and writes them to OUT if it is given.

    Examples:
      carmil compare run_abmil run_car
      carmil compare run_abmil run_clam run_car --out comparison.md
    """
    from carmil.files import write_text
    from carmil.runs.run import read_run
    from carmil.studies.compare import compare_runs, comparison_table
    from carmil.studies.tables import figures_table

    if out is not None:
        file_for(out)
    loaded = [read_run(run) for run in runs]
    tables = [figures_table(loaded), comparison_table(compare_runs(loaded))]
    print_results(tables)
    if out is not None:
        write_text(out, "\n".join(table.markdown() for table in tables))
        typer.echo(f"written: {out}")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run that `carmil train` wrote.")],
    out: Annotated[Path | None, typer.Option(help="The page.  [default: RUN/report.html]")] = None,
    slides: Annotated[
        Path | None, typer.Option(help="Folder of the slide files: maps are drawn over the tissue, not as squares.")
    ] = None,
    mpp: Annotated[
        float | None, typer.Option(help="Micrometres per pixel of slides whose files have no value.")
    ] = None,
) -> None:
    """Write the report of a run again, as one HTML file, from the files of the run.

    Examples:
      carmil report run
      carmil report run --slides slides
      carmil report run --out page.html
    """
    from carmil.report.run import write_report
    from carmil.runs.run import read_run

    page = file_for(out or run / "report.html")
    write_report(read_run(run), page, slides_folder=slides, mpp=mpp)
    typer.echo(f"written: {page}")
