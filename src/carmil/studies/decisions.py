"""Answers of models that answer together, by their joint decision rule (`runs.decision`)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from carmil.bags.bags import Bags
from carmil.runs.decision import Decision, joint_decision
from carmil.runs.run import Run, pick_device
from carmil.runs.slide_evidence import RULE
from carmil.studies.predictions import predict_frame, probability_columns
from carmil.studies.subjects import Subject, group_by_models

if TYPE_CHECKING:
    import pandas as pd

JOINT = "joint_answer"  # the column with the answer of all models that were tested on the slide
MOST = 3  # rules on a terminal


def joint_answers(frame: "pd.DataFrame", decisions: Mapping[tuple[int, int], Decision]) -> "pd.Series":
    """The answer of all models together for the slide of each row. frame: one row per slide, fold and seed; decisions: by
    fold and seed.
    """
    rules = [decisions[key] for key in zip(frame["fold"], frame["seed"], strict=True)]
    found = {}
    for slide, rows in frame.groupby("slide", sort=False).indices.items():
        joint = joint_decision([rules[row] for row in rows])
        found[slide] = joint.answer(frame[probability_columns(joint.classes)].to_numpy(dtype=np.float64)[rows].mean(0))
    return frame["slide"].map(found)


def answer_table(run: Run, bags: Bags, subjects: Sequence[Subject], device: str) -> "pd.DataFrame":
    """One row per subject: slide, p_CLASS (and cf_CLASS), the answer, the number of models, and the rule.

    The run's own slides have the probabilities that the run holds; those of other slides are computed.
    """
    import pandas as pd

    frames = []
    population = None
    for models, group in group_by_models(subjects).items():
        new = [subject for subject in group if subject.probabilities is None]
        parts = [_stored_probabilities(run, [subject for subject in group if subject.probabilities is not None])]
        if new:
            population = population or run.population(pick_device(device))
            places = torch.tensor([subject.place for subject in new])
            parts.append(predict_frame(population, models, bags, places, run.classes))
        frame = pd.concat([part for part in parts if len(part)], ignore_index=True)
        decision = run.decision(models)
        frame["answer"] = decision.answers(frame[probability_columns(run.classes)].to_numpy(dtype=np.float64))
        frame["models"] = len(models)
        frame[RULE] = decision.rule
        frames.append(frame)
    found = pd.concat(frames, ignore_index=True)
    return found.set_index("slide").loc[[subject.slide for subject in subjects]].reset_index()


def distinct_rules(frame: "pd.DataFrame") -> list[str]:
    """The rules in a table of answers, the most common first."""
    return [str(rule) for rule in frame[RULE].value_counts().index]


def rule_lines(rules: Sequence[str]) -> list[str]:
    """Rules for the terminal, one line each; at most MOST of them."""
    found = [f"answer: {rule}" for rule in rules[:MOST]]
    if len(rules) > MOST:
        found.append(f"{len(rules) - MOST} more decision rules: see the column {RULE}")
    return found


def _stored_probabilities(run: Run, subjects: Sequence[Subject]) -> "pd.DataFrame":
    """The probabilities that the run's folder holds for its own slides."""
    import pandas as pd

    frame = pd.DataFrame({"slide": [subject.slide for subject in subjects]})
    if subjects:
        frame[probability_columns(run.classes)] = np.array([subject.probabilities for subject in subjects])
        if subjects[0].counterfactual is not None:
            frame[probability_columns(run.classes, "cf")] = np.array([subject.counterfactual for subject in subjects])
    return frame
