"""Figures 1b, 5 and 7: maps of several methods on one slide, whole and zooms, with annotated tiles outlined.

The slide and the zooms are selected by a rule, not by their appearance. n tiles of the slide.
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
from carmil.models.pooling import Offsets, bag_sum
from carmil.progress import console
from carmil.report.heat_map_figure import SlideMaps, draw_heat_maps, has_annotations
from carmil.report.paper import Finding, Picture
from carmil.reproduce.method_runs import Method, train_methods
from carmil.reproduce.recipes import Request, write_finding
from carmil.reproduce.slide_cohorts import with_coordinates
from carmil.reproduce.slide_table import ABMIL, caution_lines
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
PAPERS = "on its own example, a BRACS slide, the paper has Spearman 0.67 between F and ABMIL and 0.29 between F and CF"
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
    """Draw the figure. slides: a folder with the slide's file, found by name, to draw over it."""
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
            assert subject.predicted is not None
            values = explain_slide(run, subject, bag, explainer, request.device)[:, example.number]
            maps.append(TileMap(example.label, values, kind, title, kind != "evidence"))
            certainty.append(subject.predicted[example.number])
    assert bag.coordinates is not None
    corners, size = bag.coordinates.numpy().astype(np.float64), store.entries[example.place].tile_size
    slide_maps = SlideMaps(example.slide, corners, size, str(bag.units[0]), tuple(maps), truth)
    figures = draw_heat_maps(slide_maps, request.out / "heat_maps.png", slides)
    known = f"{example.annotated} of {len(corners)} tiles annotated"
    tiles = known if example.annotated else f"{len(corners)} tiles, none known to be annotated"
    return write_finding(
        "heat-maps",
        request,
        {"slide": vars(example), "cohort": cohort.name},
        tables=(_table(maps, certainty, example, truth),),
        pictures=[Picture(path, caption) for path, caption in figures],
        lines=(
            f"{cohort.title}, slide {example.slide} ({example.label}; {tiles}): {example.rule}",
            PAPERS,
            *caution_lines(rows),
        ),
        conditions=(RAW, *cohort.notes),
    )


def choose(runs: Sequence[Run], store: Store) -> Example:
    """Select a test slide with coordinates that is not of the first class.

    Among the slides that all models predict correctly (or all slides, if there are none) it is the one with the most
    annotated tiles; if none is annotated, the first by name."""
    classes, bags = runs[0].outputs, store.bags()
    correct = set.intersection(*(_correct(run, own_subjects(run, store)) for run in runs))
    truth = torch.zeros(len(bags.features)) if bags.instance_labels is None else bags.instance_labels > 0
    annotated = bag_sum(truth.double().unsqueeze(-1), Offsets(bags.offsets)).long().flatten().tolist()
    candidates = [
        (subject.slide in correct, annotated[subject.place], subject)
        for subject in own_subjects(runs[0], store)
        if subject.label not in (None, classes[0]) and bags.units[subject.place] is not None
    ]
    if not candidates:
        raise CarmilError(
            f"{runs[0].folder}: no test slide is of another class than {classes[0]!r}: expected at least one to draw"
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
    """Return the slides that are predicted correctly by the models that were tested on them."""
    return {
        one.slide
        for one in subjects
        if one.predicted is not None and run.decision(one.models).answer(one.predicted) == one.label
    }


def explain_slide(run: Run, subject: Subject, bag: Bags, method: str, device: str) -> NDArray[np.float64]:
    """Return (n, k) the mean evidence over the models that were tested on the slide."""
    population = run.population(device)
    maps = [explain(population.member(row), bag, method) for row in subject.models]
    return torch.stack(maps).double().mean(0).numpy()


def _table(
    maps: Sequence[TileMap], certainty: Sequence[float], example: Example, truth: NDArray[np.bool_] | None
) -> ResultTable:
    """Tabulate one row per map.

    The columns are the model's probability, the correlations with ABMIL's and with CAR-MIL's factual attention, and
    the AUROC for annotated tiles if there are any."""
    values = {one.model: torch.from_numpy(one.values)[:, None] for one in maps}
    offsets = Offsets(torch.tensor([0, len(maps[0].values)]))
    columns = {
        "map": list(values),
        f"p of {example.label}, %": [f"{100 * p:.0f}" for p in certainty],
        **{
            f"Spearman with {name}": [f"{float(spearman(one, values[name], offsets)):.2f}" for one in values.values()]
            for name in ("ABMIL", "CAR-MIL (F)")
        },
    }
    if has_annotations(truth):
        hits = torch.from_numpy(truth)[:, None]
        areas = [100 * float(auroc(one, hits, offsets)) for one in values.values()]
        columns["AUROC of the annotated tiles, %"] = ["–" if truth.all() else f"{area:.1f}" for area in areas]
    title = f"{example.slide}: one slide, an illustration and no comparison of methods"
    return ResultTable(title, tuple(columns), tuple(zip(*columns.values(), strict=True)))
