"""Write the model card of a run: model, data, protocol, figures, limits, and the command that reproduces the run."""

import os
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import MISSING, fields
from math import isnan
from pathlib import Path, PurePath

import numpy as np
import yaml
from jinja2 import Environment

from carmil.bags.splits import CALIBRATION, TEST, TRAIN, VALIDATION
from carmil.runs.run import PATHS, Run
from carmil.runs.settings import Settings, Value, preset_of, set_by
from carmil.studies.cautions import cautions
from carmil.studies.figures import percent, run_table
from carmil.studies.tables import adjustment_tables, sets_line, sets_tables
from carmil.tables import ResultTable
from carmil.targets import Classes
from carmil.words import percent_text, plural

CONFIG = "study.yaml"
_PARTS = {TRAIN: "for training", VALIDATION: "for validation", TEST: "for testing", CALIBRATION: "for calibration"}
TEMPLATE = Path(__file__).with_name("card.md.jinja")
YAML_ONLY = ("options", "validation", "optimizer", "schedule", "warmup", "dtype")  # without a command-line option
SCALING = {
    "none": "none",
    "common": "centred, and divided by one deviation for all features; fitted on each model's training bags",
    "halfway": "centred, and divided by the geometric mean of each feature's own and the common deviation; fitted on each "
    "model's training bags",
    "own": "centred, and divided by each feature's own deviation; fitted on each model's training bags",
}
INTERVALS = (
    "Intervals: Clopper and Pearson's for accuracy, sensitivity and specificity, Wilson's for balanced accuracy and F1, Newcombe's "
    "(method 5) for AUC; none collapses at 0 or 100 %. Slides of one patient are not counted as independent. For the "
    "coverage of these intervals, see docs/study.md."
)
RESAMPLED = (
    "Intervals: percentiles of 1,000 resamples of the patients within the folds. Slides of one patient are not counted as "
    "independent."
)
UNKNOWN_FEATURES = (
    "Features must come from the encoder that the model was trained on, with the same tiles and the same normalisation, none of "
    "which the checkpoint records."
)
LIMITS = (
    "Research use only. This is not a medical device; do not base any decision about a patient on it.",
    "The figures describe the test folds of this cohort. Other scanners, stains, sites and encoders may change "
    "them: use carmil evaluate to measure that on another cohort.",
)


def card(run: Run) -> str:
    """Return the card as Markdown."""
    pages = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    pages.filters["plain"] = _plain
    return pages.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        run=run,
        trained=trained(run),
        data=data(run),
        protocol=protocol(run),
        intervals=intervals_note(run),
        figures=run_table(run),
        further=[*adjustment_tables(run), *sets_tables(run)],
        ece=None if run.metrics.calibration is None else percent(run.metrics.calibration.ece),
        limits=[
            *LIMITS[: 2 if run.data.splits else 1],
            *(f"{line[0].upper()}{line[1:]}." for line in cautions(run)),
            *_limits(run),
        ],
        remarks=remarks(run),
        choices=choices(run),
        machine=machine(run),
        command=command(run),
        config=CONFIG,
        yaml="" if run.data.imported else yaml_part(run),
    )


def command(run: Run) -> str:
    """Return the command that wrote the run, for the folder that holds it."""
    imported, settings = run.data.imported, run.settings
    if imported is None:
        return command_of("train", run, run.folder)
    home = run.folder.resolve().parent
    paths = {"bags": settings.bags if run.data.splits else None, "labels": settings.labels}
    words = ["carmil", "import", imported.checkpoint, "--from", imported.tool, "--classes", ",".join(run.data.classes)]
    for name, path in paths.items():
        words += [f"--{name}", _relative_path(home, str(path))] if path else []
    return shlex.join([*words, "--out", run.folder.resolve().name])


