"""`carmil evaluate` and `carmil predict`: apply the models of a run to other bags."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from carmil.bags.geometry import TileGeometry, check_geometry
from carmil.bags.labels import read_labels
from carmil.bags.store import Store
from carmil.errors import CarmilError, unknown
from carmil.files import write_text
from carmil.progress import Log
from carmil.provenance import machine, to_json
from carmil.runs.calibration_slides import CalibrationSlides, write_calibration
from carmil.runs.facts import PredictionSets, Range, Spread
from carmil.runs.run import Run, pick_device, read_run, weights_key
from carmil.runs.writing import check_no_run, write_predictions
from carmil.statistics.conformal import fewest_cases
from carmil.studies.calibrate import calibrate
from carmil.studies.cautions import answer_cautions, readings
from carmil.studies.cohort import Cohort, LabelsRead, class_labels, label_cohort, open_bags, read_target_table
from carmil.studies.conformal import (
    SetCalibration,
    check_counts,
    check_patients,
    check_target,
    count_patients,
    run_sets,
)
from carmil.studies.figures import calibration as reliability
from carmil.studies.figures import fold_answers, intervals, measure
from carmil.studies.predictions import merge_patients, outcomes, predict_frame, predicted
from carmil.studies.scope import outside_line
from carmil.studies.subjects import Subject, answer_table, distinct_rules, same_features, store_subjects
from carmil.targets import Classes, Target
from carmil.targets.decision import Decision
from carmil.words import examples, plural


@dataclass(frozen=True)
class Evaluation:
    """Figures of a run on an external cohort, of all models together and of single models.

    own: the number of slides that are the run's own, answered by the models that were tested on them. sets: figures of
    the run's prediction sets, if it has any; calibration: the sets that were calibrated on this cohort, if this was
    requested.
    """

    run: Run
    slides: int
    own: int
    cautions: list[str]
    figures: dict[str, float]
    intervals: dict[str, Range]
    each: dict[str, Spread]
    cases: int
    level: str
    rules: list[str]
    sets: PredictionSets | None = None
    calibration: SetCalibration | None = None


def predict_bags(
    run_folder: Path,
    bags: Path,
    out: Path,
    *,
    device: str,
    log: Log,
    skip_broken: bool = False,
    asked: Collection[str] | None = None,
    calibration: Path | None = None,
) -> pd.DataFrame:
    """Answer for every bag by the run's decision rule; write out/predictions.parquet and .csv.

    New slides are answered by all models together, the run's own slides by the models that were tested on them. asked:
    the slides that messages concern, by default all. calibration: a folder with calibration slides for prediction sets,
    by default those of the run.
    """
    run = read_run(run_folder)
    check_no_run(out)
    sets = run_sets(run, calibration)
    store = open_fitting_store(run, bags, out, log, skip_broken=skip_broken, asked=asked)
    if sets is not None:
        log(sets.meaning)
        if known := sets.calibrating(store.ids if asked is None else asked):
            log(
                f"{examples(known)}: slides of these names calibrated the prediction sets, which are no test of their coverage"
            )
    frame = answer_table(run, store.bags(), store_subjects(run, store), device, sets)
    for line in outside_line(frame if asked is None else frame[frame["slide"].isin(asked)]):
        log(line)
    write_predictions(out, frame)
    return frame


def evaluate_run(
    run_folder: Path,
    bags: Path,
    labels: Path,
    out: Path,
    *,
    named: dict[str, str | None],
    device: str,
    log: Log,
    mapping: Mapping[str, str] | None = None,
    skip_broken: bool = False,
    conformal: float | None = None,
) -> Evaluation:
    """Measure a run on another cohort, with the thresholds that were chosen on the run's validation bags; nothing is
    fitted.

    mapping: from labels of the table to classes of the run, "" for labels to leave out. conformal: the coverage of
    prediction sets to calibrate on this cohort, for later use by `predict_bags`.
    """
    run = read_run(run_folder)
    target = run.target
    check_no_run(out)
    if conformal is not None:
        check_target(target)
        fewest_cases(conformal)  # refuses a level that is no probability
    sets = run_sets(run) if conformal is None else None
    read = read_labels_of(run.target, f"{run.folder}", labels, named, mapping or {})
    store = open_fitting_store(run, bags, out, log, skip_broken=skip_broken)
    rule = run.metrics.rule
    one_bag = out / "patients" if rule == "one-bag" else None
    cohort = label_cohort(
        store, read, one_bag=one_bag, allow_duplicates=True, log=log
    )  # no folds, so that duplicates cannot leak
    subjects = {subject.place: subject for subject in store_subjects(run, cohort.store)}
    answering = [subjects[place] for place in cohort.known.tolist()]
    own = sum(subject.predicted is not None for subject in answering)  # some of the models were trained on these
    if own and target.timed:
        raise CarmilError(
            f"{plural(own, 'slide')} of {bags} {'is' if own == 1 else 'are'} the run's own, tested by different models, whose "
            "risks cannot be compared: read the figures of the run, or give new slides"
        )
    if conformal is not None:
        slides = _calibrate(run, cohort, same_features(run, store) or {}, conformal, device)
    used = [] if sets is None or own else sets.calibrating(cohort.slides)
    if used:
        log(
            f"{examples(used)}: slides of these names calibrated the prediction sets, whose coverage is not measured here"
        )
    frame = cohort.add_labels(answer_table(run, cohort.bags, answering, device, sets))
    judged, level = frame, "slide"
    if run.merges_slides and cohort.has_patients:
        judged, level = merge_patients(frame, target, rule), "patient"
    decisions = _decisions(run, judged[level].to_list(), frame[level].to_list(), answering)
    figures = measure(judged, target, decisions, run.training(range(len(run.models))))
    each = {} if own else _single_models(run, cohort, rule, level, device)
    sure = intervals(target, fold_answers(judged, target, decisions))
    evaluation = Evaluation(
        run,
        slides=len(frame),
        own=own,
        cautions=answer_cautions(
            target,
            readings(target, predicted(judged, target), outcomes(judged, target)),
            sure.get(target.key_figure),
            f"{level}s",
        )
        + outside_line(frame),
        figures=figures,
        intervals=sure,
        each=each,
        cases=len(judged),
        level=level,
        rules=distinct_rules(frame),
        sets=None
        if sets is None or own or used or not cohort.has_patients
        else _measure_sets(sets, judged, level, run),
        calibration=None if conformal is None else SetCalibration(target, slides, rule),
    )
    write_predictions(out, frame)
    if conformal is not None:
        write_calibration(out, slides)
    facts = {
        "run": run.key,
        "data": cohort.fingerprint,
        "machine": machine(),
        "level": level,
        "own_slides": own,
        "map": dict(mapping or {}),
        "answer_rules": evaluation.rules,
        "figures": figures,
        "intervals": evaluation.intervals,
        "calibration": reliability(judged, target),
        "each_model": evaluation.each,
        **({} if evaluation.sets is None else {"prediction_sets": evaluation.sets}),
    }
    write_text(out / "evaluation.json", json.dumps(to_json(facts), indent=2))
    return evaluation


def _calibrate(run: Run, cohort: Cohort, known: Mapping[str, str], level: float, device: str) -> CalibrationSlides:
    """Return the predictions for a cohort that calibrates prediction sets. Slides that the run was trained on are refused.

    known: the names of the run's slides with equal features, see `same_features`.
    """
    trained = set(run.data.trained_on or ())
    if used := [slide for bag in cohort.slides for slide in cohort.checksums[bag] if known.get(slide) in trained]:
        raise CarmilError(
            f"--conformal {level:g}: the run was trained on the features of {examples(used)}, whose predictions are no measure of "
            "its errors: give a cohort that it has not seen, or train with --conformal"
        )
    numbers, names = cohort.strata
    check_patients(cohort.patients, numbers)
    counts = count_patients(np.array(cohort.patients), np.array(numbers), names)
    check_counts(counts, level, cohort.target.strata_word, "the table of labels")
    return calibrate(run.population(pick_device(device)), cohort, cohort.known, level, weights=weights_key(run))


def _measure_sets(sets: SetCalibration, judged: pd.DataFrame, level: str, run: Run) -> PredictionSets:
    """Return the figures of the sets of new cases, each answered by all models together."""
    everyone = [tuple(range(len(run.models)))] * len(judged)
    return sets.measure(judged, everyone, of_patients=level == "patient")


def parse_map(words: Sequence[str]) -> dict[str, str]:
    """Parse "tumor=carcinoma" and "unknown=" into {"tumor": "carcinoma", "unknown": ""}."""
    mapping: dict[str, str] = {}
    for word in words:
        name, sign, new = (part.strip() for part in word.partition("="))
        if not name or not sign:
            raise CarmilError(
                f"--map {word}: expected LABEL=CLASS, for example tumor=carcinoma, or LABEL= to leave it out"
            )
        if name in mapping:
            raise CarmilError(f"--map {word}: {name!r} is mapped to {mapping[name]!r} already: give each label once")
        mapping[name] = new
    return mapping


def read_labels_of(
    target: Target, run: str, labels: Path, named: Mapping[str, str | None], mapping: Mapping[str, str]
) -> LabelsRead:
    """Read the outcomes of a run's own target from a table of labels."""
    slide, patient, label = (named.get(kind) for kind in ("slide", "patient", "label"))
    if not isinstance(target, Classes):
        if mapping or label:
            option = "--map" if mapping else "--label"
            raise CarmilError(
                f"{option} is for classes; {run} predicts {target.title}: its columns are looked for by name; "
                "rename those of the table"
            )
        return read_target_table(labels, target, slide=slide, patient=patient)
    classes = target.names
    for name, new in mapping.items():
        if new and new not in classes:
            raise CarmilError(f"--map {name}={new}: {unknown('class of the run', new, classes)}")
    table = read_labels(labels, mapping=mapping, classes=classes, slide=slide, patient=patient, label=label)
    surplus = [name for name in table.classes if name not in classes]
    if surplus:
        known, others = ", ".join(map(repr, classes)), ", ".join(map(repr, surplus))
        maps = " ".join(f"--map '{name}=CLASS'" for name in surplus)
        raise CarmilError(
            f"{labels}: {table.columns[1]} has {'a label' if len(surplus) == 1 else 'labels'} that the run "
            f"does not have, {others}; its classes are {known}: give the class of each with {maps}, leave "
            f"slides out with --map '{surplus[0]}=', or name another column with --label"
        )
    return class_labels(table)


