"""The appendix of the paper, formula by formula, against autograd and brute force."""

import math

import pytest
import torch

from carmil.counterfactual.theory import (
    logit_sensitivity,
    margin_bound,
    margin_sensitivity,
    optimal_l1_perturbation,
)

N, K, D = 9, 4, 5


@pytest.fixture
def bag():
    torch.manual_seed(2)
    u, z = torch.randn(N, dtype=torch.float64), torch.randn(N, D, dtype=torch.float64)
    w, bias = torch.randn(K, D, dtype=torch.float64), torch.randn(K, dtype=torch.float64)
    return u, z @ w.T, lambda u: w @ (u.softmax(0) @ z) + bias


def test_logit_sensitivity_is_the_jacobian(bag):
    u, s, F = bag
    assert torch.allclose(logit_sensitivity(u, s), torch.autograd.functional.jacobian(F, u).T)


def test_margin_sensitivity_is_the_gradient_of_the_margin(bag):
    u, s, F = bag
    u.requires_grad_()
    logits = F(u)
    (expected,) = torch.autograd.grad(logits[2] - logits[1], u)
    assert torch.allclose(margin_sensitivity(u.detach(), s, 2, 1), expected)


def test_optimal_perturbation_has_the_largest_first_order_effect(bag):
    u, s, _ = bag
    g, epsilon = margin_sensitivity(u, s, 0, 3), 0.1
    best = optimal_l1_perturbation(g, epsilon)
    assert best.abs().sum() == pytest.approx(epsilon)
    assert (-g @ best).item() == pytest.approx(epsilon * g.abs().max().item())
    tried = torch.randn(20_000, N, dtype=torch.float64)
    tried = epsilon * tried / tried.abs().sum(1, keepdim=True)
    assert (-(tried @ g)).max() <= -g @ best + 1e-12


def test_optimal_perturbation_widens_the_margin(bag):
    u, s, F = bag
    g = margin_sensitivity(u, s, 0, 3)
    u_cf = u + optimal_l1_perturbation(g, 1e-3)
    difference = F(u) - F(u_cf)
    assert (difference[0] - difference[3]).item() == pytest.approx(1e-3 * g.abs().max().item(), rel=1e-2)


@pytest.mark.parametrize("epsilon", [0.01, 0.3, 2.0])
def test_small_loss_bounds_every_margin(epsilon):
    differences = 4 * torch.randn(50_000, K, dtype=torch.float64)
    loss = torch.nn.functional.cross_entropy(differences, torch.zeros(50_000, dtype=torch.long), reduction="none")
    margins = (differences[:, :1] - differences[:, 1:]).amin(1)
    small = loss <= epsilon
    assert small.any()
    assert (margins[small] >= margin_bound(epsilon) - 1e-9).all()
    # the bound is tight: two classes with a loss of exactly epsilon
    margin = torch.tensor(margin_bound(epsilon))
    assert math.log1p(math.exp(-margin)) == pytest.approx(epsilon, rel=1e-4)
