"""Recorded steps equal unrecorded steps; a tensor marked as CUDA replaces a GPU."""

from dataclasses import replace

import torch

from carmil import Bags, create_model
from carmil.recording import Recorder
from carmil.training import Member, Population, Recipe
from carmil.training.early_stopping import TrainingState
from carmil.training.feeder import Feeder
from carmil.training.step import Batch, Stepper


class TensorMarkedAsCuda(torch.Tensor):
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
    return Batch(fed.features, fed.labels, fed.offsets, fed.rows, share, share > 0, learners, feeder.graph_key(chosen))


def test_steps_run_unrecorded_if_recording_runs_out_of_memory(monkeypatch):
    recordings = []

    def run_out_of_memory(self, work):
        recordings.append(work)
        self.full = True

    monkeypatch.setattr(Recorder, "record", run_out_of_memory)
    plain, recorded = stepper(), stepper()
    for _ in range(4):
        one = plain(batch())
        other = recorded(replace(batch(), features=batch().features.as_subclass(TensorMarkedAsCuda)))
        torch.testing.assert_close(torch.as_tensor(other), one)
    assert len(recordings) == 1  # recording is attempted once, at the second step with equal keys
    torch.testing.assert_close(recorded.state.population.weights, plain.state.population.weights)
    assert plain.terms == recorded.terms


def test_replayed_step_uses_the_current_bag(monkeypatch):
    """Bags of equal size share a graph, recorded on the second bag and replayed on the features of later bags."""

    class Replayed:
        def __init__(self, work):
            self.work = work

        def __call__(self):
            return self.work()

    monkeypatch.setattr(Recorder, "record", lambda self, work: Replayed(work))
    plain, recorded = stepper(), stepper()
    for seed in (0, 1, 2, 3):
        example = replace(batch(seed), graph_key="bags of one size")
        one = plain(example)
        other = recorded(replace(example, features=example.features.as_subclass(TensorMarkedAsCuda)))
        torch.testing.assert_close(torch.as_tensor(other), one)
    torch.testing.assert_close(recorded.state.population.weights, plain.state.population.weights)


def test_passes_with_different_keys_are_recorded_separately(monkeypatch):
    """WENO alternates teacher and student and later adds mining; each kind of pass is run, recorded, then replayed."""
    run, plain = [], Stepper._step

    def spy(self, batch):
        run.append(self._population.pass_key)
        return plain(self, batch)

    monkeypatch.setattr(Stepper, "_step", spy)
    monkeypatch.setattr(Recorder, "record", lambda self, work: (work(), lambda: torch.zeros(3, 2))[1])
    members = [Member(seed=seed) for seed in range(2)]
    small = {"hidden": 6, "teacher": 5, "attention": 3, "student": 4, "smooth_epochs": 2}
    step = Stepper(TrainingState(Population(lambda: create_model("weno", 4, 2, **small), members), Recipe(epochs=1)))
    example = replace(batch(), features=batch().features.as_subclass(TensorMarkedAsCuda))
    for epoch in range(6):
        for phase, term in (("teacher", "cls"), ("student", "student")):
            step.state.population.begin(phase, epoch)
            step(example)
            assert step.terms[0] == term
    # Epochs 0 to 2 run without mining, 3 to 5 with it; the last epoch of either is replayed.
    assert run == [(phase, mining) for mining in (False, True) for _ in range(2) for phase in ("teacher", "student")]


def test_stopped_models_are_sent_to_the_device_before_a_step_is_recorded(monkeypatch):
    """Nothing can be copied to the device during a recording."""
    sent, recording, plain = [], [], Stepper._on_device

    def spy(self, rows):
        if recording:
            sent.append(rows.numpy().tobytes() in self._rows)
        return plain(self, rows)

    def record(self, work):
        recording.append(True)
        work()
        recording.clear()
        return work

    monkeypatch.setattr(Stepper, "_on_device", spy)
    monkeypatch.setattr(Recorder, "record", record)
    members = [Member(seed=seed) for seed in range(4)]
    step = Stepper(
        TrainingState(Population(lambda: create_model("abmil", 4, 2, hidden=6, attention=3), members), Recipe(epochs=1))
    )
    example = replace(
        batch(), share=torch.ones(4, 1), counted=torch.ones(4, 1, dtype=torch.bool),
        learners=torch.ones(4, dtype=torch.bool), features=batch().features.as_subclass(TensorMarkedAsCuda),
    )  # fmt: skip
    step(example)
    step.state.active[1], step.state.running[1] = False, False
    step(example)
    assert sent == [True]
