"""`carmil faithfulness`: whether models need what their maps show, measured alike for several runs and explainers.

Every model is probed on the slides it was tested on, by its own map of the class that it answers. The figure of a slide is the
mean over its models; deletion, insertion and what follows from them are over rightly answered slides, as in the paper.

OUT/asked/RUN-i.json   results of the i-th group of models that were tested on the same slides, so that the command resumes
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from carmil import __version__
from carmil.bags.bags import Bags
from carmil.bags.store import Store
from carmil.errors import CarmilError
from carmil.evidence.concentration import stability
from carmil.evidence.explainers import check_explainers, default_explainer, explainers_of
from carmil.files import safe_name
from carmil.models.contract import BagModel
from carmil.progress import Log, count_progress
from carmil.runs.compute_once import compute_once
from carmil.runs.faithfulness import MapFaithfulness, RemovalFigures, RunFaithfulness
from carmil.runs.run import Run, read_run, weights_key
from carmil.studies import faithfulness_probe
from carmil.studies.accumulator import Accumulator, Floats
from carmil.studies.faithfulness_probe import TWINS, ProbeSettings, probe
from carmil.studies.subjects import Subject, check_complete, group_by_models, open_run_store, own_subjects, pack_bags

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
) -> list[RunFaithfulness]:
    """Measure every run by every method that fits it; without `methods` by its default explainer and attention.

    bags: where the cohort of the runs has moved to. Intermediate results are kept in `out`.
    """
    if steps < 10 or steps % 10:
        raise CarmilError(f"--steps {steps}: expected a multiple of 10, so that a tenth of the tiles is a step")
    if random_orders < 1:
        raise CarmilError(f"--random-orders {random_orders}: expected at least one, to compare with")
    check_explainers(methods)
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        check_complete(run)
    if len({run.data.fingerprint for run in runs}) > 1:
        log("these runs are not of the same slides and labels: their curves must not be compared")
    chosen = [_fitting(run, methods) for run in runs]
    for method in methods:
        without = [run for run, own in zip(runs, chosen, strict=True) if method not in own]
        if len(without) == len(runs):
            raise CarmilError(
                f"{method!r} fits none of these runs' models; those that fit {runs[0].folder}: {_all(runs[0])}"
            )
        for run in without:
            log(f"{method} does not fit {run.folder}: it is left out there")
    names = _names(runs)
    place = None if bags is None else pack_bags(runs[0], bags, out, log=log)
    stores = [open_run_store(run, place) for run in runs]
    return [
        _measure_run(run, name, store, ProbeSettings(own, steps, random_orders), out / "asked", device)
        for run, name, store, own in zip(runs, names, stores, chosen, strict=True)
    ]


def _all(run: Run) -> str:
    return ", ".join(explainers_of(run.model()))


def _fitting(run: Run, asked: Sequence[str]) -> tuple[str, ...]:
    model = run.model()
    wanted = asked or (default_explainer(model), "attention")
    found = tuple(dict.fromkeys(method for method in wanted if method in explainers_of(model)))
    if not found:
        raise CarmilError(f"none of {', '.join(asked)} fits {run.folder}; those that fit: {_all(run)}")
    return found


def _names(runs: Sequence[Run]) -> list[str]:
    """Names of the folders, with a number after the second of the same name."""
    names: list[str] = []
    for run in runs:
        same = sum(name.partition(" (")[0] == run.name for name in names)
        names.append(f"{run.name} ({same + 1})" if same else run.name)
    return names


def _measure_run(
    run: Run, name: str, store: Store, probe_settings: ProbeSettings, cache: Path, device: str
) -> RunFaithfulness:
    subjects = own_subjects(run, store)
    labels = [run.classes.index(str(subject.label)) for subject in subjects]
    patients = [subject.patient or subject.slide for subject in subjects]
    at = {subject.slide: i for i, subject in enumerate(subjects)}
    bags, population = store.bags(), run.population(device)
    accumulator, done = _empty(run, len(subjects), probe_settings), 0
    total = sum(len(subject.models) for subject in subjects)
    key = {"carmil": __version__, "weights": weights_key(run), "data": store.fingerprint, **vars(probe_settings)}
    key["thresholds"] = run.thresholds
    key["twins"] = [faithfulness_probe.TWINS, faithfulness_probe.EXPLAINED, faithfulness_probe.FOLLOWED]
    with count_progress(f"asking {name}", "answers") as on_answers:
        for i, (rows, group) in enumerate(group_by_models(subjects).items()):

            def measure(
                rows: tuple[int, ...] = rows, group: list[Subject] = group, done: int = done
            ) -> dict[str, Floats]:
                members = {row: population.member(row) for row in rows}
                return _group(run, members, bags, group, probe_settings, lambda more: on_answers(done + more, total))

            where = np.array([at[subject.slide] for subject in group])
            mine = key | {"models": rows, "slides": [subject.slide for subject in group]}
            path = cache / f"{safe_name(name)}-{i}.json"
            found, _ = compute_once(path, mine, measure, device=device, kind=dict[str, list])
            accumulator.add_state(where, found)
            done += len(rows) * len(group)
            on_answers(done, total)
    return _summarise(run, name, probe_settings.methods, accumulator, labels, patients)


def _empty(run: Run, slides: int, probe_settings: ProbeSettings) -> Accumulator:
    return Accumulator(
        slides,
        len(probe_settings.methods),
        steps=probe_settings.steps,
        random_orders=probe_settings.random_orders,
        twins=TWINS,
        classes=len(run.classes),
    )


def _group(
    run: Run,
    members: dict[int, BagModel],
    bags: Bags,
    group: Sequence[Subject],
    probe_settings: ProbeSettings,
    on_answers: Callable[[int], None],
) -> dict[str, Floats]:
    """Probe models that were tested on the same slides; every model has twins of its own. on_answers: gets the answers so far."""
    accumulator, done = _empty(run, len(group), probe_settings), 0
    at = {subject.slide: i for i, subject in enumerate(group)}
    for part in bags.parts(AT_ONCE, torch.tensor([subject.place for subject in group])):
        where = np.array([at[slide] for slide in part.ids])
        labels = torch.tensor([run.classes.index(str(group[i].label)) for i in where])
        every = []
        for row, model in members.items():
            seeds = range(row * TWINS, (row + 1) * TWINS)
            every.append(probe(model, part, labels, probe_settings, accumulator, where, run.decision([row]), seeds))
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
    methods: Sequence[str],
    accumulator: Accumulator,
    labels: Sequence[int],
    patients: Sequence[str],
) -> RunFaithfulness:
    figures = accumulator.figures(patients)
    auc, auc_at_random, auc_of_twins = accumulator.auc(labels)
    removals = [
        RemovalFigures(
            figures[i],
            accumulator.band(accumulator.most[i], patients),
            accumulator.band(accumulator.least[i], patients, backwards=True),
            tuple(auc[i].tolist()),
        )
        for i in range(len(figures))
    ]
    learned = None if np.isnan(auc[0, 0]) else bool(auc[0, 0] > auc_of_twins.max())
    maps = tuple(
        MapFaithfulness(**vars(own), method=method, learned=learned, weights_shuffled=twin)
        for method, own, twin in zip(methods, removals[: len(methods)], removals[len(methods) :], strict=True)
    )
    return RunFaithfulness(
        name=name,
        run=run.key,
        weights=weights_key(run),
        data=run.data.fingerprint,
        model=run.settings.model,
        slides=len(labels),
        rightly_answered=int((accumulator.rights > 0).sum()),
        random_order=accumulator.band(accumulator.at_random, patients),
        random_order_auc=tuple(auc_at_random.tolist()),
        auc_of_twins=tuple(auc_of_twins.tolist()),
        maps=maps,
    )
