"""The model card of a run: model, data, protocol, figures, limits, and the command that reproduces the run."""

import os
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import MISSING, fields
from math import isnan
from pathlib import Path, PurePath

from carmil.bags.splits import TEST, TRAIN, VALIDATION
from carmil.runs.run import PATHS, Run
from carmil.runs.settings import Settings, Value, preset_of
from carmil.statistics.operating import Rule
from carmil.studies.cautions import cautions
from carmil.studies.figures import percent, run_table
from carmil.tables import ResultTable
from carmil.words import plural

CONFIG = "study.yaml"
TEMPLATE = Path(__file__).with_name("card.md.jinja")
YAML_ONLY = (  # settings without an option on the command line
    "options",
    "validation",
    "optimizer",
    "schedule",
    "warmup",
    "dtype",
)
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
LIMITS = (
    "Research use only. This is not a medical device; do not base any decision about a patient on it.",
    "The figures describe the test folds of this cohort. Other scanners, stains, sites and encoders may change "
    "them: use carmil evaluate to measure that on another cohort.",
)


def card(run: Run) -> str:
    """Return the card as Markdown."""
    from jinja2 import Environment

    pages = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    pages.filters["plain"] = _plain
    return pages.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        run=run,
        trained=trained(run),
        data=data(run),
        protocol=protocol(run),
        intervals=INTERVALS,
        figures=run_table(run),
        ece=percent(run.metrics.calibration.ece),
        limits=[*LIMITS, *(f"{line[0].upper()}{line[1:]}." for line in cautions(run)), *_limits(run)],
        remarks=remarks(run),
        choices=choices(run),
        machine=machine(run),
        command=command(run),
        config=CONFIG,
        yaml=yaml_part(run),
    )


def trained(run: Run) -> dict[str, str]:
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
    return {
        "slides": f"{data.slides} of {plural(data.patients, 'patient')}",
        "classes": ", ".join(f"{name} ({n})" for name, n in zip(run.classes, data.class_counts, strict=True)),
        "features": PurePath(run.settings.bags).name,
        "labels": PurePath(run.settings.labels).name if run.settings.labels else "stored with the features",
        "encoder": f"{data.encoder or 'not known'}, {data.width} features per tile"
        + (f", pooled by {data.pooling}" if data.pooling else ""),
        "tiles": str(run.data.geometry),
        "fingerprint": f"{data.fingerprint} (features, labels and patients); {data.store} (features)",
    }


def protocol(run: Run) -> list[str]:
    """Return how the figures were obtained and what they describe."""
    settings = run.settings
    selection = (
        "Epoch, hyper-parameters and threshold were chosen on validation bags only; each test fold was used once."
    )
    if len(run.classes) > 2:
        selection = "Epoch and hyper-parameters were chosen on validation bags only; each test fold was used once."
    return [
        _folds(run),
        selection,
        f"Answers: {answer_rule(run)}.",
        f"Figures are per {run.metrics.level}{_combination(run)}.",
        f"Training: at most {plural(settings.epochs, 'epoch')}, patience {settings.patience}, "
        f"{settings.optimizer}, {plural(settings.batch, 'bag')} per step, learning rate {_text(settings.lr)} "
        f"({settings.schedule}), weight decay {settings.weight_decay:g}, label smoothing {settings.label_smoothing:g}.",
    ]


def choices(run: Run) -> ResultTable:
    """Return the table of choices made on validation bags, one row per selected model."""
    settings = list(dict.fromkeys(name for model in run.models for name in model.settings))
    named = [name for name in ("inner", "seed") if len({getattr(model, name) for model in run.models}) > 1]
    heads = ["fold", *named, "epoch (from 0)", "validation loss", *(name.rstrip("_") for name in settings)]
    two, abstains = len(run.classes) == 2, any(model.abstain_below is not None for model in run.models)
    if two:
        heads += ["threshold", "sensitivity there", "specificity there"]
    if abstains:
        heads.append("no answer if closer than")
    if any(model.threshold_note for model in run.models):
        heads.append("remark")
    lines = []
    for fold, model in zip(run.tested_folds, run.models, strict=True):
        cells = [str(fold), *(str(getattr(model, name)) for name in (*named, "best_epoch"))]
        cells += [_number(model.validation_loss), *(_text(model.settings.get(name)) for name in settings)]
        if two:
            cells.append(_number(model.threshold))
            cells += [percent(getattr(model, f"validation_{name}")) for name in ("sensitivity", "specificity")]
        if abstains:
            cells.append(_number(model.abstain_below))
        if "remark" in heads:
            cells.append(model.threshold_note or "–")
        lines.append(tuple(cells))
    return ResultTable("What each model chose", tuple(heads), tuple(lines), names=1 + len(named))


