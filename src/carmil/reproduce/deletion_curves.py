"""How models answer as the instances go that a map calls relevant: curves and measures of all initialisations together.

Relevance is that for the class a model answers. Curves and measures are over the test bags that it answers right, as the paper's;
the cohort's AUC, as its Figure 1a, is over all. e maps, b bags, p right answers of all models, S+1 points of a curve.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.errors import CarmilError
from carmil.evidence import explain, explainers_of
from carmil.evidence.faithfulness import (
    Faithfulness,
    auc_curve,
    deletion_logits,
    deletion_orders,
    evidence_of_class,
    faithfulness_from_logits,
)
from carmil.models.contract import BagModel
from carmil.statistics.resampling import mean_intervals

EVIDENCE = ("attention", "factual_minus_counterfactual", "path")  # the second is the paper's relevance for CAR-MIL
STEPS = 100
FRACTION = 0.1  # of a bag, for sufficiency and necessity
MEASURES: dict[str, Callable[[Faithfulness], Tensor]] = {
    "deletion area": lambda curves: curves.deletion_area,
    "AOPC over random": lambda curves: curves.aopc_over_random,
    "insertion area": lambda curves: curves.insertion_area,
    f"sufficiency, {FRACTION * 100:g} %": lambda curves: curves.sufficiency(FRACTION),
    f"necessity, {FRACTION * 100:g} %": lambda curves: curves.necessity(FRACTION),
    "monotonicity": lambda curves: curves.monotonicity,
}

Bounded = dict[str, Any]  # mean, low, high: a number each, or the S+1 points of a curve


@dataclass(frozen=True)
class Request:
    """A trained model and its test bags: `places` (b) of these in the cohort, `answers` (b) the classes it gives them."""

    model: BagModel
    bags: Bags
    places: Tensor
    answers: Tensor
    seed: int = 0


@dataclass(frozen=True)
class Curves:
    """What a map of a model's initialisations gave.

    aucs, right: of each, the AUC of the whole bags and the share of bags that it answers right
    deletion, measures: with intervals; at_random: the mean curve of random orders
    cohort: the AUC as instances go, mean -+ standard deviation
    """

    dataset: str
    model: str
    evidence: str
    aucs: list[float]
    right: list[float]
    measures: dict[str, Bounded]
    deletion: Bounded
    at_random: list[float]
    cohort: Bounded


def check_model(name: str, model: BagModel) -> None:
    """Refuses a model that has none of the maps whose order the curves follow."""
    if not _methods(model):
        raise CarmilError(
            f"{name} has none of the maps that curves are drawn of ({', '.join(EVIDENCE)}): expected a model with attention"
        )


def _methods(model: BagModel) -> list[str]:
    return [method for method in EVIDENCE if method in explainers_of(model)]


def curves_of(dataset: str, model: str, tested: Iterable[Request], *, repeats: int = 1000) -> list[Curves]:
    """Intervals are a bootstrap over bags and over seeds together, each drawn by itself."""
    methods: list[str] = []
    columns: list[Tensor] = []
    units: list[Tensor] = []
    cohorts, right = [], []
    for one in tested:
        methods = _methods(one.model)
        rows, mine, aucs = _followed(one, methods)
        columns.append(rows)
        units.append(torch.stack([one.places[mine], torch.full((int(mine.sum()),), one.seed)]))
        cohorts.append(aucs)
        right.append(float(mine.double().mean()))
    values, (bags, seeds) = torch.cat(columns, dim=1), torch.cat(units, dim=1)
    if not values.shape[1]:
        raise CarmilError(
            f"{model} answers no test bag of {dataset} right: there is nothing to delete from; train longer"
        )
    cohort = np.stack(cohorts, axis=1)  # (e, models, S+1)
    return [
        Curves(
            dataset,
            model,
            method,
            aucs=cohort[i, :, 0].tolist(),
            right=right,
            cohort=_spread(cohort[i]),
            **_bounded(values[i], bags, seeds, repeats),
        )
        for i, method in enumerate(methods)
    ]


def _followed(one: Request, methods: list[str]) -> tuple[Tensor, Tensor, np.ndarray]:
    """Columns (e, right bags, 2 (S+1) + measures), which bags are right (b), and the cohort's AUC (e, S+1)."""
    assert one.bags.labels is not None
    labels = one.bags.labels.cpu()
    right = one.answers == labels
    evidence = (explain(one.model, one.bags, method) for method in methods)
    maps = torch.stack([evidence_of_class(map_, one.answers, one.bags.offsets) for map_ in evidence])
    logits = deletion_logits(one.model, one.bags, deletion_orders(maps), steps=STEPS)
    curves = faithfulness_from_logits(logits, one.answers, maps=len(maps)).over(right)
    measures = torch.stack([measure(curves) for measure in MEASURES.values()], dim=-1)
    chance = curves.at_random.mean(0).expand_as(curves.most_first)
    aucs = auc_curve(logits[: len(maps)], labels)
    return torch.cat([curves.most_first, chance, measures], dim=-1).double(), right, aucs


def _bounded(values: Tensor, bags: Tensor, seeds: Tensor, repeats: int) -> dict[str, Any]:
    """Deletion, random order and measures of one map, (p, 2 (S+1) + measures)."""
    sides = mean_intervals(values, bags, seeds, repeats=repeats)._asdict()
    curve, chance = slice(STEPS + 1), slice(STEPS + 1, 2 * STEPS + 2)
    return {
        "deletion": {side: found[curve].tolist() for side, found in sides.items()},
        "at_random": sides["mean"][chance].tolist(),
        "measures": {
            name: {side: float(found[2 * STEPS + 2 + i]) for side, found in sides.items()}
            for i, name in enumerate(MEASURES)
        },
    }


def _spread(aucs: np.ndarray) -> Bounded:
    mean = aucs.mean(0)
    reach = aucs.std(0, ddof=1) if len(aucs) > 1 else np.zeros_like(mean)
    low, high = (mean - reach).clip(0, 1), (mean + reach).clip(0, 1)
    return {"mean": mean.tolist(), "low": low.tolist(), "high": high.tolist()}
