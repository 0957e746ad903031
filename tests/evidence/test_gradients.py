import pytest
import torch

from carmil import Bags, create_model, list_models
from carmil.evidence import residual
from carmil.evidence.gradients import input_x_gradient, integrated_gradients
from carmil.models.pooling import Offsets, bag_sum

WIDTH = 12
SIZES = [9, 1, 5]
STARTS = torch.tensor([0, *SIZES]).cumsum(0)
SMALL = {
    "rrt": {"hidden": 16, "heads": 2, "attention": 8, "regions": 4},  # squares of 16: no region has two instances
    "transmil": {"hidden": 8, "heads": 2, "landmarks": 4},
    "weno": {"hidden": 8, "teacher": 8, "attention": 4, "student": 8, "init_std": None},
    "dsmil.official": {},
}


def fresh(name, dtype=torch.float64, **options):
    torch.manual_seed(1)
    plain = name.rpartition("/")[2]
    options = {**SMALL.get(plain, {"hidden": 16}), **options}
    return create_model(name, WIDTH, 2 if plain == "weno" else 3, **options).to(dtype).eval()


@pytest.mark.parametrize("name", list_models())
def test_input_x_gradient_equals_jacobian_times_features(name):
    model, x = fresh(name), torch.randn(sum(SIZES), WIDTH, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: model(x, STARTS).logits.sum(0), x)  # (k, n, d)
    assert torch.allclose(input_x_gradient(model, x, STARTS), (jacobian * x).sum(-1).T, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in list_models() if "/" not in name])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_integrated_gradients_sum_to_the_change_of_logits(name, dtype):
    """DSMIL gets bags of one instance: its logits jump where another instance becomes critical."""
    model = fresh(name, dtype)
    sizes = [1, 1, 1] if name.endswith("dsmil") else SIZES
    x, starts = 2 * torch.randn(sum(sizes), WIDTH, dtype=dtype), torch.tensor([0, *sizes]).cumsum(0)
    change = model(x, starts).logits - model(torch.zeros_like(x), starts).logits
    assert change.abs().max() > 0.02
    sums = bag_sum(integrated_gradients(model, x, starts), Offsets(starts))
    assert ((sums - change).abs() / change.abs().clamp_min(1)).max() < 1e-3


def test_integrated_gradients_agree_with_fine_quadrature_across_kinks():
    model, x = fresh("abmil", output_layers=1), 3 * torch.randn(10, WIDTH, dtype=torch.float64)
    one = torch.tensor([0, 10])
    steps = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    fine = torch.stack([input_x_gradient(model, t * x, one) / t for t in steps]).mean(0)
    result = integrated_gradients(model, x, one, tolerance=1e-5)
    assert fine.abs().max() > 0.05
    assert torch.allclose(result, fine, atol=1e-4)


def test_residual_of_integrated_gradients_reveals_discontinuous_logits():
    torch.manual_seed(3)
    model = fresh("dsmil")
    with torch.no_grad():
        model.query.weight.mul_(3)
        model.embedding[0].bias.normal_()
    bags = Bags.from_list([3 * torch.randn(20, WIDTH) for _ in range(8)])
    assert residual(model, bags, "integrated_gradients").max() > 1e-2
    assert residual(fresh("abmil"), bags, "integrated_gradients").max() < 1e-3


def test_weno_gradients_are_independent_of_the_training_phase():
    model, x = fresh("weno"), torch.randn(5, WIDTH, dtype=torch.float64)
    expected = input_x_gradient(model, x, torch.tensor([0, 5]))
    model.begin("student", 3)
    assert torch.equal(input_x_gradient(model, x, torch.tensor([0, 5])), expected)
