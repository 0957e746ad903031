"""Requirements on every explainer, with every registered model that supports it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from carmil import Bags, create_model, list_models
from carmil.errors import CarmilError
from carmil.evidence import EXPLAINERS, explain, explainers_of, residual
from carmil.models import Ability, BagModel, Prediction
from carmil.models.pooling import Offsets, bag_mean
from carmil.models.scaled_model import ScaledModel

WIDTH = 12
SIZES = [6, 1, 4]
SMALL = {
    "rrt": {"hidden": 16, "heads": 2, "attention": 8, "regions": 2},
    "transmil": {"hidden": 8, "heads": 2, "landmarks": 4},
    "weno": {"hidden": 8, "teacher": 8, "attention": 4, "student": 8, "init_std": None},
    "dsmil.official": {},
}
ANY = {"single", "coalition", "coalition.4", "input_x_gradient", "integrated_gradients", "random"}
POOLED = {"path", "path.uniform", "path.zero", "attention", "margin_sensitivity", "leave_one_out", "lrp"}
COUNTERFACTUAL = {"counterfactual_attention", "factual_minus_counterfactual"}


def fresh(name, dtype=torch.float32):
    torch.manual_seed(1)
    plain = name.rpartition("/")[2]
    options = SMALL.get(plain, {"hidden": 16})
    return create_model(name, WIDTH, 2 if plain == "weno" else 3, **options).to(dtype)


def some_bags(sizes=SIZES):
    torch.manual_seed(2)
    return Bags.from_list([torch.randn(size, WIDTH) for size in sizes])


def quick(name):
    """Return whether the explainer is fast; integrated gradients are slow and tested separately."""
    return name != "integrated_gradients"


@pytest.mark.parametrize("name", list_models())
def test_a_bag_alone_and_in_company_gets_the_same_evidence(name):
    model, bags = fresh(name), some_bags()
    for method in filter(quick, explainers_of(model)):
        together = explain(model, bags, method)
        assert together.shape == (sum(SIZES), model.classes)
        assert together.isfinite().all(), "a bag of one instance has evidence too"
        if method != "random":
            alone = torch.cat([explain(model, bags[i], method) for i in range(len(bags))])
            assert torch.allclose(together, alone, atol=1e-4), method


@pytest.mark.parametrize("name", list_models())
def test_evidence_in_double_and_single_precision_agrees_up_to_rounding(name):
    model, bags = fresh(name), some_bags()
    for method in filter(quick, explainers_of(model)):
        single, double = explain(model.float(), bags, method), explain(model.double(), bags, method)
        assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
        assert torch.allclose(single.double(), double, atol=1e-3), method


@pytest.mark.parametrize("name", list_models())
def test_evidence_differs_between_classes_only_where_declared(name):
    model, bags = fresh(name), some_bags()
    for method in filter(quick, explainers_of(model)):
        evidence = explain(model, bags, method)
        alike = torch.equal(evidence, evidence[:, :1].expand_as(evidence))
        map_per_class = Ability.MAP_PER_CLASS in model.abilities and "attention" in EXPLAINERS[method].description
        assert alike != (EXPLAINERS[method].class_conditional or map_per_class), method


@pytest.mark.parametrize("name", list_models())
def test_undeclared_explainers_raise_an_error_of_one_line(name):
    model, bags = fresh(name), some_bags()
    fitting = explainers_of(model)
    assert [method for method in EXPLAINERS if method in fitting] == fitting
    for method in set(EXPLAINERS) - set(fitting):
        with pytest.raises(CarmilError) as refused:
            explain(model, bags, method)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("abmil", ANY | POOLED),
        ("car/abmil", ANY | POOLED | COUNTERFACTUAL | {"path.counterfactual"}),
        ("targeted/clam.sb", ANY | POOLED | {"targeted"}),
        ("cia/abmil", ANY | POOLED),
        ("dsmil", ANY | POOLED | {"patch_scores"}),
        ("transmil", ANY | {"attention", "rollout"}),
        ("car/transmil", ANY | COUNTERFACTUAL | {"attention", "rollout"}),
        ("mean", ANY | {"patch_scores"}),
        ("additive", ANY | {"attention", "patch_scores"}),
        ("weno", ANY | {"attention", "patch_scores"}),
    ],
)
def test_models_have_the_expected_explainers(name, expected):
    model = fresh(name)
    assert set(explainers_of(model)) == expected
    assert set(explainers_of(ScaledModel(model, WIDTH))) == expected


class LinearMean(BagModel):
    """A third-party model: the mean of x W', with x as instances, equal scores and logits of every instance."""

    def __init__(self, abilities):
        super().__init__()
        self.classes, self.abilities = 3, abilities
        self.weight = torch.nn.Parameter(torch.randn(3, WIDTH))

    def embed(self, features, offsets):
        return features

    def attend(self, instances, offsets):
        return instances[:, :1] * 0

    def classify(self, pooled):
        return pooled.squeeze(-2) @ self.weight.T

    def forward(self, features, offsets):
        offsets = Offsets.of(offsets)
        u, logits = self.attend(features, offsets), features @ self.weight.T
        weights = (1 / offsets.sizes)[offsets.bag_of].unsqueeze(-1)
        pooled = bag_mean(features, offsets).unsqueeze(-2)
        return Prediction(self.classify(pooled), offsets, u, features, pooled, weights, instance_logits=logits)


