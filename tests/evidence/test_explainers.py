import pytest
import torch

from carmil import Bags, create_model, explain
from carmil.errors import CarmilError
from carmil.evidence import EXPLAINERS
from carmil.evidence.path import path_evidence
from carmil.models.pooling import Offsets, bag_softmax, bag_sum, bag_weighted_sum

SIZES = [30, 7, 1, 12]
STARTS = torch.tensor([0, *SIZES]).cumsum(0)


def model_of(name="abmil", scale=3.0, **options):
    torch.manual_seed(0)
    model = create_model(name, 16, 4, hidden=20, attention=20, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


def difference(model, x, offsets):
    """F(Z) - F(Z_ref), by the definition."""
    z = model.embed(x, offsets)
    u = model.attend(z, offsets)
    pools = [bag_weighted_sum(bag_softmax(s, offsets), z, offsets) for s in (u, -u)]
    return model.classify(pools[0]) - model.classify(pools[1])


@pytest.mark.parametrize("name", ["abmil", "abmil.gated", "car/abmil", "targeted/abmil"])
@pytest.mark.parametrize("layers", [0, 1, 2])
@pytest.mark.parametrize("starts", [STARTS, torch.arange(6) * 10])
def test_path_evidence_sums_to_the_difference_of_logits(name, layers, starts):
    model, offsets = model_of(name, output_layers=layers), Offsets(starts)
    x = torch.randn(int(starts[-1]), 16)
    evidence = path_evidence(model, x, offsets)
    expected = difference(model, x, offsets)
    assert expected.abs().max() > 1, "a vanishing difference would prove nothing"
    error = (bag_sum(evidence, offsets) - expected).abs() / expected.abs().clamp_min(1)
    assert error.max() < 1e-3


def test_path_evidence_of_linear_classifier_equals_closed_form():
    model, x, offsets = model_of(), torch.randn(50, 16), Offsets(STARTS)
    z = model.embed(x, offsets)
    u = model.attend(z, offsets)
    reference = bag_weighted_sum(bag_softmax(-u, offsets), z, offsets).squeeze(1)[offsets.bag_of]
    expected = bag_softmax(u, offsets) * ((z - reference) @ model.classifier[0].weight.T)
    assert torch.allclose(path_evidence(model, x, offsets), expected, atol=1e-5)


def test_path_evidence_agrees_with_fine_quadrature_across_kinks():
    model, x, offsets = model_of(output_layers=1), torch.randn(10, 16), Offsets(torch.tensor([0, 10]))
    z = model.embed(x, offsets).detach()
    u = model.attend(z, offsets).detach()
    a = bag_softmax(u, offsets)
    end, start = (bag_weighted_sum(w, z, offsets) for w in (a, bag_softmax(-u, offsets)))
    total = torch.zeros(4, 20)
    for t in (torch.arange(4000) + 0.5) / 4000:
        total += (
            torch.autograd.functional.jacobian(lambda Z: model.classify(Z)[0], start + t * (end - start)).squeeze()
            / 4000
        )
    assert torch.allclose(path_evidence(model, x, offsets), a * ((z - start[0]) @ total.T), atol=5e-3)


@pytest.mark.parametrize("method", ["path", "attention", "targeted", "single"])
def test_evidence_of_a_bag_does_not_depend_on_other_bags(method):
    model = model_of("targeted/abmil", output_layers=1)
    bags = Bags.from_list([torch.randn(size, 16) for size in SIZES], labels=[0, 1, 2, 3])
    together = explain(model, bags, method)
    assert together.shape == (50, 4)
    assert torch.allclose(together, torch.cat([explain(model, bags[i], method) for i in range(4)]), atol=1e-3)
    assert torch.allclose(together, explain(model, bags, method, max_instances=13), atol=1e-3)


def test_attention_is_equal_for_all_classes_and_path_evidence_is_not():
    model, bags = model_of(), Bags.from_list([torch.randn(9, 16)])
    attention, path = explain(model, bags, "attention"), explain(model, bags, "path")
    assert (attention == attention[:, :1]).all()
    assert not torch.allclose(path[:, 0], path[:, 1])
    assert not EXPLAINERS["attention"].class_conditional
    assert EXPLAINERS["path"].class_conditional
    assert EXPLAINERS["path"].signed


def test_unknown_or_unsupported_explainer_raises_an_error_naming_it():
    bags = Bags.from_list([torch.randn(3, 16)])
    with pytest.raises(CarmilError, match="unknown explainer 'paht'; did you mean 'path'"):
        explain(model_of(), bags, "paht")
    with pytest.raises(CarmilError, match="'targeted' needs a model that declares 'target maps'; ABMIL does not"):
        explain(model_of("car/abmil"), bags, "targeted")


def test_large_logits_do_not_increase_the_number_of_path_pieces(monkeypatch):
    """Rounding errors of a linear classifier must not be mistaken for a kink."""
    from carmil.evidence import path

    points = []
    gradient = path.classifier_gradient
    monkeypatch.setattr(path, "classifier_gradient", lambda model, at: points.append(len(at)) or gradient(model, at))
    model, x = model_of(), torch.randn(30, 16) * 10 + 300
    evidence = path_evidence(model, x, torch.tensor([0, 10, 30]))
    assert points == [2 * path.FIRST_CUTS]
    assert torch.isfinite(evidence).all()


def test_unsupported_explainer_leaves_model_in_training_mode():
    model, bags = create_model("mean", 16, 4, hidden=8).train(), Bags.from_list([torch.randn(3, 16)])
    with pytest.raises(CarmilError, match="'path' needs a model that declares 'pools by attention'; MeanMIL does not"):
        explain(model, bags, "path")
    with pytest.raises(CarmilError, match="'attention' needs a model that declares 'attends'"):
        explain(model, bags, "attention")
    with pytest.raises(CarmilError, match="'patch_scores' needs a model that declares 'instance logits'"):
        explain(model_of(), bags, "patch_scores")
    with pytest.raises(CarmilError, match="'rollout' needs a model that declares 'rollout'"):
        explain(model_of(), bags, "rollout")
    assert model.training


def test_single_is_prediction_for_one_instance_and_random_is_reproducible():
    model, bags = model_of(), Bags.from_list([torch.randn(5, 16), torch.randn(3, 16)])
    single = explain(model, bags, "single")
    for j in range(8):
        alone = model(bags.features[j : j + 1], torch.tensor([0, 1])).logits.softmax(-1)[0]
        assert torch.allclose(single[j], alone, atol=1e-6)
    assert torch.equal(explain(model, bags, "random"), explain(model, bags, "random"))


def test_attention_of_model_with_one_map_per_class_differs_by_class():
    model, bags = create_model("clam.mb", 16, 4, hidden=8, attention=6), Bags.from_list([torch.randn(9, 16)])
    attention = explain(model, bags, "attention")
    assert torch.allclose(attention, model.eval()(bags.features, bags.offsets).scores)


def test_attention_of_several_heads_is_log_of_mean_attention_weight():
    model = create_model("acmil", 6, 2).eval()
    bags = Bags.from_list([torch.randn(9, 6), torch.randn(4, 6)])
    offsets = Offsets(bags.offsets)
    weights = bag_softmax(model(bags.features, offsets).scores, offsets).mean(-1)
    assert torch.allclose(explain(model, bags, "attention")[:, 0].exp(), weights, atol=1e-6)
