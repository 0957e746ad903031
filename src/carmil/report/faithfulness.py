"""The tables, the picture and the page of `carmil faithfulness`, with its randomisation test made plain to see."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carmil.files import write_text
from carmil.report.faithfulness_picture import write_picture
from carmil.report.plots import Line, bars_svg, colour, share_svg
from carmil.report.tables import ResultTable
from carmil.studies import card
from carmil.studies.faithfulness import FAILS_FROM, FRACTION, Figure, JudgedMap, JudgedRun
from carmil.studies.gathered import Curve
from carmil.training.runs import machine, plain

CURVES = {
    "deletion_area": "deletion area ↓",
    "insertion_area": "insertion area ↑",
    "aopc_over_random": "AOPC over random ↑",
    "monotonicity": "monotonicity ↑",
    "necessity": f"necessity at {FRACTION:.0%} ↑",
    "sufficiency": f"sufficiency at {FRACTION:.0%} ↑",
    "randomisation": "randomisation: 0 is good, 1 fails",
}
MAPS = {
    "normalised_entropy": "entropy of log n",
    "gini": "Gini",
    "effective": "effective instances",
    "stability": "stability: Spearman",
    "overlap": "stability: ten best in common",
}
PASSED, FAILED, UNKNOWN = "passes", "FAILS", "no value: a map is constant"
MEANING = (
    "The model's weights are shuffled, so that nothing it has learned is left, and it is asked for its map again. Near 1 the two "
    "maps are the same: the map does not show what the model has learned, and must not be read as its reason. Near 0 the map went "
    "with the weights, as it should. Below 0 the shuffled model points the other way.",
    f"A map fails from {FAILS_FROM:g} on. That line is ours; a map just below it is not good because of it.",
)


def write_faithfulness(runs: Sequence[JudgedRun], out: Path, *, command: str) -> list[ResultTable]:
    """Writes faithfulness.json, .md, .png and .html; gives the tables."""
    from jinja2 import Environment, PackageLoader

    tables = [curves_table(runs), maps_table(runs)]
    lines = remarks(runs)
    facts = {"command": command, "machine": machine(), "runs": [_facts(run) for run in runs]}
    write_text(out / "faithfulness.json", json.dumps(plain(facts), indent=2))
    listed = "\n".join(f"- {line}" for line in lines)
    written = "\n".join(table.markdown() for table in tables)
    write_text(out / "faithfulness.md", f"# Faithfulness\n\nResearch use only.\n\n{written}\n{listed}\n")
    write_picture(runs, out / "faithfulness.png")
    maps = [one for run in runs for one in run.maps]
    page = Environment(
        loader=PackageLoader("carmil.report", "pages"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    html = page.get_template("faithfulness.html").render(
        title=", ".join(run.name for run in runs),
        tables=tables,
        lines=lines,
        panels=panels(runs),
        keys=[(colour(i), named(one, runs)) for i, one in enumerate(maps)],
        tested=randomisation_rows(runs),
        bars=bars_svg(
            [(named(one, runs), one.figures["randomisation"], bool(one.fails)) for one in maps], fails=FAILS_FROM
        ),
        failed=[named(one, runs) for one in maps if one.fails],
        meaning=MEANING,
        limits=card.LIMITS,
        about={run.name: _about(run) for run in runs},
        machine=machine(),
        command=command,
    )
    write_text(out / "faithfulness.html", html)
    return tables


def curves_table(runs: Sequence[JudgedRun]) -> ResultTable:
    title = "Faithfulness over rightly answered slides, 95 % intervals over patients"
    return _table(title, runs, CURVES)


def maps_table(runs: Sequence[JudgedRun]) -> ResultTable:
    return _table("How few instances carry a map, and how alike the maps of a slide's models are", runs, MAPS)


def remarks(runs: Sequence[JudgedRun]) -> list[str]:
    """What the tables are of, and every map that fails."""
    found = [f"{run.name}: {_about(run)}" for run in runs]
    for run in runs:
        for one in run.maps:
            if one.fails:
                value = one.figures["randomisation"]["value"]
                found.append(
                    f"{named(one, runs)} FAILS the randomisation test ({value:.2f}): the map is much the same without anything "
                    "that was learned"
                )
    return found


def named(one: JudgedMap, runs: Sequence[JudgedRun]) -> str:
    return one.method if len(runs) == 1 else f"{one.run}: {one.method}"


def panels(runs: Sequence[JudgedRun]) -> list[tuple[str, str]]:
    """(heading, svg) of deletion, insertion and the cohort's AUC. Dashed: random orders, of the first run."""
    maps, first = [one for run in runs for one in run.maps], runs[0]
    gone = {"x_label": "share of the tiles taken away", "y_label": "probability of the label"}
    come = {"x_label": "share of the tiles put in", "y_label": "probability of the label"}
    parts = [
        (
            "Deletion: the most relevant go first; lower is better",
            [one.deletion.mean for one in maps],
            first.at_random.mean,
            gone,
        ),
        (
            "Insertion: the most relevant come first; higher is better",
            [one.insertion.mean for one in maps],
            first.at_random.mean[::-1],
            come,
        ),
        ("AUC of the cohort as tiles go", [one.auc for one in maps], first.auc_at_random, gone | {"y_label": "AUC"}),
    ]
    return [
        (head, share_svg([Line(_points(y)) for y in lines], guide=_points(guide), **axes))
        for head, lines, guide, axes in parts
    ]


def randomisation_rows(runs: Sequence[JudgedRun]) -> ResultTable:
    """The test in figures: how alike the maps are, and what the shuffled model's map is worth to the trained one."""
    lines = []
    for run in runs:
        for one in run.maps:
            verdict = UNKNOWN if one.fails is None else FAILED if one.fails else PASSED
            own, lost = one.figures["aopc_over_random"], one.figures["aopc_shuffled"]
            lines.append((named(one, runs), verdict, cell(one.figures["randomisation"]), cell(own), cell(lost)))
    heads = (
        "map",
        "verdict",
        "Spearman with the shuffled model's map",
        "AOPC over random, own map",
        "the shuffled model's map",
    )
    return ResultTable("Randomisation test", heads, tuple(lines), names=2)


def cell(figure: Figure | None, digits: int = 2) -> str:
    """0.61 (0.52 to 0.70)."""
    if figure is None or math.isnan(figure["value"]):
        return "–"
    value, low, high = (f"{figure[name]:.{digits}f}" for name in ("value", "low", "high"))
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
        f"{run.run.settings['model']}, {run.slides} slides as they were tested, {run.right} of them answered rightly "
        "by at least one of their models"
    )


def _facts(run: JudgedRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "run": run.run.facts["key"],
        "data": run.run.facts["data"],
        "model": run.run.settings["model"],
        "slides": run.slides,
        "rightly_answered": run.right,
        "random_order": _curve(run.at_random),
        "random_order_auc": run.auc_at_random.tolist(),
        "maps": [
            {
                "method": one.method,
                "figures": one.figures,
                "fails_randomisation": one.fails,
                "deletion": _curve(one.deletion),
                "insertion": _curve(one.insertion),
                "auc": one.auc.tolist(),
            }
            for one in run.maps
        ],
    }


def _curve(curve: Curve) -> dict[str, list[float]]:
    return {"mean": curve.mean.tolist(), "low": curve.low.tolist(), "high": curve.high.tolist()}