def trained(run: Run) -> dict[str, str]:
    if (imported := run.data.imported) is not None:
        return {
            "model": run.settings.model,
            "options": _text(run.settings.options),
            "imported from": f"{imported.tool}, {imported.architecture}",
            "checkpoint": f"{imported.checkpoint}, SHA-256 {imported.sha256}",
            "run": run.key,
        }
    folds = len({model.fold for model in run.models})
    inner = len({model.inner for model in run.models})
    seeds = len({model.seed for model in run.models})
    nested = f" x {inner} inner folds" if inner > 1 else ""
    return {
        "model": run.settings.model,
        "options": _text(run.settings.options) if run.settings.options else "the model's defaults",
        "models kept": f"{len(run.models)}: {plural(folds, 'fold')}{nested} x {plural(seeds, 'seed')}",
        "input scaling": SCALING[run.settings.scale],
        "initial weights": "Xavier-normal, zero biases" if run.settings.init == "xavier" else "the model's own",
        **_objective(run),
        **({"preset": f"{preset}, with all settings unchanged"} if (preset := preset_of(run.settings)) else {}),
        "run": run.key,
    }


def _objective(run: Run) -> dict[str, str]:
    """Weights of the loss terms of the selected models; several values where they were selected on validation bags."""
    weights = {}
    for name in ("alpha", "lambda_", "distance"):
        values = dict.fromkeys(_text(model.settings[name]) for model in run.models if name in model.settings)
        if values:
            weights[name.rstrip("_")] = ", ".join(values)
    return weights


def data(run: Run) -> dict[str, str]:
    data = run.data
    encoder = f"{data.encoder or 'not known'}, {data.width} features per tile"
    if not data.splits:
        return {"slides": "none", "classes": ", ".join(data.classes), "encoder": encoder}
    return {
        "slides": f"{data.slides} of {plural(data.patients, 'patient')}",
        **_target(run),
        "features": PurePath(run.settings.bags).name,
        "labels": PurePath(run.settings.labels).name if run.settings.labels else "stored with the features",
        "encoder": encoder + (f", pooled by {data.pooling}" if data.pooling else ""),
        "tiles": "; ".join((str(data.geometry), *data.tilings)),
        "fingerprint": f"{data.fingerprint} (features, labels and patients); {data.store} (features)",
    }


def _target(run: Run) -> dict[str, str]:
    """Describe the target, and count the slides of each class or other stratum."""
    counts = ", ".join(f"{name} ({n})" for name, n in zip(run.data.classes, run.data.class_counts, strict=True))
    target = run.target
    if isinstance(target, Classes):
        return {"classes": counts}
    outcomes = target.summary(np.array(run.data.outcomes, dtype=np.float64))
    return {
        "target": f"{target.title} ({target.kind}); columns {', '.join(target.columns)}",
        **({"outcomes": outcomes} if outcomes else {}),
        f"slides by {target.strata_word}": counts,
        **target.facts,
    }


def intervals_note(run: Run) -> str:
    """Describe how the intervals of the run's figures are computed."""
    return INTERVALS if isinstance(run.target, Classes) else RESAMPLED


def protocol(run: Run) -> list[str]:
    """Describe how the figures were obtained and what they measure."""
    settings = run.settings
    if run.data.imported is not None:
        return _imported_protocol(run)
    chosen = "Epoch, hyper-parameters and threshold" if _has_thresholds(run) else "Epoch and hyper-parameters"
    smoothing = run.target.label_smoothing if settings.label_smoothing is None else settings.label_smoothing
    return [
        _folds(run),
        f"{chosen} were chosen on validation bags only; each test fold was used once.",
        f"Answers: {answer_rule(run)}.",
        f"Figures are per {run.metrics.level}{_combination(run)}.",
        *_sets(run),
        f"Training: at most {plural(settings.epochs, 'epoch')}, patience {settings.patience}, "
        f"{settings.optimizer}, {plural(settings.batch or run.target.batch, 'bag')} per step, learning rate {_text(settings.lr)} "
        f"({settings.schedule}), weight decay {settings.weight_decay:g}"
        + (f", label smoothing {smoothing:g}." if run.target.link().smooths_labels else "."),
    ]


def _imported_protocol(run: Run) -> list[str]:
    assert run.data.imported is not None
    slides = run.data.slides
    measured = f"It was measured on all {plural(slides, 'slide')} that have a label, as one test fold."
    return [
        f"The model was trained with {run.data.imported.tool}; carmil read its weights and trained nothing.",
        measured if slides else "It was not measured: the run has no slides of its own.",
        f"Answers: {answer_rule(run)}.",
        *([f"Figures are per {run.metrics.level}{_combination(run)}."] if slides else []),
    ]


