"""The tables, the picture and the page of `carmil faithfulness`, with its randomisation test."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from carmil.files import write_text
from carmil.provenance import machine
from carmil.report.faithfulness_picture import write_picture
from carmil.report.page import write_page
from carmil.report.plots import Line, bars_svg, colour, share_svg
from carmil.runs.facts import SlideMean
from carmil.runs.faithfulness import (
    ALIKE,
    FAILS_FROM,
    Curve,
    MapFaithfulness,
    RemovalFigures,
    RunFaithfulness,
    write_faithfulness_file,
)
from carmil.studies import card
from carmil.studies.faithfulness_probe import EXPLAINED, FOLLOWED, FRACTION, TWINS
from carmil.tables import ResultTable

CURVES = {
    "deletion_area": "deletion area ↓",
    "insertion_area": "insertion area ↑",
    "aopc_over_random": "AOPC over random ↑",
    "monotonicity": "monotonicity ↑",
    "necessity": f"necessity at {FRACTION:.0%} ↑",
    "sufficiency": f"sufficiency at {FRACTION:.0%} ↑",
}
MAPS = {
    "normalised_entropy": "entropy of log n",
    "gini": "Gini",
    "effective": "effective instances",
    "stability": "stability: Spearman",
    "overlap": "stability: overlap of the ten best",
}
PASSED, FAILED, UNKNOWN, CONTROL = "passes ✓", "FAILS ✗", "not known", "control"
_KINDS = {FAILED: "fails", PASSED: "passes", UNKNOWN: ""}
WITHOUT = "weights shuffled"
MEANING = (
    "The model's weights are shuffled, so that nothing it has learned is left, and this twin is asked for its map and its answers. "
    "A map fails if one of these is so, and must then not be read as the model's reason:",
    f"the map is much like the twin's: the likeness below is {FAILS_FROM:g} or more. It then shows the features or the "
    "architecture. Likeness is |Spearman|, as a mirrored map is the same map, counted from what chance gives in bags of that size: "
    f"0 is chance, 1 the same map. It is the mean over {EXPLAINED} twins of each model, then over slides. The line at "
    f"{FAILS_FROM:g} is ours; a map just below it is not good because of it.",
    "the map explains no better than the twin's: as tiles go in its order, the model falls no further than in the order of the "
    "twin's map (AOPC gained: the lower end of its 95 % interval, paired over patients, is not above 0; "
    f"{FOLLOWED} twins of each model).",
    f"the model has learned nothing: the AUC of its test slides is not above that of every one of {TWINS} copies of the run with "
    f"shuffled weights. One of {TWINS + 1} runs without anything learned would pass this. A random model, too, has maps that "
    "explain its answers; there is nothing in them.",
)


@dataclass(frozen=True)
class FaithfulnessPart:
    """What the page of `carmil faithfulness` and the report of a run show: tables, curves, the randomisation test.

    kinds: of each row of the first table, for the page's colours. panels: (heading, svg); keys: (colours, map);
    verdicts: (map, whether it fails, why); about: what the figures of each run are of.
    """

    tables: tuple[ResultTable, ResultTable]
    kinds: list[str]
    panels: list[tuple[str, str]]
    keys: list[tuple[str, str]]
    tested: ResultTable
    bars: str
    verdicts: list[tuple[str, bool | None, tuple[str, ...]]]
    meaning: tuple[str, ...]
    about: dict[str, str]


def write_faithfulness(runs: Sequence[RunFaithfulness], out: Path, *, command: str) -> tuple[ResultTable, ...]:
    """Write faithfulness.json, .md, .png and .html; return the tables."""
    part = faithfulness_part(runs)
    write_faithfulness_file(runs, out, command=command)
    notes = "\n".join(f"- {line}" for line in remarks(runs))
    tables = "\n".join(table.markdown() for table in part.tables)
    write_text(out / "faithfulness.md", f"# Faithfulness\n\nResearch use only.\n\n{tables}\n{notes}\n")
    write_picture(runs, out / "faithfulness.png")
    write_page(
        out / "faithfulness.html",
        "faithfulness.html",
        title=", ".join(run.name for run in runs),
        faith=part,
        limits=card.LIMITS,
        machine=machine(),
        command=command,
    )
    return part.tables


def faithfulness_part(runs: Sequence[RunFaithfulness]) -> FaithfulnessPart:
    maps = named_maps(runs)
    return FaithfulnessPart(
        tables=(curves_table(maps), maps_table(runs)),
        kinds=[kind for one in maps.values() for kind in (_KINDS[verdict(one)], "control")],
        panels=panels(runs),
        keys=[(colour(i), name) for i, name in enumerate(maps)],
        tested=randomisation_table(runs),
        bars=bars_svg(
            [(name, one.figures["randomisation"], ALIKE in one.failures) for name, one in maps.items()],
            fails=FAILS_FROM,
        ),
        verdicts=[(name, one.fails, one.failures) for name, one in maps.items()],
        meaning=MEANING,
        about={run.name: _about(run) for run in runs},
    )


def named_maps(runs: Sequence[RunFaithfulness]) -> dict[str, MapFaithfulness]:
    """All maps by name: the explainer, of several runs with the run's name before it."""
    several = len(runs) > 1
    return {f"{run.name}: {one.method}" if several else one.method: one for run in runs for one in run.maps}


