"""Figures 1b, 5 and 7: maps of several methods on one slide, whole and zooms, with the truth drawn around where it is known.

Which slide and which zooms is said by a rule, not by looks. n tiles of the slide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from carmil.bags.bags import Bags
from carmil.bags.store import Store
from carmil.datasets.study_cohort import StudyCohort
from carmil.errors import CarmilError
from carmil.evidence.explainers import explain
from carmil.evidence.localisation import auroc
from carmil.evidence.rank_correlation import spearman
from carmil.maps.tile_maps import Kind, TileMap
from carmil.models.pooling import Offsets
from carmil.progress import console
from carmil.reproduce.chosen_cohorts import with_places
from carmil.reproduce.heat_map_picture import Drawn, annotated, draw_heat_maps
from carmil.reproduce.method_runs import Method, MethodRun, train_model
from carmil.reproduce.recipes import Finding, Picture, Request, write_finding
from carmil.reproduce.slide_table import uninformed
from carmil.runs.run import Run
from carmil.studies.decisions import decision_of
from carmil.studies.predictions import probabilities
from carmil.studies.subjects import Subject, open_run_store, own_subjects
from carmil.tables import ResultTable

CAR = "car/abmil.gated"
MAPS: tuple[tuple[str, str, str, Kind], ...] = (
    ("ABMIL", "abmil.gated", "attention", "factual"),
    ("CLAM", "clam.sb", "attention", "factual"),
    ("AddMIL", "additive", "attention", "factual"),
    ("DSMIL", "dsmil", "attention", "factual"),
    ("CAR-MIL (F)", CAR, "attention", "factual"),
    ("CAR-MIL (CF)", CAR, "counterfactual_attention", "counterfactual"),
    ("CAR-MIL, path evidence", CAR, "path", "evidence"),
)
PAPERS_EXAMPLE = (
    "on its own example, a BRACS slide, the paper has Spearman 0.67 between F and ABMIL and 0.29 between F and CF"
)
RAW = (
    "attention scores, before the softmax, min-max over the tiles of the slide, as the paper has them; path evidence is signed and "
    "has 0 in its middle; where several models were tested on the slide, the mean of their maps; research use only"
)


@dataclass(frozen=True)
class Chosen:
    """A test slide, its class by name and number, how many of its tiles are annotated if known, and by which rule it was taken."""

    slide: str
    place: int
    label: str
    number: int
    annotated: int | None
    rule: str


def reproduce(request: Request, *, slides: Path | None = None) -> Finding:
    """slides: a folder in which the slide's file is looked for by name, to draw over its picture."""
    cohort = with_places(request)
    runs = {model: train_model(cohort, model, request) for _, model, _, _ in MAPS}
    store = open_run_store(runs[CAR])
    chosen = choose(list(runs.values()), store)
    bag = store.bags()[torch.tensor([chosen.place])]
    with console.status(f"asking {len(runs)} models about {chosen.slide}"):
        maps = [
            TileMap(
                chosen.label, _asked(runs[model], method, chosen, bag, request.device), kind, title, kind != "evidence"
            )
            for title, model, method, kind in MAPS
        ]
    drawn = Drawn(
        slide=chosen.slide,
        corners=_corners(bag),
        size=store.entries[chosen.place].tile_size,
        unit=str(bag.units[0]),
        maps=tuple(maps),
        truth=_truth(bag),
    )
    figures = draw_heat_maps(drawn, request.out / "heat_maps.png", slides)
    finding = Finding(
        (_table(maps, runs, chosen, bag),),
        tuple(Picture(path, words) for path, words in figures),
        (*_lines(cohort, chosen, maps, bag), *uninformed(_answered(cohort, runs))),
        (RAW, *cohort.notes),
    )
    return write_finding("heat-maps", request, finding, {"slide": vars(chosen), "cohort": cohort.name})


def choose(runs: Sequence[Run], store: Store) -> Chosen:
    """Of the test slides with coordinates that are not of the first class the one with the most annotated tiles that all
    models answer rightly; where they never do, the one with the most. Where none is annotated, the first by name."""
    classes, bags = runs[0].classes, store.bags()
    units = bags.units
    right = set.intersection(*(_rightly(run, own_subjects(run, store)) for run in runs))
    found = []
    for one in own_subjects(runs[0], store):
        if one.label is not None and one.label != classes[0] and units[one.place] is not None:
            found.append((one.slide in right, _annotated(bags, one.place), one))
    if not found:
        raise CarmilError(
            f"{runs[0].folder}: no slide of another class than {classes[0]!r} was tested: nothing to draw"
        )
    agreed, most, one = min(found, key=lambda line: (not line[0], -line[1], line[2].slide))
    kind = "with the most annotated tiles" if most else "that comes first by name"
    among = f"{sum(line[0] for line in found)} of {len(found)} test slides that are not {classes[0]!r}"
    rule = f"the slide {kind} among the {among} which all {len(runs)} models answer rightly"
    if not agreed:
        rule = f"the slide {kind} among the {len(found)} test slides that are not {classes[0]!r}, as all {len(runs)} models "
        rule += "together answer none of them rightly"
    assert one.label is not None
    known = None if bags.instance_labels is None else most
    return Chosen(one.slide, one.place, one.label, classes.index(one.label), known, rule)


