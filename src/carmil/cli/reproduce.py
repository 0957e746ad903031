"""carmil reproduce ...: the paper's tables and figures."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from carmil.cli.app import app
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
    request_in,
    shared_options,
    show_finding,
    tasks_in,
)
from carmil.errors import CarmilError

if TYPE_CHECKING:
    from carmil.datasets.study_cohort import StudyCohort
    from carmil.reproduce.method_runs import Method
    from carmil.reproduce.recipes import Request

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


def _parse_digits(
    mnist: Annotated[
        str | None,
        typer.Option(help="Folder of MNIST's idx files, or 'download'.  [default: 5,000 bundled MNIST images]"),
    ] = None,
    features: Annotated[
        Path | None,
        typer.Option(help="A .npy file of features, one row per image (train, then test) in the same order."),
    ] = None,
    encoder: Annotated[
        str, typer.Option(help="pixels (principal components) or resnet18 (as in the paper).")
    ] = "pixels",
    weights: Annotated[
        Path | None, typer.Option(help="Weights of ResNet18.  [default: downloaded by torchvision]")
    ] = None,
    pool: Annotated[Pool, typer.Option(help="disjoint: no image in two splits; shared: as in the paper.")] = "disjoint",
    tasks: Annotated[str, typer.Option(help="Digit tasks, separated by commas.")] = "adjacent_pairs,four_bags",
    repetitions: Annotated[int, typer.Option(min=1, help="Initialisations of each model, trained together.")] = 10,
    lr: Annotated[
        float, typer.Option(help="Learning rate; the paper's 2e-4 reaches the same results more slowly.")
    ] = 1e-3,
    epochs: Annotated[int, typer.Option(help="Maximum number of epochs; patience is 100.")] = 1000,
    alpha: Annotated[
        str, typer.Option(help="Weights of the counterfactual term, separated by commas.  [default: the branch's own]")
    ] = "",
    lambda_: Annotated[
        str, typer.Option("--lambda", help="Weights of the distance; every combination.  [default: the branch's own]")
    ] = "",
    distance: Annotated[
        Distance, typer.Option(help="Distance between factual and counterfactual scores (CAR).")
    ] = "l1",
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
) -> "tuple[DigitOptions]":
    """Return the options of every command about digit bags."""
    data = DigitOptions(
        tasks=tasks_in(tasks),
        protocol={"seeds": repetitions, "lr": lr, "epochs": epochs},
        points={
            "alpha": numbers_in("--alpha", alpha, float),
            "lambda_": numbers_in("--lambda", lambda_, float),
            "distance": distance,
        },
        source={
            "mnist": mnist,
            "features": features,
            "encoder": encoder,
            "weights": weights,
            "pool": pool,
            "seed": seed,
            "device": device_named(device),
        },
    )
    return (data,)


@dataclass(frozen=True)
class DigitOptions:
    """protocol: differences from that of digit bags. points: of CAR's objective. source: for load_digits."""

    tasks: tuple[str, ...]
    protocol: dict[str, Any]
    points: dict[str, Any]
    source: dict[str, Any]

    def methods(self, models: str) -> "list[Method]":
        from carmil.reproduce.digits import check_settings, digit_methods
        from carmil.reproduce.table1 import MODELS

        methods = digit_methods(MODELS if models == "all" else names_in(models), **self.points)
        for method in methods:
            check_settings(method, self.protocol)
        return methods

    def request(self, out: Path) -> "Request":
        from carmil.reproduce.recipes import Request

        out = folder_for(out)
        return Request(out=out, shared=out, seed=self.source["seed"], device=self.source["device"])

    def cohorts(self, request: "Request") -> "list[StudyCohort]":
        from carmil.datasets.digit_cohorts import DIGITS, load_digits

        digits, protocol = load_digits(**self.source), replace(DIGITS, **self.protocol)
        return [digits.cohort(task, request.shared / "cohorts", protocol) for task in self.tasks]


# Commands about digit bags are called with these options as `digits`.
_of_digits = shared_options(_parse_digits, "digits")


@reproduce.command()
@_of_digits
def table1(
    digits: DigitOptions,
    models: Annotated[
        str,
        typer.Option(
            help="Names, separated by commas, or 'all' for every row of the paper (TransMIL is slow on a CPU)."
        ),
    ] = "abmil,car/abmil,targeted/abmil",
    out: OutOption = Path("table1"),
) -> None:
    """Table 1: digit bags with known truth; our figures and the paper's, with the negative rule of every row.

    Writes OUT/table1.md, table1.json, the cohorts, OUT/cohorts, and an ordinary run per task and model, OUT/runs. If
    interrupted, run the same command again to resume.

    Examples:
      carmil reproduce table1
      carmil reproduce table1 --mnist DIR --features FILE.npy --pool shared
    """
    from carmil.reproduce.table1 import run_table1

    methods, request = digits.methods(models), digits.request(out)
    show_finding("table1", request, run_table1(digits.cohorts(request), methods, request))


