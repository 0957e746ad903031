"""Does the counterfactual attention do more than any attention that moves as much? r models, b bags, n instances, h heads."""

import torch
from torch import Tensor

from carmil.evidence.counterfactual_change import attention_moved
from carmil.models.contract import BagModel, Prediction
from carmil.models.pooling import bag_softmax, bag_sum, bag_weighted_sum

STEPS, FARTHEST = 24, 64.0  # of the bisection that finds how far scores must change


@torch.no_grad()
def random_fall(model: BagModel, prediction: Prediction) -> tuple[Tensor, Tensor, Tensor]:
    """Attention moved by u_cf; fall of the answered class's logit under u_cf; its fall under a random attention: (r, b) each.

    The random attention has the changes u_cf - u dealt out anew among the instances of the bag, times the number with which it
    moves as much as u_cf does. Of models with one counterfactual map that pool by attention.
    """
    cf, u, offsets = prediction.counterfactual, prediction.scores, prediction.offsets
    assert cf is not None and u is not None and prediction.instances is not None
    moved = attention_moved(prediction).squeeze(-1)
    generator = torch.Generator().manual_seed(0)
    keys = offsets.bag_of.cpu() + torch.rand(offsets.instances, generator=generator, dtype=torch.float64)
    change = (cf.scores.squeeze(-2) - u)[..., keys.argsort().to(u.device), :]
    a = bag_softmax(u, offsets)
    near, far = torch.zeros_like(moved), torch.full_like(moved, FARTHEST)

    def attention(times: Tensor) -> Tensor:
        return bag_softmax(u + times.index_select(-1, offsets.bag_of).unsqueeze(-1) * change, offsets)

    for _ in range(STEPS):
        middle = (near + far) / 2
        too_far = bag_sum((attention(middle) - a).abs(), offsets).mean(-1) > moved
        near, far = torch.where(too_far, near, middle), torch.where(too_far, middle, far)
    pool = bag_weighted_sum(attention(near), prediction.instances.float(), offsets)
    answer = prediction.logits.argmax(-1, keepdim=True)
    falls = [
        (prediction.logits - logits).gather(-1, answer).squeeze(-1)
        for logits in (cf.logits.squeeze(-2), model.classify(pool))
    ]
    return moved, falls[0], falls[1]
