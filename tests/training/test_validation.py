"""Validation reads the same bags every epoch, so a GPU records it; here, a recorder that runs the work directly stands in."""

import gc
import weakref

import torch

from carmil import Bags, create_model
from carmil.recording import Recorder
from carmil.training import Member, Population, Recipe
from carmil.training.early_stopping import TrainingState
from carmil.training.feeder import Feeder
from carmil.training.validation import Validator, validation_parts

SIZES = (3, 5, 2, 7, 4, 6)


def validators(count: int = 2) -> list[Validator]:
    """Validators of the same three models; the last model validates on other bags than the first two."""
    generator = torch.Generator().manual_seed(0)
    bags = Bags.from_list([torch.randn(n, 4, generator=generator) for n in SIZES], labels=torch.arange(6) % 2)
    validated = torch.zeros(3, 6, dtype=torch.bool)
    validated[:2, [0, 3, 4]] = True
    validated[2, [1, 2, 5]] = True
    made = []
    for _ in range(count):
        members = [Member(seed=seed) for seed in range(3)]
        population = Population(lambda: create_model("abmil", 4, 2, hidden=6, attention=3), members)
        population.train(False)
        state, feeder = TrainingState(population, Recipe(epochs=9, patience=1)), Feeder(bags, torch.device("cpu"))
        made.append(Validator(state, feeder, validation_parts(bags, validated, lambda models: 100)))
    return made


class Replayed:
    def __init__(self, work):
        self.work, self.times = work, 0

    def __call__(self):
        self.times += 1
        return self.work()


def test_a_replayed_pass_follows_the_weights_and_the_remaining_models(monkeypatch):
    made = []
    monkeypatch.setattr(Recorder, "record", lambda self, work: made.append(Replayed(work)) or made[-1])
    plain, replayed = validators()
    replayed._records = True
    for epoch in range(4):
        for validator in (plain, replayed):
            validator.state.population.weights *= 0.9
        torch.testing.assert_close(replayed(), plain(), rtol=0, atol=0)
        assert plain().shape == (3,) and plain().std() > 0
        assert [one.times for one in made] == [epoch] * len(made)
    for validator in (plain, replayed):
        validator.state.active[:] = torch.tensor([True, False, False])
        validator.state._compact()
    for _ in range(3):
        torch.testing.assert_close(replayed(), plain(), rtol=0, atol=0)
    assert len(made) == 3  # two parts of three models, then one part of the remaining model


def test_validation_runs_unrecorded_if_memory_does_not_suffice(monkeypatch):
    tried = []

    def too_much(self, work):
        tried.append(work)
        self.full = True

    monkeypatch.setattr(Recorder, "record", too_much)
    plain, full = validators()
    full._records = True
    for _ in range(4):
        torch.testing.assert_close(full(), plain(), rtol=0, atol=0)
    assert len(tried) == 1


def test_inputs_of_a_recorded_pass_stay_alive(monkeypatch):
    """A graph does not own its inputs: released memory could be reused before the next epoch."""
    # The recorder keeps no reference to the work.
    monkeypatch.setattr(Recorder, "record", lambda self, work: Replayed(lambda: torch.zeros(2)))
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
