"""A run's own slides, each with the models that were tested on it and may answer for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from carmil.bags.store import Dtype, Store, is_store, open_store
from carmil.errors import CarmilError
from carmil.evidence.explainers import check_explainers, default_explainer, explainers_of
from carmil.progress import Log
from carmil.runs.run import SHORT, Run
from carmil.studies.cohort import open_bags
from carmil.studies.predictions import probability_columns
from carmil.untrusted import short_message


@dataclass(frozen=True)
class Subject:
    """A slide, its position in a store, and the rows of the models that answer for it and explain it.

    label and patient where they are known. Of a slide that the run was tested on: the probabilities (k) that the run holds, and
    those of the counterfactual attention, each the mean over the models.
    """

    slide: str
    place: int
    models: tuple[int, ...]
    label: str | None = None
    patient: str | None = None
    probabilities: tuple[float, ...] | None = None
    counterfactual: tuple[float, ...] | None = None


def find_run_store(run: Run, given: Path | None = None) -> Store | None:
    """The store the run was trained on, recognised by its fingerprint: at `given`, or where the run left it. None if not found."""
    beside = run.folder.resolve().parents[1] / "data" if len(run.folder.resolve().parents) > 1 else run.folder
    places = [given] if given is not None else []
    places += [run.folder / "patients", run.folder / "cohort", Path(run.settings.bags)]
    places += [*sorted(beside.glob("*/patients")), *sorted(beside.glob("*/cohort"))]  # of a sweep's point
    for place in places if given is None else places[:1]:
        if is_store(place):
            store = open_store(place)
            if store.fingerprint == run.data.store:
                return store
    return None


def open_run_store(run: Run, given: Path | None = None) -> Store:
    """Open the run's own cohort, where it was or where it has moved to."""
    store = find_run_store(run, given)
    if store is None and given is not None:
        raise CarmilError(
            f"--bags {given} is not the cohort that {run.folder} was trained on: its fingerprint is another; the run's own "
            f"was at {run.settings.bags}"
        )
    if store is None:
        raise CarmilError(
            f"the cohort of {run.folder} is neither at {run.settings.bags} nor in the run: put it back, or give its path "
            "with --bags"
        )
    return store


def match_run_store(run: Run, store: Store) -> Store | None:
    """The run's own cohort, if these bags are it, or the slides that its patients' bags were made of; None if they are new."""
    if store.fingerprint == run.data.store:
        return find_run_store(run) or store  # the run's copy may know more of its instances
    if run.settings.patients == "one-bag":
        slides = [place for place in (run.folder / "cohort", Path(run.settings.bags)) if is_store(place)]
        if any(open_store(place).fingerprint == store.fingerprint for place in slides):
            return open_run_store(run)
    return None


def pack_bags(run: Run, bags: Path, out: Path, *, log: Log) -> Path:
    """The path of a store of these bags. Files are packed into one in `out`, as the run's own were, so that they are
    recognised."""
    if not is_store(bags):
        open_bags(bags, out / "cohort", dtype=run.settings.dtype, truth=None, log=log)
        return out / "cohort"
    return bags


def check_complete(run: Run) -> None:
    """Refuse a run that lacks a file needed later, before anything is computed."""
    for name in ("weights.safetensors", "predictions.parquet", "splits.tsv"):
        if not (run.folder / name).is_file():
            raise CarmilError(f"the run {run.folder} lacks {name}: train again")


def own_subjects(run: Run, store: Store) -> list[Subject]:
    """Every tested slide, with all models of the folds in which it was tested."""
    subjects = _tested_subjects(run, {name: i for i, name in enumerate(store.ids)})
    if stranger := next((subject.slide for subject in subjects if subject.place < 0), None):
        raise CarmilError(
            f"{run.folder / 'predictions.parquet'} has the slide {stranger!r}, which the run's cohort has not: train again"
        )
    return subjects


