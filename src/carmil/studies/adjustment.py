"""Measure how much a slide's risk improves on known covariates: Cox's model with and without the risk, in the same
folds.

The covariates' model is fitted on the training and validation cases of each fold. The risk of a training case is not
comparable with that of a test case, as the model was trained on it: the coefficient of the risk is fitted on the
validation cases alone, which with inner folds are all cases that the fold does not test.

c cases (patients, or slides), d columns of the design.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from carmil.errors import CarmilError
from carmil.runs.facts import Adjustment, HazardRatio, Range
from carmil.statistics.hazards import fit_cox
from carmil.statistics.intervals import resampled_interval
from carmil.studies.predictions import arrange, outcomes
from carmil.targets.survival import Survival
from carmil.words import examples, plural

PENALIZER = 0.01  # of Cox's models, per case and squared standardised coefficient
RISK = "risk"
MISSING = "missing"  # the category of an empty cell
MOST_CATEGORIES = 10

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Design:
    """The encoding of columns of text as numbers: numbers unchanged, and one column for each category except the first.

    The means, which replace missing numbers, and the categories are fitted on some cases.
    """

    means: dict[str, float]
    categories: dict[str, tuple[str, ...]]

    @classmethod
    def of(cls, covariates: pd.DataFrame) -> "Design":
        """Fit the design on some cases. covariates: text, empty where missing."""
        means: dict[str, float] = {}
        categories: dict[str, tuple[str, ...]] = {}
        for name in map(str, covariates.columns):
            numbers = as_numbers(covariates[name])
            if numbers is not None:
                means[name] = float(np.nanmean(numbers))
            else:
                categories[name] = tuple(sorted(set(covariates[name].replace("", MISSING))))
        return cls(means, categories)

    @property
    def names(self) -> list[str]:
        return [*self.means, *(f"{name}: {value}" for name, values in self.categories.items() for value in values[1:])]

    def matrix(self, covariates: pd.DataFrame) -> Floats:
        """Return (c, d) the design of some cases. Cells unlike the fitted ones count as unknown.

        In a column of numbers, a cell without a number gets the mean of the fitted cells; a category that was not among
        the fitted ones is 0 in every column.
        """
        columns = []
        for name, mean in self.means.items():
            numbers = _cell_numbers(covariates[name])
            columns.append(np.where(np.isfinite(numbers), numbers, mean))
        for name, values in self.categories.items():
            given = covariates[name].replace("", MISSING)
            columns += [(given == value).to_numpy(dtype=np.float64) for value in values[1:]]
        return np.column_stack(columns)


def as_numbers(cells: pd.Series) -> Floats | None:
    """Return a column of text as numbers, NaN where empty; None if some cell is not a number, or all are empty."""
    numbers, known = _cell_numbers(cells), (cells != "").to_numpy()
    return numbers if known.any() and np.isfinite(numbers[known]).all() else None


def _cell_numbers(cells: pd.Series) -> Floats:
    """Return the number in each cell, NaN where there is none."""
    return pd.to_numeric(cells.replace("", np.nan), errors="coerce").to_numpy(dtype=np.float64)


def check_covariates(covariates: pd.DataFrame, cases: Sequence[str]) -> None:
    """Refuse columns that differ between the slides of a case, are the same for all, or have too many categories."""
    for name in map(str, covariates.columns):
        values = covariates[name]
        different = values.groupby(np.asarray(cases, dtype=object)).nunique()
        if (different > 1).any():
            raise CarmilError(
                f"--adjust {name}: {examples(different[different > 1].index)} has several values of it: expected one per patient"
            )
        if values.nunique() < 2:
            raise CarmilError(f"--adjust {name}: the column is the same for all slides: leave it out")
        if as_numbers(values) is None and values.nunique() > MOST_CATEGORIES:
            raise CarmilError(
                f"--adjust {name}: {plural(values.nunique(), 'different text')}: expected numbers, or at most "
                f"{MOST_CATEGORIES} categories"
            )


@dataclass(frozen=True, eq=False)
class FoldCases:
    """The cases of a fold and seed: tables with `case`, the columns of the outcome, the covariates and, except in
    `training`, `risk`. training: training and validation cases.
    """

    fold: int
    seed: int
    training: pd.DataFrame
    validation: pd.DataFrame
    test: pd.DataFrame


def measure_adjustment(folds: Sequence[FoldCases], target: Survival, covariates: Sequence[str]) -> Adjustment:
    """Return the C-index of the covariates, of the risk and of both, each the mean over the folds, and the difference."""
    scores: dict[str, list[Floats]] = {"covariates": [], "risk": [], "both": []}
    for one in folds:
        design = Design.of(one.training[[*covariates]])
        matrices = [design.matrix(frame[[*covariates]]) for frame in (one.training, one.validation, one.test)]
        used = np.ptp(matrices[0], axis=0) > 0
        fit = fit_cox(matrices[0][:, used], *_outcomes(one.training, target), penalizer=PENALIZER)
        validation, test = (matrix[:, used] @ fit.coefficients for matrix in matrices[1:])
        both = np.column_stack([validation, one.validation[RISK]])
        varies = np.ptp(both, axis=0) > 0
        weights = np.zeros(2)
        weights[varies] = fit_cox(both[:, varies], *_outcomes(one.validation, target), penalizer=PENALIZER).coefficients
        scores["covariates"].append(test)
        scores["risk"].append(one.test[RISK].to_numpy(dtype=np.float64))
        scores["both"].append(np.column_stack([test, one.test[RISK]]) @ weights)
    tests = pd.concat([one.test.assign(fold=one.fold, seed=one.seed) for one in folds], ignore_index=True)
    answers = {name: arrange(tests, target, np.concatenate(values)[:, None]) for name, values in scores.items()}
    c_index = target.measures[target.key_figure]
    intervals = {name: resampled_interval(c_index, given) for name, given in answers.items()}
    difference = resampled_interval(c_index, answers["both"], answers["covariates"])
    return Adjustment(
        covariates=tuple(covariates),
        missing={name: int((tests.drop_duplicates("case")[name] == "").sum()) for name in covariates},
        c_index={name: Range.of(one) for name, one in intervals.items()},
        gain=Range.of(difference),
        hazard_ratios=hazard_ratios(tests, target, covariates),
    )


def hazard_ratios(tests: pd.DataFrame, target: Survival, covariates: Sequence[str]) -> tuple[HazardRatio, ...]:
    """Return the hazard ratios of one Cox model of all test cases, for the covariates and for one standard deviation of
    the risk.

    Risks of different models are not compared: they are standardised within each fold and seed, and the mean over the
    seeds is taken. Where a model gives all cases the same risk, it is 0.
    """
    by_model = tests.groupby(["fold", "seed"])[RISK]
    deviation = by_model.transform("std")
    standardised = ((tests[RISK] - by_model.transform("mean")) / deviation).where(deviation > 0, 0.0)
    cases = tests.assign(**{RISK: standardised}).groupby("case", sort=False)
    frame = cases.first().assign(**{RISK: cases[RISK].mean()})
    design = Design.of(frame[[*covariates]])
    matrix = np.column_stack([design.matrix(frame[[*covariates]]), frame[RISK]])
    names = [*design.names, "risk, per standard deviation"]
    used = np.ptp(matrix, axis=0) > 0
    ratios = fit_cox(matrix[:, used], *_outcomes(frame, target), penalizer=PENALIZER).hazard_ratios()
    kept = [name for name, varies in zip(names, used, strict=True) if varies]
    return tuple(HazardRatio(name, one.value, one.low, one.high, one.p) for name, one in zip(kept, ratios, strict=True))


def _outcomes(frame: pd.DataFrame, target: Survival) -> tuple[Floats, NDArray[np.bool_]]:
    time, event = outcomes(frame, target).T
    return time, event > 0