@pytest.mark.parametrize(
    ("abilities", "expected"),
    [
        (Ability.NONE, {"random"}),
        (Ability.GRADIENTS, {"random", "input_x_gradient", "integrated_gradients"}),
        (Ability.SMALL_BAGS, {"random", "single", "coalition", "coalition.4"}),
        (BagModel.abilities | Ability.INSTANCE_LOGITS, ANY | {"patch_scores"}),
        (BagModel.abilities | Ability.ATTENDS, ANY | {"attention"}),
        (BagModel.abilities | Ability.ATTENDS | Ability.POOLS_BY_ATTENTION, ANY | POOLED - {"lrp"}),
    ],
)
def test_third_party_model_gets_exactly_the_explainers_it_declares(abilities, expected):
    model, bags = LinearMean(abilities), some_bags()
    assert set(explainers_of(model)) == set(explainers_of(ScaledModel(model, WIDTH))) == expected
    assert all(explain(model, bags, method).isfinite().all() for method in expected)
    with pytest.raises(CarmilError, match="'rollout' needs a model that declares 'rollout'; LinearMean does not"):
        explain(ScaledModel(model, WIDTH), bags, "rollout")


def test_evidence_of_third_party_linear_model_equals_instance_contributions():
    bags = some_bags()
    model = LinearMean(BagModel.abilities | Ability.ATTENDS | Ability.POOLS_BY_ATTENTION | Ability.INSTANCE_LOGITS)
    sizes = bags.sizes[torch.repeat_interleave(bags.sizes)].unsqueeze(-1)
    own = explain(model, bags, "patch_scores") / sizes
    for method in ("path.zero", "input_x_gradient", "integrated_gradients"):
        assert torch.allclose(explain(model, bags, method), own, atol=1e-5), method


@pytest.mark.parametrize("name", ["car/abmil", "targeted/abmil", "car/transmil", "mean"])
def test_evidence_is_unchanged_by_scaling_absorbed_in_the_model(name):
    model, bags = fresh(name).double(), some_bags()
    scaled = ScaledModel(model, WIDTH).double()
    scaled.mean += 3
    scaled.deviation += 1
    moved = Bags(bags.features.double() * 2 + 3, bags.offsets)
    for method in explainers_of(model):
        if method not in ("input_x_gradient", "integrated_gradients"):
            assert torch.allclose(explain(scaled, moved, method), explain(model, bags, method), atol=1e-6), method


