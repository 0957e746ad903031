"""Digit bags for the recipes: cohorts, methods, and the conditions of the figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from carmil.bags.labels import read_labels
from carmil.counterfactual import create_model
from carmil.datasets.digit_cohorts import ADAM, DIGITS, FAST_SIZES, FEATURES, SIZES, load_digits
from carmil.datasets.study_cohort import StudyCohort
from carmil.errors import CarmilError
from carmil.models.contract import BagModel
from carmil.reproduce.method_runs import Method, measured_on
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
        """Return CAR-ABMIL at this point; at the point of Table 1, it uses the run of Table 1."""
        settings = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}
        return Method(f"car/abmil ({self.name})", "car/abmil", settings)


def digit_cohorts(request: Request, tasks: Sequence[str] = TASKS) -> list[StudyCohort]:
    """Return the tasks as every recipe trains on them, so that recipes share their runs.

    If DATA/mnist exists, MNIST with one pool of images for all splits, as in the paper, and with its features if
    there are any; otherwise the bundled images, none in two splits.
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
    """Return one method per model and combination of alpha and lambda; missing weights are the defaults of the branch."""
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
            weights = ", ".join(f"{name.removesuffix('_')} {value:g}" for name, value in point.items())
            methods.append(Method(f"{model} ({weights})" if weights else model, model, {**point, **fixed}))
    return methods


def check_settings(method: Method, protocol: Mapping[str, Any]) -> None:
    """Refuse settings that `carmil train` would refuse, before a cohort is built. protocol: the differences from
    that of digit bags.
    """
    given = {"bags": ".", "out": ".", "preset": "0.1", "model": method.model, **protocol, **method.settings}
    check(Settings.of(given, where=method.model))


def build(method: Method, cohort: StudyCohort) -> BagModel:
    """Build the model as it is trained on the cohort, which shows before training whether it can be built and explained."""
    classes = len(read_labels(cohort.labels).classes)
    return create_model(method.model, 2, classes, **cohort.protocol.of_model(method.model).options)


def training_lines(cohorts: Sequence[StudyCohort], runs: Sequence[Run]) -> list[str]:
    """Describe the bags, the training, and the machine."""
    protocol = runs[0].settings
    return [
        f"mean ± standard deviation, of AUC and AUPRC in per cent: over {protocol.seeds} initialisations on the same bags",
        *dict.fromkeys(line for cohort in cohorts for line in cohort.notes),
        f"ours: SGD, momentum 0.9 ({', '.join(ADAM)}: Adam), learning rate {protocol.lr:g}, at most {protocol.epochs} epochs, "
        f"patience {protocol.patience}; the epoch with the lowest validation cross-entropy of the factual answer",
        measured_on(runs),
    ]
