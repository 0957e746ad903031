"""State dicts with random weights in the layouts of other tools, and their models' logits from the equations alone.

The equations are computed bag by bag in double precision. n instances of a bag, k classes.
"""

import numpy as np
import torch


def clam_state(
    *,
    width: int,
    hidden: int = 6,
    attention: int = 4,
    classes: int = 2,
    gated: bool = True,
    multi: bool = False,
    net: str = "attention_net",
) -> dict[str, torch.Tensor]:
    """Return a state dict of CLAM. net: "attention_net", or "attention_net.module", as it was trained on several GPUs."""
    heads = classes if multi else 1
    layers = {f"{net}.0": (hidden, width)}
    if gated:
        layers |= {f"{net}.3.attention_{part}.0": (attention, hidden) for part in "ab"}
        layers[f"{net}.3.attention_c"] = (heads, attention)
    else:
        layers |= {f"{net}.3.module.0": (attention, hidden), f"{net}.3.module.3": (heads, attention)}
    layers |= {f"classifiers.{c}": (1, hidden) for c in range(classes)} if multi else {"classifiers": (classes, hidden)}
    layers |= {f"instance_classifiers.{c}": (2, hidden) for c in range(classes)}
    return _weights(layers)


def clam_logits(state: dict[str, torch.Tensor], x: np.ndarray) -> np.ndarray:
    """z = relu(E x);  u = C (tanh(A z) * sigmoid(B z)), or C tanh(A z);  F = W sum_j softmax(u)_j z_j.

    CLAM-MB: F_c = w_c . sum_j softmax(u_c)_j z_j.
    """
    layer = _Layers(state, lambda name: name.replace("attention_net.module.", "attention_net."))
    z = np.maximum(layer("attention_net.0", x), 0)
    if "attention_net.3.attention_c.weight" in layer.names:
        t = np.tanh(layer("attention_net.3.attention_a.0", z)) / (
            1 + np.exp(-layer("attention_net.3.attention_b.0", z))
        )
        u = layer("attention_net.3.attention_c", t)
    else:
        u = layer("attention_net.3.module.3", np.tanh(layer("attention_net.3.module.0", z)))
    Z = _softmax(u).T @ z
    if "classifiers.weight" in layer.names:
        return layer("classifiers", Z)[0]
    return np.array([layer(f"classifiers.{c}", Z[c]).item() for c in range(len(Z))])


def xmil_state(
    *,
    width: int,
    hidden: int = 6,
    attention: int = 4,
    classes: int = 2,
    layers: int = 1,
    out: int = 0,
    bias: bool = True,
) -> dict[str, torch.Tensor]:
    """Return a state dict of xMIL's AttentionMIL. bias: of the layers for which the tool can leave it out."""
    free = {f"linear_layers.{i}.0": (hidden, hidden) for i in range(1, layers)}
    free |= {f"out_layers.{i}.0": (hidden, hidden) for i in range(out)} | {"classifier": (classes, hidden)}
    always = {"linear_layers.0.0": (hidden, width), "attention.0": (attention, hidden), "attention.2": (1, attention)}
    return _weights(always) | _weights(free, bias=bias)


def xmil_logits(state: dict[str, torch.Tensor], x: np.ndarray) -> np.ndarray:
    """z = relu(E ... relu(E x));  u = w tanh(V z);  F = W relu(O ... sum_j softmax(u)_j z_j)."""
    layer, z = _Layers(state), x
    for name in (name for name in layer.names if name.startswith("linear_layers") and name.endswith("weight")):
        z = np.maximum(layer(name.removesuffix(".weight"), z), 0)
    Z = _softmax(layer("attention.2", np.tanh(layer("attention.0", z)))).T @ z
    for name in (name for name in layer.names if name.startswith("out_layers") and name.endswith("weight")):
        Z = np.maximum(layer(name.removesuffix(".weight"), Z), 0)
    return layer("classifier", Z)[0]


def additive_state(*, width: int, hidden: int = 6, classes: int = 2) -> dict[str, torch.Tensor]:
    """Return a state dict of xMIL's additive MIL."""
    state = _weights(
        {f"pointer.model.{3 * i}": shape for i, shape in enumerate([(hidden, width), (hidden, hidden), (1, hidden)])}
        | {
            f"classifier.model.{2 * i}": shape
            for i, shape in enumerate([(hidden, width), (hidden, hidden), (classes, hidden)])
        }
    )
    for i in (1, 4):
        state |= {
            f"pointer.model.{i}.{name}": torch.rand(hidden) + 0.5
            for name in ("weight", "bias", "running_mean", "running_var")
        }
        state[f"pointer.model.{i}.num_batches_tracked"] = torch.tensor(3)
    return state


def additive_logits(state: dict[str, torch.Tensor], x: np.ndarray) -> np.ndarray:
    """a = softmax(attention MLP with batch normalisation and LeakyReLU(0.2));  F = sum_j g(a_j x_j)."""
    layer, u = _Layers(state), x
    for i in (0, 3):
        mean, var = (layer.values[f"pointer.model.{i + 1}.running_{kind}"] for kind in ("mean", "var"))
        h = (layer(f"pointer.model.{i}", u) - mean) / np.sqrt(var + 1e-5)
        h = h * layer.values[f"pointer.model.{i + 1}.weight"] + layer.values[f"pointer.model.{i + 1}.bias"]
        u = np.where(h > 0, h, 0.2 * h)
    h = _softmax(layer("pointer.model.6", u)) * x
    for i in (0, 2):
        h = np.maximum(layer(f"classifier.model.{i}", h), 0)
    return layer("classifier.model.4", h).sum(0)


def _weights(layers: dict[str, tuple[int, int]], *, bias: bool = True) -> dict[str, torch.Tensor]:
    state = {}
    for name, (outputs, inputs) in layers.items():
        state[f"{name}.weight"] = torch.randn(outputs, inputs) / inputs**0.5
        if bias:
            state[f"{name}.bias"] = torch.randn(outputs)
    return state


class _Layers:
    """The linear layers of a state dict in double precision: layer(name, x) = x W' + b, with b = 0 if there is none."""

    def __init__(self, state, rename=lambda name: name):
        self.values = {rename(name): value.double().numpy() for name, value in state.items()}
        self.names = [*self.values]

    def __call__(self, name: str, x: np.ndarray) -> np.ndarray:
        return np.atleast_2d(x) @ self.values[f"{name}.weight"].T + self.values.get(f"{name}.bias", 0)


def _softmax(u: np.ndarray) -> np.ndarray:
    a = np.exp(u - u.max(0))
    return a / a.sum(0)
