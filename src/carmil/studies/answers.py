"""Answers as tables: slide by slide, and patient by patient by a stated rule. k classes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.training.population import Population
from carmil.training.predict import predict

if TYPE_CHECKING:
    import pandas as pd


def columns(classes: Sequence[str], prefix: str = "p") -> list[str]:
    """Names of the columns that hold the classes' probabilities."""
    return [f"{prefix}_{name}" for name in classes]


def answered(
    population: Population, rows: Sequence[int], bags: Bags, chosen: Tensor, classes: Sequence[str]
) -> "pd.DataFrame":
    """What these models together (the mean of their probabilities) answer for the chosen bags; a line a bag.

    With a counterfactual branch also what they would answer looking elsewhere: cf_..., the mean over its maps.
    """
    import pandas as pd

    some = population.subset(torch.tensor(rows, device=population.device))
    answers = predict(some, bags, chosen=chosen, maps=False)
    frame = pd.DataFrame({"slide": [bags.ids[i] for i in chosen.tolist()]})
    frame[columns(classes)] = answers.probabilities.double().mean(0).numpy()
    if answers.counterfactual_probabilities is not None:
        frame[columns(classes, "cf")] = answers.counterfactual_probabilities.double().mean((0, 2)).numpy()
    return frame


def by_patient(frame: "pd.DataFrame", classes: Sequence[str], rule: str) -> "pd.DataFrame":
    """One line a patient (and fold and seed, where there are such columns): the mean over the slides, or the largest.

    max: of two classes the largest probability of the second; of more the largest of each, scaled to sum to one.
    """
    names = columns(classes)
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
    return frame[columns(classes)].to_numpy(dtype=np.float64)


def numbers(frame: "pd.DataFrame", classes: Sequence[str]) -> np.ndarray:
    """The labels as class numbers."""
    of = {name: i for i, name in enumerate(classes)}
    return frame["label"].map(of).to_numpy(dtype=np.int64)