@reproduce.command()
@_of_digits
def interpretability(
    digits: DigitOptions,
    models: Annotated[
        str, typer.Option(help="Names, separated by commas, or 'all' for every model of Table 1.")
    ] = "abmil,car/abmil",
    explainers: Annotated[str, typer.Option(help="Names, separated by commas.  [default: all that fit a model]")] = "",
    out: OutOption = Path("interpretability"),
) -> None:
    """The interpretability table: every explainer that fits a model, with the negative rule of every row.

    Writes OUT/interpretability.md, interpretability.json and OUT/runs. Models that table1 has trained with the same
    options are used again if --out is its folder. If interrupted, run the same command again to resume.

    Example: carmil reproduce interpretability --mnist DIR --features FILE.npy --pool shared --out table1
    """
    from carmil.reproduce.interpretability import run_interpretability

    methods, request = digits.methods(models), digits.request(out)
    finding = run_interpretability(digits.cohorts(request), methods, request, explainers=names_in(explainers))
    show_finding("interpretability", request, finding)


@reproduce.command()
@_of_digits
def faithfulness(
    digits: DigitOptions,
    models: Annotated[str, typer.Option(help="Names, separated by commas.")] = "abmil,cia/abmil,car/abmil",
    crc: Annotated[
        Path | None, typer.Option(help="Folder with crc's features.npy and instances.csv, to include these bags.")
    ] = None,
    crc_models: Annotated[
        str, typer.Option(help="Names, separated by commas.")
    ] = "abmil.gated,cia/abmil.gated,car/abmil.gated",
    crc_epochs: Annotated[int, typer.Option(help="Maximum number of epochs.")] = 100,
    out: OutOption = Path("faithfulness"),
) -> None:
    """The deletion figure: the model's confidence and the cohort's AUC as the most relevant instances are removed.

    Writes OUT/faithfulness.md, faithfulness.json, faithfulness.png and cohort_auc.png. Models that table1 has trained
    with the same options are used again if --out is its folder. If interrupted, run the same command again to resume.

    Example: carmil reproduce faithfulness --mnist DIR --features FILE.npy --pool shared --crc DIR
    """
    from carmil.reproduce.crc import crc_cohort
    from carmil.reproduce.digits import digit_methods
    from carmil.reproduce.faithfulness import run_faithfulness

    methods, request = digits.methods(models), digits.request(out)
    finding = run_faithfulness(
        digits.cohorts(request),
        methods,
        request,
        nuclei=[] if crc is None else [crc_cohort(crc, request, epochs=crc_epochs)],
        nuclei_methods=[] if crc is None else digit_methods(names_in(crc_models)),
    )
    show_finding("faithfulness", request, finding)


@reproduce.command()
def crc(
    data: Annotated[Path, typer.Option(help="Folder with crc's features.npy and instances.csv.")],
    models: Annotated[str, typer.Option(help="Names, separated by commas.  [default: all methods]")] = "",
    epochs: Annotated[int, typer.Option(min=1, help="Maximum number of epochs; patience is 50.")] = 100,
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
    """Count parameters and multiply-adds of all models, ours and the paper's, and explain the differences.

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
        str, typer.Option(help="Names, separated by commas; these two must be included.")
    ] = "abmil.gated,car/abmil.gated",
    seeds: Annotated[int, typer.Option(min=1, help="Initialisations of every fold, trained together.")] = 5,
    epochs: Annotated[int, typer.Option(min=1, help="Maximum number of epochs; patience is 50.")] = 100,
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


@reproduce.command()
def targets(
    crc: Annotated[Path | None, typer.Option(help="Folder with crc's features.npy and instances.csv.")] = None,
    ki67: Annotated[Path | None, typer.Option(help="Folder with ki67's patients.csv and cells.npz.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Initialisations of every fold, trained together.")] = 5,
    seed: SeedOption = 0,
    fast: Annotated[bool, typer.Option("--fast", help="Few bags and epochs, for a quick trial.")] = False,
    out: OutOption = Path("targets"),
    device: DeviceOption = "auto",
) -> None:
    """Survival, grades, several labels and a number: planted hazards with known truth, and patients with Ki67 of every cell.

    Writes OUT/targets.md and targets.json. If interrupted, run the same command again to resume.

    Example: carmil reproduce targets --crc DIR --ki67 DIR --out targets
    """
    from carmil.reproduce.targets import run_targets

    request = request_in(out, {"seed": seed, "device": device_named(device), "fast": fast})
    show_finding("targets", request, run_targets(crc, ki67, request, seeds=seeds))
