"""carmil reproduce ...: the paper's tables and figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from carmil.cli.app import app
from carmil.cli.findings import request_in, show_finding
from carmil.cli.options import (
    DeviceOption,
    Distance,
    OutOption,
    Pool,
    SeedOption,
    device_named,
    folder_for,
    names_in,
    numbers_in,
    shared_options,
    tasks_in,
)
from carmil.errors import CarmilError

if TYPE_CHECKING:
    from carmil.tables import ResultTable

reproduce = typer.Typer(
    help="""The paper's tables and figures, one recipe each.

    Examples:
      carmil reproduce list
      carmil reproduce table1
      carmil reproduce all --data DIR --fast
    """,
    no_args_is_help=True,
)
app.add_typer(reproduce, name="reproduce")


def _words_of_digits(
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
    pool: Annotated[Pool, typer.Option(help="disjoint: no image in two splits; shared: as the paper.")] = "disjoint",
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
    distance: Annotated[Distance, typer.Option(help="Between factual and counterfactual scores (CAR).")] = "l1",
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What table1's Settings are made of beside the models, and what load_digits is asked for."""
    training = {
        "repetitions": repetitions,
        "lr": lr,
        "epochs": epochs,
        "alpha": numbers_in("--alpha", alpha, float),
        "lambda_": numbers_in("--lambda", lambda_, float),
        "distance": distance,
    }
    data = {
        "tasks": tasks_in(tasks),
        "mnist": mnist,
        "features": features,
        "encoder": encoder,
        "weights": weights,
        "pool": pool,
        "seed": seed,
        "device": device_named(device),
    }
    return training, data


# A command about digit bags is called with `training`, for table1's Settings, and `data`, for load_digits.
_of_digits = shared_options(_words_of_digits, "training", "data")


@reproduce.command()
@_of_digits
def table1(
    training: dict[str, Any],
    data: dict[str, Any],
    models: Annotated[
        str,
        typer.Option(
            help="Names with commas between, or 'all' for every row of the paper (TransMIL is slow on a CPU)."
        ),
    ] = "abmil,car/abmil,targeted/abmil",
    out: OutOption = Path("table1"),
) -> None:
    """Table 1: digit bags with known truth; our figures beside the paper's, every negative rule named.

    Writes OUT/table1.md, table1.json and the trained models, OUT/runs. Killed and started again, it goes on with the populations
    that are not there yet.

    Examples:
      carmil reproduce table1
      carmil reproduce table1 --mnist DIR --features FILE.npy --pool shared
    """
    from carmil.datasets.digit_data import load_digits
    from carmil.reproduce.table1 import ALL_MODELS, Settings, run_table1, tables

    settings = Settings(models=ALL_MODELS if models == "all" else names_in(models), **training)
    out = folder_for(out)
    digits = load_digits(**data)
    rows, lines = run_table1(digits.studies, settings, digits.about, out, device=data["device"])
    _say(tables(rows), lines)
    typer.echo(f"\nwritten: {out / 'table1.md'}, {out / 'table1.json'}, {out / 'runs'}")


@reproduce.command()
@_of_digits
def interpretability(
    training: dict[str, Any],
    data: dict[str, Any],
    models: Annotated[
        str, typer.Option(help="Names with commas between, or 'all' for every model of Table 1.")
    ] = "abmil,car/abmil",
    explainers: Annotated[
        str, typer.Option(help="Names with commas between.  [default: all that a model can be asked for]")
    ] = "",
    out: OutOption = Path("interpretability"),
) -> None:
    """The interpretability table: every explainer a model can be asked for, every negative rule named.

    Writes OUT/interpretability.md, interpretability.json and OUT/runs. Models that table1 has trained with the same options are
    used again if --out is its folder. Killed and started again, it goes on with what is not there yet.

    Example: carmil reproduce interpretability --mnist DIR --features FILE.npy --pool shared --out table1
    """
    from carmil.datasets.digit_data import load_digits
    from carmil.reproduce.interpretability import run_interpretability, tables
    from carmil.reproduce.table1 import ALL_MODELS, Settings

    settings = Settings(models=ALL_MODELS if models == "all" else names_in(models), **training)
    out = folder_for(out)
    digits = load_digits(**data)
    rows, lines = run_interpretability(
        digits.studies, settings, digits.about, out, explainers=names_in(explainers), device=data["device"]
    )
    _say(tables(rows), lines)
    typer.echo(f"\nwritten: {out / 'interpretability.md'}, {out / 'interpretability.json'}, {out / 'runs'}")


