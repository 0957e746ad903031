"""The results of a benchmark as tables, JSON, markdown and a plot."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from carmil.files import write_text
from carmil.plot_style import save_figure
from carmil.tables import ResultTable

from .plan import SECTIONS
from .results import Fact, Measurement, Record, Results, ratios

CONDITIONS = (
    "a training step is forward, backward and Adam, with dropout, on alternating bags of noise 1024 wide; carmil keeps them in "
    "bfloat16 on a GPU and in float16 on a CPU, the one-bag loop in float32",
    "slides/s and ms are per bag and model: the time of a step divided by the bags and models it trains; the median of several "
    "rounds, and the range from the fastest to the slowest; a row of crc is a pass over its bags, one bag per step",
    "TFLOP/s: for ABMIL and CAR-ABMIL, 2 n (2 x 1024 x 512 + 3 x 512 x 256) operations (ungated: 128 instead of 256); for other "
    "models, every product that torch's flop counter counts",
    "floor: the same operations at the speed of the fastest large matrix product on this machine (first row of the floors)",
    "the one-bag loop uses fused Adam and never waits for the device; on a CPU it runs with the same settings of threads and "
    "memory as carmil, except in rows marked 'torch defaults'",
)


def line(record: Record) -> str:
    """One line of progress for a record."""
    if isinstance(record, Fact):
        return f"{record.what}: {_fact_value(record)}" + (f" ({record.note})" if record.note else "")
    place = f"{record.models} x {record.bags} bags of {record.instances:,}"
    figures = record.note if record.ms is None else f"{_number(record.ms)} ms, {_number(record.tflops)} TFLOP/s"
    return f"{record.what}, {record.model}, {place}: {figures}"


def tables(results: Results) -> list[ResultTable]:
    by_section = {name: [one for one in results.measurements if one.section == name] for name in SECTIONS}
    sections = [_steps_table(section, records) for section, records in by_section.items() if records]
    comparisons = ratios(results.measurements)
    if comparisons:
        rows = tuple(
            (
                ratio.ours.section,
                ratio.ours.model,
                f"{ratio.ours.models} x {ratio.ours.bags}",
                f"{ratio.ours.instances:,}",
                ratio.other.what,
                f"{ratio.times:.2f}",
                f"{ratio.at_best:.2f}",
            )
            for ratio in comparisons
        )
        heads = (
            "section",
            "model",
            "models x bags",
            "instances",
            "compared with",
            "times as fast",
            "by the fastest rounds",
        )
        sections.append(ResultTable("carmil and the one-bag loop", heads, rows, names=2))
    facts = tuple((fact.section, fact.what, _fact_value(fact), fact.note) for fact in results.facts)
    return [ResultTable("Floors and facts", ("section", "what", "value", "note"), facts, names=2), *sections]


def _steps_table(section: str, records: list[Measurement]) -> ResultTable:
    heads = (
        *("what", "model", "models x bags", "instances", "ms", "from – to"),
        *("slides/s", "TFLOP/s", "of the floor", "MiB", "note"),
    )
    rows = tuple(
        (
            record.what,
            record.model,
            f"{record.models} x {record.bags}",
            f"{record.instances:,}",
            _number(record.ms),
            f"{_number(record.fastest_ms)} – {_number(record.slowest_ms)}",
            _number(record.slides_per_second),
            _number(record.tflops),
            "–" if record.ms is None or record.floor_ms is None else f"{record.floor_ms / record.ms:.0%}",
            "–" if record.memory_mib is None else f"{record.memory_mib:,.0f}",
            record.note,
        )
        for record in records
    )
    return ResultTable(section, heads, rows, names=2)


def write_results(results: Results, out: Path) -> None:
    """Write benchmark.json, with everything, and benchmark.md."""
    write_text(out / "benchmark.json", json.dumps(as_json(results), indent=2))
    about = [f"Measured on {results.machine}.", "", *(f"- {condition}" for condition in CONDITIONS), ""]
    write_text(out / "benchmark.md", "\n".join(["# Benchmark", "", *about, *(t.markdown() for t in tables(results))]))


def as_json(results: Results) -> dict[str, Any]:
    """All results in types that JSON has."""
    return {
        "machine": results.machine,
        "device": results.device,
        "settings": results.settings,
        "conditions": CONDITIONS,
        "facts": [asdict(fact) for fact in results.facts],
        "measurements": [
            {**asdict(record), "slides_per_second": record.slides_per_second} for record in results.measurements
        ],
        "ratios": [ratio.as_json() for ratio in ratios(results.measurements)],
    }


def write_plot(results: Results, path: Path) -> bool:
    """Plot time per bag and model with its floor. Return False, and write nothing, if nothing was timed.

    One row per measurement; in the section of all models, carmil and the one-bag loop share a row.
    """
    from matplotlib.figure import Figure

    timed = [(one, one.ms, one.floor_ms) for one in results.measurements if one.ms is not None and one.floor_ms]
    if not timed:
        return False
    labels = list(dict.fromkeys(_label(one) for one, _, _ in timed))
    row_of = {label: len(labels) - 1 - i for i, label in enumerate(labels)}
    figure = Figure(figsize=(9, 1.5 + 0.17 * len(labels)), layout="constrained")
    axes = figure.subplots()
    for one, ms, floor in timed:
        axes.hlines(row_of[_label(one)], floor, ms, color="#cccccc", linewidth=1, zorder=0)
    for ours, colour, name in ((True, "#0b6e99", "carmil"), (False, "#c4641a", "one-bag loop")):
        points = [(ms, row_of[_label(one)]) for one, ms, _ in timed if one.ours is ours]
        axes.plot([ms for ms, _ in points], [row for _, row in points], "o", markersize=5, color=colour, label=name)
    floors = [(floor, row_of[_label(one)]) for one, _, floor in timed]
    axes.plot([floor for floor, _ in floors], [row for _, row in floors], "|", color="black", label="floor")
    axes.set_xscale("log")
    axes.set_ylim(-1, len(labels))
    axes.set_yticks(list(row_of.values()), list(row_of), fontsize=7)
    axes.set_xlabel("ms per bag and model")
    figure.suptitle(results.machine, fontsize=7)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    save_figure(figure, path)
    return True


def _label(record: Measurement) -> str:
    if record.section == "models":
        return f"{record.model}, bags of {record.instances:,}"
    return f"{record.what}, {record.model}, {record.models} x {record.bags} x {record.instances:,}"


def _fact_value(fact: Fact) -> str:
    return "–" if fact.value is None else f"{_number(fact.value)} {fact.unit}".rstrip()


def _number(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
