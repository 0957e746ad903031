"""The slides of a run, each with the models that were tested on it, and the joint answers of these models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd
import torch

from carmil.bags.bags import Bags
from carmil.bags.store import Dtype, Store, is_store, open_store
from carmil.errors import CarmilError
from carmil.evidence.explainers import check_explainers, default_explainer, explainers_of
from carmil.progress import Log
from carmil.runs.answers import RUN_AGAIN, SlideAnswers
from carmil.runs.run import DISTANCE, SET_LEVEL, SHORT, SLIDE_SET, Run, pick_device
from carmil.runs.scopes import read_scopes
from carmil.runs.slide_evidence import RULE
from carmil.studies.cohort import open_bags
from carmil.studies.conformal import SetCalibration
from carmil.studies.predictions import outcomes, predict_frame, predicted
from carmil.studies.scope import distances
from carmil.targets import Target
from carmil.targets.decision import Decision, joint_decision
from carmil.untrusted import short_message
from carmil.words import percent_text

JOINT = "joint_answer"  # the column with the answer of all models that were tested on the slide
MOST = 3  # rules listed on a terminal


@dataclass(frozen=True)
class Subject:
    """A slide, its position in a store, and the rows of the models that answer for it and explain it.

    label (the outcome in words) and patient are set if known, and prediction_set (in words) if there is one. A slide
    that the run was tested on has the predictions (p) stored in the run, and those of the counterfactual attention,
    each the mean over the models.
    """

    slide: str
    place: int
    models: tuple[int, ...]
    label: str | None = None
    patient: str | None = None
    predicted: tuple[float, ...] | None = None
    counterfactual: tuple[float, ...] | None = None
    prediction_set: str | None = None
    distance: float | None = None  # from the training cohort, see `studies.scope`


def find_run_store(run: Run, given: Path | None = None) -> Store | None:
    """Find the store that the run was trained on, by its fingerprint, at `given` or in its recorded places. None if not found."""
    beside = run.folder.resolve().parents[1] / "data" if len(run.folder.resolve().parents) > 1 else run.folder
    places = [given] if given is not None else []
    places += [run.folder / "patients", run.folder / "cohort", Path(run.settings.bags)]
    places += [*sorted(beside.glob("*/patients")), *sorted(beside.glob("*/cohort"))]  # next to the points of a sweep
    for place in places if given is None else places[:1]:
        if is_store(place):
            store = open_store(place)
            if store.fingerprint == run.data.store:
                return store
    return None


def open_run_store(run: Run, given: Path | None = None) -> Store:
    """Open the run's own cohort at `given` or at its recorded path."""
    if not run.data.splits:
        raise CarmilError(
            f"{run.folder} was imported without slides: import it again with --bags and --labels, or give slides to "
            "`carmil predict`, `evaluate` or `explain` with --bags"
        )
    store = find_run_store(run, given)
    if store is None and given is not None:
        raise CarmilError(
            f"--bags {given} has another fingerprint than the cohort that {run.folder} was trained on: give "
            f"the path of that cohort, recorded as {run.settings.bags}"
        )
    if store is None:
        raise CarmilError(
            f"the cohort of {run.folder} is neither at {run.settings.bags} nor in the run: restore it, or give "
            "its path with --bags"
        )
    return store


def match_run_store(run: Run, store: Store) -> Store | None:
    """Match a store with the run's cohort; return None if its bags are new.

    The result is the run's own store if the bags are the same, or if they are the slides that its patients' bags were
    made of.
    """
    if store.fingerprint == run.data.store:
        return find_run_store(run) or store  # the run's copy may contain more truth about instances
    if run.settings.patients == "one-bag":
        slides = [place for place in (run.folder / "cohort", Path(run.settings.bags)) if is_store(place)]
        if any(open_store(place).fingerprint == store.fingerprint for place in slides):
            return open_run_store(run)
    return None


def pack_bags(run: Run, bags: Path, out: Path, *, log: Log) -> Path:
    """Return the path of a store of these bags.

    Files are packed into a store in `out` with the settings of the run's store, so that the run's own bags are
    recognised."""
    if not is_store(bags):
        open_bags(bags, out / "cohort", dtype=run.settings.dtype, truth=None, log=log)
        return out / "cohort"
    return bags


def check_complete(run: Run) -> None:
    """Check, before anything is computed, that the run has all files needed later."""
    of_slides = ("predictions.parquet",) if run.data.splits else ()
    of_folds = ("splits.tsv",) if run.data.imported is None else ()
    for name in ("weights.safetensors", *of_slides, *of_folds):
        if not (run.folder / name).is_file():
            raise CarmilError(f"the run {run.folder} lacks {name}: train again")


