"""The tables, picture and page of `carmil faithfulness`, with its randomisation test.

All runs of a page predict the same kind of target: the words for the first run apply to all.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from carmil.evidence.faithfulness import DROPPED, FRACTION
from carmil.explanations.faithfulness_probe import BY_REGION, EXPLAINED, FOLLOWED, TWINS
from carmil.files import write_text
from carmil.plot_style import COLOURS, SOFT, STYLE, save_figure
from carmil.provenance import machine
from carmil.report.page import write_page
from carmil.report.plots import Axes, Line, bars_svg, colour, line_svg
from carmil.runs.faithfulness import (
    ALIKE,
    FAILED,
    FAILS_FROM,
    PASSED,
    UNKNOWN,
    Band,
    Curve,
    CurveWords,
    MapFaithfulness,
    RemovalFigures,
    RunFaithfulness,
    write_faithfulness_file,
)
from carmil.studies import card
from carmil.studies.figures import mean_text
from carmil.tables import ResultTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axis

CURVES = {
    "deletion_area": "deletion area ↓",
    "insertion_area": "insertion area ↑",
    "srg": "SRG ↑",
    "aopc_over_random": "AOPC over random ↑",
    "monotonicity": "monotonicity ↑",
}
FEW_TILES = {
    "necessity": f"necessity at {FRACTION:.0%} ↑",
    "sufficiency": f"sufficiency at {FRACTION:.0%} ↑",
    "msk": "MSK ↓",
    "aukc": "AUKC ↑",
}
ALL_FIGURES = {**CURVES, **FEW_TILES}
MAPS = {
    "normalised_entropy": "entropy of log n",
    "gini": "Gini",
    "effective": "effective instances",
    "stability": "stability: Spearman",
    "overlap": "stability: overlap of the ten best",
    "robustness": f"answer unchanged without a random {DROPPED:.0%} of the tiles",
}
CONTROL = "control"
_KINDS = {FAILED: "fails", PASSED: "passes", UNKNOWN: ""}
WITHOUT = "weights shuffled"


def write_faithfulness(runs: Sequence[RunFaithfulness], out: Path, *, command: str) -> tuple[ResultTable, ...]:
    """Write faithfulness.json, .md, .png and .html; return the tables."""
    part = faithfulness_part(runs)
    write_faithfulness_file(runs, out, command=command)
    notes = "\n".join(f"- {line}" for line in remarks(runs))
    tables = "\n".join(table.markdown() for table in part["tables"])
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
    return part["tables"]


def faithfulness_part(runs: Sequence[RunFaithfulness]) -> dict[str, Any]:
    """Return the contents of the faithfulness page and report section: tables, curves, the randomisation test.

    kinds: the kind of each row of the first table, for the page's colours. panels: (heading, svg); keys: (colours,
    map); verdicts: (map, whether it fails, why); about: a description of the figures of each run; notes: below tables
    and curves.
    """
    maps, words = named_maps(runs), runs[0].words
    likeness = [(name, one.figures["randomisation"], ALIKE in one.failures) for name, one in maps.items()]
    return {
        "tables": tables(runs),
        "by_region": any(run.region_tiles for run in runs),
        "kinds": [kind for one in maps.values() for kind in (_KINDS[one.verdict], "control")],
        "panels": panels(runs),
        "keys": [(colour(i), name) for i, name in enumerate(maps)],
        "tested": randomisation_table(runs),
        "bars": bars_svg(likeness, fails=FAILS_FROM),
        "verdicts": [(name, one.fails, one.failures) for name, one in maps.items()],
        "meaning": _meaning(words),
        "about": {run.name: _about(run) for run in runs},
        "notes": {"figures": _figures_note(words), "few": _few_note(runs), "curves": _curves_note(words)},
    }


def _meaning(words: CurveWords) -> tuple[str, ...]:
    """Explain the randomisation test, then list every reason why a map fails."""
    falls = "its curve" if words.two_sided else "the model"
    equal = "" if words.by_fold else " (where they are equal, its labels must be likelier)"
    return (
        "The model's weights are shuffled, so that nothing it has learned is left, and this twin is asked for its map and its "
        "answers. A map fails if one of these is so, and must then not be read as the model's reason:",
        f"the map is much like the twin's: the likeness below is {FAILS_FROM:g} or more. It then shows the features or the "
        "architecture. Likeness is |Spearman|, as a mirrored map is the same map, counted from what chance gives in bags of that "
        f"size: 0 is chance, 1 the same map. It is the mean over {EXPLAINED} twins of each model, then over slides. The line at "
        f"{FAILS_FROM:g} is ours; a map just below it is not good because of it.",
        f"the map explains no better than the twin's: as tiles go in its order, {falls} falls no further than in the order of the "
        "twin's map (AOPC gained: the lower end of its 95 % interval, paired over patients, is not above 0; "
        f"{FOLLOWED} twins of each model).",
        f"the model has learned nothing: the {words.figure} of its test slides is not above that of every one of {TWINS} copies of "
        f"the run with shuffled weights{equal}. One of {TWINS + 1} runs without anything learned would pass this. A random model, "
        "too, has maps that explain its answers; there is nothing in them.",
    )


def _figures_note(words: CurveWords) -> str:
    """Explain how to read the first table."""
    if not words.by_fold:
        order, value = "the map of the answered class", "Areas are mean probabilities of the label"
    elif not words.two_sided:
        order, value = "the map of the label whose evidence is shown", f"Areas are means of the {words.value}"
    else:
        order = (
            "each map: where the prediction is above the middle, the tiles that raise it go first, where it is below, those that "
            "lower it (maps without a sign, such as attention, are not turned)"
        )
        value = f"Areas are means of the {words.value}, counted towards the side of the prediction"
    over = "slides that the model answers correctly" if not words.by_fold else "all slides"
    return (
        f"Tiles are taken away in the order of {order}, and the model is asked again. {value}: a good map lets it fall early "
        "(deletion) or rise early (insertion). AOPC over random: how much further it falls than in random orders; 0 is chance. "
        "SRG: the insertion area minus the deletion area, which is the area between the curves with the least and with the most "
        "relevant tiles removed first; 0 is chance. Monotonicity: 1 if it never rises on the way. In grey, as a control: the map "
        "of the same model with its weights shuffled, tried on the model itself. "
        f"Over {over}; a slide's figure is the mean over its models, each with its own map."
    )


def _few_note(runs: Sequence[RunFaithfulness]) -> str:
    """Explain how to read the table of few tiles."""
    words, confidence = runs[0].words, runs[0].confidence
    part = (
        "what that tenth alone answers, less what all do"
        if not words.two_sided
        else "the value for that tenth alone, less that for all"
    )
    least = (
        f"a {words.value} of {confidence:g} or more; slides where all tiles together do not reach it are left out"
        if not words.two_sided
        else f"{confidence:.0%} of the {words.value} that all tiles have"
    )
    counts = [f"{run.maps[0].figures['msk'].slides} of {run.name}" for run in runs if "msk" in run.maps[0].figures]
    return (
        f"Necessity: what is lost without the first tenth of the tiles; sufficiency: {part}. MSK: the smallest number of tiles, "
        f"the most relevant, that keep the answer with {least} (slides that count: {', '.join(counts) or 'none'}). AUKC: the mean "
        "over the number of tiles kept, on a logarithmic axis from one tile to all."
    )


def _curves_note(words: CurveWords) -> str:
    of = "the mean over the test folds" if words.by_fold else "of all test folds together, right and wrong answers"
    return f"The last point of each curve is the bag of zeros. The {words.figure} is {of}."


def named_maps(runs: Sequence[RunFaithfulness]) -> dict[str, MapFaithfulness]:
    """Return all maps by name: the explainer, preceded by the run's name if there are several runs."""
    several = len(runs) > 1
    return {f"{run.name}: {one.method}" if several else one.method: one for run in runs for one in run.maps}


