import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from carmil.counterfactual import theory as closed_forms
from carmil.counterfactual.branches import create_model
from carmil.evidence.branch_outputs import predict_branches
from carmil.evidence.counterfactual_direction import _measured, followed, margin_gradient, margins
from carmil.models.pooling import Offsets, bag_softmax
from carmil.reproduce import digits, theory
from carmil.reproduce.method_runs import models_of_run, train_model
from carmil.reproduce.recipes import Request


@pytest.fixture
def bags():
    from carmil.bags.bags import Bags

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


def test_theory_recipe_measures_both_tasks_and_distances(tmp_path, monkeypatch):
    monkeypatch.setattr(digits, "FAST_SIZES", (60, 20, 30))
    monkeypatch.setattr(digits, "FAST", replace(digits.FAST, fast_epochs=3))
    request = Request(out=tmp_path / "out", shared=tmp_path / "shared", fast=True)
    result = theory.reproduce(request)
    facts = json.loads((request.out / "theory.json").read_text())["rows"]
    assert [(row["task"], row["distance"]) for row in facts if row["rival"] == "all others"] == [
        ("Adjacent Pairs", "L1"),
        ("Adjacent Pairs", "cosine"),
        ("Four Bags", "L1"),
        ("Four Bags", "cosine"),
    ]
    run = train_model(
        digits.digit_cohorts(request, ["four_bags"])[0], "car/abmil", request
    )  # read from disk, not trained
    bags, models = models_of_run(run, "cpu")
    tested = list(models)
    measured = followed(bags, tested)
    row = next(r for r in facts if (r["task"], r["distance"], r["rival"]) == ("Four Bags", "L1", "all others"))
    assert row["pearson"] == pytest.approx(measured.intervals["pearson"])
    outputs = predict_branches(tested[0].model, bags, tested[0].places)
    promised = measured.margin[0]
    change = (outputs.logits - outputs.counterfactual_logits).double()
    y = tested[0].labels
    expected = change[torch.arange(30), y] - (change.sum(1) - change[torch.arange(30), y]) / 3
    assert promised.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    mean, low, high = row["pearson"]
    line = next(line for line in result.tables[0].lines if line[:3] == ("Four Bags", "L1", "all others"))
    assert line[3] == f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]" and row["pearson_shuffled"][1] <= 0.1 < 1
    assert result.tables[0].heads[3:5] == ("Pearson", "Pearson, shuffled")
    assert np.isfinite(measured.instances).mean() > 0.9
    assert result.pictures[0].path.is_file()
