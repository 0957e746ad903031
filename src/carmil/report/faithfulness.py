"""The tables, the picture and the page of `carmil faithfulness`, with its randomisation test made plain to see."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carmil.files import write_text
from carmil.provenance import machine, plain
from carmil.report.faithfulness_file import FILE, facts_of
from carmil.report.faithfulness_picture import write_picture
from carmil.report.page import write_page
from carmil.report.plots import Line, bars_svg, colour, share_svg
from carmil.studies import card
from carmil.studies.faithfulness_probe import EXPLAINED, FOLLOWED, FRACTION, TWINS
from carmil.studies.verdict import ALIKE, FAILS_FROM, Figure, Followed, JudgedMap, JudgedRun
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


def write_faithfulness(runs: Sequence[JudgedRun], out: Path, *, command: str) -> list[ResultTable]:
    """Writes faithfulness.json, .md, .png and .html; gives the tables."""
    parts = faithfulness_parts(runs)
    facts = {"command": command, "machine": machine(), "runs": [facts_of(run) for run in runs]}
    write_text(out / FILE, json.dumps(plain(facts), indent=2))
    listed = "\n".join(f"- {line}" for line in remarks(runs))
    written = "\n".join(table.markdown() for table in parts["tables"])
    write_text(out / "faithfulness.md", f"# Faithfulness\n\nResearch use only.\n\n{written}\n{listed}\n")
    write_picture(runs, out / "faithfulness.png")
    write_page(
        out / "faithfulness.html",
        "faithfulness.html",
        title=", ".join(run.name for run in runs),
        faith=parts,
        limits=card.LIMITS,
        machine=machine(),
        command=command,
    )
    return parts["tables"]


def faithfulness_parts(runs: Sequence[JudgedRun]) -> dict[str, Any]:
    """What the page of `carmil faithfulness` and the report of a run show: tables, curves, the randomisation test."""
    maps = [one for run in runs for one in run.maps]
    return {
        "tables": [curves_table(runs), maps_table(runs)],
        "kinds": kinds(runs),
        "panels": panels(runs),
        "keys": [(colour(i), named(one, runs)) for i, one in enumerate(maps)],
        "tested": randomisation_rows(runs),
        "bars": bars_svg(
            [(named(one, runs), one.figures["randomisation"], ALIKE in one.failures) for one in maps], fails=FAILS_FROM
        ),
        "verdicts": [(named(one, runs), one.fails, one.failures) for one in maps],
        "meaning": MEANING,
        "about": {run.name: _about(run) for run in runs},
    }


def curves_table(runs: Sequence[JudgedRun]) -> ResultTable:
    """Two lines a map: itself, and as its control the map of the model with shuffled weights."""
    lines = []
    for run in runs:
        for one in run.maps:
            name = named(one, runs)
            for who, said, found in ((name, verdict(one), one), (f"{name}, {WITHOUT}", CONTROL, one.twin)):
                lines.append((who, said, *(cell(found.figures.get(column)) for column in CURVES)))
    title = "Faithfulness over rightly answered slides, 95 % intervals over patients; the verdict is the randomisation test's"
    return ResultTable(title, ("map", "verdict", *CURVES.values()), tuple(lines), names=2)


def verdict(one: JudgedMap) -> str:
    return UNKNOWN if one.fails is None else FAILED if one.fails else PASSED


def kinds(runs: Sequence[JudgedRun]) -> list[str]:
    """What each line of `curves_table` is, for the page's colours."""
    of_verdict = {FAILED: "fails", PASSED: "passes", UNKNOWN: ""}
    return [kind for run in runs for one in run.maps for kind in (of_verdict[verdict(one)], "control")]


def maps_table(runs: Sequence[JudgedRun]) -> ResultTable:
    return _table("Concentration of the maps, and agreement between the maps of a slide's models", runs, MAPS)