def tables(runs: Sequence[RunFaithfulness]) -> tuple[ResultTable, ...]:
    """Return the tables of the page: areas, few tiles, concentration, and by region if regions were measured."""
    over = f"{runs[0].words.slides}, 95 % intervals over patients"
    of = f"; areas are of the {runs[0].words.value}" if runs[0].words.two_sided else ""
    areas = f"Faithfulness over {over}; the verdict is the randomisation test's{of}"
    few = f"Faithfulness of the most relevant tiles, over {over}"
    listed = [_figures_table(runs, areas, CURVES), _figures_table(runs, few, FEW_TILES), maps_table(runs)]
    if any(run.region_tiles for run in runs):
        tiles = max(run.region_tiles for run in runs)
        title = f"By region: up to {tiles} neighbouring tiles are removed together, over {over}; MSK counts regions"
        shown = {BY_REGION + name: words for name, words in ALL_FIGURES.items() if name not in ("monotonicity",)}
        listed.append(_figures_table(runs, title, shown))
    return tuple(listed)


def _figures_table(runs: Sequence[RunFaithfulness], title: str, columns: Mapping[str, str]) -> ResultTable:
    """Tabulate two rows per map: the map itself, and as its control the map of the model with shuffled weights."""
    rows, decimals = [], _decimals(runs)
    for name, one in named_maps(runs).items():
        pair: tuple[tuple[str, str, RemovalFigures], ...] = (
            (name, one.verdict, one),
            (f"{name}, {WITHOUT}", CONTROL, one.weights_shuffled),
        )
        for row, words, found in pair:
            cells = (mean_text(found.figures.get(column), _digits(column, decimals)) for column in columns)
            rows.append((row, words, *cells))
    return ResultTable(title, ("map", "verdict", *columns.values()), tuple(rows), names=2)