def curves_table(maps: Mapping[str, MapFaithfulness]) -> ResultTable:
    """Two rows per map: itself, and as its control the map of the model with shuffled weights."""
    rows = []
    for name, one in maps.items():
        pair: tuple[tuple[str, str, RemovalFigures], ...] = (
            (name, verdict(one), one),
            (f"{name}, {WITHOUT}", CONTROL, one.weights_shuffled),
        )
        for title, words, found in pair:
            rows.append((title, words, *(cell(found.figures.get(column)) for column in CURVES)))
    title = "Faithfulness over rightly answered slides, 95 % intervals over patients; the verdict is the randomisation test's"
    return ResultTable(title, ("map", "verdict", *CURVES.values()), tuple(rows), names=2)


def verdict(one: MapFaithfulness) -> str:
    return UNKNOWN if one.fails is None else FAILED if one.fails else PASSED


def maps_table(runs: Sequence[RunFaithfulness]) -> ResultTable:
    columns = [name for name in MAPS if any(name in one.figures for run in runs for one in run.maps)]
    rows = tuple(
        (run.name, one.method, *(cell(one.figures.get(name)) for name in columns)) for run in runs for one in run.maps
    )
    title = "Concentration of the maps, and agreement between the maps of a slide's models"
    return ResultTable(title, ("run", "map", *(MAPS[name] for name in columns)), rows, names=2)


def remarks(runs: Sequence[RunFaithfulness]) -> list[str]:
    """What the tables are of, and every map that fails."""
    return [f"{run.name}: {_about(run)}" for run in runs] + [
        f"{name} FAILS the randomisation test: {words}"
        for name, one in named_maps(runs).items()
        for words in one.failures
    ]


def panels(runs: Sequence[RunFaithfulness]) -> list[tuple[str, str]]:
    """(heading, svg) of deletion, insertion and the cohort's AUC. Dashed: random orders, of the first run; grey: the twins."""
    first, maps = runs[0], [one for run in runs for one in run.maps]
    twins = [one.weights_shuffled for one in maps]
    removed, added = "share of the tiles removed", "share of the tiles added"
    return [
        (
            "Deletion: the most relevant tiles are removed first; lower is better",
            _curves_svg(
                [one.deletion.mean for one in maps],
                [one.deletion.mean for one in twins],
                guide=first.random_order.mean,
                x_label=removed,
            ),
        ),
        (
            "Insertion: the most relevant tiles are added first; higher is better",
            _curves_svg(
                [one.insertion.mean for one in maps],
                [one.insertion.mean for one in twins],
                guide=first.random_order.mean[::-1],
                x_label=added,
            ),
        ),
        (
            "AUC of the cohort as tiles are removed",
            _curves_svg(
                [one.auc for one in maps],
                [one.auc for one in twins],
                guide=first.random_order_auc,
                x_label=removed,
                y_label="AUC",
            ),
        ),
    ]


def _curves_svg(
    maps: Sequence[Curve],
    twins: Sequence[Curve],
    *,
    guide: Curve,
    x_label: str,
    y_label: str = "probability of the label",
) -> str:
    lines = [Line(_points(curve)) for curve in maps] + [Line(_points(curve), control=True) for curve in twins]
    return share_svg(lines, guide=_points(guide), x_label=x_label, y_label=y_label)


def randomisation_table(runs: Sequence[RunFaithfulness]) -> ResultTable:
    """The test in figures: how alike the maps are, how much more the own map explains, and the AUC beside that of the twins."""
    twins = [f"{min(run.auc_of_twins):.2f} to {max(run.auc_of_twins):.2f}" for run in runs for _ in run.maps]
    rows = []
    for (name, one), auc in zip(named_maps(runs).items(), twins, strict=True):
        figures = (cell(one.figures["randomisation"]), cell(one.figures["aopc_gain"]))
        rows.append((name, verdict(one), *figures, f"{one.auc[0]:.2f}", auc))
    heads = ("map", "verdict", "likeness, all slides", "AOPC gained, rightly answered", "AUC", "AUC, weights shuffled")
    return ResultTable("Randomisation test", heads, tuple(rows), names=2)


def cell(figure: SlideMean | None, digits: int = 2) -> str:
    """0.61 (0.52 to 0.70)."""
    if figure is None or math.isnan(figure.value):
        return "–"
    value, low, high = (
        f"{round(number, digits) + 0.0:.{digits}f}" for number in (figure.value, figure.low, figure.high)
    )  # no -0.00
    return value if math.isnan(figure.low) else f"{value} ({low} to {high})"


def _points(values: Curve) -> list[tuple[float, float]]:
    last = len(values) - 1
    return [(i / last, min(1.0, max(0.0, y))) for i, y in enumerate(values) if not math.isnan(y)]


def _about(run: RunFaithfulness) -> str:
    return (
        f"{run.model}, {run.slides} slides as they were tested, {run.rightly_answered} of them answered rightly "
        "by at least one of their models"
    )
