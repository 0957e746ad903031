"""One population on one digit task, from bags to a run folder. r models, n test instances, k classes."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.counterfactual import create_model
from carmil.datasets.digits import DigitStudy, Task
from carmil.evidence import bag_performance, evidence_agreement, explain, explainers_of
from carmil.progress import training_progress
from carmil.training.loop import fit
from carmil.training.population import Member, Population
from carmil.training.predict import Predictions, predict
from carmil.training.recipe import TRAIN, VALIDATION, Recipe
from carmil.training.runs import Run, has_run, read_run, write_run

# xMIL's template: 20 units everywhere, ungated attention, one hidden output layer, no dropout. What a method adds of its own
# is cut to the same size.
TEMPLATE: dict[str, dict[str, Any]] = {
    "mean": {"dropout": 0.0},
    "max": {"dropout": 0.0},
    "abmil": {"attention": 20, "output_layers": 1, "dropout": 0.0},
    "abmil.gated": {"attention": 20, "output_layers": 1, "dropout": 0.0},
    "clam.sb": {"attention": 20, "dropout": 0.0},
    "clam.mb": {"attention": 20, "dropout": 0.0},
    "acmil": {"attention": 20},
    "dsmil": {"query_size": 20, "dropout": 0.0},
    "dsmil.official": {"query_size": 20},
    "transmil": {"dropout": 0.0},
    "rrt": {"heads": 2, "attention": 20, "dropout": 0.0, "projection_dropout": 0.0},
    "weno": {"teacher": 20, "attention": 20, "student": 20, "dropout": 0.0, "init_std": None},
}

# SGD with momentum, as the template. Adam for additive, as xMIL has it, and by our own choice for these others: SGD was not
# tried on them (xMIL trains TransMIL with SGD).
ADAM = ("additive", "acmil", "dsmil", "dsmil.official", "transmil", "rrt", "weno")


def template(model: str) -> dict[str, Any]:
    """The options of the model of this name on digit bags."""
    branch, _, plain = model.rpartition("/")
    options = {"hidden": 20, **TEMPLATE.get(plain, {})}
    if plain == "dsmil.official":
        options.pop("hidden")
    # Table 1's counterfactual branch is a whole second attention.
    return {**options, **({"branch": "full"} if branch == "car" else {})}


def optimizer_of(model: str) -> str:
    return "adam" if model.rpartition("/")[2] in ADAM else "sgd"


@dataclass(frozen=True)
class Experiment:
    """What is asked of one population. `data` says which bags these are.

    evidence: explainers whose maps the run holds, as far as the model can be asked for them.
    """

    task: Task
    model: str
    members: tuple[Member, ...]
    recipe: Recipe = field(default_factory=Recipe)
    data: Mapping[str, Any] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        return template(self.model)

    def build(self, in_features: int) -> Any:
        return create_model(self.model, in_features, self.task.classes, **self.options)

    @property
    def config(self) -> dict[str, Any]:
        return {
            "task": self.task.name,
            "model": self.model,
            "options": self.options,
            "members": [asdict(member) for member in self.members],
            "recipe": asdict(self.recipe),
            "data": dict(self.data),
            "evidence": list(self.evidence),
        }


def run_experiment(experiment: Experiment, study: DigitStudy, folder: Path, *, device: str = "cpu") -> Run:
    """Trains, measures on the test bags and writes the folder; a finished run of the same config is read instead."""
    if has_run(folder, experiment.config):
        return read_run(folder)
    train, validation, test = study.train.bags, study.validation.bags, study.test.bags
    bags = Bags.concatenate([train, validation])
    roles = torch.cat([torch.full((len(train),), TRAIN), torch.full((len(validation),), VALIDATION)])
    population = Population(lambda: experiment.build(bags.width), experiment.members, device=device)
    title = f"{experiment.model} on {experiment.task.title}"
    started = time.perf_counter()
    with training_progress(title, experiment.recipe.epochs, len(population)) as on_epoch:
        history = fit(population, bags, roles, experiment.recipe, on_epoch=on_epoch)
    seconds = time.perf_counter() - started
    answers = predict(population, test)
    maps = evidence_maps(population, test, experiment.evidence)
    metrics = _measured(answers, maps, test.to(device))
    if answers.counterfactual_scores is not None:
        maps["counterfactual"] = answers.counterfactual_scores
    write_run(
        folder,
        config=experiment.config,
        population=population,
        history=history,
        answers=answers,
        bag_ids=test.ids,
        labels=known(test.labels),
        metrics=metrics,
        maps=maps,
        seconds=seconds,
    )
    return read_run(folder)


def population_of(run: Run, experiment: Experiment, width: int, *, device: str = "cpu") -> Population:
    """The trained models of a run, to be asked further questions."""
    population = Population(lambda: experiment.build(width), experiment.members, device=device)
    population.load_state(run.weights)
    return population


def evidence_maps(population: Population, bags: Bags, methods: Sequence[str]) -> dict[str, Tensor]:
    """Evidence (r, n, k) by those of the methods that the model can be asked for."""
    members = [population.member(row) for row in range(len(population))]
    request = [method for method in explainers_of(members[0]) if method in methods]
    there = bags.to(population.device)  # copied once, not for every model and method
    return {method: torch.stack([explain(member, there, method) for member in members]) for method in request}


def scored(maps: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """Every map with each rule that its negative evidence is scored by: evidence, rule, supporting, refuting."""
    for evidence, s in maps.items():
        yield evidence, "mirror", s, -s
        if evidence == "attention":
            yield evidence, "self", s, s
            if "counterfactual_attention" in maps:
                yield evidence, "counterfactual", s, maps["counterfactual_attention"]


def _measured(answers: Predictions, maps: Mapping[str, Tensor], test: Bags) -> dict[str, list[float]]:
    """Bag measures, and agreement with the truth under every negative rule that applies, for each model."""
    labels, truth = known(test.labels).cpu(), known(test.instance_labels)
    by_model = [bag_performance(probabilities, labels) for probabilities in answers.probabilities]
    measured = {name: [one[name] for one in by_model] for name in by_model[0]}
    for evidence, rule, supporting, refuting in scored(maps):
        supporting, refuting = supporting.to(truth.device), refuting.to(truth.device)
        agreement = evidence_agreement(supporting, refuting, truth, test.offsets)
        measured[f"{evidence}.auprc_pos"] = agreement.positive.tolist()
        measured[f"{evidence}.{rule}.auprc_both"] = agreement.both.tolist()
    return measured


def known(value: Tensor | None) -> Tensor:
    if value is None:
        raise ValueError("digit bags have labels and instance labels")
    return value
