"""`carmil faithfulness`: measure whether models depend on the tiles that their maps mark, for several runs and
explainers.

Every model is probed on the slides it was tested on, by its own map of the class that it answers. The figure of a slide
is the mean over its models; deletion, insertion and the figures derived from them are over correctly answered slides,
as in the paper. For other targets all slides count, as no answer is right or wrong, and the map is that of the output
that `carmil explain` shows; see `faithfulness_probe` for what the curves follow.

The figure of the cohort is the target's key figure. For classes it is that of all test folds together; for other
targets it is the mean over the test folds, as predictions of different models, such as risks, must not be compared.

OUT/asked/RUN-i.npz   results of the i-th group of models that were tested on the same slides, so that the
command resumes
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from carmil import __version__
from carmil.bags.bags import Bags
from carmil.bags.store import Store
from carmil.errors import CarmilError
from carmil.evidence.concentration import stability
from carmil.evidence.explainers import check_explainers, default_explainer, explainers_of
from carmil.evidence.faithfulness import CONFIDENCE
from carmil.evidence.regions import check_coordinates
from carmil.explanations import faithfulness_probe
from carmil.explanations.faithfulness_probe import TWINS, Accumulator, Explained, Floats, ProbeSettings, probe
from carmil.files import safe_name
from carmil.progress import Log, count_progress
from carmil.runs.compute_once import Arrays, compute_arrays_once
from carmil.runs.faithfulness import CurveWords, MapFaithfulness, RemovalFigures, RunFaithfulness
from carmil.runs.run import Run, read_run, weights_key
from carmil.studies.figures import figure_names
from carmil.studies.predictions import outcomes
from carmil.studies.subjects import Subject, check_complete, group_by_models, open_run_store, own_subjects, pack_bags
from carmil.targets import Classes, Target
from carmil.training.population import Population

AT_ONCE = 2**17  # instances in memory


def measure_faithfulness(
    folders: Sequence[Path],
    out: Path,
    *,
    methods: Sequence[str],
    steps: int,
    random_orders: int,
    device: str,
    log: Log,
    bags: Path | None = None,
    confidence: float = CONFIDENCE,
    region_tiles: int = 0,
) -> list[RunFaithfulness]:
    """Measure every run with every method that fits it; by default with its default explainer and attention.

    confidence: the one that the answer from the smallest sufficient number of tiles must reach. region_tiles: also
    remove regions of this many neighbouring tiles; 0: tiles only.

    bags: the present path of the runs' cohort, if it was moved. Intermediate results are stored in `out`.
    """
    if steps < 10 or steps % 10:
        raise CarmilError(
            f"--steps {steps}: expected a multiple of 10, so that some step removes exactly a tenth of the tiles"
        )
    if random_orders < 1:
        raise CarmilError(f"--random-orders {random_orders}: expected at least one, for comparison")
    if not 0 < confidence < 1:
        raise CarmilError(f"--confidence {confidence:g}: expected a number between 0 and 1, such as 0.9")
    if region_tiles < 0:
        raise CarmilError(f"--region-tiles {region_tiles}: expected at least one")
    check_explainers(methods)
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        check_complete(run)
    words = [curve_words(run.target) for run in runs]
    if other := next((run for run, own in zip(runs, words, strict=True) if own != words[0]), None):
        raise CarmilError(
            f"{runs[0].folder} predicts {runs[0].target.title or 'classes'} and {other.folder} "
            f"{other.target.title or 'classes'}: expected runs whose curves show the same"
        )
    if len({run.data.fingerprint for run in runs}) > 1:
        log("these runs are not of the same slides and labels: their curves must not be compared")
    chosen = [_fitting(run, methods) for run in runs]
    for method in methods:
        without = [run for run, own in zip(runs, chosen, strict=True) if method not in own]
        if len(without) == len(runs):
            raise CarmilError(
                f"{method!r} fits none of these runs' models; expected one that fits, for {runs[0].folder}: "
                f"{_all(runs[0])}"
            )
        for run in without:
            log(f"{method} does not fit {run.folder}: it is left out there")
    names = _names(runs)
    place = None if bags is None else pack_bags(runs[0], bags, out, log=log)
    stores = [open_run_store(run, place) for run in runs]
    for store in stores if region_tiles else ():
        check_coordinates(store.bags())
    return [
        _measure_run(
            run,
            name,
            store,
            ProbeSettings(own, steps, random_orders, confidence, region_tiles),
            out / "asked",
            device,
        )
        for run, name, store, own in zip(runs, names, stores, chosen, strict=True)
    ]


def _all(run: Run) -> str:
    return ", ".join(explainers_of(run.model()))


def _fitting(run: Run, asked: Sequence[str]) -> tuple[str, ...]:
    model = run.model()
    wanted = asked or (default_explainer(model), "attention")
    fitting = tuple(dict.fromkeys(method for method in wanted if method in explainers_of(model)))
    if not fitting:
        raise CarmilError(f"none of {', '.join(asked)} fits {run.folder}; expected one of {_all(run)}")
    return fitting


def _names(runs: Sequence[Run]) -> list[str]:
    """Return the names of the folders, with a number appended where a name repeats."""
    names: list[str] = []
    for run in runs:
        same = sum(name.partition(" (")[0] == run.name for name in names)
        names.append(f"{run.name} ({same + 1})" if same else run.name)
    return names


def curve_words(target: Target) -> CurveWords:
    """Return the names and properties of the curves of a target."""
    return CurveWords(
        target.followed_words,
        figure_names(target)[target.key_figure],
        by_fold=not isinstance(target, Classes),
        two_sided=target.two_sided,
    )


def _explained(run: Run, subjects: Sequence[Subject]) -> list[int]:
    """Return the class of each subject's label or, for other targets, the number of the output that is explained."""
    if isinstance(run.target, Classes):
        return [run.outputs.index(str(subject.label)) for subject in subjects]
    return [
        run.outputs.index(run.decision(subject.models).explained(np.array(subject.predicted))) for subject in subjects
    ]


