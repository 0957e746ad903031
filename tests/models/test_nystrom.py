"""The parts of Nystrom attention, against explicit computations."""

import pytest
import torch

from carmil.models import nystrom, transmil


def test_pseudo_inverse_and_its_gradient_equal_explicit_iteration():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64).softmax(-1).requires_grad_()
    z = a.mT / (a.abs().sum(-1).amax(-1) * a.abs().sum(-2).amax(-1))[..., None, None]
    one = torch.eye(16, dtype=torch.float64)
    for _ in range(6):
        z = 0.25 * z @ (13 * one - a @ z @ (15 * one - a @ z @ (7 * one - a @ z)))
    result = nystrom.pseudo_inverse(a, 6)
    torch.testing.assert_close(result, z)
    up = torch.randn(z.shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(result, a, up), torch.autograd.grad(z, a, up))


@pytest.mark.parametrize("tokens", [1, 40, 64, 65, 200])
@pytest.mark.parametrize("models", [(), (3,)])
def test_band_matrix_product_equals_convolution_along_tokens(tokens, models):
    generator = torch.Generator().manual_seed(tokens)
    values = torch.randn(*models, 2, 4, tokens, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(*models, 4, 1, 33, 1, generator=generator, dtype=torch.float64, requires_grad=True)
    up = torch.randn(values.shape, generator=generator, dtype=torch.float64)
    product, convolved = nystrom.along_tokens(values, weight), transmil.depthwise(values, weight, None)
    torch.testing.assert_close(product, convolved)
    for one, other in zip(*(torch.autograd.grad(y, (values, weight), up) for y in (product, convolved)), strict=True):
        torch.testing.assert_close(one, other)


def test_kernel_gradient_is_exact_for_large_bags():
    """The gradient of torch's own float32 convolution is off by one per cent here."""
    generator = torch.Generator().manual_seed(0)
    values, up = (torch.randn(2, 8, 5041, 64, generator=generator) for _ in range(2))
    weight = torch.randn(8, 1, 33, 1, generator=generator)

    def gradient(dtype):
        kernel = weight.to(dtype).requires_grad_()
        return torch.autograd.grad(nystrom.along_tokens(values.to(dtype), kernel), kernel, up.to(dtype))[0]

    fine, single = gradient(torch.float64), gradient(torch.float32)
    assert (fine - single).abs().max() < 1e-5 * fine.abs().max()
