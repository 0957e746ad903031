"""Select the point of a sweep on validation bags, and compute its figures on the test folds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from carmil.runs.facts import FoldFigures, Spread
from carmil.runs.run import Run
from carmil.studies.figures import summarise_folds

ALIKE = ("splits", "classes", "class_counts", "patients", "target", "outcomes")  # target: its loss too


@dataclass(frozen=True)
class Choice:
    """The selection among runs on validation bags. There is none if the runs were validated on different bags, or by
    different losses.

    losses: mean and standard deviation over the folds, by run. best: the run with the lowest mean. taken: the run
    selected for each fold and seed on its own validation bags, as `carmil train` does with a list of values; no test
    bag is involved. by_fold: the test figures of these runs.
    """

    losses: list[Spread]
    best: int | None
    taken: dict[tuple[int, int], int]
    by_fold: dict[str, Spread]


def choose(runs: Sequence[Run]) -> Choice:
    each = [validation_losses(run) for run in runs]
    summaries = []
    for losses in each:
        lines = [FoldFigures(fold, seed, {"loss": loss}) for (fold, seed), loss in losses.items()]
        summaries.append(summarise_folds(lines)["loss"])
    alike = [
        [getattr(run.data, name) for name in ALIKE] + [list(losses)] for run, losses in zip(runs, each, strict=True)
    ]
    if any(facts != alike[0] for facts in alike):
        return Choice(summaries, None, {}, {})
    tested = [{(line.fold, line.seed): line for line in run.metrics.by_fold} for run in runs]
    taken = {key: int(np.argmin([losses[key] for losses in each])) for key in each[0]}
    by_fold = summarise_folds([tested[run][key] for key, run in taken.items()])
    return Choice(summaries, int(np.argmin([summary.mean for summary in summaries])), taken, by_fold)


def validation_losses(run: Run) -> dict[tuple[int, int], float]:
    """Return the loss on validation bags by test fold and seed; for a nested fold, the mean over its inner folds."""
    losses: dict[tuple[int, int], list[float]] = {}
    for fold, model in zip(run.tested_folds, run.models, strict=True):
        losses.setdefault((fold, model.seed), []).append(model.validation_loss)
    return {key: float(np.mean(values)) for key, values in losses.items()}
