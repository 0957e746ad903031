"""Predictions of a trained population. r models, b bags, n instances, k classes, h heads, m counterfactual maps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.errors import CarmilError
from carmil.models.contract import Prediction
from carmil.models.pooling import Offsets
from carmil.training.population import Population


@dataclass(frozen=True)
class Predictions:
    """The predictions of r models.

    values (r, b, p), computed by the target's link: probabilities if the target is classes. scores u (r, n, h) if the
    model attends; with a learned branch u_cf (r, n, m, h) and its values (r, b, m, p).
    """

    values: Tensor
    scores: Tensor | None
    counterfactual_scores: Tensor | None
    counterfactual_values: Tensor | None


@torch.no_grad()
def predict(
    population: Population,
    bags: Bags,
    *,
    chosen: Tensor | None = None,
    maps: bool = True,
    on_part: Callable[[Prediction], None] = lambda prediction: None,
) -> Predictions:
    """Predict every bag, or the chosen bags (positions), with every model; results are on the CPU.

    Without `maps` only the values are stored, as the scores of all instances of a large cohort need much
    memory. on_part: called with the prediction of each part, in order, while it is on the device.
    """
    was_training = population.model.training
    population.train(False)
    parts = []
    for part in bags.parts(population.instances_per_pass(), chosen):
        prediction = population(part.features.to(population.device), Offsets(part.offsets, population.device))
        on_part(prediction)
        cf, link = prediction.counterfactual, population.link
        parts.append(
            (
                link.predictions(prediction.logits).cpu(),
                prediction.scores.cpu() if maps and prediction.scores is not None else None,
                cf.scores.cpu() if maps and cf is not None else None,
                None if cf is None else link.predictions(cf.logits.transpose(-3, -2)).transpose(-3, -2).cpu(),
            )
        )
    population.train(was_training)
    joined = [None if column[0] is None else torch.cat(column, dim=1) for column in zip(*parts, strict=True)]
    predictions = Predictions(*joined)  # type: ignore[arg-type]
    check_finite(predictions.values, bags.ids if chosen is None else [bags.ids[i] for i in chosen.tolist()])
    return predictions


def check_finite(values: Tensor, names: Sequence[str]) -> None:
    """Refuse predictions (..., b, k) that are not finite, which argmax would convert to a class; the error names the
    first such bag.
    """
    odd = ~values.isfinite().all(-1).reshape(-1, len(names)).all(0)
    if odd.any():
        raise CarmilError(
            f"{names[int(odd.nonzero()[0])]!r} has a prediction that is not a number: its features are damaged or far too large; "
            "check them with `carmil cohort check`, and build the cohort again"
        )
