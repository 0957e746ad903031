"""The relative distance: its value, and its independence of the scale of the scores."""

import pytest
import torch

from carmil.counterfactual import create_model
from carmil.counterfactual.branches import study_coefficients
from carmil.counterfactual.objective import l1_distance, relative_distance
from carmil.errors import CarmilError
from carmil.models.pooling import Offsets

OFFSETS = Offsets(torch.tensor([0, 4, 9]))


def scores(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(9, 2, generator=generator), torch.randn(9, 3, 2, generator=generator)


def test_relative_distance_is_l1_divided_by_deviation_of_scores_in_the_bag():
    u, u_cf = scores()
    u, u_cf = u[:, :1], u_cf[..., :1]
    deviation = torch.stack([part.std(unbiased=False) for part in (u[:4], u[4:])])
    assert torch.allclose(relative_distance(u, u_cf, OFFSETS), l1_distance(u, u_cf, OFFSETS) / deviation, atol=1e-6)


def test_relative_distance_is_invariant_to_scaling_and_shifting_scores():
    u, u_cf = scores()
    here = relative_distance(u, u_cf, OFFSETS)
    assert torch.allclose(relative_distance(50 * u - 7, 50 * u_cf - 7, OFFSETS), here, rtol=1e-4)
    assert not torch.allclose(l1_distance(50 * u, 50 * u_cf, OFFSETS), l1_distance(u, u_cf, OFFSETS))


def test_relative_distance_of_each_head_uses_the_deviation_of_that_head():
    u, u_cf = scores()
    size = torch.tensor([1.0, 300.0])
    assert torch.allclose(
        relative_distance(u * size, u_cf * size, OFFSETS), relative_distance(u, u_cf, OFFSETS), rtol=1e-4
    )


def test_relative_distance_has_no_gradient_through_the_deviation():
    u, u_cf = scores()
    moved = (u + 1.0).requires_grad_()  # adding one to all scores changes the distance but not the deviation
    plain = (moved.unsqueeze(-2) - u_cf).abs().mean((-2,))
    unit = torch.stack([u[:4].std(0, unbiased=False)] * 4 + [u[4:].std(0, unbiased=False)] * 5)
    size = torch.tensor([4.0] * 4 + [5.0] * 5).unsqueeze(-1)
    (expected,) = torch.autograd.grad((plain / unit / size).mean(-1).sum(), moved)
    (result,) = torch.autograd.grad(relative_distance(moved, u_cf, OFFSETS).sum(), moved)
    assert torch.allclose(result, expected, atol=1e-5)
    assert torch.isfinite(relative_distance(torch.zeros(9, 1), torch.ones(9, 1, 1), OFFSETS)).all()


def test_car_studies_use_relative_distance_by_default():
    assert study_coefficients("car/abmil", {}) == (
        {"diff": 0.05, "l1": 0.0, "cosine": 0.0, "relative": 0.02},
        {"alpha": 0.05, "lambda_": 0.02, "distance": "relative"},
    )
    coefficients, _ = study_coefficients("car/abmil", {"distance": "l1", "alpha": None})
    assert coefficients == {"diff": 0.2, "l1": 1.0, "cosine": 0.0, "relative": 0.0}
    assert study_coefficients("abmil", {"alpha": None}) == ({}, {})
    with pytest.raises(CarmilError, match="try 'car/abmil'"):
        study_coefficients("abmil", {"alpha": 0.1})


def test_branch_does_not_change_initial_weights_of_the_model():
    def initial_state(name: str, init: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(5)
        return create_model(name, 6, 2, hidden=4, attention=3, init=init).state_dict()

    for init in ("own", "xavier"):
        plain, branched = initial_state("abmil", init), initial_state("car/abmil", init)
        assert all(torch.equal(branched[f"model.{name}"], tensor) for name, tensor in plain.items())
    assert not any(
        tensor.any() for name, tensor in initial_state("car/abmil", "xavier").items() if name.endswith("bias")
    )
    with pytest.raises(CarmilError, match="unknown init 'he'"):
        create_model("abmil", init="he")