def _rightly(run: Run, subjects: Sequence[Subject]) -> set[str]:
    """Slides that the models which were tested on them answer rightly."""
    return {
        one.slide
        for one in subjects
        if one.probabilities is not None and decision_of(run, one.models).answer(one.probabilities) == one.label
    }


def _asked(run: Run, method: str, chosen: Chosen, bag: Bags, device: str) -> NDArray[np.float64]:
    """(n) for the slide's class: the mean over the models that were tested on it."""
    store = open_run_store(run)
    subject = next(one for one in own_subjects(run, store) if one.slide == chosen.slide)
    population = run.population(device)
    found = [explain(population.member(row), bag, method)[:, chosen.number] for row in subject.models]
    return torch.stack(found).double().mean(0).numpy()


def _corners(bag: Bags) -> NDArray[np.float64]:
    assert bag.coordinates is not None
    return bag.coordinates.numpy().astype(np.float64)


def _truth(bag: Bags) -> NDArray[np.bool_] | None:
    return None if bag.instance_labels is None else (bag.instance_labels > 0).numpy()


def _annotated(bags: Bags, place: int) -> int:
    if bags.instance_labels is None:
        return 0
    return int((bags.instance_labels[int(bags.offsets[place]) : int(bags.offsets[place + 1])] > 0).sum())


def _table(maps: Sequence[TileMap], runs: dict[str, Run], chosen: Chosen, bag: Bags) -> ResultTable:
    """What each map's model answers on this one slide, and what the map makes of the annotated tiles if there are any."""
    truth, lines = _truth(bag), []
    for one, (_, model, _, _) in zip(maps, MAPS, strict=True):
        p = runs[model].predictions()
        mine = p[p["slide"] == chosen.slide]
        sure = float(probabilities(mine, runs[model].classes)[:, chosen.number].mean())
        lines.append((one.model, f"{100 * sure:.0f}", *([_area(one, truth)] if annotated(truth) else [])))
    heads = ("map", f"p of {chosen.label}, %", *(["AUROC of the annotated tiles, %"] if annotated(truth) else []))
    return ResultTable(
        f"{chosen.slide}: one slide, so an illustration and no comparison of methods", heads, tuple(lines)
    )


def _area(one: TileMap, truth: NDArray[np.bool_]) -> str:
    """AUROC in per cent; none where all tiles are annotated."""
    if truth.all():
        return "–"
    scores, hits = torch.from_numpy(one.values)[:, None], torch.from_numpy(truth)[:, None]
    return f"{100 * float(auroc(scores, hits, Offsets(torch.tensor([0, len(truth)])))):.1f}"


def _lines(cohort: StudyCohort, chosen: Chosen, maps: Sequence[TileMap], bag: Bags) -> list[str]:
    offsets = Offsets(bag.offsets)
    values = {one.model: torch.from_numpy(one.values)[:, None] for one in maps}
    alike = [
        float(spearman(values[a], values[b], offsets))
        for a, b in (("ABMIL", "CAR-MIL (F)"), ("CAR-MIL (F)", "CAR-MIL (CF)"))
    ]
    n = len(bag.features)
    area = (
        f"{chosen.annotated} of {n} tiles annotated" if chosen.annotated else f"{n} tiles, none known to be annotated"
    )
    return [
        f"{cohort.title}, slide {chosen.slide} ({chosen.label}; {area}): {chosen.rule}. Chosen by this rule, not by looks",
        f"on this slide Spearman is {alike[0]:.2f} between F and ABMIL and {alike[1]:.2f} between F and CF; {PAPERS_EXAMPLE}",
    ]


def _answered(cohort: StudyCohort, runs: dict[str, Run]) -> list[MethodRun]:
    """The models by the first word of their maps' titles."""
    titles = {model: title.partition(" (")[0] for title, model, _, kind in MAPS if kind == "factual"}
    return [MethodRun.of(cohort, Method(titles[model], model), run) for model, run in runs.items()]
