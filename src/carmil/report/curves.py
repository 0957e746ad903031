"""Line charts as SVG that takes its colours from the page, light or dark."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 420, 200
LEFT, BOTTOM, TOP, RIGHT = 44, 28, 10, 10


@dataclass(frozen=True)
class Curve:
    """One quantity of several models: values[epoch][model], None where a model has stopped."""

    name: str
    values: Sequence[Sequence[float | None]]
    dashed: bool = False


def curve_svg(curves: Sequence[Curve], *, marks: Sequence[int] = (), y_label: str) -> str:
    """Draw all curves over the epochs; `marks` puts a dot on the last curve at each model's chosen epoch."""
    epochs = max(len(curve.values) for curve in curves)
    known = [value for curve in curves for line in curve.values for value in line if value is not None]
    top = max(known) if known else 1.0

    def x(epoch: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * epoch / max(1, epochs - 1)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / top

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{y_label} by epoch" class="curves">']
    for value in _ticks(top):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for epoch in _ticks(epochs - 1):
        parts.append(f'<text x="{x(epoch):.1f}" y="{HEIGHT - 10}" text-anchor="middle">{epoch:g}</text>')
    for i, curve in enumerate(curves):
        for model in range(len(curve.values[0])):
            points = [(e, line[model]) for e, line in enumerate(curve.values)]
            path = " ".join(f"{x(e):.1f},{y(v):.1f}" for e, v in points if v is not None)
            parts.append(f'<polyline class="curve c{i}{" dashed" if curve.dashed else ""}" points="{path}"/>')
    for model, epoch in enumerate(marks):
        best = curves[-1].values[epoch][model] if epoch >= 0 else None
        if best is not None:
            parts.append(f'<circle class="c{len(curves) - 1}" cx="{x(epoch):.1f}" cy="{y(best):.1f}" r="3"/>')
    return "".join([*parts, "</svg>"])


def _ticks(top: float) -> list[float]:
    """A few round numbers from 0 to top."""
    if top <= 0:
        return [0.0]
    step = 10 ** math.floor(math.log10(top))
    while top / step < 3:
        step /= 2
    return [i * step for i in range(int(top / step + 1e-9) + 1)]