def open_fitting_store(
    run: Run,
    bags: Path,
    out: Path,
    log: Log,
    *,
    skip_broken: bool = False,
    asked: Collection[str] | None = None,
) -> Store:
    """Open the store of these bags if it fits the run: the same width, encoder, pooling and tile geometry."""
    store = open_bags(bags, out / "cohort", dtype=run.settings.dtype, skip_broken=skip_broken, log=log)
    check_fits(run, store, bags, log, asked)
    return store


def check_fits(run: Run, store: Store, bags: Path, log: Log, asked: Collection[str] | None = None) -> None:
    """Refuse bags that do not fit the run's models, and log which of the slides `asked` may have been used in training."""
    check_encoder(run, store.encoder, store.width, str(bags), log, pooling=store.pooling)
    check_tiles(run, store.geometry, str(bags), log)
    tilings = [entry.tiling for entry in store.entries if asked is None or entry.id in asked]
    check_tiling(run, tilings, str(bags), log)
    for line in _known_slides(run, store, set(store.ids if asked is None else asked)):
        log(line)


def _known_slides(run: Run, store: Store, asked: set[str]) -> list[str]:
    """Return lines about slides with features that the run was trained on, under any name, and about equal names."""
    tested = set(run.predictions()["slide"])
    matches = same_features(run, store)
    if matches is None:
        by_name = _equal_names(set(run.data.trained_on or tested) & asked, len(asked))
        if run.data.trained_on is None:  # a run of version 0.1.0
            return by_name
        types = f"{store.path} holds {store.dtype}, the run's own store {run.data.store_type}"
        return [f"{types}: slides are compared by name only", *by_name]
    lines = []
    used = "measured" if run.data.imported else "trained"
    for was_tested, level, then in (
        (True, "", "each is answered by the models that were tested on it, as in the run's report"),
        (False, "WARNING: ", "these answers are no test of it"),
    ):
        same = [(name, known) for name, known in matches.items() if name in asked and (known in tested) is was_tested]
        if same:
            named = ", ".join(repr(name) if name == known else f"{name!r} as {known!r}" for name, known in same[:3])
            lines.append(
                f"{level}the run was {used} on the features of {len(same)} of these {plural(len(asked), 'slide')} "
                f"({named}{', ...' if len(same) > 3 else ''}): {then}"
            )
    trained = set(run.data.trained_on or ())
    return lines + _equal_names(trained & asked - set(matches), len(asked))