def choices(run: Run) -> ResultTable | None:
    """Return the table of choices made on validation bags, one row per selected model; None if the model was imported."""
    if run.data.imported is not None:
        return None
    models = run.models
    settings = dict.fromkeys(name for model in models for name in model.settings)
    named = [name for name in ("inner", "seed") if len({getattr(model, name) for model in models}) > 1]
    columns = {"fold": [str(fold) for fold in run.tested_folds]}
    columns |= {name: [str(getattr(model, name)) for model in models] for name in named}
    columns["epoch (from 0)"] = [str(model.best_epoch) for model in models]
    columns["validation loss"] = [_number(model.validation_loss) for model in models]
    columns |= {name.rstrip("_"): [_text(model.settings.get(name)) for model in models] for name in settings}
    if _has_thresholds(run):
        columns["threshold"] = [_number(model.threshold) for model in models]
    if isinstance(run.target, Classes) and len(run.target.names) == 2:
        columns["sensitivity there"] = [percent(model.validation_sensitivity) for model in models]
        columns["specificity there"] = [percent(model.validation_specificity) for model in models]
    if any(model.abstain_below is not None for model in models):
        columns["no answer if closer than"] = [_number(model.abstain_below) for model in models]
    if any(model.threshold_note for model in models):
        columns["remark"] = [model.threshold_note or "–" for model in models]
    rows = tuple(zip(*columns.values(), strict=True))
    return ResultTable("What each model chose", tuple(columns), rows, names=1 + len(named))


def settings_shown(run: Run) -> dict[str, str]:
    """Return all settings as text. Only the last part of a path is included, since the rest describes the machine."""
    return {
        name.rstrip("_"): PurePath(str(value)).name if name in PATHS and value else _text(value)
        for name, value in run.settings.lasting().items()
    }


def machine(run: Run) -> dict[str, str]:
    return {"carmil": run.version, **run.machine}


def remarks(run: Run) -> list[str]:
    """Return the notes of the run (guesses, omitted slides) without folders of the machine."""
    folders = {
        str(Path(str(value)).parent) for name, value in run.settings.lasting().items() if name in PATHS and value
    }
    folders |= {str(run.folder.parent), str(run.folder.resolve().parent)}
    lines = []
    for text in run.notes:
        for folder in sorted(folders - {"/", "."}, key=len, reverse=True):
            text = text.replace(f"{folder}/", "")
        lines.append(re.sub(r"(?<![^\s'\"(=])/(?:[^\s/'\"]+/)+", "", text))
    return lines


def command_of(verb: str, run: Run, out: Path, *, without: Collection[str] = (), extra: Sequence[str] = ()) -> str:
    """Return the command of a study with the settings of a run, for the folder that contains `out`.

    without: settings to omit. extra: further arguments. OUT/study.yaml contains the result of `yaml_part`, if not empty.
    """
    home, name = out.resolve().parent, out.resolve().name
    words = ["carmil", verb]
    if yaml_part(run, without=without):
        words += ["--config", f"{name}/{CONFIG}"]
    for setting, value in _changed_settings(run, home).items():
        if setting in YAML_ONLY or setting in without:
            continue
        words.append("--" + setting.rstrip("_").replace("_", "-"))
        if value is not True:
            words.append(_text(value))
    return shlex.join([*words, *extra, "--out", name])


def yaml_part(run: Run, *, without: Collection[str] = ()) -> str:
    """Return the settings that have no command-line option as YAML, or an empty string."""
    home = run.folder.resolve().parent
    rest = {
        name: value for name, value in _changed_settings(run, home).items() if name in YAML_ONLY and name not in without
    }
    return yaml.safe_dump(rest, sort_keys=False) if rest else ""


def _changed_settings(run: Run, home: Path) -> dict[str, Value]:
    """Return the settings that differ from their defaults, with paths relative to `home`; bags, labels and model are
    always included.
    """
    defaults = {field.name: None if field.default is MISSING else field.default for field in fields(Settings)}
    defaults |= set_by(run.target)
    return {
        name: _relative_path(home, str(value)) if name in PATHS and value else value
        for name, value in run.settings.completed(run.target).lasting().items()
        if name == "model" or value != defaults.get(name)
    }


def _relative_path(home: Path, path: str) -> str:
    """Return a path relative to `home`, or only its last part if it no longer exists."""
    existing = next((place for place in (Path(path), home / path) if place.exists()), None)
    return PurePath(path).name if existing is None else os.path.relpath(existing.resolve(), home)


