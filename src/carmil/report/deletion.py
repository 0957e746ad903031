"""Plot predictions as instances are removed: one row of panels per cohort, one column per order, one line per model."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from carmil.plot_style import COLOURS, STYLE, save_figure
from carmil.runs.faithfulness import RunFaithfulness


def draw_deletion(
    found: Mapping[str, Mapping[str, RunFaithfulness]],
    path: Path,
    *,
    orders: Mapping[str, Mapping[str, str]],
    cohort_auc: bool,
) -> None:
    """Plot the probability of the answered class with its interval and that in random order (dotted), or the
    cohort's AUC.

    found: by cohort and model. orders: title of a column -> its maps, each with the text after the model's name
    in the legend; all maps but the first are dashed.
    """
    with matplotlib.rc_context(STYLE):
        size = (4.4 * len(orders), 3.2 * len(found) + 0.8)
        figure = Figure(figsize=size, layout="constrained")
        lines: dict[str, Line2D] = {}
        axes = figure.subplots(len(found), len(orders), squeeze=False, sharex=True, sharey="row")
        for line, (cohort, runs) in zip(axes, found.items(), strict=True):
            for panel, (title, words) in zip(line, orders.items(), strict=True):
                for i, (model, run) in enumerate(runs.items()):
                    removed = np.linspace(0, 100, len(run.random_order.mean))
                    how = {"color": COLOURS[i % len(COLOURS)], "linewidth": 1.6}
                    for one in run.maps:
                        if one.method not in words:
                            continue
                        main = one.method == next(iter(words))
                        y = one.auc if cohort_auc else one.deletion.mean
                        label = model + words[one.method]
                        (lines[label],) = panel.plot(removed, y, "-" if main else "--", **how)
                        if cohort_auc:
                            continue
                        low, high = one.deletion.low, one.deletion.high
                        panel.fill_between(removed, low, high, color=how["color"], alpha=0.18, linewidth=0)
                        if main:
                            (lines[f"{model}, random order"],) = panel.plot(removed, run.random_order.mean, ":", **how)
                panel.set_title(f"{cohort}, {title}")
                panel.grid(True)
        figure.supxlabel("instances removed, most relevant first, per cent", fontsize=9)
        figure.supylabel("AUC of the test bags" if cohort_auc else "probability of the answered class", fontsize=9)
        # One legend for all panels, above them, so that it covers no curve.
        figure.legend(list(lines.values()), list(lines), loc="outside upper center", ncols=3, fontsize=8, frameon=False)
        save_figure(figure, path)