@reproduce.command()
@_of_digits
def faithfulness(
    training: dict[str, Any],
    data: dict[str, Any],
    models: Annotated[str, typer.Option(help="Names with commas between.")] = "abmil,cia/abmil,car/abmil",
    crc: Annotated[
        Path | None, typer.Option(help="Folder with crc's features.npy and instances.csv: on these bags too.")
    ] = None,
    crc_models: Annotated[
        str, typer.Option(help="Names with commas between.")
    ] = "abmil.gated,cia/abmil.gated,car/abmil.gated",
    crc_epochs: Annotated[int, typer.Option(help="At most this many.")] = 100,
    out: OutOption = Path("faithfulness"),
) -> None:
    """The deletion figure: how sure a model stays as its most relevant instances go, and the cohort's AUC meanwhile.

    Writes OUT/faithfulness.md, faithfulness.json, faithfulness.png and cohort_auc.png. Models that table1 has trained with the
    same options are used again if --out is its folder. Killed and started again, it goes on with what is not there yet.

    Example: carmil reproduce faithfulness --mnist DIR --features FILE.npy --pool shared --crc DIR
    """
    from carmil.datasets.digit_data import load_digits
    from carmil.reproduce.faithfulness import Nuclei, run_faithfulness, tables
    from carmil.reproduce.table1 import Settings

    settings = Settings(models=names_in(models), **training)
    nuclei = None
    if crc is not None:
        nuclei = Nuclei(crc, names_in(crc_models), crc_epochs, seed=data["seed"])
    out = folder_for(out)
    digits = load_digits(**data)
    curves, lines = run_faithfulness(digits.studies, settings, digits.about, out, nuclei=nuclei, device=data["device"])
    _say(tables(curves), lines)
    kinds = ("faithfulness.md", "faithfulness.json", "faithfulness.png", "cohort_auc.png")
    typer.echo(f"\nwritten: {', '.join(str(out / name) for name in kinds)}")


def _say(tables: "Sequence[ResultTable]", lines: Sequence[str]) -> None:
    from carmil.tables import print_tables

    print_tables(tables)
    for line in lines:
        typer.echo(f"- {line}")


@reproduce.command()
def crc(
    data: Annotated[Path, typer.Option(help="Folder with crc's features.npy and instances.csv.")],
    models: Annotated[str, typer.Option(help="Names with commas between.  [default: all methods]")] = "",
    epochs: Annotated[int, typer.Option(min=1, help="At most this many; patience is 50.")] = 100,
    seed: SeedOption = 0,
    out: OutOption = Path("crc"),
    device: DeviceOption = "auto",
) -> None:
    """All methods on nuclei of colorectal cancer with known instances, one bag per patient; five folds.

    Writes OUT/crc.md and crc.json. If interrupted, run the same command again to resume.

    Example: carmil reproduce crc --data DIR --models abmil.gated,car/abmil.gated
    """
    from carmil.reproduce.crc import MODELS, run_crc

    names = names_in(models or MODELS)
    if not names:
        raise CarmilError("no model named: expected for example --models abmil.gated,car/abmil.gated")
    request = request_in(out, {"seed": seed, "device": device_named(device)})
    show_finding("crc", request, run_crc(data, names, request, epochs=epochs))


@reproduce.command()
def complexity(out: OutOption = Path("complexity")) -> None:
    """Parameters and multiply-adds of all models, ours and the paper's, and what explains the difference.

    Writes OUT/complexity.md and complexity.json.

    Example: carmil reproduce complexity --out complexity
    """
    from carmil.reproduce import complexity as recipe

    request = request_in(out, {})
    show_finding("complexity", request, recipe.reproduce(request))


@reproduce.command()
def crc_evidence(
    data: Annotated[Path, typer.Option(help="Folder with crc's features.npy and instances.csv.")],
    models: Annotated[
        str, typer.Option(help="Names with commas between; these two must be among them.")
    ] = "abmil.gated,car/abmil.gated",
    seeds: Annotated[int, typer.Option(min=1, help="Initialisations of every fold, trained together.")] = 5,
    epochs: Annotated[int, typer.Option(min=1, help="At most this many; patience is 50.")] = 100,
    seed: SeedOption = 0,
    out: OutOption = Path("crc_evidence"),
    device: DeviceOption = "auto",
) -> None:
    """Every explainer on nuclei of colorectal cancer; the default map, fixed on validation bags, against ABMIL's attention.

    Writes OUT/crc_evidence.md, crc_evidence.json and crc_evidence.png. If interrupted, run the same command
    again to resume.

    Example: carmil reproduce crc-evidence --data DIR --out crc_evidence
    """
    from carmil.reproduce.crc_evidence import run_crc_evidence

    request = request_in(out, {"seed": seed, "device": device_named(device)})
    show_finding("crc_evidence", request, run_crc_evidence(data, names_in(models), request, seeds=seeds, epochs=epochs))
