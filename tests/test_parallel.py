"""Concurrent training runs give the same results as separate runs."""

import threading
import time

import pytest
import torch

from carmil.bags.bags import Bags
from carmil.counterfactual import create_model
from carmil.parallel import run_parallel
from carmil.progress import training_progress
from carmil.training.loop import fit
from carmil.training.population import Member, Population
from carmil.training.recipe import TRAIN, VALIDATION, Recipe


def _bags(seed: int) -> Bags:
    generator = torch.Generator().manual_seed(seed)
    return Bags(torch.randn(60, 5, generator=generator), torch.arange(0, 61, 5), torch.arange(12) % 2)


def _trained(seed: int) -> torch.Tensor:
    members = [Member(seed=seed), Member(seed=seed + 100)]
    population = Population(lambda: create_model("car/abmil", 5, 2, hidden=8, attention=4), members)
    roles = torch.tensor([TRAIN] * 8 + [VALIDATION] * 4)
    with training_progress(f"training {seed}", 5, 2) as on_epoch:
        fit(population, _bags(seed), roles, Recipe(epochs=5, batch=4), on_epoch=on_epoch)
    assert all(torch.isfinite(parameter).all() for parameter in population.member(0).parameters())
    return population.weights


def test_concurrent_training_gives_the_results_of_separate_training_in_order():
    alone = [_trained(seed) for seed in range(6)]
    together = run_parallel([lambda seed=seed: _trained(seed) for seed in range(6)], "cpu", at_once=4)
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_failure_stops_concurrent_training_after_the_current_epoch():
    ended, started = [], threading.Event()

    def long() -> None:
        with training_progress("long", 10_000, 1) as on_epoch:
            for epoch in range(10_000):
                time.sleep(0.01)
                on_epoch(epoch, {}, 1)
                started.set()
        ended.append("long")

    def wrong() -> None:
        assert started.wait(60)
        raise ValueError("this one cannot be trained")

    with pytest.raises(ValueError, match="cannot be trained"):
        run_parallel([wrong, long], "cpu", at_once=2)
    assert not ended
    with training_progress("the next", 1, 1) as on_epoch:  # later training is not interrupted
        on_epoch(0, {}, 1)


def test_training_that_runs_out_of_memory_is_retried_alone():
    running, running_counts = [], []
    together, tried = threading.Barrier(3), threading.Event()

    def large() -> str:
        running_counts.append(len(running))
        if running:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "greedy"

    def small() -> str:
        running.append(True)
        together.wait(60)
        assert tried.wait(60)
        running.pop()
        return "modest"

    def late() -> str:
        if not tried.is_set():
            together.wait(60)
        try:
            return large()
        finally:
            tried.set()

    assert run_parallel([small, late, small], "cpu", at_once=3) == ["modest", "greedy", "modest"]
    assert running_counts == [2, 0]
