"""Digit bags as the recipes have them: cohorts, methods, and what the figures depend on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from carmil.bags.labels import read_labels
from carmil.counterfactual import create_model
from carmil.datasets.digit_cohorts import ADAM, DIGITS, FAST_SIZES, FEATURES, SIZES, load_digits
from carmil.datasets.study_cohort import Protocol, StudyCohort
from carmil.errors import CarmilError
from carmil.models.contract import BagModel
from carmil.reproduce.method_runs import Method
from carmil.reproduce.recipes import Request
from carmil.runs.run import Run
from carmil.runs.settings import Settings
from carmil.studies.train import check, check_model

TASKS = ("adjacent_pairs", "four_bags")  # of the paper
FAST = replace(DIGITS, seeds=2, lr=4e-3)


@dataclass(frozen=True)
class Point:
    """The weights and the distance of CAR's objective; the defaults are Table 1's."""

    alpha: float = 0.2
    lambda_: float = 1.0
    distance: str = "l1"

    @property
    def name(self) -> str:
        return f"{self.distance}, alpha {self.alpha:g}, lambda {self.lambda_:g}"

    @property
    def method(self) -> Method:
        """CAR-ABMIL at this point; at Table 1's its run is Table 1's."""
        settings = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}
        return Method(f"car/abmil ({self.name})", "car/abmil", settings)


def digit_cohorts(request: Request, tasks: Sequence[str] = TASKS) -> list[StudyCohort]:
    """The tasks as every recipe trains on them, so that one's runs are another's.

    MNIST in DATA/mnist, one pool of images for all splits as the paper has it, and the features there if any; else the bundled
    images, none in two splits.
    """
    folder = request.folder("mnist")
    features = None if folder is None else folder / FEATURES
    data = load_digits(
        mnist=None if folder is None else str(folder),
        features=features if features is not None and features.is_file() else None,
        pool="disjoint" if folder is None else "shared",
        sizes=FAST_SIZES if request.fast else SIZES,
        seed=request.seed,
        device=request.device,
    )
    return [data.cohort(task, request.shared / "cohorts", FAST if request.fast else DIGITS) for task in tasks]


def digit_methods(
    models: Sequence[str], *, alpha: Sequence[float] = (), lambda_: Sequence[float] = (), distance: str = "l1"
) -> list[Method]:
    """One method per model and combination of alpha and lambda; weights that are not given are the branch's own."""
    if not models:
        raise CarmilError("no model named: expected for example --models abmil,car/abmil")
    methods = []
    for model in dict.fromkeys(models):
        check_model(model)
        given = {"alpha": alpha, "lambda_": lambda_} if "/" in model else {}
        named = {name: values for name, values in given.items() if values}
        fixed = {"distance": distance} if model.startswith("car/") and distance != "l1" else {}
        for values in product(*named.values()):
            point = dict(zip(named, values, strict=True))
            weights = point_name(point)
            methods.append(Method(f"{model} ({weights})" if weights else model, model, {**point, **fixed}))
    return methods


def check_settings(method: Method, protocol: Mapping[str, Any]) -> None:
    """Refuse settings that no training can have, before a cohort is made. protocol: what differs from that of digit bags."""
    given = {"bags": ".", "out": ".", "preset": "0.1", "model": method.model, **protocol, **method.settings}
    check(Settings.of(given, where=method.model))


def build(method: Method, cohort: StudyCohort) -> BagModel:
    """The model as it is trained on the cohort; whether it can be built, and what it can explain, is known before training."""
    classes = len(read_labels(cohort.labels).classes)
    return create_model(method.model, 2, classes, **cohort.protocol.of_model(method.model).options)


def point_name(settings: Mapping[str, float]) -> str:
    weights = {name: settings[name] for name in ("alpha", "lambda_") if name in settings}
    return ", ".join(f"{name.removesuffix('_')} {value:g}" for name, value in weights.items())


def spread_line(protocol: Protocol) -> str:
    return f"mean ± standard deviation over {protocol.seeds} initialisations on the same bags, in per cent"


def training_lines(cohorts: Sequence[StudyCohort], runs: Sequence[Run]) -> list[str]:
    """Which bags these are, how models were trained on them, and where."""
    protocol = runs[0].settings
    return [
        *dict.fromkeys(line for cohort in cohorts for line in cohort.notes),
        f"ours: SGD, momentum 0.9 ({', '.join(ADAM)}: Adam), learning rate {protocol.lr:g}, at most {protocol.epochs} epochs, "
        f"patience {protocol.patience}; the epoch with the lowest validation cross-entropy of the factual answer",
        f"measured on {'; and on '.join(dict.fromkeys(measured_on(run) for run in runs))}",
    ]


def measured_on(run: Run) -> str:
    return ", ".join(f"{name} {value}" for name, value in run.machine.items())
