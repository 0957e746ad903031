"""Agreement of a run's maps with the known truth of the instances, each model on its own test or validation bags."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.evidence import explainers_of
from carmil.evidence.map_agreement import MEASURES, MapAgreement, agreement
from carmil.models.contract import BagModel
from carmil.runs.compute_once import compute_once
from carmil.runs.facts import SlideMean
from carmil.runs.run import Run, weights_key
from carmil.studies.figures import mean_interval
from carmil.studies.subjects import open_run_store, own_subjects, validation_places
from carmil.training.population import Population

MAPS = ("attention", "rollout", "path")  # maps whose agreement `carmil train` reports


def map_figures(
    population: Population, rows: Sequence[int], bags: Bags, chosen: Tensor
) -> dict[str, NDArray[np.float64]]:
    """Return AUPRC+ of the maps of MAPS on each chosen bag, (b), and for a single output AUPRC± by the mirror rule.

    Each value is the mean over the models at `rows`, and over the outputs if the truth has several columns. The columns
    of two classes cover both signs, as evidence against one is evidence for the other; instances that lower a risk are
    found only by the negative side of its map.
    """
    models = [population.member(row) for row in rows]
    agreements = [one for one in agreement(models, bags, chosen, MAPS) if one.rule == "mirror"]
    measures = {"auprc": "auprc_plus"} | ({"auprc_both": "auprc_both"} if models[0].classes == 1 else {})
    return {
        f"{name}_{one.explainer}": one.measures[measure].mean(0).nanmean(-1).numpy()
        for name, measure in measures.items()
        for one in agreements
    }


def run_agreement(
    run: Run, explainers: Sequence[str] = (), *, bags: Literal["test", "validation"] = "test", device: str = "cpu"
) -> list[MapAgreement]:
    """Return the agreement of the maps of a run, each model on its own test or validation bags; NaN on all other
    bags of the store.

    explainers: those to use, which must fit the run's model; by default all that fit. The results are cached in
    the run's folder.
    """
    store, population = open_run_store(run), run.population(device)
    models = [population.member(row) for row in range(len(population))]
    if bags == "validation":
        places = validation_places(run, store)
    else:
        subjects = own_subjects(run, store)
        places = [sorted(subject.place for subject in subjects if row in subject.models) for row in range(len(models))]
    results: list[MapAgreement] = []
    for name in explainers or explainers_of(models[0]):
        measure = partial(_by_model, models, store.bags(), places, name)
        request = {"run": run.key, "weights": weights_key(run), "explainer": name, "measures": [*MEASURES]}
        path = run.folder / "agreement" / f"{bags}-{name}.json"
        kept, _ = compute_once(path, request, measure, device=device)
        results += [_expand(one, name, places, len(store.ids)) for one in kept]
    return results


def slide_agreement(run: Run, explainers: Sequence[str], *, device: str) -> dict[str, dict[str, SlideMean]]:
    """Return every measure of each explainer that has a value, by the mirror rule, with intervals over patients.

    The value of a test slide is the mean over its models, then over classes.
    """
    patients = {subject.place: subject.patient or subject.slide for subject in own_subjects(run, open_run_store(run))}
    places = sorted(patients)
    figures: dict[str, dict[str, SlideMean]] = {}
    for one in run_agreement(run, explainers, device=device):
        for measure, values in one.measures.items() if one.rule == "mirror" else ():
            by_slide = values.nanmean(0).nanmean(-1).numpy()[places]
            figure = mean_interval(by_slide, [patients[place] for place in places])
            if figure.slides:
                figures.setdefault(one.explainer, {})[measure] = figure
    return figures


def _by_model(models: Sequence[BagModel], bags: Bags, places: Sequence[Sequence[int]], name: str) -> list[Any]:
    """Return one entry per rule, with the values of every measure for every model on its own bags.

    Models with the same bags are computed together.
    """
    together: dict[tuple[int, ...], list[int]] = {}
    for row, own in enumerate(places):
        together.setdefault(tuple(own), []).append(row)
    rules: dict[str, dict[str, list[Any]]] = {}
    for own, rows in together.items():
        for one in agreement([models[row] for row in rows], bags, torch.tensor(own), [name]):
            values = rules.setdefault(one.rule, {measure: [[] for _ in models] for measure in MEASURES})
            for measure, tensor in one.measures.items():
                for row, of_model in zip(rows, tensor.tolist(), strict=True):
                    values[measure][row] = of_model
    return [{"rule": rule, "measures": values} for rule, values in rules.items()]


def _expand(kept: Any, name: str, places: Sequence[Sequence[int]], bags: int) -> MapAgreement:
    """Expand the values of each model's own bags to (r, b, c); None in the JSON is NaN."""
    measures = {}
    for measure, by_model in kept["measures"].items():
        rows = [torch.from_numpy(np.array(values, dtype=np.float64)) for values in by_model]
        measures[measure] = torch.full((len(rows), bags, rows[0].shape[-1]), torch.nan, dtype=torch.float64)
        for row, (own, values) in enumerate(zip(places, rows, strict=True)):
            measures[measure][row, list(own)] = values
    return MapAgreement(name, kept["rule"], measures)