def _digits(figure: str, decimals: int) -> int:
    """Return the decimals of a figure: counts of tiles have one, shares two, others those of the curves."""
    name = figure.removeprefix(BY_REGION)
    return {"msk": 1, "monotonicity": 2}.get(name, decimals)


def _decimals(runs: Sequence[RunFaithfulness]) -> int:
    """Return the decimals of figures in the unit of the curves: two for probabilities, three significant digits for
    numbers.
    """
    if not runs[0].words.two_sided:
        return 2
    largest = max(
        (abs(y) for run in runs for one in run.maps for y in one.deletion.mean if not math.isnan(y)), default=1.0
    )
    return min(6, max(0, 2 - math.floor(math.log10(largest or 1.0))))


def maps_table(runs: Sequence[RunFaithfulness]) -> ResultTable:
    columns = [name for name in MAPS if any(name in one.figures for run in runs for one in run.maps)]
    rows = tuple(
        (run.name, one.method, *(mean_text(one.figures.get(name)) for name in columns))
        for run in runs
        for one in run.maps
    )
    title = "Concentration of the maps, agreement between the maps of a slide's models, and robustness of the answers"
    return ResultTable(title, ("run", "map", *(MAPS[name] for name in columns)), rows, names=2)


def remarks(runs: Sequence[RunFaithfulness]) -> list[str]:
    """Return notes on the contents of the tables, and on every map that fails."""
    return [f"{run.name}: {_about(run)}" for run in runs] + [
        f"{name} FAILS the randomisation test: {words}"
        for name, one in named_maps(runs).items()
        for words in one.failures
    ]


@dataclass(frozen=True)
class _Panel:
    """One plot: the curves of all maps, those of the twins, and that of random orders; bands of the maps, if there are any.

    share: whether values are from 0 to 1.
    """

    heading: str
    order: str
    better: str
    x_label: str
    y_label: str
    maps: Sequence[Curve]
    twins: Sequence[Curve]
    guide: Curve
    bands: Sequence[Band] = ()
    share: bool = True

    @property
    def long_heading(self) -> str:
        return f"{self.heading}: {self.order}; {self.better}" if self.better else f"{self.heading} as tiles are removed"

    @property
    def limits(self) -> tuple[float, float]:
        """Return the ends of the y axis: 0 and 1, or for other numbers the lowest and the highest, with some space."""
        curves = [*self.maps, *self.twins, self.guide]
        if not self.share:
            curves += [end for band in self.bands for end in (band.low, band.high)]
        known = [y for curve in curves for y in curve if not math.isnan(y)]
        low, high = min(known, default=0.0), max(known, default=1.0)
        if self.share:
            return min(0.0, round(low - 0.05, 1)) if low < 0 else 0.0, 1.0
        space = 0.05 * (high - low) or 0.5
        return low - space, high + space


def _panels(runs: Sequence[RunFaithfulness]) -> tuple[_Panel, _Panel, _Panel]:
    """Return deletion, insertion and the figure of the cohort. Random orders are those of the first run."""
    first, words, maps = runs[0], runs[0].words, [one for run in runs for one in run.maps]
    twins = [one.weights_shuffled for one in maps]
    removed, added = "share of the tiles removed", "share of the tiles added"
    return (
        _Panel(
            "Deletion",
            "the most relevant tiles are removed first",
            "lower is better",
            removed,
            words.value,
            [one.deletion.mean for one in maps],
            [one.deletion.mean for one in twins],
            first.random_order.mean,
            [one.deletion for one in maps],
            share=not words.two_sided,
        ),
        _Panel(
            "Insertion",
            "the most relevant tiles are added first",
            "higher is better",
            added,
            words.value,
            [one.insertion.mean for one in maps],
            [one.insertion.mean for one in twins],
            first.random_order.mean[::-1],
            [one.insertion for one in maps],
            share=not words.two_sided,
        ),
        _Panel(
            f"{words.figure} of the cohort",
            "",
            "",
            removed,
            words.figure,
            [one.auc for one in maps],
            [one.auc for one in twins],
            first.random_order_auc,
        ),
    )


def panels(runs: Sequence[RunFaithfulness]) -> list[tuple[str, str]]:
    """Return (heading, svg) of deletion, insertion and the cohort's figure. Dashed: random orders, of the first run;
    grey: the twins.
    """
    drawn = []
    for panel in _panels(runs):
        lines = [Line(_points(curve, panel.limits)) for curve in panel.maps]
        lines += [Line(_points(curve, panel.limits), control=True) for curve in panel.twins]
        axes = Axes(panel.x_label, panel.y_label, y=panel.limits)
        svg = line_svg(axes, lines, guides=[_points(panel.guide, panel.limits)])
        drawn.append((panel.long_heading, svg))
    return drawn