def _tested_subjects(run: Run, place: Mapping[str, int]) -> list[Subject]:
    """`own_subjects` with the positions of the slides, -1 where they are not known."""
    folds, frame = run.tested_folds, run.predictions()
    names, others = probability_columns(run.classes), probability_columns(run.classes, "cf")
    subjects = []
    for slide, lines in frame.groupby("slide", sort=False):
        tested = set(lines["fold"])
        subjects.append(
            Subject(
                slide=str(slide),
                place=place.get(str(slide), -1),
                models=tuple(row for row, fold in enumerate(folds) if fold in tested),
                label=str(lines["label"].iloc[0]),
                patient=str(lines["patient"].iloc[0]),
                probabilities=tuple(lines[names].mean()),
                counterfactual=tuple(lines[others].mean()) if others[0] in frame else None,
            )
        )
    return subjects


def same_features(run: Run, store: Store) -> dict[str, str] | None:
    """Bags of a store with the features of a bag of the run, and their names there; None where only names can be compared.

    A run keeps checksums of the slides that train or validate in some fold; a run of version 0.1.0 keeps none.
    """
    if store.fingerprint == run.data.store:
        return {name: name for name in store.ids}
    trained = run.data.trained_on
    checksums = store.checksums_in(cast("Dtype", run.data.store_type)) if trained else None
    if trained is None or checksums is None:
        return None
    names = {str(checksum): str(name) for name, checksum in trained.items()}
    found = {name: names[checksum[:SHORT]] for name, checksum in checksums.items() if checksum[:SHORT] in names}
    same_name = {name for name in found if trained.get(name) == checksums[name][:SHORT]}
    return {name: name if name in same_name else known for name, known in found.items()}


def store_subjects(run: Run, store: Store) -> list[Subject]:
    """One subject per bag of a store: with the models that were tested on it, or with all models where none was."""
    tested = {subject.slide: subject for subject in _tested_subjects(run, {})}
    known = {name: tested[of] for name, of in (same_features(run, store) or {}).items() if of in tested}
    everyone = tuple(range(len(run.models)))
    return [
        replace(known[slide], slide=slide, place=place) if slide in known else Subject(slide, place, everyone)
        for place, slide in enumerate(store.ids)
    ]


def validation_places(run: Run, store: Store) -> list[list[int]]:
    """The positions of the validation bags in the store, by model."""
    import pandas as pd

    from carmil.bags.splits import VALIDATION

    path, place = run.folder / "splits.tsv", {name: i for i, name in enumerate(store.ids)}
    try:
        table = pd.read_csv(path, sep="\t", dtype=str, keep_default_na=False)
        slides = [place[slide] for slide in table.iloc[:, 0]]
    except (ValueError, KeyError) as error:
        raise CarmilError(f"{path} cannot be read ({short_message(error)}): train again") from None
    if any(len(roles) != len(slides) for division in run.data.splits for roles in division):
        raise CarmilError(f"{path} lists {len(slides)} slides, and the run was divided with others: train again")
    divisions, seeds = run.data.splits, sorted({model.seed for model in run.models})
    inner = 1 + max(model.inner for model in run.models)
    found = []
    for model in run.models:
        division = divisions[seeds.index(model.seed) if len(divisions) > 1 else 0]
        roles = division[model.fold * inner + model.inner]
        found.append([at for at, role in zip(slides, roles, strict=True) if role == VALIDATION])
    return found


def explainers_for(run: Run, asked: Sequence[str], *, log: Log) -> tuple[str, ...]:
    """The default explainer of the run's model, then the others that were asked for. Those that do not fit are refused."""
    check_explainers(asked)
    model = run.model()
    fitting, default = explainers_of(model), default_explainer(model)
    for method in asked:
        if method not in fitting:
            raise CarmilError(
                f"{run.folder} is a run of {run.settings.model!r}, which {method!r} does not fit; "
                f"expected one of {', '.join(fitting)}"
            )
    if default != "path":
        log(f"{run.settings.model} does not pool by attention, as path evidence needs: its evidence is {default}")
    return tuple(dict.fromkeys([default, *asked]))


def group_by_models(subjects: Sequence[Subject]) -> dict[tuple[int, ...], list[Subject]]:
    """Subjects by the models that explain them."""
    groups: dict[tuple[int, ...], list[Subject]] = {}
    for subject in subjects:
        groups.setdefault(subject.models, []).append(subject)
    return groups
