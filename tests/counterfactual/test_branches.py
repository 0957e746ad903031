import pytest
import torch
import torch.nn.functional as nnf

from carmil import create_model
from carmil.counterfactual.branches import CAR, CIA, Targeted
from carmil.counterfactual.objective import cosine_distance, evidence_differential_loss, l1_distance
from carmil.errors import CarmilError
from carmil.models.pooling import Offsets

X, STARTS, Y = torch.randn(11, 8), torch.tensor([0, 4, 11]), torch.tensor([2, 0])


def predicted(name, **options):
    torch.manual_seed(0)
    model = create_model(name, 8, 3, hidden=6, attention=5, dropout=0.0, **options).train()
    return model, model(X, STARTS)


@pytest.mark.parametrize("branch", ["shared", "full"])
def test_car_loss_terms_equal_paper_formulas(branch):
    model, p = predicted("car/abmil.gated", branch=branch)
    losses = model.losses(p, Y, ("cls", "diff", "l1", "cosine"))
    for i, (first, last) in enumerate(((0, 4), (4, 11))):
        u, u_cf = p.scores[first:last, 0], p.counterfactual.scores[first:last, 0, 0]
        F, F_cf = p.logits[i], p.counterfactual.logits[i, 0]
        assert torch.isclose(losses["cls"][i], nnf.cross_entropy(F, Y[i]))
        assert torch.isclose(losses["diff"][i], nnf.cross_entropy(F - F_cf, Y[i]))
        assert torch.isclose(losses["l1"][i], (u - u_cf).abs().mean())
        assert torch.isclose(losses["cosine"][i], 1 - nnf.cosine_similarity(u, u_cf, dim=0), atol=1e-6)


def test_only_requested_loss_terms_are_computed_besides_cls_and_diff():
    model, p = predicted("car/abmil")
    assert set(model.losses(p, Y, ("l1",))) == {"cls", "diff", "l1"}


def test_shared_branch_reuses_the_attention_trunk_and_full_branch_does_not():
    model, p = predicted("car/abmil", branch="shared")
    trunk = model.model.attention.trunk(p.instances)
    assert torch.allclose(model.branch.attention(trunk), p.counterfactual.scores[..., 0, :])
    model, p = predicted("car/abmil", branch="full")
    assert torch.allclose(model.branch.attention(p.instances), p.counterfactual.scores[..., 0, :])
    assert not torch.allclose(p.scores, p.counterfactual.scores[..., 0, :])


def test_counterfactual_logits_apply_the_shared_classifier_to_the_counterfactual_bag():
    model, p = predicted("car/abmil", output_layers=1)
    for i, (first, last) in enumerate(((0, 4), (4, 11))):
        a = p.counterfactual.scores[first:last, 0].softmax(0)
        Z = (a * p.instances[first:last]).sum(0)
        assert torch.allclose(model.classify(Z.reshape(1, 1, -1))[0], p.counterfactual.logits[i, 0], atol=1e-6)


def test_targeted_branch_trains_one_map_per_class():
    model, p = predicted("targeted/abmil")
    assert p.counterfactual.scores.shape == (11, 3, 1)
    losses = model.losses(p, Y, ("target", "change"))
    expected = torch.stack([nnf.cross_entropy(p.counterfactual.logits[0, c], torch.tensor(c)) for c in range(3)]).mean()
    assert torch.isclose(losses["target"][0], expected)
    change = (p.counterfactual.scores - p.scores.unsqueeze(-2))[:4].abs().mean()
    assert torch.isclose(losses["change"][0], change)


def test_cia_draws_random_attention_in_training_only():
    model, p = predicted("cia/abmil")
    again = model(X, STARTS)
    assert not torch.equal(p.counterfactual.scores, again.counterfactual.scores)
    assert 0 <= p.counterfactual.scores.min() <= p.counterfactual.scores.max() < 1
    assert torch.equal(p.logits, again.logits)
    assert set(model.losses(p, Y, ("diff",))) == {"cls", "diff"}
    assert model.eval()(X, STARTS).counterfactual is None


def test_alpha_lambda_and_distance_become_coefficients():
    assert CAR.coefficients(0.2, 1.0, "l1") == {"diff": 0.2, "l1": 1.0, "cosine": 0.0, "relative": 0.0}
    assert CAR.coefficients(0.5, 0.3, "cosine") == {"diff": 0.5, "l1": 0.0, "cosine": 0.3, "relative": 0.0}
    assert CAR.coefficients(0.5, 0.3, "relative") == {"diff": 0.5, "l1": 0.0, "cosine": 0.0, "relative": 0.3}
    assert CAR.coefficients() == CAR.coefficients(0.2, 1.0, "l1"), "the defaults are those of the paper"
    assert Targeted.coefficients(0.05, 0.1) == {"target": 0.05, "change": 0.1}
    assert CIA.coefficients(0.2) == {"diff": 0.2}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((-0.1, 1.0, "l1"), "alpha is -0.1: expected a number >= 0"),
        ((0.1, -1.0, "l1"), "lambda is -1.0"),
        ((float("nan"), 1.0, "l1"), "alpha is nan"),
        ((0.1, 1.0, "l3"), "unknown distance 'l3'"),
    ],
)
def test_invalid_loss_weights_raise_an_error(given, words):
    with pytest.raises(CarmilError) as raised:
        CAR.coefficients(*given)
    assert words in str(raised.value)


def test_distance_of_a_map_to_itself_is_zero_and_cosine_gradient_is_finite():
    offsets, u = Offsets(STARTS), torch.randn(11, 2)
    assert torch.allclose(l1_distance(u, u.unsqueeze(-2), offsets), torch.zeros(2))
    assert torch.allclose(cosine_distance(u, u.unsqueeze(-2), offsets), torch.zeros(2), atol=1e-6)
    zeros = torch.zeros(11, 1, requires_grad=True)
    cosine_distance(zeros, zeros.unsqueeze(-2), offsets).sum().backward()
    assert torch.isfinite(zeros.grad).all()


def test_differential_loss_is_small_if_the_difference_favours_the_label():
    F, F_cf = torch.tensor([[5.0, 0.0, 0.0]]), torch.tensor([[[0.0, 5.0, 0.0]]])
    assert (
        evidence_differential_loss(F, F_cf, torch.tensor([0]))
        < 0.01
        < evidence_differential_loss(F, F_cf, torch.tensor([1]))
    )
