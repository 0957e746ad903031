"""Which point of a sweep validation bags choose, and how well that does on the test folds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from carmil.studies.card import tested_folds
from carmil.studies.figures import summarised
from carmil.studies.run_folder import StudyRun

ALIKE = ("splits", "classes", "class_counts", "patients")


@dataclass(frozen=True)
class Choice:
    """What validation bags say of some runs.

    losses: mean and standard deviation over the folds, a run. best: the run of the lowest mean. taken: the run that each
    fold and seed takes by its own validation bags, as `carmil train` does with a list of values: no test bag has a say;
    by_fold: test figures of these. Nothing is chosen between runs that were validated on different bags.
    """

    losses: list[dict[str, float]]
    best: int | None
    taken: dict[tuple[int, int], int]
    by_fold: dict[str, dict[str, float]]


def choose(runs: Sequence[StudyRun]) -> Choice:
    import pandas as pd

    each = [validation_losses(run) for run in runs]
    summaries = []
    for losses in each:
        lines = [{"fold": fold, "seed": seed, "loss": loss} for (fold, seed), loss in losses.items()]
        summaries.append(summarised(pd.DataFrame(lines))["loss"])
    alike = [[run.facts[name] for name in ALIKE] + [list(losses)] for run, losses in zip(runs, each, strict=True)]
    if any(facts != alike[0] for facts in alike):
        return Choice(summaries, None, {}, {})
    tested = [{(line["fold"], line["seed"]): line for line in run.metrics["by_fold"]} for run in runs]
    taken = {key: int(np.argmin([losses[key] for losses in each])) for key in each[0]}
    by_fold = summarised(pd.DataFrame([tested[run][key] for key, run in taken.items()]).astype(float))
    return Choice(summaries, int(np.argmin([summary["mean"] for summary in summaries])), taken, by_fold)


def validation_losses(run: StudyRun) -> dict[tuple[int, int], float]:
    """The loss on validation bags by test fold and seed, of a nested fold the mean over its inner ones."""
    found: dict[tuple[int, int], list[float]] = {}
    for fold, model in zip(tested_folds(run), run.models, strict=True):
        found.setdefault((fold, model["seed"]), []).append(model["validation_loss"])
    return {key: float(np.mean(values)) for key, values in found.items()}