def settings_shown(run: Run) -> dict[str, str]:
    """Return all settings as text; of paths only the last part, since the rest describes the machine."""
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


def command(run: Run) -> str:
    """Return the `carmil train` command that reproduces the run, for the folder that contains the run."""
    return command_of("train", run, run.folder)


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
    import yaml

    home = run.folder.resolve().parent
    rest = {
        name: value for name, value in _changed_settings(run, home).items() if name in YAML_ONLY and name not in without
    }
    return yaml.safe_dump(rest, sort_keys=False) if rest else ""


def _changed_settings(run: Run, home: Path) -> dict[str, Value]:
    """Settings that differ from their defaults, with paths relative to `home`; bags, labels and model always."""
    defaults = {field.name: None if field.default is MISSING else field.default for field in fields(Settings)}
    return {
        name: _relative_path(home, str(value)) if name in PATHS and value else value
        for name, value in run.settings.lasting().items()
        if name == "model" or value != defaults.get(name)
    }


def _relative_path(home: Path, path: str) -> str:
    """A path relative to `home`; only its last part if it no longer exists."""
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
        origin = f"{settings.folds} folds by patient, stratified by class (seed {settings.seed})"
        if settings.inner > 1:
            origin += f", each with {settings.inner} inner folds"
        if settings.site is not None:
            origin += ", no site in two of them"
        if len(divisions) > 1:
            origin += f", drawn anew for each of {len(divisions)} seeds"
    counts = ", ".join(
        f"{_range([fold.count(role) for fold in roles])} {words}"
        for role, words in ((TRAIN, "for training"), (VALIDATION, "for validation"), (TEST, "for testing"))
    )
    return f"{origin[0].upper()}{origin[1:]}; bags per fold: {counts}."


def answer_rule(run: Run) -> str:
    """Return how probabilities become answers, wherever answers of this run are displayed."""
    share = run.settings.abstain
    if len(run.classes) > 2:
        rule = "the most probable class"
    else:
        chosen, level = Rule.parse(str(run.settings.threshold)), run.metrics.level
        how = (
            f"chosen for {chosen.words} on the validation {level}s of each model"
            if chosen.name != "fixed"
            else "given, the same for every model"
        )
        several = " (the mean, where several models answer together by their mean probability)"
        rule = f"“{run.classes[1]}” if its probability is at least the threshold, {how}{several}"
        if level == "patient" and run.metrics.rule != "one-bag":
            rule += "; slides use the threshold of their patients"
    rule += "; a slide is answered by the models that were tested on it"
    withheld = f"; no answer below the confidence of {share:.0%} of the validation cases, the mean again"
    return rule + (withheld if share else "")


def _combination(run: Run) -> str:
    """How slides are combined into a patient's answer."""
    if run.metrics.level == "slide":
        return ", since slides of a patient have different labels" if run.data.patients < run.data.slides else ""
    return {
        "mean": " (the mean of the probabilities of their slides)",
        "max": " (the largest probability among their slides)",
        "one-bag": " (all slides of a patient are one bag)",
    }[run.metrics.rule]


def _limits(run: Run) -> list[str]:
    roles = [fold for division in run.data.splits for fold in division]
    validated = [fold.count(VALIDATION) for fold in roles]
    lines = [
        f"Epoch and threshold were chosen on {_range(validated)} validation bags per fold: the fewer, the more they "
        "depend on chance."
    ]
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