def _equal_names(names: set[str], slides: int) -> list[str]:
    if not names:
        return []
    return [
        f"{len(names)} of these {plural(slides, 'slide')} {'has the name' if len(names) == 1 else 'have names'} of "
        f"slides that the run was trained on ({min(names)!r}, ...): if they are the same, these answers are no test of it"
    ]


def check_tiles(run: Run, geometry: TileGeometry, what: str, log: Log) -> None:
    """Refuse tiles (of `what`) with another geometry than the run's; if it is unknown, log one line."""
    todo = f"cut them with `{run.data.geometry.command}` and encode them again"
    check_geometry(geometry, run.data.geometry, what=what, whose=f"the run {run.folder}", todo=todo, log=log)


def check_tiling(run: Run, tilings: Iterable[str | None], what: str, log: Log) -> None:
    """Log one line if tiles (of `what`) were chosen in other ways than the run's, and one if that is not recorded.

    They are not refused: another preset for finding tissue may be right for another kind of slide.
    """
    if not run.data.tilings:
        return
    ways = dict.fromkeys(tilings)
    own = " or ".join(run.data.tilings)
    if others := [way for way in ways if way is not None and way not in run.data.tilings]:
        log(
            f"WARNING: {what} has tiles chosen by {'; '.join(others)}, the run {run.folder} was trained on tiles chosen by "
            f"{own}: other tiles can change the answers; cut them as the run's were, unless these slides need it"
        )
    if None in ways:
        log(f"how the tiles of {what} were chosen is not recorded: it could not be checked that it is by {own}")


