"""Checkpoints of other tools become models of ours with the same logits; whatever is not wholly recognised is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.models.made_checkpoints import (
    additive_logits,
    additive_state,
    clam_logits,
    clam_state,
    xmil_logits,
    xmil_state,
)

from carmil.errors import CarmilError
from carmil.models import create
from carmil.models.checkpoint_layouts import recognise
from carmil.torch_files import read_state_dicts

SIZES = (1, 2, 17, 200, 1500)
MADE = {
    "CLAM-SB, gated": ("clam", "clam.sb", clam_logits, lambda: clam_state(width=9)),
    "CLAM-SB, on several GPUs": (
        "clam",
        "clam.sb",
        clam_logits,
        lambda: clam_state(width=9, net="attention_net.module"),
    ),
    "CLAM-SB, not gated": ("clam", "clam.sb", clam_logits, lambda: clam_state(width=9, classes=3, gated=False)),
    "CLAM-MB, gated": ("clam", "clam.mb", clam_logits, lambda: clam_state(width=9, classes=3, multi=True)),
    "CLAM-MB, twelve classes": ("clam", "clam.mb", clam_logits, lambda: clam_state(width=9, classes=12, multi=True)),
    "CLAM-MB, not gated": ("clam", "clam.mb", clam_logits, lambda: clam_state(width=9, gated=False, multi=True)),
    "AttentionMIL": ("xmil", "abmil", xmil_logits, lambda: xmil_state(width=9, classes=3)),
    "AttentionMIL, deep": ("xmil", "abmil", xmil_logits, lambda: xmil_state(width=9, layers=3, out=2)),
    "AttentionMIL, without biases": (
        "xmil",
        "abmil",
        xmil_logits,
        lambda: xmil_state(width=9, layers=2, out=1, bias=False),
    ),
    "additive MIL": ("xmil", "additive", additive_logits, lambda: additive_state(width=9, classes=3)),
}
REAL = {
    "clam_demo": ("clam", clam_logits),
    "xmil_attnmil_camelyon": ("xmil", xmil_logits),
    "xmil_attnmil_nsclc": ("xmil", xmil_logits),
}


def our_logits(found, bags, dtype):
    """Return the logits of all bags in one pass."""
    model = create(found.model, found.in_features, found.classes, **found.options).eval()
    model.load_state_dict(found.weights)
    starts = np.cumsum([0, *map(len, bags)])
    with torch.no_grad():
        return model.to(dtype)(
            torch.from_numpy(np.concatenate(bags)).to(dtype), torch.from_numpy(starts)
        ).logits.numpy()


def check_logits(found, state, logits):
    """Compare with the equations: in double precision wholly, in single precision up to its rounding."""
    bags = random_bags(found.in_features)
    expected = np.array([logits(state, bag) for bag in bags])
    assert np.abs(our_logits(found, bags, torch.float64) - expected).max() < 1e-9
    assert np.abs(our_logits(found, bags, torch.float32) - expected).max() < 1e-5 * max(1, np.abs(expected).max())


def random_bags(width):
    rng = np.random.default_rng(3)
    return [rng.normal(size=(n, width)).astype(np.float32) for n in SIZES]


@pytest.mark.parametrize("name", MADE)
def test_logits_equal_the_equations_of_the_other_tool(name):
    tool, model, logits, make = MADE[name]
    state = make()
    found = recognise(tool, {"": state}, Path("x.pt"))
    assert found.model == model
    check_logits(found, state, logits)


@pytest.mark.parametrize("name", REAL)
def test_logits_of_a_published_checkpoint_equal_the_equations(name, shared_data):
    tool, logits = REAL[name]
    path = shared_data / "checkpoints" / f"{name}.pt"
    states = read_state_dicts(path)
    found = recognise(tool, states, path)
    (state,) = states.values()
    check_logits(found, state, logits)


@pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod.module."])
def test_prefix_of_a_wrapper_is_removed(prefix):
    state = xmil_state(width=4)
    found = recognise("xmil", {"state_dict": {prefix + name: value for name, value in state.items()}}, Path("x.pt"))
    assert torch.equal(found.weights["attention.V.weight"], state["attention.0.weight"])


def test_loss_and_counts_are_omitted_and_half_precision_becomes_single_precision():
    state = {name: value.half() for name, value in clam_state(width=4).items()}
    found = recognise("clam", {"": {**state, "instance_loss_fn.labels": torch.tensor([0, 1])}}, Path("x.pt"))
    assert {value.dtype for value in found.weights.values()} == {torch.float32}


def changed(**others):
    return {**clam_state(width=4), **others}


@pytest.mark.parametrize(
    "state",
    [
        {"fc.weight": torch.ones(2, 4)},
        changed(**{"attention_net.0.weight": torch.ones(4)}),
        changed(**{"attention_net.4.weight": torch.ones(6, 6)}),
        changed(**{"attention_net.3.attention_a.0.weight": torch.ones(5, 6)}),
        changed(**{"instance_classifiers.2.weight": torch.ones(2, 6)}),
        changed(**{"instance_classifiers.7.bias": torch.ones(2)}),
        changed(**{"classifiers.bias": torch.ones(2, dtype=torch.long)}),
        clam_state(width=4, classes=1),
        {name: value[..., :0] if "attention" in name else value for name, value in clam_state(width=4).items()},
        {name: value for name, value in clam_state(width=4).items() if name != "classifiers.bias"},
        {},
    ],
)
def test_weights_that_do_not_exactly_fit_a_known_model_are_refused(state):
    with pytest.raises(CarmilError, match=r"^x\.pt is not a model of clam that can be imported \(CLAM-SB or CLAM-MB; "):
        recognise("clam", {"": state}, Path("x.pt"))


def test_message_about_an_unknown_architecture_lists_names_and_shapes():
    with pytest.raises(CarmilError) as refused:
        recognise("xmil", {"model": {"fc\n.weight": torch.ones(2, 4), "fc.bias": torch.ones(2)}}, Path("x.pt"))
    assert str(refused.value) == (
        "x.pt is not a model of xmil that can be imported (AttentionMIL or additive MIL; see docs/importing.md, or "
        "carmil.audit for any PyTorch module); its weights are fc .weight (2, 4), fc.bias (2,)"
    )
    many = {f"w{i}": torch.ones(1) for i in range(50)}
    with pytest.raises(CarmilError, match=r"w19 \(1,\) and 30 more$"):
        recognise("xmil", {"": many}, Path("x.pt"))


def test_unknown_tool_is_refused():
    with pytest.raises(
        CarmilError, match=r"unknown tool 'xmill'; did you mean 'xmil'\? expected one of clam, (.+, )?xmil"
    ):
        recognise("xmill", {"": xmil_state(width=4)}, Path("x.pt"))


def test_file_with_two_models_or_with_diverged_weights_is_refused():
    state = xmil_state(width=4)
    with pytest.raises(CarmilError, match=r"x\.pt holds 2 models \(model, average\): expected one"):
        recognise("xmil", {"model": state, "average": state}, Path("x.pt"))
    state["classifier.bias"][0] = float("nan")
    with pytest.raises(CarmilError, match=r"x\.pt: classifier\.0\.bias has values that are not finite"):
        recognise("xmil", {"": state}, Path("x.pt"))
