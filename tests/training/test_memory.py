"""The number of models that fit into memory is estimated, and is at least one."""

from functools import partial

import pytest
import torch

from carmil.bags import Bags
from carmil.counterfactual import create_model
from carmil.targets.links import Cox, Scale, Softmax
from carmil.training import Member, Population, Recipe, memory

GIB = 2**30


def models_that_fit(model: str, sizes: list[int], *, free: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(memory, "free_memory", lambda device: free)
    population = Population(lambda: create_model(model, 32, 2, hidden=64), [Member(seed=0), Member(seed=1)])
    bags = Bags.from_list([torch.zeros(size, 32) for size in sizes], labels=torch.zeros(len(sizes)).long())
    return memory.models_that_fit(population, bags, Recipe(batch=batch), "cpu")


@pytest.mark.parametrize("model", ["abmil", "car/abmil.gated", "clam.sb", "dsmil", "transmil"])
def test_twice_the_memory_fits_twice_as_many_models(model, monkeypatch):
    once = models_that_fit(model, [2000, 500], free=GIB, batch=1, monkeypatch=monkeypatch)
    twice = models_that_fit(model, [2000, 500], free=2 * GIB, batch=1, monkeypatch=monkeypatch)
    assert once > 10
    assert twice == pytest.approx(2 * once, abs=1)


def test_more_instances_per_step_fit_fewer_models(monkeypatch):
    def models(sizes, batch):
        return models_that_fit("abmil", sizes, free=GIB, batch=batch, monkeypatch=monkeypatch)

    one = models([2000, 2000, 500], 1)
    assert models([2000, 2000, 500], 2) == pytest.approx(one / 2, rel=0.1)
    assert models([20_000, 500], 1) == pytest.approx(one / 10, rel=0.2)


def test_memory_kept_for_gradients_is_about_the_size_of_layer_outputs(monkeypatch):
    """Per instance, float32 outputs of 64 hidden and 128 attention columns are kept, and little else."""
    monkeypatch.setattr(memory, "free_memory", lambda device: GIB)
    population = Population(lambda: create_model("abmil", 32, 2, hidden=64), [Member(seed=0), Member(seed=1)])
    few, some = (memory._kept_for_gradient(population, 32, count, torch.tensor([0])) for count in (64, 192))
    per_instance = (some - few) / 128
    assert 4 * (64 + 128) <= per_instance <= 2 * 4 * (64 + 128)


def test_at_least_one_model_is_trained_if_none_fits(monkeypatch):
    assert models_that_fit("abmil", [2000], free=1000, batch=1, monkeypatch=monkeypatch) == 1


@pytest.mark.parametrize(
    ("link", "labels"), [(Cox, torch.tensor([[3.0, 1.0], [2.0, 0.0]])), (Scale, torch.tensor([[5.0], [6.0]]))]
)
def test_models_of_targets_other_than_classes_need_the_same_memory(link, labels, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: GIB)
    features = [torch.zeros(size, 32) for size in (2000, 500)]
    counts = []
    for outputs, given, known in ((2, Softmax, torch.tensor([0, 1])), (1, link, labels)):
        build = partial(create_model, "abmil", 32, outputs, hidden=64)
        population = Population(lambda build=build, given=given: build(link=given()), [Member(seed=0), Member(seed=1)])
        data = Bags.from_list(features, labels=known)
        counts.append(memory.models_that_fit(population, data, Recipe(batch=2), "cpu"))
    assert counts[1] == pytest.approx(counts[0], rel=0.05)


def test_free_cpu_memory_is_plausible():
    assert 2**20 < memory.free_memory("cpu") < 2**50


def test_cached_gpu_memory_is_released_before_free_memory_is_read(monkeypatch):
    kept = [GIB]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * GIB - sum(kept), 4 * GIB))
    assert memory.free_memory("cuda") == 4 * GIB