def randomisation_table(runs: Sequence[RunFaithfulness]) -> ResultTable:
    """Tabulate the test: similarity of the maps, the additional effect of the model's own map, and the figure of the cohort
    beside that of the twins.
    """
    twins = [_range(run.auc_of_twins) for run in runs for _ in run.maps]
    words, decimals = runs[0].words, _decimals(runs)
    rows = []
    for (name, one), of_twins in zip(named_maps(runs).items(), twins, strict=True):
        figures = (mean_text(one.figures["randomisation"]), mean_text(one.figures["aopc_gain"], decimals))
        rows.append((name, one.verdict, *figures, f"{one.auc[0]:.2f}", of_twins))
    heads = (
        "map",
        "verdict",
        "likeness, all slides",
        f"AOPC gained, {'all slides' if words.by_fold else 'correctly answered'}",
        words.figure,
        f"{words.figure}, weights shuffled",
    )
    return ResultTable("Randomisation test", heads, tuple(rows), names=2)


def _range(values: Sequence[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    return f"{min(known):.2f} to {max(known):.2f}" if known else "–"


def _points(values: Curve, limits: tuple[float, float]) -> list[tuple[float, float]]:
    last, (low, high) = len(values) - 1, limits
    return [(i / last, min(high, max(low, y))) for i, y in enumerate(values) if not math.isnan(y)]


def _about(run: RunFaithfulness) -> str:
    about = f"{run.model}, {run.slides} slides as they were tested"
    if run.words.by_fold:
        return about
    return f"{about}, {run.rightly_answered} of them answered correctly by at least one of their models"


def write_picture(runs: Sequence[RunFaithfulness], path: Path) -> None:
    """Plot the curves with 95 % intervals over patients. Grey: maps of the models with shuffled weights; dashed: random orders."""
    import matplotlib  # on first use, since most reports do not plot with it
    from matplotlib.figure import Figure

    names = [one.method if len(runs) == 1 else f"{run.name}: {one.method}" for run in runs for one in run.maps]
    with matplotlib.rc_context(STYLE):
        areas = all("srg" in one.figures for run in runs for one in run.maps)  # not in files of earlier versions
        figure = Figure(figsize=(11.4 + 4.2 * areas, 3.9), layout="constrained")
        x = np.linspace(0, 1, len(runs[0].random_order_auc))
        axes = figure.subplots(1, 3 + areas)
        for axis, panel in zip(axes, _panels(runs), strict=False):
            for i, curve in enumerate(panel.twins):
                axis.plot(x, curve, color=SOFT, linewidth=1.0, alpha=0.7, label=None if i else "weights shuffled")
            for i, (name, curve) in enumerate(zip(names, panel.maps, strict=True)):
                line = {"color": COLOURS[i % len(COLOURS)], "linestyle": "-" if i < len(COLOURS) else "--"}
                axis.plot(x, curve, label=name, linewidth=1.8, **line)
                if panel.bands:
                    band = panel.bands[i]
                    axis.fill_between(x, band.low, band.high, color=line["color"], alpha=0.12, linewidth=0)
            axis.plot(x, panel.guide, color=SOFT, linestyle=(0, (4, 3)), linewidth=1.2, label="random order")
            low, high = panel.limits
            axis.set(
                title=f"{panel.heading}: {panel.better}" if panel.better else panel.heading,
                xlabel=panel.x_label,
                ylabel=panel.y_label,
                xlim=(0, 1),
            )
            axis.set(ylim=(low, 1.02) if panel.share else (low, high))
            axis.grid(True)
        if areas:
            _plot_srg(axes[-1], runs, names)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
        save_figure(figure, path)


def _plot_srg(axis: "Axis", runs: Sequence[RunFaithfulness], names: Sequence[str]) -> None:
    """Plot SRG of every map, and in grey that of its control, with 95 % intervals."""
    maps = [one for run in runs for one in run.maps]
    for i, one in enumerate(maps):
        place = len(maps) - 1 - i
        for part, shift, paint in ((one, 0.12, COLOURS[i % len(COLOURS)]), (one.weights_shuffled, -0.12, SOFT)):
            srg = part.figures["srg"]
            axis.hlines(place + shift, srg.low, srg.high, color=paint)
            axis.plot([srg.value], [place + shift], "o", markersize=4.5, color=paint)
    axis.axvline(0, color=SOFT, linestyle=(0, (4, 3)), linewidth=1.2, zorder=0)
    axis.set_yticks(range(len(maps)), reversed(names))
    axis.set(title="SRG: higher is better", xlabel="insertion area less deletion area; 0 is chance")
    axis.grid(True, axis="x")