def own_subjects(run: Run, store: Store) -> list[Subject]:
    """Return every test slide, with all models of the folds in which it was tested."""
    subjects = _tested_subjects(run, {name: i for i, name in enumerate(store.ids)})
    if stranger := next((subject.slide for subject in subjects if subject.place < 0), None):
        raise CarmilError(
            f"{run.folder / 'predictions.parquet'} has the slide {stranger!r}, which is not in the run's "
            "cohort: train again"
        )
    return subjects


def _tested_subjects(run: Run, place: Mapping[str, int]) -> list[Subject]:
    """Return the subjects of `own_subjects` with the positions of the slides, -1 where they are unknown."""
    folds, frame, target = run.tested_folds, run.predictions(), run.target
    names, others = target.prediction_columns(), target.prediction_columns("cf")
    subjects = []
    for slide, lines in frame.groupby("slide", sort=False):
        tested = set(lines["fold"])
        subjects.append(
            Subject(
                slide=str(slide),
                place=place.get(str(slide), -1),
                models=tuple(row for row, fold in enumerate(folds) if fold in tested),
                label=target.describe(outcomes(lines[:1], target)[0]),
                patient=str(lines["patient"].iloc[0]),
                predicted=tuple(lines[names].mean()),
                counterfactual=tuple(lines[others].mean()) if others[0] in frame else None,
                prediction_set=_set_text(lines.iloc[0]),
                distance=float(lines[DISTANCE].mean()) if DISTANCE in frame else None,
            )
        )
    return subjects


def _set_text(row: pd.Series) -> str | None:
    """Return the prediction set of a row of predictions with its level, "a, b (90 %)"; None if it has none."""
    return (
        f"{row[SLIDE_SET]} ({percent_text(float(row[SET_LEVEL]))})" if SLIDE_SET in row and SET_LEVEL in row else None
    )


def same_features(run: Run, store: Store) -> dict[str, str] | None:
    """Map bags of a store to the names of the run's bags with equal features; return None if only names can be
    compared.

    A run stores checksums of the slides that train or validate in some fold; a run of version 0.1.0 stores none.
    """
    if store.fingerprint == run.data.store:
        return {name: name for name in store.ids}
    trained = run.data.trained_on
    checksums = store.checksums_in(cast("Dtype", run.data.store_type)) if trained else None
    if trained is None or checksums is None:
        return None
    names = {str(checksum): str(name) for name, checksum in trained.items()}
    matches = {name: names[checksum[:SHORT]] for name, checksum in checksums.items() if checksum[:SHORT] in names}
    same_name = {name for name in matches if trained.get(name) == checksums[name][:SHORT]}
    return {name: name if name in same_name else known for name, known in matches.items()}


def store_subjects(run: Run, store: Store) -> list[Subject]:
    """Return one subject per bag of a store, with the models that were tested on it, or with all models if there are none."""
    tested = {subject.slide: subject for subject in _tested_subjects(run, {})}
    known = {name: tested[of] for name, of in (same_features(run, store) or {}).items() if of in tested}
    everyone = tuple(range(len(run.models)))
    return [
        replace(known[slide], slide=slide, place=place) if slide in known else Subject(slide, place, everyone)
        for place, slide in enumerate(store.ids)
    ]


def answered_subjects(run: Run, answers: SlideAnswers, store: Store) -> list[Subject]:
    """Return the subjects of `store_subjects` for the slides of an answers folder, with the answers that it holds."""
    frame, target = answers.predictions(run), run.target
    if list(frame["slide"]) != list(store.ids):
        raise CarmilError(f"{answers.folder} has answers for other slides than its features: {RUN_AGAIN}")
    names, others = target.prediction_columns(), target.prediction_columns("cf")
    with_counterfactual = others[0] in frame
    return [
        replace(
            subject,
            predicted=tuple(frame[names].iloc[i].tolist()),
            counterfactual=tuple(frame[others].iloc[i].tolist()) if with_counterfactual else None,
            prediction_set=_set_text(frame.iloc[i]),
            distance=float(frame[DISTANCE].iloc[i]) if DISTANCE in frame else None,
        )
        for i, subject in enumerate(store_subjects(run, store))
    ]


def validation_places(run: Run, store: Store) -> list[list[int]]:
    """Return the positions of the validation bags in the store, by model."""
    from carmil.bags.splits import VALIDATION

    path, place = run.folder / "splits.tsv", {name: i for i, name in enumerate(store.ids)}
    try:
        table = pd.read_csv(path, sep="\t", dtype=str, keep_default_na=False)
        slides = [place[slide] for slide in table.iloc[:, 0]]
    except (ValueError, KeyError) as error:
        raise CarmilError(f"{path} cannot be read ({short_message(error)}): train again") from None
    if any(len(roles) != len(slides) for division in run.data.splits for roles in division):
        raise CarmilError(
            f"{path} lists {len(slides)} slides, which are not those that the run was split with: train again"
        )
    divisions, seeds = run.data.splits, sorted({model.seed for model in run.models})
    inner = 1 + max(model.inner for model in run.models)
    places = []
    for model in run.models:
        division = divisions[seeds.index(model.seed) if len(divisions) > 1 else 0]
        roles = division[model.fold * inner + model.inner]
        places.append([at for at, role in zip(slides, roles, strict=True) if role == VALIDATION])
    return places


