"""carmil reproduce ...: the paper's tables and figures."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from carmil.cli.app import app
from carmil.cli.options import (
    Device,
    DeviceOption,
    Distance,
    OutOption,
    Pool,
    device_named,
    folder_for,
    names_in,
    numbers_in,
)
from carmil.errors import CarmilError

reproduce = typer.Typer(help="The paper's tables and figures, one recipe each.", no_args_is_help=True)
app.add_typer(reproduce, name="reproduce")


@reproduce.command()
def table1(
    mnist: Annotated[
        str | None,
        typer.Option(help="Folder with MNIST's idx files, or 'download'. Without it: 5,000 bundled MNIST images."),
    ] = None,
    features: Annotated[
        Path | None, typer.Option(help="A .npy of features, one row an image (train, then test) in the same order.")
    ] = None,
    encoder: Annotated[str, typer.Option(help="pixels (principal components) or resnet18 (as the paper).")] = "pixels",
    weights: Annotated[
        Path | None, typer.Option(help="ResNet18's weights; without it torchvision downloads them.")
    ] = None,
    pool: Annotated[Pool, typer.Option(help="disjoint: no image in two splits; shared: as the paper.")] = Pool.disjoint,
    models: Annotated[
        str,
        typer.Option(
            help="Names with commas between, or 'all' for every row of the paper (TransMIL is slow on a CPU)."
        ),
    ] = "abmil,car/abmil,targeted/abmil",
    tasks: Annotated[str, typer.Option(help="Digit tasks with commas between.")] = "adjacent_pairs,four_bags",
    repetitions: Annotated[int, typer.Option(help="Initialisations of each model, trained together.")] = 10,
    lr: Annotated[float, typer.Option(help="Learning rate; the paper's is 2e-4, slower to the same place.")] = 1e-3,
    epochs: Annotated[int, typer.Option(help="At most this many; patience is 100.")] = 1000,
    alpha: Annotated[
        str, typer.Option(help="Weights of the counterfactual term, with commas between.  [default: the branch's own]")
    ] = "",
    lambda_: Annotated[
        str, typer.Option("--lambda", help="Weights of the distance; every combination.  [default: the branch's own]")
    ] = "",
    distance: Annotated[Distance, typer.Option(help="Between factual and counterfactual scores (CAR).")] = Distance.l1,
    seed: Annotated[int, typer.Option(min=0, help="Of the bags.")] = 0,
    out: OutOption = Path("table1"),
    device: DeviceOption = Device.auto,
) -> None:
    """Table 1: digit bags with known truth; our figures beside the paper's, every negative rule named.

    Killed and started again, it goes on with the populations that are not there yet.

    Example: carmil reproduce table1 --mnist DIR --features FILE.npy --pool shared
    """
    from carmil.bags.digits import TASKS
    from carmil.errors import unknown
    from carmil.report.tables import print_tables
    from carmil.reproduce.digit_data import load_digits
    from carmil.reproduce.table1 import ALL_MODELS, Settings, run_table1, tables

    settings = Settings(
        models=ALL_MODELS if models == "all" else names_in(models),
        repetitions=repetitions,
        lr=lr,
        epochs=epochs,
        alpha=numbers_in("--alpha", alpha, float),
        lambda_=numbers_in("--lambda", lambda_, float),
        distance=distance.value,
    )
    names = names_in(tasks)
    for name in names:
        if name not in TASKS:
            raise CarmilError(unknown("task", name, TASKS))
    where = device_named(device)
    out = folder_for(out)
    data = load_digits(
        names,
        mnist=mnist,
        features=features,
        encoder=encoder,
        weights=weights,
        pool=pool.value,
        seed=seed,
        device=where,
    )
    rows, lines = run_table1(data.studies, settings, data.about, out, device=where)
    print_tables(tables(rows))
    for line in lines:
        typer.echo(f"- {line}")
    typer.echo(f"\nwritten: {out / 'table1.md'}, {out / 'table1.json'}, {out / 'runs'}")


@reproduce.command()
def crc(
    data: Annotated[Path, typer.Option(help="Folder with crc's features.npy and instances.csv.")],
    models: Annotated[str, typer.Option(help="Names with commas between.  [default: all methods]")] = "",
    epochs: Annotated[int, typer.Option(help="At most this many; patience is 50.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Of the folds.")] = 0,
    out: OutOption = Path("crc"),
    device: DeviceOption = Device.auto,
) -> None:
    """All methods on nuclei of colorectal cancer, a bag a patient, with known instances; five folds.

    Killed and started again, it goes on with the models that are not there yet.

    Example: carmil reproduce crc --data DIR --models abmil.gated,car/abmil.gated
    """
    from carmil.report.tables import print_tables
    from carmil.reproduce.crc import MODELS, RECIPE, conditions, run_crc, table

    names = names_in(models or MODELS)
    if not names:
        raise CarmilError("no model named: expected for example --models abmil.gated,car/abmil.gated")
    where = device_named(device)
    recipe = replace(RECIPE, epochs=epochs)
    rows = run_crc(data, names, folder_for(out), device=where, seed=seed, recipe=recipe)
    print_tables([table(rows)])
    for line in conditions(seed, recipe):
        typer.echo(f"- {line}")
    typer.echo(f"\nwritten: {out / 'crc.md'}, {out / 'crc.json'}")


@reproduce.command()
def complexity(out: OutOption = Path("complexity")) -> None:
    """Parameters and multiply-adds of all models, ours and the paper's, and what explains the difference.

    Example: carmil reproduce complexity --out complexity
    """
    from carmil.report.tables import print_tables
    from carmil.reproduce.complexity import EXPLANATION, run_complexity, table

    lines = run_complexity(folder_for(out))
    print_tables([table(lines)])
    typer.echo(EXPLANATION)
    typer.echo(f"\nwritten: {out / 'complexity.md'}, {out / 'complexity.json'}")
