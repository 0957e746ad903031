"""Tables of predictions, one row per slide or per patient. p predictions per bag: for classes, their probabilities."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.evidence.concentration import effective_share
from carmil.evidence.counterfactual_change import attention_moved
from carmil.models.contract import Ability, Prediction
from carmil.models.pooling import bag_softmax
from carmil.statistics.intervals import FoldAnswers
from carmil.targets import Target
from carmil.training.population import Population
from carmil.training.predict import predict
from carmil.words import probability_text

ATTENTION = ("attention_spread", "attention_moved")


def predict_frame(
    population: Population,
    rows: Sequence[int],
    bags: Bags,
    chosen: Tensor,
    target: Target,
    *,
    attention: bool = False,
) -> pd.DataFrame:
    """Predict the chosen bags with these models together (the mean of their predictions); one row per bag.

    With a counterfactual branch there are also columns such as cf_CLASS, the mean over its maps. With `attention` there are
    also the share of the instances that attention is spread over and, with a branch, how far it moves attention
    (ATTENTION), each the mean over the models.
    """
    some = population.subset(torch.tensor(rows, device=population.device))
    columns: dict[str, list[Tensor]] = {name: [] for name in ATTENTION}

    def read(prediction: Prediction) -> None:
        if prediction.scores is None:
            return
        weights = Ability.SCORES_ARE_WEIGHTS in some.model.abilities
        a = prediction.scores if weights else bag_softmax(prediction.scores.float(), prediction.offsets)
        columns["attention_spread"].append(effective_share(a, prediction.offsets).mean((0, -1)).cpu())
        if prediction.counterfactual is not None:
            columns["attention_moved"].append(attention_moved(prediction, softmax=not weights).mean((0, -1)).cpu())

    given = predict(some, bags, chosen=chosen, maps=False, **({"on_part": read} if attention else {}))
    frame = pd.DataFrame({"slide": [bags.ids[i] for i in chosen.tolist()]})
    frame[target.prediction_columns()] = given.values.double().mean(0).numpy()
    if given.counterfactual_values is not None:
        frame[target.prediction_columns("cf")] = given.counterfactual_values.double().mean((0, 2)).numpy()
    for name, parts in columns.items():
        if parts:
            frame[name] = torch.cat(parts).double().numpy()
    return frame


def merge_patients(frame: pd.DataFrame, target: Target, rule: str) -> pd.DataFrame:
    """Return one row per patient (and fold and seed, if these columns exist) with the mean over the slides, or the
    maximum.

    max: with two classes the largest probability of the second; with more the largest of each, scaled to sum to
    one.
    """
    names = target.prediction_columns()
    keys = [key for key in ("fold", "seed", "patient", *target.label_columns) if key in frame]
    grouped = frame.groupby(keys, sort=False, dropna=False)
    merged = grouped[names].agg("mean" if rule == "mean" else "max").reset_index()
    merged["slides"] = grouped.size().to_numpy()
    if rule == "max" and target.answer_names:  # the probabilities of one answer each
        values = merged[names].to_numpy()
        if len(names) == 2:
            values = np.column_stack([1 - values[:, 1], values[:, 1]])
        merged[names] = values / values.sum(1, keepdims=True)
    return merged


def predicted(frame: pd.DataFrame, target: Target) -> np.ndarray:
    """Return the predictions (b, p) of a table."""
    return frame[target.prediction_columns()].to_numpy(dtype=np.float64)


def outcomes(frame: pd.DataFrame, target: Target) -> np.ndarray:
    """Return the outcomes (b) or (b, t) of a table."""
    return target.outcomes_of({name: frame[name] for name in target.label_columns})


def arrange(frame: pd.DataFrame, target: Target, scores: np.ndarray, answers: np.ndarray | None = None) -> FoldAnswers:
    """Arrange scores, one per row of a table of predictions, for intervals and tests.

    Cases are identified by the first existing column of `case`, `slide` and `patient`; folds, seeds and patients are
    known if the table has these columns.
    """
    rows = {f"{name}s": frame[name].to_numpy() for name in ("fold", "seed", "patient") if name in frame}
    cases = next(frame[name].to_numpy() for name in ("case", "slide", "patient") if name in frame)
    return FoldAnswers.of(outcomes(frame, target), scores, answers, cases=cases, **rows)


def answers_text(frame: pd.DataFrame, target: Target) -> str:
    """Format a table of answers for the terminal, with probabilities in the usual format."""
    names = [*target.prediction_columns(), *target.prediction_columns("cf")] if target.probabilities else []
    return frame.to_string(index=False, formatters={name: probability_text for name in names if name in frame})
