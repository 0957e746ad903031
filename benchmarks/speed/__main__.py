"""python -m benchmarks.speed, in the repository's root: how fast this machine trains."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from carmil.cli.app import main
from carmil.cli.options import (
    DeviceOption,
    OutOption,
    device_named,
    folder_for,
    log,
    names_in,
    numbers_in,
    print_results,
)
from carmil.provenance import machine_line
from carmil.training.process_settings import configure_process

from . import sections, studies
from .plan import Plan, default_plan
from .report import CONDITIONS, line, tables, write_plot, write_results
from .results import Record, Results
from .sections import Bench

SECTIONS: dict[str, Callable[[Bench], Iterator[Record]]] = {
    "population": sections.population,
    "one-bag": sections.one_bag,
    "agreement": sections.agreement,
    "trained": studies.trained,
    "models": sections.models,
    "linearity": sections.linearity,
    "crc": sections.crc,
    "store": studies.store,
    "study": studies.study,
}
commands = typer.Typer(rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})


@commands.command()
def benchmark(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller measurements: a minute or two.")] = False,
    only: Annotated[
        str,
        typer.Option(
            help="Sections, separated by commas: population, one-bag, agreement, trained, models, "
            "linearity, crc, store, study.  [default: all]"
        ),
    ] = "",
    models: Annotated[str, typer.Option(help="Models of the section models.  [default: one of each kind]")] = "",
    instances: Annotated[
        str,
        typer.Option(help="Instances per bag in the section models, separated by commas.  [default: 1000,10000,50000]"),
    ] = "",
    bag: Annotated[
        int | None, typer.Option(min=1, help="Instances per bag in the other sections.  [default: 10000]")
    ] = None,
    population: Annotated[
        int | None, typer.Option(min=1, help="Models trained at once.  [default: 50 on a GPU, 25 on a CPU; quick: 4]")
    ] = None,
    crc: Annotated[
        Path | None, typer.Option(help="Folder with crc's features. Without it: noise in bags of such sizes.")
    ] = None,
    study_epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of the study.  [default: 20]")] = None,
    out: OutOption = Path("benchmark"),
    device: DeviceOption = "auto",
) -> None:
    """Measure how fast this machine trains: carmil, the one-bag loop of the field, and what the machine could do at best.

    Slides/s, TFLOP/s and memory of each model, and the speed of reading a store. Prints tables, and writes OUT/benchmark.json,
    benchmark.md and benchmark.png.

    Examples:
      python -m benchmarks.speed --quick
      python -m benchmarks.speed --only models --models abmil.gated,car/abmil.gated --instances 1000,10000 --device cpu
    """
    where = device_named(device)
    usual = default_plan(where, quick=quick)
    plan = replace(
        usual,
        sections=names_in(only) or usual.sections,
        models=names_in(models) or usual.models,
        instances=numbers_in("--instances", instances) or usual.instances,
        bag=bag or usual.bag,
        population=population or usual.population,
        crc=crc,
        study=replace(usual.study, epochs=study_epochs or usual.study.epochs),
    )
    results = run_benchmark(plan, folder_for(out), device=where, log=log)
    written: list[Path | str] = [out / "benchmark.json", "benchmark.md"]
    if write_plot(results, out / "benchmark.png"):
        written.append("benchmark.png")
    print_results(tables(results), (f"measured on {results.machine}", *CONDITIONS), written)


def run_benchmark(plan: Plan, out: Path, *, device: str, log: Callable[[str], None] = lambda line: None) -> Results:
    """Measure the sections of the plan, and write benchmark.json and benchmark.md after each of them."""
    settings = {name: value for name, value in asdict(plan).items() if name != "crc"}  # without the name of a folder
    results = Results(f"{device}: {machine_line()}", device, settings)

    def add(record: Record) -> None:
        results.records.append(record)
        log(line(record))

    for fact in studies.floors(device, seconds=plan.seconds):
        add(fact)
    bench = Bench(plan, device, peak=1e12 * (results.facts[0].value or 0), out=out)
    if device == "cpu":
        log("measuring the one-bag loop with torch's defaults …")
        for record in sections.torch_defaults(bench):
            add(record)
        configure_process()  # from here on for both loops
    for name in plan.sections:
        log(f"measuring {name} …")
        for record in SECTIONS[name](bench):
            add(record)
        write_results(results, out)
    return results


if __name__ == "__main__":
    main(commands, "python -m benchmarks.speed")
