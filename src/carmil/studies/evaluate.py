"""`carmil evaluate` and `carmil predict`: the models of a run on other bags. k classes."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from carmil.bags.geometry import TileGeometry, check_geometry
from carmil.bags.labels import LabelTable, read_labels
from carmil.bags.store import Store
from carmil.errors import CarmilError, unknown
from carmil.files import write_text
from carmil.progress import Log
from carmil.provenance import machine, to_json
from carmil.runs.decision import Decision
from carmil.runs.facts import Range, Spread
from carmil.runs.run import Run, pick_device, read_run
from carmil.runs.writing import check_no_run, write_predictions
from carmil.studies.cautions import answer_cautions, readings
from carmil.studies.cohort import Cohort, label_cohort, open_bags
from carmil.studies.decisions import answer_table, distinct_rules
from carmil.studies.figures import calibration, fold_answers, intervals, measure
from carmil.studies.predictions import class_numbers, merge_patients, predict_frame, probabilities
from carmil.studies.subjects import Subject, same_features, store_subjects
from carmil.words import plural

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Evaluation:
    """Figures of a run on an external cohort: of all models together, and of each by itself.

    own: how many of the slides are the run's own, answered by the models that were tested on them.
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


def predict_bags(
    run_folder: Path,
    bags: Path,
    out: Path,
    *,
    device: str,
    log: Log,
    skip_broken: bool = False,
    asked: Collection[str] | None = None,
) -> "pd.DataFrame":
    """Answer for every bag by the run's decision rule; write out/predictions.parquet and .csv.

    New slides are answered by all models together, the run's own by the models that were tested on them. asked: the slides that
    messages are about, by default all.
    """
    run = read_run(run_folder)
    check_no_run(out)
    store = open_fitting_store(run, bags, out, log, skip_broken=skip_broken, asked=asked)
    frame = answer_table(run, store.bags(), store_subjects(run, store), device)
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
) -> Evaluation:
    """Measure a run on another cohort. Thresholds are those that the run chose on its validation bags; nothing is fitted.

    mapping: from labels of the table to classes of the run, "" for labels to leave out.
    """
    run = read_run(run_folder)
    check_no_run(out)
    table = _labels_of_run(run, labels, named, mapping or {})
    store = open_fitting_store(run, bags, out, log, skip_broken=skip_broken)
    rule = run.metrics.rule
    one_bag = out / "patients" if rule == "one-bag" else None
    cohort = label_cohort(store, table, one_bag=one_bag, allow_duplicates=True, log=log)  # there are no folds here
    subjects = {subject.place: subject for subject in store_subjects(run, cohort.store)}
    answering = [subjects[place] for place in cohort.known.tolist()]
    frame = _add_labels(answer_table(run, cohort.bags, answering, device), cohort)
    judged, level = frame, "slide"
    if run.merges_slides and cohort.has_patients:
        judged, level = merge_patients(frame, run.classes, rule), "patient"
    decisions = _decisions(run, judged[level].to_list(), frame[level].to_list(), answering)
    figures = measure(judged, run.classes, decisions)
    own = sum(subject.probabilities is not None for subject in answering)  # some of the models were trained on these
    each = {} if own else _single_models(run, cohort, rule, level, device)
    sure = intervals(fold_answers(judged, run.classes, decisions))
    found = Evaluation(
        run,
        slides=len(frame),
        own=own,
        cautions=answer_cautions(
            readings(probabilities(judged, run.classes), class_numbers(judged, run.classes)),
            sure.get("auc"),
            f"{level}s",
        ),
        figures=figures,
        intervals=sure,
        each=each,
        cases=len(judged),
        level=level,
        rules=distinct_rules(frame),
    )
    write_predictions(out, frame)
    facts = {
        "run": run.key,
        "data": cohort.fingerprint,
        "machine": machine(),
        "level": level,
        "own_slides": own,
        "map": dict(mapping or {}),
        "answer_rules": found.rules,
        "figures": figures,
        "intervals": found.intervals,
        "calibration": calibration(judged, run.classes),
        "each_model": found.each,
    }
    write_text(out / "evaluation.json", json.dumps(to_json(facts), indent=2))
    return found


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
            raise CarmilError(f"--map {word}: {name!r} is mapped to {mapping[name]!r} already; name it once")
        mapping[name] = new
    return mapping


def _labels_of_run(run: Run, labels: Path, named: Mapping[str, str | None], mapping: Mapping[str, str]) -> LabelTable:
    """Read a table of labels, in the classes of the run."""
    for name, new in mapping.items():
        if new and new not in run.classes:
            raise CarmilError(f"--map {name}={new}: {unknown('class of the run', new, run.classes)}")
    columns = {kind: named.get(kind) for kind in ("slide", "patient", "label")}
    table = read_labels(labels, mapping=mapping, classes=run.classes, **columns)
    surplus = [name for name in table.classes if name not in run.classes]
    if surplus:
        known, others = ", ".join(map(repr, run.classes)), ", ".join(map(repr, surplus))
        maps = " ".join(f"--map '{name}=CLASS'" for name in surplus)
        raise CarmilError(
            f"{labels}: {table.columns[1]} has {'a label' if len(surplus) == 1 else 'labels'} that the run does not know, "
            f"{others}; its classes are {known}: name the class of each with {maps}, leave slides out with "
            f"--map '{surplus[0]}=', or name another column with --label"
        )
    return table


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
    """Refuse bags that do not fit the run's models, and log which of the slides `asked` for the models may know already."""
    check_encoder(run, store.encoder, store.width, str(bags), log, pooling=store.pooling)
    check_tiles(run, store.geometry, str(bags), log)
    for line in _known_slides(run, store, set(store.ids if asked is None else asked)):
        log(line)


