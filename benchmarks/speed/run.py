"""Measures one section after the other, in one run, and writes what was found after each."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from carmil.provenance import machine_line
from carmil.training.process_settings import configure_process

from .bench import Bench
from .measure import floors
from .plan import Plan
from .records import Record, Results
from .report import line, write_results
from .sections import SECTIONS, untouched


def run_benchmark(plan: Plan, out: Path, *, device: str, say: Callable[[str], None] = lambda line: None) -> Results:
    """The sections of the plan; benchmark.json and benchmark.md under `out` are whole after each of them."""
    results = Results(f"{device}: {machine_line()}", device, _settings(plan))

    def found(record: Record) -> None:
        results.records.append(record)
        say(line(record))

    for fact in floors(device, seconds=plan.seconds):
        found(fact)
    bench = Bench(plan, device, peak=1e12 * (results.facts[0].value or 0), out=out)
    if device == "cpu":
        say("measuring the one-bag loop as torch comes …")
        for record in untouched(bench):
            found(record)
        configure_process()  # from here on for their loop as for ours
    for name in plan.sections:
        say(f"measuring {name} …")
        for record in SECTIONS[name](bench):
            found(record)
        write_results(results, out)
    return results


def _settings(plan: Plan) -> dict[str, Any]:
    """What was asked, without the name of any folder."""
    return {name: value for name, value in asdict(plan).items() if name != "crc"}
