"""The picture of `carmil faithfulness`: deletion, insertion, and the cohort's AUC as tiles are removed, one line per map."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from carmil.plot_style import COLOURS, SOFT, STYLE, save_figure
from carmil.runs.faithfulness import RunFaithfulness


def write_picture(runs: Sequence[RunFaithfulness], path: Path) -> None:
    """Bands are 95 % intervals over patients. Grey: the maps of the models with shuffled weights; dashed, random orders."""
    import matplotlib
    from matplotlib.figure import Figure

    named, first = [(run.name, one) for run in runs for one in run.maps], runs[0]
    maps = [one for _, one in named]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11.4, 3.9), layout="constrained")
        deletion, insertion, auc = figure.subplots(1, 3)
        x = np.linspace(0, 1, len(first.random_order_auc))
        for i, twin in enumerate(one.weights_shuffled for one in maps):
            for panel, y in ((deletion, twin.deletion.mean), (insertion, twin.insertion.mean), (auc, twin.auc)):
                panel.plot(x, y, color=SOFT, linewidth=1.0, alpha=0.7, label=None if i else "weights shuffled")
        for i, (run_name, one) in enumerate(named):
            line = {
                "color": COLOURS[i % len(COLOURS)],
                "linestyle": "-" if i < len(COLOURS) else "--",
                "linewidth": 1.8,
            }
            label = one.method if len(runs) == 1 else f"{run_name}: {one.method}"
            for panel, curve in ((deletion, one.deletion), (insertion, one.insertion)):
                panel.plot(x, curve.mean, label=label, **line)
                panel.fill_between(x, curve.low, curve.high, color=line["color"], alpha=0.12, linewidth=0)
            auc.plot(x, one.auc, **line)
        at_random = first.random_order.mean
        for panel, y in ((deletion, at_random), (insertion, at_random[::-1]), (auc, first.random_order_auc)):
            panel.plot(x, y, color=SOFT, linestyle=(0, (4, 3)), linewidth=1.2, label="random order")
            panel.set_xlim(0, 1)
            panel.set_ylim(0, 1.02)
            panel.grid(True)
        for panel, title, across, up in (
            (deletion, "Deletion: lower is better", "share of the tiles removed", "probability of the label"),
            (insertion, "Insertion: higher is better", "share of the tiles added", "probability of the label"),
            (auc, "AUC of the cohort", "share of the tiles removed", "AUC"),
        ):
            panel.set_title(title)
            panel.set_xlabel(across)
            panel.set_ylabel(up)
        handles, labels = deletion.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
        save_figure(figure, path)
