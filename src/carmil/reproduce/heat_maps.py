"""Figures 1b, 5 and 7: maps of several methods on one slide, whole and zooms, with annotated tiles outlined.

The slide and the zooms are chosen by a rule, not by looks. n tiles of the slide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from carmil.bags.bags import Bags
from carmil.bags.store import Store
from carmil.errors import CarmilError
from carmil.evidence.explainers import explain
from carmil.evidence.localisation import auroc
from carmil.evidence.rank_correlation import spearman
from carmil.maps.tile_maps import Kind, TileMap
from carmil.models.pooling import Offsets
from carmil.progress import console
from carmil.report.heat_map_figure import SlideMaps, draw_heat_maps, has_annotations
from carmil.reproduce.method_runs import Method, train_methods
from carmil.reproduce.recipes import Finding, Picture, Request, write_finding
from carmil.reproduce.slide_cohorts import with_coordinates
from carmil.reproduce.slide_table import ABMIL, uninformed_lines
from carmil.runs.run import Run
from carmil.studies.subjects import Subject, open_run_store, own_subjects
from carmil.tables import ResultTable

CAR = Method("CAR-MIL", "car/abmil.gated")
METHODS = (ABMIL, Method("CLAM", "clam.sb"), Method("AddMIL", "additive"), Method("DSMIL", "dsmil"), CAR)
# title, method, explainer and kind of each map
MAPS: tuple[tuple[str, Method, str, Kind], ...] = (
    *((method.title, method, "attention", "factual") for method in METHODS[:-1]),
    ("CAR-MIL (F)", CAR, "attention", "factual"),
    ("CAR-MIL (CF)", CAR, "counterfactual_attention", "counterfactual"),
    ("CAR-MIL, path evidence", CAR, "path", "evidence"),
)
PAPERS_EXAMPLE = (
    "on its own example, a BRACS slide, the paper has Spearman 0.67 between F and ABMIL and 0.29 between F and CF"
)
RAW = (
    "attention scores, before the softmax, min-max over the tiles of the slide, as the paper has them; path evidence is signed, "
    "its scale centred at 0; where several models were tested on the slide, the mean of their maps; research use only"
)


@dataclass(frozen=True)
class Example:
    """A test slide: its class by name and number, its annotated tiles if known, and the rule it was chosen by."""

    slide: str
    place: int
    label: str
    number: int
    annotated: int | None
    rule: str


def reproduce(request: Request, *, slides: Path | None = None) -> Finding:
    """slides: a folder in which the slide's file is found by name, to draw over it."""
    cohort = with_coordinates(request)
    rows = train_methods([cohort], METHODS, request)
    runs = {row.method.title: row.run for row in rows}
    store = open_run_store(runs[CAR.title])
    example = choose([row.run for row in rows], store)
    bag = store.bags()[torch.tensor([example.place])]
    truth = None if bag.instance_labels is None else (bag.instance_labels > 0).numpy()
    maps, certainty = [], []
    with console.status(f"explaining {example.slide} by {len(runs)} models"):
        for title, method, explainer, kind in MAPS:
            run = runs[method.title]
            subject = next(one for one in own_subjects(run, store) if one.slide == example.slide)
            assert subject.probabilities is not None
            values = explain_slide(run, subject, bag, explainer, request.device)[:, example.number]
            maps.append(TileMap(example.label, values, kind, title, kind != "evidence"))
            certainty.append(subject.probabilities[example.number])
    assert bag.coordinates is not None
    corners, size = bag.coordinates.numpy().astype(np.float64), store.entries[example.place].tile_size
    slide_maps = SlideMaps(example.slide, corners, size, str(bag.units[0]), tuple(maps), truth)
    figures = draw_heat_maps(slide_maps, request.out / "heat_maps.png", slides)
    finding = Finding(
        (_table(maps, certainty, example, truth),),
        tuple(Picture(path, caption) for path, caption in figures),
        (*_lines(cohort.title, example, maps, bag), *uninformed_lines(rows)),
        (RAW, *cohort.notes),
    )
    return write_finding("heat-maps", request, finding, {"slide": vars(example), "cohort": cohort.name})


