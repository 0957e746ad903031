"""The double-precision copy of a model stays in step with the model."""

import torch

from carmil import create_model
from carmil.evidence.pooling_pass import in_double


def test_double_precision_copy_is_cached_until_weights_change():
    model = create_model("abmil", 4, 2, hidden=8).eval()
    first = in_double(model)
    assert in_double(model) is first
    with torch.no_grad():
        next(model.parameters()).add_(1)
    second = in_double(model)
    assert second is not first
    for own, double in zip(model.parameters(), second.parameters(), strict=True):
        assert double.dtype == torch.float64 and torch.equal(double, own.double())


def test_double_precision_copy_has_the_training_mode_of_the_model():
    model = create_model("abmil", 4, 2, hidden=8).train()
    assert in_double(model).training
    assert not in_double(model.eval()).training
