"""Do maps find the cancerous nuclei? Every explainer on crc, five folds by patient and several seeds, against ABMIL's attention.

The folds and the recipe are crc's; all folds and seeds of a model are one population. b bags, a patient each, n instances, f folds,
s seeds, r = s f models: model i is of seed i // f and fold i % f.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.counterfactual import list_models
from carmil.errors import CarmilError, unknown
from carmil.evidence import average_precision, explain, explainers_of
from carmil.evidence.localisation import auroc, ndcg
from carmil.models.pooling import Offsets
from carmil.progress import tracked, training_progress
from carmil.provenance import config_key, machine_line
from carmil.reproduce.crc import FOLDS, LEARNING_RATE, RECIPE, build, fold_roles, load_crc, study_of
from carmil.reproduce.crc_evidence_report import conditions, write_result
from carmil.reproduce.map_comparison import BASELINE, DEFAULT, MEASURES, Folds, Measured, Result, compared
from carmil.training.checkpoint import Checkpoint, read_keyed, write_keyed
from carmil.training.loop import fit
from carmil.training.population import Member, Population
from carmil.training.predict import predict
from carmil.training.recipe import VALIDATION, Recipe

SEEDS = 5


@dataclass(frozen=True)
class Study:
    """What every model is trained and measured with. measurable (f, b): of the fold's validation and test bags, those that have
    nuclei of both kinds; in others any map is right. `facts` is what figures depend on."""

    bags: Bags
    roles: Tensor
    measurable: Tensor
    recipe: Recipe
    facts: Mapping[str, Any]
    out: Path
    device: str

    def key(self, model: str) -> str:
        return config_key({**self.facts, "model": model})

    def file(self, kind: str, model: str) -> Path:
        return self.out / kind / f"{model.replace('/', '-')}.safetensors"

    @property
    def machine(self) -> str:
        return f"{self.device}: {machine_line()}"


def run_crc_evidence(
    folder: Path,
    models: Sequence[str],
    out: Path,
    *,
    device: str,
    seeds: int = SEEDS,
    seed: int = 0,
    recipe: Recipe = RECIPE,
) -> Result:
    """Trains and measures what `out` does not have yet, and writes crc_evidence.md, .json and .png."""
    _check(models, seeds)
    bags = load_crc(folder)
    assert bags.labels is not None
    roles, tested = fold_roles(bags.labels, seed)
    validated = roles == VALIDATION
    both_kinds = _both_kinds(bags)
    for kind, chosen in (("validation", validated), ("test", tested)):
        empty = (~(chosen & both_kinds).any(1)).nonzero().flatten().tolist()
        if empty:
            raise CarmilError(
                f"{folder}: no {kind} patient of fold {empty[0]} has nuclei of both kinds, cancerous and not; "
                "expected at least one, to measure maps on: try another --seed"
            )
    measurable = (validated | tested) & both_kinds
    facts = {**study_of(bags, recipe, seed), "seeds": seeds}
    study = Study(bags, roles, measurable, recipe, facts, out, device)
    measured = {model: _measured(model, study) for model in dict.fromkeys(models)}
    folds = Folds(tested.numpy(), validated.numpy(), bags.labels.numpy())
    lines = conditions([machine for one in measured.values() for machine in one.machines], seeds, seed, recipe)
    result = compared(measured, folds, lines)
    write_result(result, study.facts, out)
    return result


def agreement(scores: Tensor, bags: Bags) -> Tensor:
    """Of scores (n) with the truth, bag by bag: MEASURES (3, b). NDCG's gain is 1 for a cancerous nucleus, else 0."""
    assert bags.instance_labels is not None
    s, truth, offsets = scores.unsqueeze(-1), (bags.instance_labels > 0).unsqueeze(-1), Offsets(bags.offsets)
    found = (average_precision(s, truth, offsets), auroc(s, truth, offsets), ndcg(s, truth.double(), offsets))
    return torch.cat(found, dim=-1).T


def _check(models: Sequence[str], seeds: int) -> None:
    known = list_models()
    for model in models:
        if model not in known:
            raise CarmilError(unknown("model", model, known))
    for needed, why in ((BASELINE[0], "whose attention maps are compared with"), (DEFAULT[0], "the default model")):
        if needed not in models:
            raise CarmilError(f"--models {','.join(models)}: expected {needed!r}, {why}, among them")
    if seeds < 1:
        raise CarmilError(f"{seeds} seeds: expected at least 1")


def _both_kinds(bags: Bags) -> Tensor:
    """(b) has it cancerous nuclei and others?"""
    assert bags.instance_labels is not None
    parts = bags.instance_labels.split(bags.sizes.tolist())
    return torch.tensor([bool((part > 0).any() and (part <= 0).any()) for part in parts])


def _trained(model: str, study: Study) -> tuple[Population, str]:
    """All folds and seeds, and the machine that trained them; read if they are there, gone on with if they were begun."""
    key, path, seeds = study.key(model), study.file("weights", model), study.facts["seeds"]
    members = [Member(seed=row, lr=LEARNING_RATE) for row in range(seeds * FOLDS)]
    population = Population(partial(build, model, study.bags.width), members, device=study.device)
    if path.exists():
        weights, facts = read_keyed(path, key)
        population.load_state(weights)
        return population, facts["machine"]
    begun = Checkpoint(path.with_suffix(".begun.safetensors"), key)
    with training_progress(model, study.recipe.epochs, len(members)) as on_epoch:
        fit(population, study.bags, study.roles.repeat(seeds, 1), study.recipe, on_epoch=on_epoch, checkpoint=begun)
    write_keyed(path, population.state(), {"key": key, "machine": study.machine})
    begun.remove()
    return population, study.machine


def _measured(model: str, study: Study) -> Measured:
    """Answers for all bags, and the maps of every explainer, which are written one by one."""
    population, trained_on = _trained(model, study)
    key, path = study.key(model), study.file("measured", model)
    kept, facts = read_keyed(path, key) if path.exists() else ({}, {"key": key, "machines": [trained_on]})
    if "answers" not in kept:
        kept["answers"] = predict(population, study.bags, maps=False).probabilities[:, :, 1].double()
    methods = explainers_of(population.member(0))
    for method in methods:
        if method not in kept:
            kept[method] = _agreement_of(population, study, method, f"{model}: {method}")
            facts["machines"] = list(dict.fromkeys([*facts["machines"], study.machine]))
            write_keyed(path, kept, facts)
    maps = {method: kept[method].numpy() for method in methods}
    return Measured(kept["answers"].numpy(), maps, tuple(facts["machines"]))


def _agreement_of(population: Population, study: Study, method: str, title: str) -> Tensor:
    """MEASURES (3, r, b) of every model on the measurable bags of its own fold, NaN elsewhere."""
    values = torch.full((len(MEASURES), len(population), len(study.bags)), torch.nan, dtype=torch.float64)
    parts = [study.bags[chosen] for chosen in study.measurable]
    for row in tracked(range(len(population)), title):
        fold = row % FOLDS
        evidence = explain(population.member(row), parts[fold], method)[:, 1]
        values[:, row, study.measurable[fold]] = agreement(evidence, parts[fold])
    return values