def _folds(run: Run, subjects: Sequence[Subject]) -> np.ndarray:
    """Return (v, b) the test fold of each subject in each division into folds; for classes, one fold for all."""
    if isinstance(run.target, Classes):
        return np.zeros((1, len(subjects)), dtype=np.int64)
    folds = np.zeros((len(run.data.splits), len(subjects)), dtype=np.int64)
    for i, subject in enumerate(subjects):
        for row in subject.models:
            folds[_division(run, row), i] = run.tested_folds[row]
    return folds


def _division(run: Run, row: int) -> int:
    """Return the division into folds that a model was tested in: the number of its seed, if each seed has its own folds."""
    if isinstance(run.target, Classes) or len(run.data.splits) == 1:
        return 0
    return sorted({model.seed for model in run.models}).index(run.models[row].seed)


def _measure_run(
    run: Run, name: str, store: Store, probe_settings: ProbeSettings, cache: Path, device: str
) -> RunFaithfulness:
    subjects = own_subjects(run, store)
    table = run.predictions().drop_duplicates("slide").set_index("slide")
    truth = outcomes(table.loc[[subject.slide for subject in subjects]], run.target)
    patients = [subject.patient or subject.slide for subject in subjects]
    at = {subject.slide: i for i, subject in enumerate(subjects)}
    bags, population = store.bags(), run.population(device)
    accumulator, done = _empty(run, len(subjects), probe_settings), 0
    total = sum(len(subject.models) for subject in subjects)
    key = {"carmil": __version__, "weights": weights_key(run), "data": store.fingerprint, **vars(probe_settings)}
    key |= {"thresholds": run.thresholds, "divisions": len(accumulator.models)}
    key["twins"] = [faithfulness_probe.TWINS, faithfulness_probe.EXPLAINED, faithfulness_probe.FOLLOWED]
    with count_progress(f"asking {name}", "answers") as on_answers:

        def on_more(before: int, more: int) -> None:
            on_answers(before + more, total)

        for i, (rows, group) in enumerate(group_by_models(subjects).items()):
            measure = partial(_group, run, population, rows, bags, group, probe_settings, partial(on_more, done))
            where = np.array([at[subject.slide] for subject in group])
            request = key | {"models": rows, "slides": [subject.slide for subject in group]}
            path = cache / f"{safe_name(name)}-{i}.npz"
            accumulator.add_state(where, compute_arrays_once(path, request, measure, device=device))
            done += len(rows) * len(group)
            on_answers(done, total)
    cohort = accumulator.cohort(run.target.key_measure, truth, _folds(run, subjects))
    learned = has_learned(run.target, accumulator, cohort, truth)
    return _summarise(run, name, probe_settings, accumulator, cohort, patients, learned)


def _empty(run: Run, slides: int, probe_settings: ProbeSettings) -> Accumulator:
    return Accumulator(
        slides,
        len(probe_settings.methods),
        steps=probe_settings.steps,
        random_orders=probe_settings.random_orders,
        twins=TWINS,
        predictions=len(run.target.prediction_columns()),
        divisions=1 if isinstance(run.target, Classes) else len(run.data.splits),
    )


