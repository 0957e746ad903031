"""Trained models on digit bags, where every recipe looks for them. r models, k classes."""

from dataclasses import dataclass, replace

from carmil.bags.bags import Bags
from carmil.datasets.digit_data import DigitData
from carmil.datasets.digits import DigitBags, Task
from carmil.models.contract import BagModel
from carmil.reproduce import table1
from carmil.reproduce.digit_data import training_of
from carmil.reproduce.digit_runs import Experiment, population_of
from carmil.reproduce.recipes import Request
from carmil.reproduce.table1 import Settings
from carmil.training.runs import Run


@dataclass(frozen=True)
class Point:
    """The weights and the distance of CAR's objective; the defaults are Table 1's."""

    alpha: float = 0.2
    lambda_: float = 1.0
    distance: str = "l1"

    @property
    def name(self) -> str:
        return f"{self.distance}, alpha {self.alpha:g}, lambda {self.lambda_:g}"


@dataclass(frozen=True, eq=False)
class DigitModels:
    """r models that differ in their seed, and the bags they are tested on."""

    experiment: Experiment
    run: Run
    models: tuple[BagModel, ...]
    test: DigitBags

    @property
    def task(self) -> Task:
        return self.experiment.task

    @property
    def bags(self) -> Bags:
        return self.test.bags


def digit_models(request: Request, digits: DigitData, task: str, model: str, point: Point | None = None) -> DigitModels:
    """Trains the population, or reads the run that is there: at Table 1's point it is Table 1's."""
    point = point or Point()
    settings = Settings(models=(model,), distance=point.distance, **training_of(request))
    if point != Point(distance=point.distance):
        settings = replace(settings, alpha=(point.alpha,), lambda_=(point.lambda_,))
    studies = {task: digits.studies[task]}
    usual = point == Point() or not model.startswith("car/")
    where = request.digits if usual else request.digits / "points" / point.name.replace(", ", "-").replace(" ", "_")
    ((experiment, run),) = table1.trained(
        table1.planned(studies, settings, digits.about), studies, where, request.device
    )
    population = population_of(run, experiment, studies[task].test.bags.width, device=request.device)
    members = tuple(population.member(row) for row in range(len(population)))
    return DigitModels(experiment, run, members, studies[task].test)


def said_of_digits(request: Request, digits: DigitData, *found: DigitModels) -> list[str]:
    """What the figures on digit bags depend on, a line each."""
    settings = Settings(**training_of(request))
    _, bags, _, training, measured = table1.conditions(settings, digits.about, [one.run.measured_on for one in found])
    return [bags, training, measured]
