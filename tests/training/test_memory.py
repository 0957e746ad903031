"""The number of models that fit into memory is computed, and is at least one."""

import pytest
import torch

from carmil.bags import Bags
from carmil.counterfactual import create_model
from carmil.training import Member, Population, Recipe, memory

GIB = 2**30


def fitting(model: str, sizes: list[int], *, free: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(memory, "free_memory", lambda device: free)
    population = Population(lambda: create_model(model, 32, 2, hidden=64), [Member(seed=0), Member(seed=1)])
    bags = Bags.from_list([torch.zeros(size, 32) for size in sizes], ids=[str(i) for i in range(len(sizes))])
    return memory.models_that_fit(population, bags, Recipe(batch=batch), "cpu")


@pytest.mark.parametrize("model", ["abmil", "car/abmil.gated", "clam.sb", "dsmil", "transmil"])
def test_twice_the_memory_fits_twice_the_models(model, monkeypatch):
    once = fitting(model, [2000, 500], free=GIB, batch=1, monkeypatch=monkeypatch)
    twice = fitting(model, [2000, 500], free=2 * GIB, batch=1, monkeypatch=monkeypatch)
    assert once > 10
    assert twice == pytest.approx(2 * once, abs=1)


def test_more_instances_per_step_leave_room_for_fewer_models(monkeypatch):
    def models(sizes, batch):
        return fitting("abmil", sizes, free=GIB, batch=batch, monkeypatch=monkeypatch)

    one = models([2000, 2000, 500], 1)
    assert models([2000, 2000, 500], 2) == pytest.approx(one / 2, rel=0.1)
    assert models([20_000, 500], 1) == pytest.approx(one / 10, rel=0.2)


def test_memory_kept_for_the_gradient_is_that_of_the_layers(monkeypatch):
    """A hidden layer of 64 and attention of 128 columns in float32 keep z, tanh, scores and weights, and little else."""
    monkeypatch.setattr(memory, "free_memory", lambda device: GIB)
    population = Population(lambda: create_model("abmil", 32, 2, hidden=64), [Member(seed=0), Member(seed=1)])
    few, some = (memory._kept_for_gradient(population, 32, count) for count in (64, 192))
    for_an_instance = (some - few) / 128
    assert 4 * (64 + 128) <= for_an_instance <= 2 * 4 * (64 + 128)


def test_one_model_is_tried_if_none_fits(monkeypatch):
    assert fitting("abmil", [2000], free=1000, batch=1, monkeypatch=monkeypatch) == 1


def test_free_memory_of_this_machine_is_plausible():
    assert 2**20 < memory.free_memory("cpu") < 2**50


def test_cached_gpu_memory_is_released_before_free_memory_is_read(monkeypatch):
    kept = [GIB]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * GIB - sum(kept), 4 * GIB))
    assert memory.free_memory("cuda") == 4 * GIB