def _folds(run: Run) -> str:
    settings, divisions = run.settings, run.data.splits
    roles = [fold for division in divisions for fold in division]
    if settings.splits is not None:
        origin = f"folds from {PurePath(settings.splits).name}"
    elif settings.official:
        origin = "the table's own train/val/test column"
    else:
        origin = f"{settings.folds} folds by patient, stratified by {run.target.strata_word} (seed {settings.seed})"
        if settings.inner > 1:
            origin += f", each with {settings.inner} inner folds"
        if settings.site is not None:
            origin += ", no site in two of them"
        if len(divisions) > 1:
            origin += f", drawn anew for each of {len(divisions)} seeds"
    counts = ", ".join(
        f"{_range([fold.count(role) for fold in roles])} {words}"
        for role, words in _PARTS.items()
        if role != CALIBRATION or run.settings.conformal is not None
    )
    return f"{origin[0].upper()}{origin[1:]}; bags per fold: {counts}."


def _sets(run: Run) -> list[str]:
    """Describe the calibration of the prediction sets, and their figures on test patients."""
    found = run.metrics.prediction_sets
    if found is None:
        return []
    least = min(one.calibrated for one in found.by_class.values())
    return [
        f"Prediction sets at {percent_text(found.level)} are calibrated on patients set aside from all folds, at least {least} of "
        f"each {run.target.strata_word}; they served neither training nor any choice, nor are they tested. The promise is for new "
        "patients like these, on average over the patients who might have been set aside.",
        f"Test patients: {sets_line(found, 'test patient')}.",
    ]


def answer_rule(run: Run) -> str:
    """Describe how probabilities become answers, in the words used wherever answers of this run are displayed."""
    if run.data.imported is not None:
        return run.decision().words
    share, level = run.settings.abstain, run.metrics.level
    merged = level == "patient" and run.metrics.rule != "one-bag"
    rule = run.target.rule_words(str(run.settings.threshold), level=level, merged=merged)
    rule += "; a slide is answered by the models that were tested on it"
    withheld = f"; no answer below the confidence of {share:.0%} of the validation cases, the mean again"
    return rule + (withheld if share else "")


def _combination(run: Run) -> str:
    """Describe how slides are combined into a patient's answer."""
    if run.metrics.level == "slide":
        return ", since slides of a patient have different labels" if run.data.patients < run.data.slides else ""
    predicted = "probabilities" if run.target.probabilities else "predictions"
    return {
        "mean": f" (the mean of the {predicted} of their slides)",
        "max": f" (the largest of the {predicted} of their slides)",
        "one-bag": " (all slides of a patient are one bag)",
    }[run.metrics.rule]


def _limits(run: Run) -> list[str]:
    if run.data.imported is not None:
        return [UNKNOWN_FEATURES]
    roles = [fold for division in run.data.splits for fold in division]
    validated = [fold.count(VALIDATION) for fold in roles]
    chosen, they = (
        ("Epoch and threshold were", "they depend") if _has_thresholds(run) else ("The epoch was", "it depends")
    )
    lines = [f"{chosen} chosen on {_range(validated)} validation bags per fold: the fewer, the more {they} on chance."]
    if run.data.encoder is None:
        lines.append(
            "The encoder of the features is not known, so it cannot be checked that other features come from the same one."
        )
    if not run.data.geometry.known:
        lines.append(
            "The size of the tiles (pixels, micrometres per pixel) is not fully known, so it cannot be checked that other "
            "tiles have the same."
        )
    return lines


def _has_thresholds(run: Run) -> bool:
    return any(model.threshold is not None for model in run.models)


def _text(value: Value) -> str:
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case list():
            return ",".join(_text(item) for item in value)
        case dict():
            return ", ".join(f"{name}={_text(item)}" for name, item in value.items())
        case _:
            return str(value)


def _number(value: float | None) -> str:
    return "–" if value is None or isnan(value) else f"{value:.3f}"


def _range(values: list[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _plain(text: str) -> str:
    """Escape text from a file so that Markdown displays it literally: no tag, no table cell, no second line."""
    return re.sub(r"([\\`*|])", r"\\\1", " ".join(text.split())).replace("&", "&amp;").replace("<", "&lt;")
