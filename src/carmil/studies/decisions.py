"""The decision rule of models that answer together, and tables of their answers.

A slide of the run's own cohort is answered by the models that were tested on it, a new slide by all models: the mean of their
probabilities is compared with the mean of their thresholds, and of the confidences below which they give no answer. The mean
of p - threshold has the sign that all models agree on, if they agree; with the median of the thresholds it might not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import TYPE_CHECKING

import numpy as np
import torch

from carmil.bags.bags import Bags
from carmil.runs.decision import Decision
from carmil.runs.run import Run, pick_device
from carmil.runs.slide_evidence import RULE
from carmil.statistics.operating import Rule
from carmil.studies.predictions import predict_frame, probability_columns
from carmil.studies.subjects import Subject, group_by_models

if TYPE_CHECKING:
    import pandas as pd

JOINT = "joint_answer"  # the column with the answer of all models that were tested on the slide
MOST = 3  # rules on a terminal


def decision_of(run: Run, models: Sequence[int] | None = None) -> Decision:
    """The rule of some models (rows of `run.models`) that answer together; without `models` of all, for new slides."""
    rows = range(len(run.models)) if models is None else models
    each = run.decisions(rows)
    folds = run.tested_folds
    mine = {folds[row] for row in rows}
    one_rule = len({(model.threshold, model.abstain_below) for model in run.models}) == 1
    origin = rule_origin(
        str(run.settings.threshold),
        each,
        folds=() if one_rule or mine == set(folds) else sorted(mine),
        level=run.metrics.level,
        patients=run.metrics.rule,
    )
    return replace(joint_decision(each), origin=origin)


def joint_decision(each: Sequence[Decision]) -> Decision:
    """The rule of models that answer by the mean of their probabilities: the mean of their thresholds and cuts."""
    thresholds = [one.threshold for one in each if one.threshold is not None]
    cuts = [one.cut for one in each if one.cut is not None]
    threshold, cut = (mean(values) if values else None for values in (thresholds, cuts))  # exact: equal ones stay equal
    return replace(each[0], threshold=threshold, cut=cut)


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
        decision = decision_of(run, models)
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


def rule_origin(rule: str, each: Sequence[Decision], *, folds: Sequence[int] = (), level: str, patients: str) -> str:
    """How the numbers of a decision rule were chosen, and in which test folds it holds, unless in all.

    each: the rules of the models that answer together. rule, level and patients as in the run's settings and metrics.
    """
    parsed, thresholds = Rule.parse(rule), [one.threshold for one in each]
    where = f"{'fold' if len(folds) == 1 else 'folds'} {', '.join(map(str, folds))}" if folds else ""
    if None in thresholds:
        return where if any(one.cut is not None for one in each) else ""
    if parsed.name == "fixed":
        return "threshold given"
    chosen = f"chosen for {parsed.words} on validation {level}s"
    if len(set(thresholds)) > 1:
        chosen = f"mean of the thresholds of {len(thresholds)} models, each {chosen}"
    else:
        chosen = f"threshold {chosen}"
    chosen += "; slides use the same" if level == "patient" and patients != "one-bag" else ""
    return f"{where}: {chosen}" if where else chosen
