"""Stopped models are dropped from the population when that speeds up the remaining models."""

import pytest
import torch

from carmil import Member, Population, Recipe, create_model
from carmil.training.early_stopping import TrainingState


class TensorMarkedAsCuda(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize(("models", "on_gpu", "left"), [(4, False, 2), (8, True, 8), (12, True, 6)])
def test_stopped_models_are_dropped_once_half_have_stopped_except_for_few_models_on_a_gpu(models, on_gpu, left):
    members = [Member(seed=seed) for seed in range(models)]
    population = Population(lambda: create_model("abmil", 4, 2, hidden=6, attention=3), members)
    if on_gpu:
        population.weights = population.weights.as_subclass(TensorMarkedAsCuda)
    state = TrainingState(population, Recipe(epochs=9, patience=1, warmup=0))
    falling = torch.ones(models)
    assert state.after_epoch(0, falling) == models
    falling[::2] = 0.5  # every other model keeps improving
    assert state.after_epoch(1, falling) == models // 2
    assert len(state.population) == left
    assert state.running.sum() == models // 2