def choose(runs: Sequence[Run], store: Store) -> Example:
    """The test slide, with coordinates and not of the first class, with the most annotated tiles that all models predict
    correctly; if they never do, the one with the most. If none is annotated, the first by name."""
    classes, bags = runs[0].classes, store.bags()
    correct = set.intersection(*(_correct(run, own_subjects(run, store)) for run in runs))
    candidates = [
        (subject.slide in correct, _annotated_tiles(bags, subject.place), subject)
        for subject in own_subjects(runs[0], store)
        if subject.label not in (None, classes[0]) and bags.units[subject.place] is not None
    ]
    if not candidates:
        raise CarmilError(
            f"{runs[0].folder}: no slide of another class than {classes[0]!r} was tested: nothing to draw"
        )
    agreed, most, subject = min(candidates, key=lambda line: (not line[0], -line[1], line[2].slide))
    kind = "with the most annotated tiles" if most else "that comes first by name"
    tests = f"{len(candidates)} test slides that are not {classes[0]!r}"
    if agreed:
        count = sum(line[0] for line in candidates)
        rule = f"the slide {kind} among the {count} of {tests} which all {len(runs)} models predict correctly"
    else:
        rule = f"the slide {kind} among the {tests}, as all {len(runs)} models together predict none of them correctly"
    label = str(subject.label)
    known = None if bags.instance_labels is None else most
    return Example(subject.slide, subject.place, label, classes.index(label), known, rule)


def _correct(run: Run, subjects: Sequence[Subject]) -> set[str]:
    """Slides that the models which were tested on them predict correctly."""
    return {
        one.slide
        for one in subjects
        if one.probabilities is not None and run.decision(one.models).answer(one.probabilities) == one.label
    }


def explain_slide(run: Run, subject: Subject, bag: Bags, method: str, device: str) -> NDArray[np.float64]:
    """(n, k) the mean over the models that were tested on the slide."""
    population = run.population(device)
    maps = [explain(population.member(row), bag, method) for row in subject.models]
    return torch.stack(maps).double().mean(0).numpy()


def _annotated_tiles(bags: Bags, place: int) -> int:
    if bags.instance_labels is None:
        return 0
    return int((bags.instance_labels[int(bags.offsets[place]) : int(bags.offsets[place + 1])] > 0).sum())


def _table(
    maps: Sequence[TileMap], certainty: Sequence[float], example: Example, truth: NDArray[np.bool_] | None
) -> ResultTable:
    """The probability by each map's model, and the AUROC of the map for the annotated tiles if there are any."""
    lines = []
    for one, p in zip(maps, certainty, strict=True):
        area = []
        if has_annotations(truth):
            scores, hits = torch.from_numpy(one.values)[:, None], torch.from_numpy(truth)[:, None]
            value = float(auroc(scores, hits, torch.tensor([0, len(truth)])))
            area = ["–" if truth.all() else f"{100 * value:.1f}"]
        lines.append((one.model, f"{100 * p:.0f}", *area))
    heads = (
        "map",
        f"p of {example.label}, %",
        *(["AUROC of the annotated tiles, %"] if has_annotations(truth) else []),
    )
    return ResultTable(f"{example.slide}: one slide, an illustration and no comparison of methods", heads, tuple(lines))


def _lines(title: str, example: Example, maps: Sequence[TileMap], bag: Bags) -> list[str]:
    offsets, n = Offsets(bag.offsets), len(bag.features)
    values = {one.model: torch.from_numpy(one.values)[:, None] for one in maps}
    alike = [
        float(spearman(values[a], values[b], offsets))
        for a, b in (("ABMIL", "CAR-MIL (F)"), ("CAR-MIL (F)", "CAR-MIL (CF)"))
    ]
    tiles = (
        f"{example.annotated} of {n} tiles annotated" if example.annotated else f"{n} tiles, none known to be annotated"
    )
    return [
        f"{title}, slide {example.slide} ({example.label}; {tiles}): {example.rule}. Chosen by this rule, not by looks",
        f"on this slide Spearman is {alike[0]:.2f} between F and ABMIL and {alike[1]:.2f} between F and CF; {PAPERS_EXAMPLE}",
    ]