def remarks(runs: Sequence[JudgedRun]) -> list[str]:
    """What the tables are of, and every map that fails."""
    found = [f"{run.name}: {_about(run)}" for run in runs]
    for run in runs:
        for one in run.maps:
            found += [f"{named(one, runs)} FAILS the randomisation test: {words}" for words in one.failures]
    return found


def named(one: JudgedMap, runs: Sequence[JudgedRun]) -> str:
    return one.method if len(runs) == 1 else f"{one.run}: {one.method}"


def panels(runs: Sequence[JudgedRun]) -> list[tuple[str, str]]:
    """(heading, svg) of deletion, insertion and the cohort's AUC. Dashed: random orders, of the first run; grey: the twins."""
    maps, first = [one for run in runs for one in run.maps], runs[0]
    gone = {"x_label": "share of the tiles removed", "y_label": "probability of the label"}
    come = {"x_label": "share of the tiles added", "y_label": "probability of the label"}
    at_random = first.at_random.mean
    parts: list[tuple[str, Callable[[Followed], NDArray[np.float64]], NDArray[np.float64], dict[str, str]]] = [
        (
            "Deletion: the most relevant tiles are removed first; lower is better",
            lambda one: one.deletion.mean,
            at_random,
            gone,
        ),
        (
            "Insertion: the most relevant tiles are added first; higher is better",
            lambda one: one.insertion.mean,
            at_random[::-1],
            come,
        ),
        ("AUC of the cohort as tiles are removed", lambda one: one.auc, first.auc_at_random, gone | {"y_label": "AUC"}),
    ]
    found = []
    for head, y, guide, axes in parts:
        lines = [Line(_points(y(one))) for one in maps] + [Line(_points(y(one.twin)), control=True) for one in maps]
        found.append((head, share_svg(lines, guide=_points(guide), **axes)))
    return found


def randomisation_rows(runs: Sequence[JudgedRun]) -> ResultTable:
    """The test in figures: how alike the maps are, what the own map explains more, and what the run answers more."""
    lines = []
    for run in runs:
        for one in run.maps:
            figures = (cell(one.figures["randomisation"]), cell(one.figures["aopc_gain"]))
            lines.append((named(one, runs), verdict(one), *figures, f"{one.auc[0]:.2f}", _range(run.auc_of_twins)))
    heads = ("map", "verdict", "likeness, all slides", "AOPC gained, rightly answered", "AUC", "AUC, weights shuffled")
    return ResultTable("Randomisation test", heads, tuple(lines), names=2)


def _range(values: NDArray[np.float64]) -> str:
    return f"{values.min():.2f} to {values.max():.2f}"


def cell(figure: Figure | None, digits: int = 2) -> str:
    """0.61 (0.52 to 0.70)."""
    if figure is None or math.isnan(figure["value"]):
        return "–"
    value, low, high = (
        f"{round(figure[name], digits) + 0.0:.{digits}f}" for name in ("value", "low", "high")
    )  # no -0.00
    return value if math.isnan(figure["low"]) else f"{value} ({low} to {high})"


def _table(title: str, runs: Sequence[JudgedRun], columns: dict[str, str]) -> ResultTable:
    shown = [name for name in columns if any(name in one.figures for run in runs for one in run.maps)]
    lines = tuple(
        (run.name, one.method, *(cell(one.figures.get(name)) for name in shown)) for run in runs for one in run.maps
    )
    return ResultTable(title, ("run", "map", *(columns[name] for name in shown)), lines, names=2)


def _points(values: NDArray[np.float64]) -> list[tuple[float, float]]:
    last = len(values) - 1
    return [(i / last, min(1.0, max(0.0, float(y)))) for i, y in enumerate(values) if not math.isnan(y)]


def _about(run: JudgedRun) -> str:
    return (
        f"{run.run.settings.model}, {run.slides} slides as they were tested, {run.right} of them answered rightly "
        "by at least one of their models"
    )
