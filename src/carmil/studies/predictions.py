"""Tables of predictions, one row per slide or per patient. k classes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.evidence.concentration import effective_share
from carmil.evidence.counterfactual_change import attention_moved
from carmil.models.contract import Ability, Prediction
from carmil.models.pooling import bag_softmax
from carmil.training.population import Population
from carmil.training.predict import predict

if TYPE_CHECKING:
    import pandas as pd

ATTENTION = ("attention_spread", "attention_moved")


def probability_columns(classes: Sequence[str], prefix: str = "p") -> list[str]:
    """The columns with the probabilities of the classes."""
    return [f"{prefix}_{name}" for name in classes]


def predict_frame(
    population: Population,
    rows: Sequence[int],
    bags: Bags,
    chosen: Tensor,
    classes: Sequence[str],
    *,
    attention: bool = False,
) -> "pd.DataFrame":
    """Predict the chosen bags by these models together (the mean of their probabilities); one row per bag.

    With a counterfactual branch also cf_CLASS, the mean over its maps. attention: also the share of the instances that
    attention
    is spread over and, with a branch, how far it moves (ATTENTION), the means over the models.
    """
    import pandas as pd

    some = population.subset(torch.tensor(rows, device=population.device))
    found: dict[str, list[Tensor]] = {name: [] for name in ATTENTION}

    def read(prediction: Prediction) -> None:
        if prediction.scores is None:
            return
        weights = Ability.SCORES_ARE_WEIGHTS in some.model.abilities
        a = prediction.scores if weights else bag_softmax(prediction.scores.float(), prediction.offsets)
        found["attention_spread"].append(effective_share(a, prediction.offsets).mean((0, -1)).cpu())
        if prediction.counterfactual is not None:
            found["attention_moved"].append(attention_moved(prediction, softmax=not weights).mean((0, -1)).cpu())

    answers = predict(some, bags, chosen=chosen, maps=False, **({"on_part": read} if attention else {}))
    frame = pd.DataFrame({"slide": [bags.ids[i] for i in chosen.tolist()]})
    frame[probability_columns(classes)] = answers.probabilities.double().mean(0).numpy()
    if answers.counterfactual_probabilities is not None:
        frame[probability_columns(classes, "cf")] = answers.counterfactual_probabilities.double().mean((0, 2)).numpy()
    for name, parts in found.items():
        if parts:
            frame[name] = torch.cat(parts).double().numpy()
    return frame


def merge_patients(frame: "pd.DataFrame", classes: Sequence[str], rule: str) -> "pd.DataFrame":
    """One row per patient (and fold and seed, where these columns exist): the mean over the slides, or the largest.

    max: with two classes the largest probability of the second; with more the largest of each, scaled to sum to one.
    """
    names = probability_columns(classes)
    keys = [key for key in ("fold", "seed", "patient", "label") if key in frame]
    grouped = frame.groupby(keys, sort=False)
    merged = grouped[names].agg("mean" if rule == "mean" else "max").reset_index()
    merged["slides"] = grouped.size().to_numpy()
    if rule == "max":
        values = merged[names].to_numpy()
        if len(names) == 2:
            values = np.column_stack([1 - values[:, 1], values[:, 1]])
        merged[names] = values / values.sum(1, keepdims=True)
    return merged


def probabilities(frame: "pd.DataFrame", classes: Sequence[str]) -> np.ndarray:
    return frame[probability_columns(classes)].to_numpy(dtype=np.float64)


def class_numbers(frame: "pd.DataFrame", classes: Sequence[str]) -> np.ndarray:
    """The labels as class numbers."""
    of = {name: i for i, name in enumerate(classes)}
    return frame["label"].map(of).to_numpy(dtype=np.int64)