def explainers_for(run: Run, asked: Sequence[str], *, log: Log) -> tuple[str, ...]:
    """Return the default explainer of the run's model, then the other explainers in `asked`. Those that do not fit are refused."""
    check_explainers(asked)
    model = run.model()
    fitting, default = explainers_of(model), default_explainer(model)
    for method in asked:
        if method not in fitting:
            raise CarmilError(
                f"{run.folder} is a run of {run.settings.model!r}, which {method!r} does not fit; expected one "
                f"of {', '.join(fitting)}"
            )
    if default != "path":
        log(f"{run.settings.model} does not pool by attention, as path evidence needs: its evidence is {default}")
    return tuple(dict.fromkeys([default, *asked]))


def group_by_models(subjects: Sequence[Subject]) -> dict[tuple[int, ...], list[Subject]]:
    """Group subjects by the models that explain them."""
    groups: dict[tuple[int, ...], list[Subject]] = {}
    for subject in subjects:
        groups.setdefault(subject.models, []).append(subject)
    return groups


def joint_answers(frame: pd.DataFrame, target: Target, decisions: Mapping[tuple[int, int], Decision]) -> pd.Series:
    """Return the joint answer of all models for the slide of each row.

    frame: one row per slide, fold and seed; decisions: by fold and seed.
    """
    rules = [decisions[key] for key in zip(frame["fold"], frame["seed"], strict=True)]
    answers, values = {}, predicted(frame, target)
    for slide, rows in frame.groupby("slide", sort=False).indices.items():
        answers[slide] = joint_decision([rules[row] for row in rows]).answer(values[rows].mean(0))
    return frame["slide"].map(answers)


def answer_table(
    run: Run, bags: Bags, subjects: Sequence[Subject], device: str, sets: SetCalibration | None = None
) -> pd.DataFrame:
    """Tabulate one row per subject: slide, p_CLASS (and cf_CLASS) or the predictions of another kind of target, the
    answer, its prediction set if `sets` are given, its distance from the training cohort if the run has scopes, the
    number of models, and the rule.

    The run's own slides have the predictions stored in the run; those of other slides are computed.
    """
    frames, target = [], run.target
    population = None
    for models, group in group_by_models(subjects).items():
        new = [subject for subject in group if subject.predicted is None]
        parts = [_stored_predictions(target, [subject for subject in group if subject.predicted is not None])]
        if new:
            population = population or run.population(pick_device(device))
            places = torch.tensor([subject.place for subject in new])
            parts.append(predict_frame(population, models, bags, places, target))
        frame = pd.concat([part for part in parts if len(part)], ignore_index=True)
        decision = run.decision(models)
        frame["answer"] = decision.answers(predicted(frame, target))
        if sets is not None:
            frame[SLIDE_SET] = sets.slide_words(frame, [models] * len(frame))
            frame[SET_LEVEL] = sets.level
        frame["models"] = len(models)
        frame[RULE] = decision.rule
        frames.append(frame)
    table = pd.concat(frames, ignore_index=True)
    if (scopes := read_scopes(run)) is not None:
        far = {subject.slide: subject.distance for subject in subjects}
        new = [subject for subject in subjects if subject.distance is None]
        if new:
            places = torch.tensor([subject.place for subject in new])
            measured = distances(scopes, bags, places, [subject.models for subject in new], pick_device(device))
            far |= dict(zip([subject.slide for subject in new], measured, strict=True))
        table[DISTANCE] = table["slide"].map(far).astype(float)
    return table.set_index("slide").loc[[subject.slide for subject in subjects]].reset_index()


def distinct_rules(frame: pd.DataFrame) -> list[str]:
    """Return the distinct rules in a table of answers, the most common first."""
    return [str(rule) for rule in frame[RULE].value_counts().index]


def rule_lines(rules: Sequence[str]) -> list[str]:
    """Format rules for the terminal, one line each, at most MOST of them."""
    lines = [f"answer: {rule}" for rule in rules[:MOST]]
    if len(rules) > MOST:
        lines.append(f"{len(rules) - MOST} more decision rules: see the column {RULE}")
    return lines


def _stored_predictions(target: Target, subjects: Sequence[Subject]) -> pd.DataFrame:
    """Return the predictions that the run stores for its own slides."""
    frame = pd.DataFrame({"slide": [subject.slide for subject in subjects]})
    if subjects:
        frame[target.prediction_columns()] = np.array([subject.predicted for subject in subjects])
        if subjects[0].counterfactual is not None:
            frame[target.prediction_columns("cf")] = np.array([subject.counterfactual for subject in subjects])
    return frame