def model_with_known_evidence():
    """Return a model that attends to x_0 > 0, evidence for class 0 against 1, and x_1 > 0, the reverse."""
    model = create_model("car/abmil", 3, 2, hidden=3, attention=3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.embedding[0].weight.copy_(torch.eye(3))
        model.model.attention.V.weight.copy_(torch.eye(3))
        model.model.attention.score.weight.copy_(torch.tensor([[1.0, 1.0, -1.0]]))
        model.branch.attention.weight.copy_(torch.tensor([[-1.0, -1.0, 1.0]]))
        model.model.classifier[0].weight.copy_(torch.tensor([[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0]]))
        model.model.classifier[0].bias.copy_(torch.tensor([0.01, 0.01]))
    return model


@pytest.mark.parametrize(
    "method",
    [name for name in explainers_of(model_with_known_evidence()) if EXPLAINERS[name].signed and name != "random"],
)
def test_positive_evidence_supports_a_class_and_negative_refutes_it(method):
    bags = Bags.from_list([torch.tensor([[1.0, 0, 0], [0, 1.1, 0], [0, 0, 1.0], [0, 0, 1.0]])])
    evidence = explain(model_with_known_evidence(), bags, method)
    if EXPLAINERS[method].class_conditional:
        assert evidence[0, 0] > 0 > evidence[0, 1]
        assert evidence[1, 1] > 0 > evidence[1, 0]
    else:
        assert (evidence[:2] > 0).all() and (evidence[2:] < 0).all(), "attended by one branch, not by the other"


def test_factual_minus_counterfactual_sums_to_zero_and_ignores_constants():
    model, bags = fresh("car/abmil"), some_bags()
    before = explain(model, bags, "factual_minus_counterfactual")
    with torch.no_grad():
        model.branch.attention.bias.add_(5.0)
    assert torch.allclose(explain(model, bags, "factual_minus_counterfactual"), before, atol=1e-6)
    assert torch.allclose(before[: SIZES[0]].sum(0), torch.zeros(1), atol=1e-6)
    assert before.abs().max() > 1e-4


def test_counterfactual_attention_is_attention_of_the_branch():
    model, bags = fresh("car/abmil").eval(), some_bags()
    u_cf = model(bags.features, bags.offsets).counterfactual.scores
    assert torch.allclose(explain(model, bags, "counterfactual_attention")[:, 0], u_cf[:, 0, 0])


def test_residual_is_small_for_explainers_with_a_guaranteed_sum():
    model, bags = fresh("car/abmil"), some_bags()
    for method in explainers_of(model):
        if EXPLAINERS[method].total is not None:
            assert residual(model, bags, method).shape == (3, 3)
            assert residual(model, bags, method).max() < 1.5e-4  # the tolerance, and rounding in single precision
    with pytest.raises(CarmilError, match="'single' has no expected sum, so there is no residual; path, "):
        residual(model, bags, "single")


class OperationMonitor(TorchDispatchMode):
    """Counts operations and records the size of the largest tensor that any of them creates."""

    def __init__(self):
        super().__init__()
        self.operations, self.largest = 0, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        created = operation(*args, **(kwargs or {}))
        self.operations += 1
        if isinstance(created, torch.Tensor):
            self.largest = max(self.largest, created.numel())
        return created


@pytest.mark.parametrize("name", ["car/abmil", "clam.mb", "targeted/abmil"])
def test_twenty_thousand_instances_are_explained_in_batches_with_little_memory(name):
    model = fresh(name)
    large = Bags.from_list([torch.randn(20_000, WIDTH)])
    for method in explainers_of(model):
        with OperationMonitor() as monitor:
            evidence = explain(model, large, method)
        assert evidence.isfinite().all()
        assert monitor.operations < 20_000, f"{method} processes instances one by one"
        assert monitor.largest <= 2**24, f"{method} creates a tensor of {monitor.largest} numbers"


@pytest.mark.parametrize("name", ["transmil", "rrt"])
def test_single_instance_evidence_is_computed_in_small_batches(name):
    model, large = fresh(name), Bags.from_list([torch.randn(4_000, WIDTH)])
    with OperationMonitor() as monitor:
        explain(model, large, "single")
    assert monitor.largest <= 2**20
    assert monitor.operations < 10_000
