"""The Adam kernel, run by Triton's interpreter, against torch's Adam."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")
if torch.cuda.is_available():  # pragma: no cover
    pytest.skip("kernels are interpreted where there is no GPU", allow_module_level=True)

from carmil.training.optimizers import Adam


def test_adam_kernel_steps_like_torch_and_leaves_inactive_rows_unchanged() -> None:
    start = torch.randn(3, 1500)
    weights, lr = start.clone(), torch.tensor([1e-2, 2e-2, 3e-2])
    optimizer = Adam(weights, lr, weight_decay=0.1)
    expected = [torch.nn.Parameter(row.clone()) for row in start]
    references = [
        torch.optim.Adam([row], lr=float(rate), weight_decay=0.1) for row, rate in zip(expected, lr, strict=True)
    ]
    for step in range(4):
        gradient = torch.randn(3, 1500)
        active = torch.tensor([True, step % 2 == 0, False])
        optimizer.step_by_kernel(weights, [gradient[:, :1100], gradient[:, 1100:]], active)
        for row in active.nonzero().flatten().tolist():
            expected[row].grad = gradient[row].clone()
            references[row].step()
    torch.testing.assert_close(weights, torch.stack([row.detach() for row in expected]), atol=2e-6, rtol=1e-5)
    assert torch.equal(weights[2], start[2])
    assert optimizer.state[2].flatten().tolist() == [4, 2, 0]
