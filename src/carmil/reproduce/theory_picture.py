"""The picture of the appendix on trained models: density of instances, correlations of bags, promised and real margins."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from carmil.files import atomic_file
from carmil.plot_style import COLOURS, SOFT, STYLE
from carmil.report.matrices import map_colours
from carmil.reproduce.theory_reading import Followed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_DOTS = 1500  # of a cloud
REACH = 3.0  # standard deviations in a bag that are shown


@dataclass(frozen=True, eq=False)
class Row:
    """What was found on a task with a distance, against one way to name the rival; several: there is more than one to name."""

    task: str
    distance: str
    rival: str
    found: Followed
    several: bool


def draw_theory(rows: Sequence[Row], path: Path) -> Path:
    """One row of panels per task: correlations of bags, and for each distance the density and the margins, promised and real."""
    import matplotlib
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(row.task for row in rows))
    with matplotlib.rc_context(STYLE):
        distances = len({row.distance for row in rows})
        figure = Figure(figsize=(3.6 * (1 + 2 * distances), 3.6 * len(tasks)), layout="constrained")
        panels = figure.subplots(len(tasks), 1 + 2 * distances, squeeze=False)
        for line, task in zip(panels, tasks, strict=True):
            here = [row for row in rows if row.task == task]
            _correlations(line[0], here)
            for i, row in enumerate(here):
                _density(line[1 + 2 * i], row)
                _margins(line[2 + 2 * i], row, COLOURS[i])
        with atomic_file(path) as aside:
            figure.savefig(aside, dpi=140, facecolor="white")
    return path


def _density(panel: "Axes", row: Row) -> None:
    cloud = row.found.instances.reshape(-1, 2)
    cloud = cloud[~np.isnan(cloud).any(1)]
    extent = (-REACH, REACH, -REACH, REACH)
    inside = (np.abs(cloud) < REACH).all(1)
    panel.hexbin(
        *cloud[inside].T, gridsize=45, extent=extent, bins="log", mincnt=1, cmap=map_colours(signed=False), linewidths=0
    )
    panel.axline((0, 0), slope=1, color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
    mean, low, high = row.found.interval("pearson")
    panel.set_title(f"{row.task}, {row.distance}: {mean:.2f} [{low:.2f}, {high:.2f}]")
    panel.set_xlabel("−g, in standard deviations of its bag")
    panel.set_ylabel("u_cf − u, in the same way")
    panel.set_xlim(-REACH, REACH)
    panel.set_ylim(-REACH, REACH)


def _correlations(panel: "Axes", rows: Sequence[Row]) -> None:
    bins = np.linspace(-1, 1, 61)
    for i, row in enumerate(rows):
        for measures, style, words in ((row.found.measures, "-", ""), (row.found.shuffled, ":", ", shuffled")):
            values = measures["pearson"]
            counts = np.histogram(values[~np.isnan(values)], bins)[0] / values.size
            panel.stairs(
                100 * counts, bins, color=COLOURS[i], linestyle=style, linewidth=1.6, label=row.distance + words
            )
    panel.set_title(f"{rows[0].task}: correlation in each bag")
    panel.set_xlabel("Pearson of u_cf − u and −g")
    panel.set_ylabel("per cent of bags and models")
    panel.set_xlim(-1, 1)
    panel.set_xticks([-1, -0.5, 0, 0.5, 1])
    panel.grid(True)
    panel.legend(frameon=False, fontsize=8, loc="upper left")


def _margins(panel: "Axes", row: Row, colour: str) -> None:
    promised, margin = row.found.promised.ravel(), row.found.margin.ravel()
    some = np.random.default_rng(0).permutation(len(margin))[:MOST_DOTS]
    panel.scatter(promised[some], margin[some], s=5, alpha=0.35, color=colour, linewidths=0)
    panel.axline((0, 0), slope=1, color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
    low, high = np.quantile(np.concatenate([promised, margin]), [0.005, 0.995])
    if low < high:
        panel.set_xlim(low, high)
        panel.set_ylim(low, high)
    panel.set_title(f"{row.task}, {row.distance}: the margin's change")
    panel.set_xlabel("promised by the first order, −g · (u_cf − u)")
    panel.set_ylabel("as it is")
    panel.grid(True)
