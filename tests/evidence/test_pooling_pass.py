"""The copy of a model in double precision follows the model."""

import torch

from carmil import create_model
from carmil.evidence.pooling_pass import in_double


def test_the_double_of_a_model_is_kept_until_its_weights_change():
    model = create_model("abmil", 4, 2, hidden=8).eval()
    first = in_double(model)
    assert in_double(model) is first
    with torch.no_grad():
        next(model.parameters()).add_(1)
    second = in_double(model)
    assert second is not first
    for mine, double in zip(model.parameters(), second.parameters(), strict=True):
        assert double.dtype == torch.float64 and torch.equal(double, mine.double())


def test_the_double_of_a_model_trains_only_while_the_model_does():
    model = create_model("abmil", 4, 2, hidden=8).train()
    assert in_double(model).training
    assert not in_double(model.eval()).training
