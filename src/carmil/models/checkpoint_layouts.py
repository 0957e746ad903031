"""Conversion of other tools' checkpoints to models of ours, by the names and shapes of their weights.

A layout is a function that recognises a state dict by the names and shapes of all its weights, renames them, and names
the model of ours that computes the same logits. LAYOUTS lists them by tool. A layout raises KeyError or ValueError for
a state dict of another layout; its result is compared with our model name by name and shape by shape, and is refused
unless it is complete.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from carmil.errors import CarmilError, unknown
from carmil.models.registry import create

LISTED = 20  # weights of an unknown architecture that a message lists
# What DataParallel, Lightning and torch.compile put before each name.
WRAPPERS = re.compile(r"(module|model|net|_orig_mod)\.")

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class ForeignModel:
    """A model of ours with the weights of a checkpoint.

    architecture: its name in the other tool. settings: the content of that tool's own file of settings, under its
    names.
    """

    architecture: str
    model: str
    in_features: int
    classes: int
    options: Mapping[str, Any]
    weights: Weights
    settings: Mapping[str, int | str | bool]


def recognise(tool: str, state_dicts: Mapping[str, Weights], path: Path) -> ForeignModel:
    """Return the model in one of the state dicts of a file. An unknown architecture is refused; the error lists its
    names and shapes.
    """
    if tool not in LAYOUTS:
        raise CarmilError(unknown("tool", tool, LAYOUTS))
    known = [model for state in state_dicts.values() if (model := _recognise_one(tool, state)) is not None]
    if not known:
        weights = [f"{name} {tuple(value.shape)}" for state in state_dicts.values() for name, value in state.items()]
        more = f" and {len(weights) - LISTED} more" if len(weights) > LISTED else ""
        raise CarmilError(
            f"{path} is not a model of {tool} that can be imported ({' or '.join(LAYOUTS[tool])}; see docs/importing.md, "
            f"or carmil.audit for any PyTorch module); its weights are {', '.join(weights[:LISTED])}{more}"
        )
    if len(known) > 1:
        raise CarmilError(
            f"{path} holds {len(known)} models ({', '.join(state_dicts)}): expected one; save its state dict alone"
        )
    for name, value in known[0].weights.items():
        if not value.isfinite().all():
            raise CarmilError(
                f"{path}: {name} has values that are not finite: expected a model whose training did not diverge"
            )
    return known[0]


def _recognise_one(tool: str, state: Weights) -> ForeignModel | None:
    while state and all(WRAPPERS.match(name) for name in state):
        state = {WRAPPERS.sub("", name, count=1): value for name, value in state.items()}
    for layout in LAYOUTS[tool].values():
        try:
            found = layout(state)
        except (KeyError, ValueError):
            continue
        if _is_complete(found):
            return found
    return None


def _is_complete(found: ForeignModel) -> bool:
    """Return whether the weights are exactly those of the model, which predicts two or more classes and has no empty layer."""
    if found.classes < 2 or not all(value.numel() for value in found.weights.values()):
        return False
    with torch.device("meta"):
        model = create(found.model, found.in_features, found.classes, **found.options)
    shapes = {name: value.shape for name, value in (*model.named_parameters(), *model.named_buffers())}
    return shapes == {name: value.shape for name, value in found.weights.items()}


def _clam(state: Weights, *, multi_branch: bool) -> ForeignModel:
    gated = any("attention_a" in name for name in state)
    net = r"attention_net\.(?:module\.)?"
    trunk = {rf"{net}\d\.attention_a\.0\.": "attention.V.", rf"{net}\d\.attention_b\.0\.": "attention.U."}
    score = {rf"{net}\d\.attention_c\.": "attention.score."}
    if not gated:
        trunk, score = {rf"{net}\d\.module\.0\.": "attention.V."}, {rf"{net}\d\.module\.[23]\.": "attention.score."}
    heads = {r"instance_classifiers\.(?P<head>\d+)\.": "instance_classifiers."}
    heads |= {r"classifiers\.(?P<head>\d+)\.": "classifier."} if multi_branch else {r"classifiers\.": "classifier."}
    weights = renamed(state, {rf"{net}0\.": "embedding.0.", **trunk, **score, **heads}, unused=r"instance_loss_fn\.")
    hidden, in_features = weights["embedding.0.weight"].shape
    attention, _ = weights["attention.V.weight"].shape
    classes = len(weights["classifier.weight"])
    kind = "mb" if multi_branch else "sb"
    return ForeignModel(
        architecture=f"CLAM-{kind.upper()}, {'gated' if gated else 'not gated'}",
        model=f"clam.{kind}",
        in_features=in_features,
        classes=classes,
        options={"hidden": hidden, "attention": attention, "gated": gated, "dropout": 0.0},
        weights=weights,
        settings={"model_type": f"clam_{kind}", "embed_dim": in_features, "n_classes": classes},
    )


def _clam_sb(state: Weights) -> ForeignModel:
    return _clam(state, multi_branch=False)


def _clam_mb(state: Weights) -> ForeignModel:
    return _clam(state, multi_branch=True)


def _xmil_attention(state: Weights) -> ForeignModel:
    deeper = len({name.split(".")[1] for name in state if name.startswith("linear_layers.")}) - 1
    out = len({name.split(".")[1] for name in state if name.startswith("out_layers.")})
    rules = {
        r"linear_layers\.0\.0\.": "embedding.0.",
        **{rf"linear_layers\.{i + 1}\.0\.": f"further_embedding.{i}.0." for i in range(deeper)},
        r"attention\.0\.": "attention.V.",
        r"attention\.2\.": "attention.score.",
        **{rf"out_layers\.{i}\.0\.": f"classifier.{2 * i}." for i in range(out)},
        r"classifier\.": f"classifier.{2 * out}.",
    }
    weights = renamed(state, rules)
    hidden, in_features = weights["embedding.0.weight"].shape
    attention, _ = weights["attention.V.weight"].shape
    classes, _ = weights[f"classifier.{2 * out}.weight"].shape
    sizes = {"hidden": hidden, "attention": attention}
    return ForeignModel(
        architecture="AttentionMIL",
        model="abmil",
        in_features=in_features,
        classes=classes,
        options={**sizes, "embedding_layers": deeper + 1, "output_layers": out, "dropout": 0.0},
        weights=_with_biases(weights),
        settings={
            "aggregation_model": "attention_mil",
            "objective": "cross-entropy",
            "input_dim": in_features,
            "features_dim": hidden,
            "inner_attention_dim": attention,
            "num_layers": deeper + 1,
            "n_out_layers": out,
            "num_classes": classes,
            "no_bias": "classifier.bias" not in state,
        },
    )


def _xmil_additive(state: Weights) -> ForeignModel:
    rules = {
        r"pointer\.model\.": "attention.",
        r"classifier\.model\.0\.weight": "first.weight",
        r"classifier\.model\.0\.bias": "first_bias",
        r"classifier\.model\.2\.": "rest.1.",
        r"classifier\.model\.4\.": "rest.3.",
    }
    weights = renamed(state, rules, unused=r"pointer\.model\.\d\.num_batches_tracked")
    hidden, in_features = weights["first.weight"].shape
    classes, _ = weights["rest.3.weight"].shape
    return ForeignModel(
        architecture="additive MIL",
        model="additive",
        in_features=in_features,
        classes=classes,
        options={"hidden": hidden},
        weights=weights,
        settings={
            "aggregation_model": "additive_mil",
            "objective": "cross-entropy",
            "input_dim": in_features,
            "num_classes": classes,
        },
    )


Layout = Callable[[Weights], ForeignModel]
LAYOUTS: dict[str, dict[str, Layout]] = {
    "clam": {"CLAM-SB": _clam_sb, "CLAM-MB": _clam_mb},
    "xmil": {"AttentionMIL": _xmil_attention, "additive MIL": _xmil_additive},
}


def renamed(state: Weights, rules: Mapping[str, str], *, unused: str = r"(?!)") -> dict[str, Tensor]:
    """Return all weights under new names, in float32. A name that no rule fits is an error.

    rules: map a pattern, which matches the beginning of a name, to the new beginning. The weights of several heads,
    numbered by the group `head` of the pattern, are stacked. unused: a pattern of names that the model does not need.
    """
    weights: dict[str, Tensor] = {}
    heads: dict[str, dict[int, Tensor]] = {}
    for name, value in state.items():
        if re.match(unused, name):
            continue
        if not value.is_floating_point():
            raise ValueError(name)
        fits = [(found, new) for old, new in rules.items() if (found := re.match(old, name))]
        if len(fits) != 1:
            raise KeyError(name)
        found, new = fits[0]
        new += name[found.end() :]
        if "head" in found.groupdict():
            heads.setdefault(new, {})[int(found["head"])] = value
        elif new in weights:
            raise KeyError(name)
        else:
            weights[new] = value
    for new, values in heads.items():
        if new in weights or any(value.shape != values[0].shape for value in values.values()):
            raise ValueError(new)
        weights[new] = torch.stack([values[head] for head in range(len(values))])
    return {name: value.float().contiguous() for name, value in weights.items()}


def _with_biases(weights: Weights) -> dict[str, Tensor]:
    """Add a bias of 0 to each layer that has none, which does not change its output."""
    biases = {
        f"{name.removesuffix('weight')}bias": value.new_zeros(len(value))
        for name, value in weights.items()
        if value.ndim == 2
    }
    return {**biases, **weights}
