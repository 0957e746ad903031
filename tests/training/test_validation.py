"""Validation reads the same bags every epoch, so a GPU records it; here a recorder runs the work directly."""

import gc
import weakref

import pytest
import torch

from carmil import Bags, create_model
from carmil.models.pooling import Offsets
from carmil.recording import Recorder
from carmil.targets.links import Cox
from carmil.training import Member, Population, Recipe
from carmil.training.early_stopping import TrainingState
from carmil.training.feeder import Feeder
from carmil.training.validation import Validator, validation_parts

SIZES = (3, 5, 2, 7, 4, 6)
OUTCOMES = torch.tensor([[4.0, 1.0], [2.0, 1.0], [5.0, 0.0], [2.0, 1.0], [1.0, 0.0], [3.0, 1.0]])  # times and events


def validators(count: int = 2) -> list[Validator]:
    """Return validators of the same three models; the last model has other validation bags than the first two."""
    generator = torch.Generator().manual_seed(0)
    bags = Bags.from_list([torch.randn(n, 4, generator=generator) for n in SIZES], labels=torch.arange(6) % 2)
    validated = torch.zeros(3, 6, dtype=torch.bool)
    validated[:2, [0, 3, 4]] = True
    validated[2, [1, 2, 5]] = True
    created = []
    for _ in range(count):
        members = [Member(seed=seed) for seed in range(3)]
        population = Population(lambda: create_model("abmil", 4, 2, hidden=6, attention=3), members)
        population.train(False)
        state, feeder = TrainingState(population, Recipe(epochs=9, patience=1)), Feeder(bags, torch.device("cpu"))
        created.append(Validator(state, feeder, validation_parts(bags, validated, lambda models: 100)))
    return created


class Replayed:
    def __init__(self, work):
        self.work, self.times = work, 0

    def __call__(self):
        self.times += 1
        return self.work()


def test_replayed_validation_uses_current_weights_and_remaining_models(monkeypatch):
    created = []
    monkeypatch.setattr(Recorder, "record", lambda self, work: created.append(Replayed(work)) or created[-1])
    plain, replayed = validators()
    replayed._records = True
    for epoch in range(4):
        for validator in (plain, replayed):
            validator.state.population.weights *= 0.9
        torch.testing.assert_close(replayed(), plain(), rtol=0, atol=0)
        assert plain().shape == (3,) and plain().std() > 0
        assert [one.times for one in created] == [epoch] * len(created)
    for validator in (plain, replayed):
        validator.state.active[:] = torch.tensor([True, False, False])
        validator.state._compact()
    for _ in range(3):
        torch.testing.assert_close(replayed(), plain(), rtol=0, atol=0)
    assert len(created) == 3  # two parts of three models, then one part of the remaining model


def test_validation_runs_unrecorded_if_recording_runs_out_of_memory(monkeypatch):
    tried = []

    def run_out_of_memory(self, work):
        tried.append(work)
        self.full = True

    monkeypatch.setattr(Recorder, "record", run_out_of_memory)
    plain, full = validators()
    full._records = True
    for _ in range(4):
        torch.testing.assert_close(full(), plain(), rtol=0, atol=0)
    assert len(tried) == 1


def test_inputs_of_a_recorded_validation_pass_stay_in_memory(monkeypatch):
    """A graph does not own its inputs: released memory could be reused before the next epoch."""
    # The recorder keeps no reference to the work.
    monkeypatch.setattr(Recorder, "record", lambda self, work: Replayed(lambda: torch.zeros(2, 3, 2)))
    (validator,) = validators(1)
    validator._records = True
    validator()
    read = [
        weakref.ref(tensor) for fed, _ in validator._passes.values() for tensor in (fed.rows, fed.labels, fed.offsets)
    ]
    validator()
    validator()
    gc.collect()
    assert len(read) == 6 and all(one() is not None for one in read)
    kept_bytes = [fed.features.untyped_storage().nbytes() for fed, _ in validator._passes.values()]
    assert kept_bytes == [0, 0]  # features are too large to keep


@pytest.mark.parametrize("recorded", [False, True])
def test_validation_risks_are_compared_across_all_parts_of_a_model_but_not_between_models(monkeypatch, recorded):
    """Each pass has one or two bags and includes both models, which validate on different bags."""
    monkeypatch.setattr(Recorder, "record", lambda self, work: Replayed(work))
    generator = torch.Generator().manual_seed(0)
    bags = Bags.from_list([torch.randn(n, 4, generator=generator) for n in SIZES], labels=OUTCOMES)
    validated = torch.tensor([[True, False, True, True, False, True], [False, True, False, True, True, True]])
    members = [Member(seed=seed) for seed in range(2)]
    population = Population(lambda: create_model("abmil", 4, 1, link=Cox(), hidden=6, attention=3), members)
    state = TrainingState(population, Recipe(epochs=9))
    population.train(False)
    parts = validation_parts(bags, validated, lambda models: 9)
    validator = Validator(state, Feeder(bags, torch.device("cpu")), parts)
    validator._records = recorded
    assert len(parts) > 3
    for _ in range(3 if recorded else 1):
        losses = validator()
    risks = population(bags.features, Offsets(bags.offsets)).logits
    for row, own in enumerate(validated):
        expected = Cox().loss(risks[row, own], OUTCOMES[own]).sum() / OUTCOMES[own, 1].sum()
        torch.testing.assert_close(losses[row], expected)
