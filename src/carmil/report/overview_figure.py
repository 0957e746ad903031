"""The figure of the method: boxes for modules, arrows with the names of tensors, and a bag with both attentions."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from numpy.typing import NDArray
from torch import nn

from carmil.counterfactual.branches import CAR, CounterfactualModel
from carmil.models.abmil import ABMIL
from carmil.models.contract import BagModel
from carmil.plot_style import GRID, INK, SOFT, STYLE, save_figure

FACTUAL, OTHER, SHARED, LOSS = "#8050aa", "#c85a00", "#1464c8", "#0b7f69"
UP, MIDDLE, DOWN = 41, 27, 13  # vertical positions, in units of the drawing
WIDE = 18  # width of a box


@dataclass(frozen=True)
class Stage:
    """A part of the model: its equation, input and output sizes, and number of parameters."""

    name: str
    equation: str
    sizes: str
    parameters: int


@dataclass(frozen=True, eq=False)
class BagView:
    """A bag sorted by digit: pictures of the digits (n, h, w), both attentions (n), both predictions (k), the three
    terms of the loss, and their weights alpha and lambda."""

    pictures: NDArray[Any]
    attention: NDArray[np.float64]
    counterfactual: NDArray[np.float64]
    logits: NDArray[np.float64]
    counterfactual_logits: NDArray[np.float64]
    label: int
    terms: tuple[float, ...]
    weights: tuple[float, float]


def stages_of(model: BagModel) -> list[Stage]:
    """The parts of a gated CAR-ABMIL in the order of the data, with the sizes and counts of its modules."""
    assert isinstance(model, CounterfactualModel) and isinstance(model.model, ABMIL) and isinstance(model.branch, CAR)
    inner, branch = model.model, model.branch
    attention = inner.attention
    assert attention.U is not None
    gate = (attention.V, attention.U)
    return [
        Stage("embedding", "z = relu(E x)", _sizes(inner.embedding), _count(inner.embedding)),
        Stage("attention trunk", "t = tanh(V z) * sigmoid(U z)", f"2 x {_sizes(attention.V)}", sum(map(_count, gate))),
        Stage("attention", "u = w . t", _sizes(attention.score), _count(attention.score)),
        Stage("counterfactual attention", "u_cf = w_cf . t", _sizes(branch), _count(branch)),
        Stage("classifier", "F = phi(Z)", _sizes(inner.classifier), _count(inner.classifier)),
    ]


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _sizes(module: nn.Module) -> str:
    """The sizes of the layers of a module, from its inputs to its outputs."""
    shapes = [parameter.shape for parameter in module.parameters() if parameter.ndim == 2]
    return " → ".join(str(size) for size in (shapes[0][1], *(shape[0] for shape in shapes)))


def draw_overview(stages: Sequence[Stage], bag: BagView, path: Path) -> Path:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(15.5, 8.4))
        flow = figure.add_axes((0.01, 0.36, 0.98, 0.63))
        flow.axis("off")
        _flow(flow, {stage.name: stage for stage in stages}, bag)
        flow.set(xlim=(0, 169), ylim=(1, 51), aspect="auto")
        _bag(figure, bag)
        save_figure(figure, path)
    return path


def _flow(axes: Axes, stages: dict[str, Stage], bag: BagView) -> None:
    """Draw, from left to right: the bag, the shared modules, the two attentions, the classifier, the loss."""
    first, hidden = stages["embedding"].sizes.split(" → ")
    trunk = stages["attention trunk"].sizes.split(" → ")[-1]
    for i, picture in enumerate(255 - bag.pictures[:: max(1, len(bag.pictures) // 9)][:9]):
        x, y = 1.5 + 4.2 * (i % 3), 30.2 - 4.2 * (i // 3)
        axes.imshow(picture, cmap="gray", vmin=0, vmax=255, extent=(x, x + 3.8, y, y + 3.8), zorder=2)
        axes.add_patch(Rectangle((x, y), 3.8, 3.8, fill=False, edgecolor=GRID, linewidth=1, zorder=3))
    axes.text(7.6, 20.4, "a bag", ha="center", va="top", weight="bold")
    axes.text(7.6, 18, f"x  n × {first}", ha="center", va="top", color=SOFT, fontsize=8.5)
    _box(axes, (18, MIDDLE), stages["embedding"], SHARED, "embed")
    _box(axes, (44, MIDDLE), stages["attention trunk"], SHARED, "attend: trunk")
    _box(axes, (72, UP), stages["attention"], FACTUAL, "factual")
    _box(axes, (72, DOWN), stages["counterfactual attention"], OTHER, "counterfactual")
    _pool(axes, (96, UP), FACTUAL, "Z = Σ softmax(u)ⱼ zⱼ")
    _pool(axes, (96, DOWN), OTHER, "Z_cf = Σ softmax(u_cf)ⱼ zⱼ")
    _box(axes, (117, MIDDLE), stages["classifier"], SHARED, "classify (shared)")
    _arrow(axes, (14.4, MIDDLE), (18, MIDDLE))
    _arrow(axes, (18 + WIDE, MIDDLE), (44, MIDDLE), f"z  n × {hidden}")
    for y, colour, name in ((UP, FACTUAL, "u"), (DOWN, OTHER, "u_cf")):
        side = 1 if y == UP else -1
        _arrow(axes, (44 + WIDE, MIDDLE + 2 * side), (72, y), "", colour)
        _arrow(axes, (72 + WIDE, y), (96, y), name, colour)
        _arrow(axes, (96 + WIDE, y), (117, MIDDLE + 3 * side), "", colour)
        _arrow(axes, (117 + WIDE, MIDDLE + 3 * side), (138.6, MIDDLE + 6 * side), "", colour)
        axes.text(
            142, MIDDLE + 6 * side, f"F({name})", ha="center", va="center", weight="bold", color=colour, fontsize=10.5
        )
    axes.text(64, MIDDLE, f"t  n × {trunk}", ha="left", va="center", color=SOFT, fontsize=8.5)
    _losses(axes, bag)


def _losses(axes: Axes, bag: BagView) -> None:
    """Draw the three terms of the loss, with their values for the bag below."""
    first, differs, distance = bag.terms
    alpha, lambda_ = bag.weights
    terms = (
        (UP, "CE( F(u), y )", "predict y", first, ""),
        (MIDDLE, "CE( F(u) − F(u_cf), y )", "their difference predicts y", differs, f"α = {alpha:g},  "),
        (DOWN, "D( u, u_cf )", "similar attention scores", distance, f"λ = {lambda_:g},  "),
    )
    left, middle = 150, 150 + WIDE / 2
    for y, equation, words, value, weight in terms:
        axes.add_patch(_rounded(left, y - 5, WIDE, 10, LOSS))
        axes.text(middle, y + 2.7, equation, ha="center", va="center", weight="bold", fontsize=8.4)
        axes.text(middle, y, words, ha="center", va="center", color=SOFT, fontsize=8.2)
        axes.text(middle, y - 2.8, f"{weight}{value:.3f} below", ha="center", va="center", color=LOSS, fontsize=8.2)
    axes.text(middle, UP + 7.4, "L = their weighted sum", ha="center", va="center", weight="bold", color=LOSS)
    _arrow(axes, (144, MIDDLE + 7.6), (left, UP - 1), "", FACTUAL)
    _arrow(axes, (145.6, MIDDLE + 5), (left, MIDDLE + 1.5), "", FACTUAL)
    _arrow(axes, (146.4, MIDDLE - 5), (left, MIDDLE - 1.5), "", OTHER)
    # u and u_cf run below everything else to the distance, where they cross few lines.
    dotted: dict[str, Any] = {"linewidth": 1.0, "linestyle": (0, (2, 2)), "zorder": 0}
    for x, top, low, colour in ((92.6, UP, 2.2, FACTUAL), (94.2, DOWN, 3.6, OTHER)):
        end = middle + (0.8 if colour == FACTUAL else -0.8)
        axes.plot([x, x, end, end], [top, low, low, DOWN - 6.4], color=colour, **dotted)
        _arrow(axes, (end, DOWN - 6.4), (end, DOWN - 5), "", colour)
    axes.text(125, 4.2, "the scores themselves", ha="center", va="bottom", color=SOFT, fontsize=8.2)


def _box(axes: Axes, corner: tuple[float, float], stage: Stage, colour: str, title: str) -> None:
    """Draw a module; `corner` is its left edge at half its height."""
    x, y = corner
    axes.add_patch(_rounded(x, y - 6, WIDE, 12, colour))
    at = x + WIDE / 2
    axes.text(at, y + 4, title, ha="center", va="center", weight="bold", color=colour, fontsize=9.5)
    axes.text(at, y + 1.3, stage.equation.replace(" * ", " · "), ha="center", va="center", fontsize=8)
    axes.text(at, y - 1.4, stage.sizes.replace(" x ", " × "), ha="center", va="center", color=SOFT, fontsize=8.2)
    axes.text(at, y - 4, f"{stage.parameters:,} parameters", ha="center", va="center", color=SOFT, fontsize=8.2)


def _pool(axes: Axes, corner: tuple[float, float], colour: str, equation: str) -> None:
    x, y = corner
    axes.add_patch(_rounded(x, y - 4, WIDE, 8, colour))
    axes.text(x + WIDE / 2, y + 1.6, "pool", ha="center", va="center", weight="bold", color=colour, fontsize=9.5)
    axes.text(x + WIDE / 2, y - 1.4, equation, ha="center", va="center", fontsize=7.8)


def _bag(figure: Figure, bag: BagView) -> None:
    """Draw the bag: its digits, one bar per digit and attention, and both predictions."""
    n = len(bag.pictures)
    left, width = 0.055, 0.70
    bars = figure.add_axes((left, 0.135, width, 0.175))
    at = np.arange(n)
    bars.bar(at - 0.2, 100 * bag.attention, 0.38, color=FACTUAL, label="factual, softmax(u)")
    bars.bar(at + 0.2, 100 * bag.counterfactual, 0.38, color=OTHER, label="counterfactual, softmax(u_cf)")
    bars.set(xlim=(-0.6, n - 0.4), xticks=[], ylabel="attention weight, %")
    bars.grid(True, axis="y")
    bars.legend(frameon=False, fontsize=8.5, loc="upper left", ncols=2)
    bars.spines[["top", "right"]].set_visible(False)
    strip = figure.add_axes((left, 0.075, width, 0.052))
    shown = np.concatenate(list(bag.pictures), axis=1)
    strip.imshow(shown, cmap="gray", vmin=0, vmax=255, extent=(-0.5, n - 0.5, 0, 1), aspect="auto")
    strip.set_xlim(-0.6, n - 0.4)
    strip.axis("off")
    figure.text(left, 0.04, f"one bag, {n} digits, sorted for the eye", color=SOFT, fontsize=9)
    answers = figure.add_axes((0.815, 0.075, 0.17, 0.235))
    classes = np.arange(len(bag.logits))
    answers.bar(classes - 0.2, bag.logits, 0.38, color=FACTUAL, label="F(u)")
    answers.bar(classes + 0.2, bag.counterfactual_logits, 0.38, color=OTHER, label="F(u_cf)")
    answers.axhline(0, color=SOFT, linewidth=0.8)
    answers.set_xticks(classes, [f"{c}{' = y' if c == bag.label else ''}" for c in classes])
    answers.set(xlabel="class", ylabel="logit")
    answers.grid(True, axis="y")
    answers.legend(frameon=False, fontsize=8.5)
    answers.spines[["top", "right"]].set_visible(False)


def _rounded(x: float, y: float, width: float, height: float, colour: str) -> Any:
    pale = tuple(1 - 0.1 * (1 - part) for part in to_rgb(colour))
    return FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0,rounding_size=1.2", facecolor=pale, edgecolor=colour, linewidth=1.3
    )


def _arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], words: str = "", colour: str = INK
) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=11, color=colour, linewidth=1.3, shrinkA=0, shrinkB=0
        )
    )
    if words:
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        axes.text(x, y + 1, words, ha="center", va="bottom", color=colour if colour != INK else SOFT, fontsize=8.5)
