import itertools

import pytest
import torch

from carmil.counterfactual.branches import create_model
from carmil.errors import CarmilError
from carmil.evidence.counterfactual_change import counterfactual_change
from carmil.evidence.counterfactual_search import search_counterfactual
from carmil.models.pooling import Offsets, bag_mean

SIZES = [7, 1, 20, 12]
STARTS = torch.tensor([0, *SIZES]).cumsum(0)
SMALL = {
    "abmil": {"hidden": 8, "attention": 4},
    "acmil": {"hidden": 8, "attention": 4},
    "clam.mb": {"hidden": 8, "attention": 4},
    "dsmil": {"hidden": 8, "query_size": 4},
    "rrt": {"hidden": 8, "heads": 2, "attention": 4},
    "car/abmil": {"hidden": 8, "attention": 4},
}


def model_of(name="abmil", classes=2, factor=3.0):
    model = create_model(name, 6, classes, **SMALL[name]).double().eval()
    with torch.no_grad():  # larger weights, so that logits differ between instances
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


@pytest.mark.parametrize("name", SMALL)
def test_search_reaches_the_target_class(name):
    factor = 1.0 if name == "dsmil" else 3.0  # scores are products of queries and would differ by hundreds
    model, x = model_of(name, classes=3, factor=factor), torch.randn(40, 6, dtype=torch.float64)
    result = search_counterfactual(model, x, STARTS)
    prediction = model(x, STARTS)
    assert torch.equal(result.targets, prediction.logits.topk(2).indices[:, 1:])
    assert result.counterfactual.scores.shape == (40, 1, model.heads)
    assert torch.equal(result.reached, result.counterfactual.logits.argmax(-1) == result.targets)
    assert result.reached.any()
    assert not result.reached[1].any()  # attention cannot move in a bag of one instance
    assert torch.allclose(result.counterfactual.scores[7, 0], prediction.scores[7])
    assert counterfactual_change(prediction, result.counterfactual).flipped[result.reached].all()


def test_unreachable_target_leaves_scores_unchanged():
    model, x = model_of().float(), torch.randn(1, 6)
    result = search_counterfactual(model, x, torch.tensor([0, 1]), alpha=1e-6)
    assert torch.allclose(result.counterfactual.scores[:, 0], model(x, torch.tensor([0, 1])).scores)
    assert result.steps == 300 and not result.reached


def test_higher_confidence_takes_more_steps():
    model, x = model_of(), torch.randn(40, 6, dtype=torch.float64)
    loose, confident = (search_counterfactual(model, x, STARTS, confidence=confidence) for confidence in (0.0, 0.8))
    both = loose.reached & confident.reached
    assert both.any() and (confident.steps > loose.steps)[both].all()
    assert (confident.counterfactual.logits.softmax(-1).amax(-1) >= 0.8)[confident.reached].all()


def test_target_that_is_already_predicted_needs_no_change():
    model, x = model_of(), torch.randn(40, 6, dtype=torch.float64)
    prediction = model(x, STARTS)
    result = search_counterfactual(model, x, STARTS, prediction.logits.argmax(-1))
    assert torch.allclose(result.counterfactual.scores[:, 0], prediction.scores)
    assert result.reached.all() and (result.steps == 0).all()


def test_search_gives_the_same_result_for_bags_and_classes_alone_or_together():
    model, x = model_of(classes=3), torch.randn(40, 6, dtype=torch.float64)
    targets = torch.arange(3).expand(4, 3)
    together = search_counterfactual(model, x, STARTS, targets)
    for bag, (i, j) in enumerate(itertools.pairwise(STARTS.tolist())):
        for c in range(3):
            alone = search_counterfactual(model, x[i:j], torch.tensor([0, j - i]), torch.tensor([c]))
            assert torch.allclose(alone.counterfactual.scores[:, 0], together.counterfactual.scores[i:j, c], atol=1e-8)
            assert alone.steps[0, 0] == together.steps[bag, c]


@torch.no_grad()
def test_search_finds_nearly_the_smallest_change():
    """With two instances only the difference of scores matters, so a grid search finds the smallest change."""
    model, x = model_of(), torch.randn(200, 6, dtype=torch.float64)
    offsets = Offsets(torch.arange(101) * 2)
    result = search_counterfactual(model, x, offsets, step=0.02, steps=400)
    z = model.embed(x, offsets)
    u = model.attend(z, offsets)
    change = (result.counterfactual.scores[:, 0] - u).abs().view(100, 2).sum(1)
    gap = torch.linspace(-8, 8, 3201, dtype=torch.float64)
    for bag in result.reached[:, 0].nonzero().flatten().tolist():
        first, second = 2 * bag, 2 * bag + 1
        a = torch.sigmoid(u[first] - u[second] + gap)
        p = model.classify((a[:, None] * z[first] + (1 - a)[:, None] * z[second]).unsqueeze(1)).softmax(-1)
        smallest = gap.abs()[p[:, result.targets[bag, 0]] >= 0.5].min()
        assert smallest - 0.01 <= change[bag] <= smallest + 0.05
    assert result.reached.sum() >= 20


def test_higher_cost_of_change_yields_smaller_changes_of_fewer_instances():
    model, x = model_of(factor=2.0), torch.randn(200, 6, dtype=torch.float64)
    starts = torch.tensor([0, 200])
    prediction = model(x, starts)
    frugal = search_counterfactual(model, x, starts, steps=2000, growth=0.01, alpha=0.1)
    lavish = search_counterfactual(model, x, starts, alpha=1e6)
    assert frugal.reached.all() and lavish.reached.all()
    changes = [(result.counterfactual.scores[:, 0] - prediction.scores).abs().detach() for result in (frugal, lavish)]
    few, many = (int((change > 1e-12).sum()) for change in changes)
    small, large = (float(bag_mean(change, Offsets(starts))) for change in changes)
    assert few < many and small < large


def test_invalid_search_raises_an_error_and_leaves_model_unchanged():
    model, x = model_of().train(), torch.randn(40, 6, dtype=torch.float64)
    with pytest.raises(CarmilError, match="search needs a model that declares 'pools by attention'; TransMIL does not"):
        search_counterfactual(create_model("transmil", 6, 2, hidden=8, heads=2), x, STARTS)
    with pytest.raises(CarmilError, match=r"targets of shape \(3,\) for 4 bags"):
        search_counterfactual(model, x, STARTS, torch.tensor([0, 1, 1]))
    with pytest.raises(CarmilError, match="a confidence of 1: expected a probability"):
        search_counterfactual(model, x, STARTS, confidence=1.0)
    with pytest.raises(CarmilError, match="step is 0"):
        search_counterfactual(model, x, STARTS, step=0.0)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
