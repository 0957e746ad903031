"""A step that is recorded on a GPU is the step; here there is none, and a tensor that says it is on one."""

from dataclasses import replace

import torch

from carmil import Bags, create_model
from carmil.recording import Recorder
from carmil.training import Member, Population, Recipe
from carmil.training.early_stopping import TrainingState
from carmil.training.feeder import Feeder
from carmil.training.step import Batch, Stepper


class SaysItIsOnAGpu(torch.Tensor):
    is_cuda = True


def stepper() -> Stepper:
    members = [Member(seed=seed) for seed in range(2)]
    return Stepper(
        TrainingState(Population(lambda: create_model("abmil", 4, 2, hidden=6, attention=3), members), Recipe(epochs=1))
    )


def batch(seed: int = 0) -> Batch:
    bags = Bags(
        torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)), torch.tensor([0, 5]), torch.tensor([1])
    )
    feeder, chosen = Feeder(bags, torch.device("cpu")), torch.tensor([0])
    (fed,) = feeder.feed([chosen])
    share, learners = torch.ones(2, 1), torch.ones(2, dtype=torch.bool)
    return Batch(fed.features, fed.labels, fed.offsets, fed.rows, share, learners, feeder.graph_key(chosen))


def test_where_memory_does_not_suffice_to_record_steps_are_run_as_they_are(monkeypatch):
    asked = []

    def too_much(self, work):
        asked.append(work)
        self.full = True

    monkeypatch.setattr(Recorder, "record", too_much)
    plain, recorded = stepper(), stepper()
    for _ in range(4):
        one = plain(batch())
        other = recorded(replace(batch(), features=batch().features.as_subclass(SaysItIsOnAGpu)))
        torch.testing.assert_close(torch.as_tensor(other), one)
    assert len(asked) == 1  # the second step of its kind was to be recorded; nobody tries again
    torch.testing.assert_close(recorded.state.population.weights, plain.state.population.weights)
    assert plain.terms == recorded.terms


def test_what_is_recorded_reads_the_bag_that_is_given(monkeypatch):
    """Bags of one size are one kind: the second of them is recorded, and replayed on the features of the third."""

    class Replayed:
        def __init__(self, work):
            self.work = work

        def __call__(self):
            return self.work()

    monkeypatch.setattr(Recorder, "record", lambda self, work: Replayed(work))
    plain, recorded = stepper(), stepper()
    for seed in (0, 1, 2, 3):
        given = replace(batch(seed), graph_key="bags of one size")
        one = plain(given)
        other = recorded(replace(given, features=given.features.as_subclass(SaysItIsOnAGpu)))
        torch.testing.assert_close(torch.as_tensor(other), one)
    torch.testing.assert_close(recorded.state.population.weights, plain.state.population.weights)


def test_passes_of_different_kinds_are_recorded_apart(monkeypatch):
    """WENO's teacher and student take turns, and its mining begins later: each kind is met, recorded and then replayed."""
    run, plain = [], Stepper._step

    def seen(self, batch):
        run.append(self._population.pass_key)
        return plain(self, batch)

    monkeypatch.setattr(Stepper, "_step", seen)
    monkeypatch.setattr(Recorder, "record", lambda self, work: (work(), lambda: torch.zeros(3, 2))[1])
    members = [Member(seed=seed) for seed in range(2)]
    small = {"hidden": 6, "teacher": 5, "attention": 3, "student": 4, "smooth_epochs": 2}
    step = Stepper(TrainingState(Population(lambda: create_model("weno", 4, 2, **small), members), Recipe(epochs=1)))
    given = replace(batch(), features=batch().features.as_subclass(SaysItIsOnAGpu))
    for epoch in range(6):
        for phase, term in (("teacher", "cls"), ("student", "student")):
            step.state.population.begin(phase, epoch)
            step(given)
            assert step.terms[0] == term
    # Of epochs 0, 1, 2 without mining and 3, 4, 5 with it the last is replayed.
    assert run == [(phase, mining) for mining in (False, True) for _ in range(2) for phase in ("teacher", "student")]


def test_who_stops_before_a_step_is_recorded_is_known_to_the_device_by_then(monkeypatch):
    """Nothing can be sent there while it records."""
    sent, recording, plain = [], [], Stepper._on_device

    def seen(self, rows):
        if recording:
            sent.append(rows.numpy().tobytes() in self._rows)
        return plain(self, rows)

    def record(self, work):
        recording.append(True)
        work()
        recording.clear()
        return work

    monkeypatch.setattr(Stepper, "_on_device", seen)
    monkeypatch.setattr(Recorder, "record", record)
    members = [Member(seed=seed) for seed in range(4)]
    step = Stepper(
        TrainingState(Population(lambda: create_model("abmil", 4, 2, hidden=6, attention=3), members), Recipe(epochs=1))
    )
    given = replace(
        batch(), share=torch.ones(4, 1), learners=torch.ones(4, dtype=torch.bool),
        features=batch().features.as_subclass(SaysItIsOnAGpu),
    )  # fmt: skip
    step(given)
    step.state.active[1], step.state.running[1] = False, False
    step(given)
    assert sent == [True]
