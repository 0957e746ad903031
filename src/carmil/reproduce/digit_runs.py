"""One population on one digit task, from bags to a run folder. r models, n test instances, k classes."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.bags.digits import DigitStudy, Task
from carmil.counterfactual import create_model
from carmil.evidence import bag_performance, evidence_agreement, explain
from carmil.models import registry
from carmil.progress import training_progress
from carmil.training.loop import fit
from carmil.training.population import Member, Population
from carmil.training.predict import Answers, predict
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
    """What is asked of one population. `data` says which bags these are."""

    task: Task
    model: str
    members: tuple[Member, ...]
    recipe: Recipe = field(default_factory=Recipe)
    data: Mapping[str, Any] = field(default_factory=dict)

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
            "evidence": evidence_of(self.model),
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
    maps = _maps(population, test, answers, experiment.model)
    write_run(
        folder,
        config=experiment.config,
        population=population,
        history=history,
        answers=answers,
        bag_ids=test.ids,
        labels=_known(test.labels),
        metrics=_measured(answers, maps, test),
        maps=maps,
        seconds=seconds,
    )
    return read_run(folder)


def _maps(population: Population, test: Bags, answers: Answers, model: str) -> dict[str, Tensor]:
    """Evidence by every explainer that the table shows for this model, (r, n, k), and counterfactual (r, n, m, h) if learned."""
    members = [population.member(row) for row in range(len(population))]
    maps = {method: torch.stack([explain(member, test, method) for member in members]) for method in evidence_of(model)}
    if answers.counterfactual_scores is not None:
        maps["counterfactual"] = answers.counterfactual_scores
    return maps


def evidence_of(model: str) -> list[str]:
    """Which explainers a model of this name is asked for."""
    branch, _, plain = model.rpartition("/")
    attends = registry.entries()[plain].attends
    return [
        *(["attention"] if attends or plain in ("additive", "weno") else []),
        *(["rollout"] if plain == "transmil" else []),
        *(["patch_scores"] if plain in ("additive", "mean", "max", "dsmil", "weno") and not branch else []),
        *(["targeted"] if branch == "targeted" else []),
        *(["single", "random"] if model == "abmil" else []),
        *(["path"] if attends and plain != "transmil" else []),
    ]


def _measured(answers: Answers, maps: Mapping[str, Tensor], test: Bags) -> dict[str, list[float]]:
    """Bag measures, and agreement with the truth under every negative rule that applies, for each model."""
    labels, truth = _known(test.labels), _known(test.instance_labels)
    by_model = [bag_performance(probabilities, labels) for probabilities in answers.probabilities]
    measured = {name: [one[name] for one in by_model] for name in by_model[0]}

    def add(evidence: str, rule: str, supporting: Tensor, refuting: Tensor) -> None:
        agreement = evidence_agreement(supporting, refuting, truth, test.offsets)
        measured[f"{evidence}.auprc_pos"] = agreement.positive.tolist()
        measured[f"{evidence}.{rule}.auprc_both"] = agreement.both.tolist()

    cf = maps.get("counterfactual")
    for evidence, s in maps.items():
        if evidence != "counterfactual":
            add(evidence, "mirror", s, -s)
            add(evidence, "self", s, s)
    if cf is not None and cf.shape[-2] == 1:
        # one map for every class, or a map a class: as the attention itself
        cf = cf.squeeze(-2)
        add(
            "attention",
            "counterfactual",
            maps["attention"],
            cf if cf.shape[-1] == truth.shape[1] else cf.mean(-1, keepdim=True).expand_as(maps["attention"]),
        )
    return measured


def _known(value: Tensor | None) -> Tensor:
    if value is None:
        raise ValueError("digit bags have labels and instance labels")
    return value