def _group(
    run: Run,
    population: Population,
    rows: Sequence[int],
    bags: Bags,
    group: Sequence[Subject],
    probe_settings: ProbeSettings,
    on_answers: Callable[[int], None],
) -> Arrays:
    """Probe the models that were tested on the same slides; every model has its own twins.

    on_answers: called with the number of answers so far.
    """
    accumulator, done = _empty(run, len(group), probe_settings), 0
    members = {row: population.member(row) for row in rows}
    at = {subject.slide: i for i, subject in enumerate(group)}
    for part in bags.parts(AT_ONCE, torch.tensor([subject.place for subject in group])):
        where = np.array([at[slide] for slide in part.ids])
        slides = Explained(part, run.target, torch.tensor(_explained(run, [group[i] for i in where])))
        every = []
        for row, model in members.items():
            seeds = range(row * TWINS, (row + 1) * TWINS)
            division, decision = _division(run, row), run.decision([row])
            every.append(probe(model, slides, probe_settings, accumulator, where, division, decision, seeds))
            done += len(part)
            on_answers(done)
        if len(members) > 1:
            alike = stability(torch.stack(every), part.offsets)
            accumulator.add("stability", where, alike.spearman.mean(0).T)
            accumulator.add("overlap", where, alike.overlap.mean(0).T)
    return accumulator.state()


def _summarise(
    run: Run,
    name: str,
    settings: ProbeSettings,
    accumulator: Accumulator,
    cohort: tuple[Floats, Floats, Floats],
    patients: Sequence[str],
    learned: bool | None,
) -> RunFaithfulness:
    """Combine all figures. cohort: those of the cohort, by map, in random orders, and of the twins; learned: see
    `has_learned`.
    """
    _, auc_at_random, auc_of_twins = cohort
    return RunFaithfulness(
        name=name,
        run=run.key,
        weights=weights_key(run),
        data=run.data.fingerprint,
        model=run.settings.model,
        slides=len(patients),
        rightly_answered=int((accumulator.rights > 0).sum()),
        random_order=accumulator.band(accumulator.at_random, patients),
        random_order_auc=tuple(auc_at_random.tolist()),
        auc_of_twins=tuple(auc_of_twins.tolist()),
        maps=summarise_maps(settings.methods, accumulator, cohort[0], patients, learned),
        words=curve_words(run.target),
        confidence=settings.confidence,
        region_tiles=settings.region_tiles,
    )


def has_learned(
    target: Target, accumulator: Accumulator, cohort: tuple[Floats, Floats, Floats], outcomes: NDArray[Any]
) -> bool | None:
    """Return whether the figure of the cohort is above that of every twin; None if it is not known. cohort: as for
    `_summarise`.

    If the slides are few and easily separated, a twin may have the same AUC, such as 1, without having learned
    anything: twins with the AUC of the models are compared with them by the likelihood of the labels.
    """
    auc, _, auc_of_twins = cohort
    own, twins = auc[0, 0], np.nan_to_num(auc_of_twins, nan=target.chance)  # equal predictions have no correlation
    if np.isnan(own):
        return None
    equal = np.isclose(twins, own, rtol=0, atol=1e-9)
    if (twins[~equal] > own).any() or not (equal.any() and isinstance(target, Classes)):
        return bool(own > twins.max())
    likelihood, *of_twins = accumulator.log_likelihoods(outcomes)
    return bool(likelihood > np.array(of_twins)[equal].max())


def summarise_maps(
    methods: Sequence[str],
    accumulator: Accumulator,
    auc: Floats,
    patients: Sequence[str],
    learned: bool | None,
) -> tuple[MapFaithfulness, ...]:
    """Combine the figures of each map, beside those of the twins' map. auc (2 e, S+1): the figure of the cohort."""
    figures = accumulator.figures(patients)
    removals = [
        RemovalFigures(
            figures[i],
            accumulator.band(accumulator.most[i], patients),
            accumulator.band(accumulator.least[i], patients, backwards=True),
            tuple(auc[i].tolist()),
        )
        for i in range(len(figures))
    ]
    return tuple(
        MapFaithfulness(**vars(own), method=method, learned=learned, weights_shuffled=twin)
        for method, own, twin in zip(methods, removals[: len(methods)], removals[len(methods) :], strict=True)
    )
