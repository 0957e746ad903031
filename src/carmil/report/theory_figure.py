"""The figure of the paper's appendix on trained models: density of instances, correlations of bags, promised and
real margins.

r models, b bags, n instances of all bags.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from carmil.plot_style import COLOURS, SOFT, STYLE, save_figure
from carmil.report.matrices import map_colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]

MOST_DOTS = 1500  # dots of a cloud
REACH = 3.0  # range shown, in standard deviations of the bag


@dataclass(frozen=True, eq=False)
class TheoryPanels:
    """The panels of one task and distance.

    These are the correlations (r, b) of u_cf - u with -g, as they are and shuffled, and their mean as text; -g and
    u_cf - u of every instance (r, n, 2); and the promised and real change of the margin (r, b)."""

    task: str
    distance: str
    mean: str
    correlations: Floats
    shuffled: Floats
    instances: Floats
    promised: Floats
    margin: Floats


def draw_theory(found: Sequence[TheoryPanels], path: Path) -> Path:
    """Draw one row of panels per task: correlations of bags, and for each distance the density, and promised and real margins."""
    import matplotlib
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(one.task for one in found))
    columns = 1 + 2 * len({one.distance for one in found})
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.6 * columns, 3.6 * len(tasks)), layout="constrained")
        panels = figure.subplots(len(tasks), columns, squeeze=False)
        for line, task in zip(panels, tasks, strict=True):
            here = [one for one in found if one.task == task]
            _correlations(line[0], here)
            for i, one in enumerate(here):
                _density(line[1 + 2 * i], one)
                _margins(line[2 + 2 * i], one, COLOURS[i])
        save_figure(figure, path)
    return path


def _density(panel: "Axes", one: TheoryPanels) -> None:
    cloud = one.instances.reshape(-1, 2)
    inside = (np.abs(cloud) < REACH).all(1)  # NaN compares false
    extent, colours = (-REACH, REACH, -REACH, REACH), map_colours(signed=False)
    panel.hexbin(*cloud[inside].T, gridsize=45, extent=extent, bins="log", mincnt=1, cmap=colours, linewidths=0)
    panel.axline((0, 0), slope=1, color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
    panel.set(
        title=f"{one.task}, {one.distance}: {one.mean}",
        xlabel="−g, in standard deviations of its bag",
        ylabel="u_cf − u, in the same way",
        xlim=(-REACH, REACH),
        ylim=(-REACH, REACH),
    )


def _correlations(panel: "Axes", found: Sequence[TheoryPanels]) -> None:
    bins = np.linspace(-1, 1, 61)
    for i, one in enumerate(found):
        for values, style, words in ((one.correlations, "-", ""), (one.shuffled, ":", ", shuffled")):
            shares = 100 * np.histogram(values[~np.isnan(values)], bins)[0] / values.size
            panel.stairs(shares, bins, color=COLOURS[i], linestyle=style, linewidth=1.6, label=one.distance + words)
    panel.set(
        title=f"{found[0].task}: correlation in each bag",
        xlabel="Pearson of u_cf − u and −g",
        ylabel="per cent of bags and models",
        xlim=(-1, 1),
        xticks=[-1, -0.5, 0, 0.5, 1],
    )
    panel.grid(True)
    panel.legend(frameon=False, fontsize=8, loc="upper left")


def _margins(panel: "Axes", one: TheoryPanels, colour: str) -> None:
    promised, margin = one.promised.ravel(), one.margin.ravel()
    some = np.random.default_rng(0).permutation(len(margin))[:MOST_DOTS]
    panel.scatter(promised[some], margin[some], s=5, alpha=0.35, color=colour, linewidths=0)
    panel.axline((0, 0), slope=1, color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
    low, high = np.quantile(np.concatenate([promised, margin]), [0.005, 0.995])
    if low < high:
        panel.set(xlim=(low, high), ylim=(low, high))
    panel.set(
        title=f"{one.task}, {one.distance}: the margin's change",
        xlabel="promised by the first order, −g · (u_cf − u)",
        ylabel="as it is",
    )
    panel.grid(True)
