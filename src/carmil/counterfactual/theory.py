"""The paper's appendix in closed form, for a linear classifier F_c = w_c . Z (+ bias).

One bag: n instances, k classes. a = softmax(u), s (n, k) the logits of each instance by itself, mu = sum_j a_j s_j.
"""

import math

import torch
from torch import Tensor


def logit_sensitivity(u: Tensor, s: Tensor) -> Tensor:
    """Return dF_c / du_j = a_j (s_cj - mu_c). u (n), s (n, k) -> (n, k)."""
    a = u.softmax(0).unsqueeze(-1)
    return a * (s - (a * s).sum(0))


def margin_sensitivity(u: Tensor, s: Tensor, y: int, k: int) -> Tensor:
    """Return g_j = d(F_y - F_k) / du_j = a_j [(s_yj - s_kj) - (mu_y - mu_k)]. -> (n)."""
    sensitivity = logit_sensitivity(u, s)
    return sensitivity[:, y] - sensitivity[:, k]


def optimal_l1_perturbation(g: Tensor, epsilon: float) -> Tensor:
    """Return the delta, |delta|_1 <= epsilon, with the largest margin m(u, u + delta) = -g . delta, which is epsilon max|g|.

    It is nonzero only at the instance with the largest |g| (the first among ties), with the sign opposite to g.
    """
    best = g.abs().argmax()
    delta = torch.zeros_like(g)
    delta[best] = -epsilon * g[best].sign()
    return delta


def margin_bound(epsilon: float) -> float:
    """Return the lower bound of DeltaF_y - DeltaF_k for every other class k.

    If L_diff <= epsilon, it is -log(e^epsilon - 1).
    """
    return -math.log(math.expm1(epsilon))