def _known_slides(run: Run, store: Store, asked: set[str]) -> list[str]:
    """Lines about slides whose features the run was trained on, under whatever name, and about equal names."""
    tested = set(run.predictions()["slide"])
    found = same_features(run, store)
    if found is None:
        by_name = _equal_names(set(run.data.trained_on or tested) & asked, len(asked))
        if run.data.trained_on is None:  # a run of version 0.1.0
            return by_name
        types = f"{store.path} holds {store.dtype}, the run's own store {run.data.store_type}"
        return [f"{types}: slides are compared by name only", *by_name]
    lines = []
    for was_tested, level, then in (
        (True, "", "each is answered by the models that were tested on it, as in the run's report"),
        (False, "WARNING: ", "these answers are no test of it"),
    ):
        same = [(name, known) for name, known in found.items() if name in asked and (known in tested) is was_tested]
        if same:
            named = ", ".join(repr(name) if name == known else f"{name!r} as {known!r}" for name, known in same[:3])
            lines.append(
                f"{level}the run was trained on the features of {len(same)} of these {plural(len(asked), 'slide')} "
                f"({named}{', ...' if len(same) > 3 else ''}): {then}"
            )
    trained = set(run.data.trained_on or ())
    return lines + _equal_names(trained & asked - set(found), len(asked))


def _equal_names(names: set[str], slides: int) -> list[str]:
    if not names:
        return []
    return [
        f"{len(names)} of these {plural(slides, 'slide')} {'has the name' if len(names) == 1 else 'have names'} of "
        f"slides that the run was trained on ({min(names)!r}, ...): if they are the same, these answers are no test of it"
    ]


def check_tiles(run: Run, geometry: TileGeometry, what: str, log: Log) -> None:
    """Refuse tiles (of `what`) of another geometry than the run was trained on; log one line where it is not known."""
    todo = f"cut them with `{run.data.geometry.command}` and encode them again"
    check_geometry(geometry, run.data.geometry, what=what, whose=f"the run {run.folder}", todo=todo, log=log)


def check_encoder(
    run: Run, encoder: str | None, width: int, what: str, log: Log, *, pooling: str | None = None
) -> None:
    """Refuse features (of `what`) of another encoder, width or pooling than the run was trained on."""
    mine = run.data.encoder
    if width != run.data.width:
        source = f"features by {mine}" if mine is not None else "features made as the run's were"
        raise CarmilError(
            f"{what} has {width} features per tile, the run was trained on {run.data.width}: expected {source}"
        )
    if mine != encoder and mine is not None and encoder is not None:
        raise CarmilError(f"{what} was encoded by {encoder}, the run was trained on {mine}: use its encoder")
    trained = run.data.pooling
    if None not in (trained, pooling) and trained != pooling:
        raise CarmilError(f"{what} was pooled by {pooling}, the run was trained on {trained}: encode it again")
    if mine is None or encoder is None:
        log(
            f"the encoder of {'the run' if mine is None else what} is not known: whether it is the same could not be checked"
        )


def _add_labels(frame: "pd.DataFrame", cohort: Cohort) -> "pd.DataFrame":
    patient = dict(zip(cohort.slides, cohort.patients, strict=True))
    frame.insert(1, "patient", [patient[slide] for slide in frame["slide"]])
    frame.insert(2, "label", [cohort.classes[i] for i in cohort.labels.tolist()])
    return frame


def _decisions(run: Run, cases: Sequence[str], case_of: Sequence[str], subjects: Sequence[Subject]) -> list[Decision]:
    """The rule of each case (slide or patient): that of the models which answer for its slides. case_of: of each subject."""
    models: dict[str, set[int]] = {}
    for case, subject in zip(case_of, subjects, strict=True):
        models.setdefault(case, set()).update(subject.models)
    return [run.decision(sorted(models[case])) for case in cases]


def _single_models(run: Run, cohort: Cohort, rule: str, level: str, device: str) -> dict[str, Spread]:
    """Mean and standard deviation of each figure over single models, each with its own threshold."""
    population = run.population(pick_device(device))
    lines: list[dict[str, Any]] = []
    for row in range(len(run.models)):
        frame = _add_labels(predict_frame(population, [row], cohort.bags, cohort.known, run.classes), cohort)
        if level == "patient":
            frame = merge_patients(frame, run.classes, rule)
        lines.append(measure(frame, run.classes, run.decision([row])))
    return {
        name: Spread(float(np.mean(values)), float(np.std(values, ddof=1)))
        for name in lines[0]
        if len(values := [line[name] for line in lines]) > 1
    }