def check_encoder(
    run: Run, encoder: str | None, width: int, what: str, log: Log, *, pooling: str | None = None
) -> None:
    """Refuse features (of `what`) of another encoder, width or pooling than the run's."""
    own_encoder = run.data.encoder
    if width != run.data.width:
        source = f"features by {own_encoder}" if own_encoder is not None else "features made as the run's were"
        raise CarmilError(
            f"{what} has {width} features per tile, the run was trained on {run.data.width}: expected {source}"
        )
    if own_encoder != encoder and own_encoder is not None and encoder is not None:
        raise CarmilError(f"{what} was encoded by {encoder}, the run was trained on {own_encoder}: use its encoder")
    trained = run.data.pooling
    if None not in (trained, pooling) and trained != pooling:
        raise CarmilError(f"{what} was pooled by {pooling}, the run was trained on {trained}: encode it again")
    if own_encoder is None or encoder is None:
        log(
            f"the encoder of {'the run' if own_encoder is None else what} is not known: whether it is the same could not be checked"
        )


def _decisions(run: Run, cases: Sequence[str], case_of: Sequence[str], subjects: Sequence[Subject]) -> list[Decision]:
    """Return the rule of each case (slide or patient): that of the models that answer for its slides. case_of: the case
    of each subject.
    """
    models: dict[str, set[int]] = {}
    for case, subject in zip(case_of, subjects, strict=True):
        models.setdefault(case, set()).update(subject.models)
    return [run.decision(sorted(models[case])) for case in cases]


def _single_models(run: Run, cohort: Cohort, rule: str, level: str, device: str) -> dict[str, Spread]:
    """Return the mean and standard deviation of each figure over single models, each with its own threshold."""
    population, target = run.population(pick_device(device)), run.target
    lines: list[dict[str, Any]] = []
    for row in range(len(run.models)):
        frame = cohort.add_labels(predict_frame(population, [row], cohort.bags, cohort.known, target))
        if level == "patient":
            frame = merge_patients(frame, target, rule)
        lines.append(measure(frame, target, run.decision([row]), run.training([row])))
    return {
        name: Spread(float(np.mean(values)), float(np.std(values, ddof=1)))
        for name in lines[0]
        if len(values := [line[name] for line in lines]) > 1
    }
