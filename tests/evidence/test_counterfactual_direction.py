"""The direction of u_cf - u is compared with the gradient of the margin, as the paper's appendix defines it."""

import pytest
import torch

from carmil.bags.bags import Bags
from carmil.counterfactual import theory as closed_forms
from carmil.counterfactual.branches import create_model
from carmil.evidence.branch_outputs import predict_branches
from carmil.evidence.counterfactual_direction import _measured, margin_gradient, margins
from carmil.models.pooling import Offsets, bag_softmax


@pytest.fixture
def bags():
    return Bags.from_list([torch.randn(7, 5), torch.randn(12, 5)], labels=[0, 2])


def test_margin_gradient_of_linear_classifier_equals_closed_form_of_the_appendix(bags):
    model = create_model("car/abmil", 5, 3, hidden=8, attention=4, dropout=0.0, branch="full").eval()
    outputs = predict_branches(model, bags)
    for rival in ("runner-up", "weighed most"):
        weights = margins(outputs, bags.labels, rival)
        g = margin_gradient(model, bags, outputs, weights)
        for b, (start, end) in enumerate(zip(bags.offsets, bags.offsets[1:], strict=False)):
            features = bags.features[start:end]
            alone = model(features, Offsets(torch.arange(len(features) + 1))).logits.detach().double()
            y, k = int(bags.labels[b]), int(weights[b].argmin())
            expected = closed_forms.margin_sensitivity(outputs.scores[start:end].double(), alone, y, k)
            assert g[start:end].tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_mean_margin_gradient_is_proportional_to_loss_gradient_at_unchanged_attention(bags):
    from carmil.counterfactual.objective import evidence_differential_loss

    model = create_model("car/abmil", 5, 3, hidden=8, attention=4, output_layers=1, dropout=0.0, branch="full").eval()
    outputs = predict_branches(model, bags)
    g = margin_gradient(model, bags, outputs, margins(outputs, bags.labels, "all others"))
    u_cf = outputs.scores.clone().requires_grad_()
    z = model.model.embed(bags.features, outputs.offsets)
    weights = bag_softmax(u_cf.unsqueeze(-1), outputs.offsets)
    pools = torch.stack([(weights * z)[outputs.offsets.bag_of == b].sum(0) for b in range(2)])
    loss = evidence_differential_loss(
        outputs.logits, model.model.classify(pools.unsqueeze(-2)).unsqueeze(-2), bags.labels
    )
    (slope,) = torch.autograd.grad(loss.sum(), u_cf)
    # at u_cf = u, softmax(0) gives every class 1/k, so the slope is (k - 1)/k times g
    assert slope.tolist() == pytest.approx((g * 2 / 3).tolist(), abs=1e-5)


def test_l1_optimum_concentrates_on_the_largest_gradient_and_gains_the_maximum():
    g = torch.tensor([0.1, -0.6, 0.2, 0.3, *[0.0] * 16]).double()
    whole, u = Offsets(torch.tensor([0, len(g)])), torch.linspace(-1, 1, len(g)).double()
    optimum = closed_forms.optimal_l1_perturbation(g, 2.0)
    pearson, _, on_largest, gained, _ = _measured(g, optimum + 5.0, u, whole)[0]
    assert (float(on_largest), float(gained)) == pytest.approx((1.0, 1.0))
    assert float(pearson) > 0.8
    assert float(_measured(g, 7 - 0.2 * u, u, whole)[0, 4]) == pytest.approx(-1)  # u on another scale
    steepest = _measured(g, -3 * g, u, whole)[0]
    assert steepest[:2].tolist() == pytest.approx([1.0, 1.0])
    assert float(steepest[3]) < 1  # distributed over several instances, it gains less for the same length
    assert _measured(g, 3 * g, u, whole)[0, [0, 3]].tolist() == pytest.approx([-1.0, -float(steepest[3])])
