"""The parts of a run: its data, models, figures and learning curves, frozen and typed as in JSON.

f folds, k classes, m selected models, e epochs. An undefined figure is NaN, and null in JSON.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from pydantic import AliasChoices, BeforeValidator, Field

from carmil.bags.geometry import TileGeometry
from carmil.statistics.bootstrap import Interval
from carmil.statistics.hazards import StepFunction
from carmil.targets import Labels, Ordinal, Survival, Value

WIDEST = 2**24  # features per tile
Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
Share = Annotated[float, Field(ge=0, le=1)]


NamedTarget = Annotated[Ordinal | Labels | Value | Survival, Field(discriminator="kind")]  # any but classes


@dataclass(frozen=True)
class Imported:
    """The origin of a model that carmil did not train: the tool, its name for the model, and the checkpoint."""

    tool: str
    architecture: str
    checkpoint: str
    sha256: str


@dataclass(frozen=True)
class Data:
    """The data of a run. splits: one or more divisions into folds (one per seed if reshuffled), with the role of
    every bag.

    fingerprint: of features, labels and patients; store: of the features alone. trained_on: the slides that train or
    validate in any fold, with a short checksum of their features; None in runs of 0.1.0. target: None if classes are
    predicted. classes: for another target, the strata of its folds, such as events and censored slides; its outcomes
    are (slides, t). tilings: how the tiles were chosen, see `Store.tilings`. An imported run was measured on all its
    slides as one test fold, which `trained_on` lists, or has no slides and no splits.
    """

    fingerprint: Annotated[str, Field(validation_alias="data")]
    store: str
    width: Annotated[int, Field(ge=1, le=WIDEST)]
    classes: tuple[str, ...]
    slides: Count
    patients: Count
    class_counts: tuple[Count, ...]
    splits: tuple[tuple[tuple[int, ...], ...], ...]
    truth: str | None = None
    encoder: str | None = None
    pooling: str | None = None
    store_type: str | None = None
    trained_on: Mapping[str, str] | None = None
    target: NamedTarget | None = None
    outcomes: tuple[tuple[Number, ...], ...] | None = None
    geometry: TileGeometry = field(default_factory=TileGeometry)
    tilings: tuple[str, ...] = ()
    imported: Imported | None = None


@dataclass(frozen=True)
class Baseline:
    """The cumulative baseline hazard: its values from each time on, 0 before the first."""

    times: tuple[float, ...]
    hazard: tuple[Annotated[float, Field(ge=0)], ...]

    def __post_init__(self) -> None:
        if len(self.times) != len(self.hazard) or any(later <= time for time, later in pairwise(self.times)):
            raise ValueError("increasing times with one hazard each")

    @property
    def function(self) -> StepFunction:
        return StepFunction(np.array(self.times), np.array(self.hazard), 0.0)


@dataclass(frozen=True)
class FoldModel:
    """A selected model: its fold and seed, and the values chosen on its validation bags.

    point: its position in the grid. settings: the values of that point. rule: how the threshold was chosen.
    baseline: the cumulative hazard of a risk of 0 on the training bags, for a time to an event.
    """

    fold: Count
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    best_epoch: Count
    lr: float
    settings: Mapping[str, float | str | bool | None]
    threshold: float | None
    abstain_below: float | None
    validation_loss: Number = math.nan
    inner: Count = 0
    point: Count = 0
    rule: str | None = None
    validation_sensitivity: Number = math.nan
    validation_specificity: Number = math.nan
    threshold_note: Annotated[str | None, Field(validation_alias=AliasChoices("threshold_note", "threshold_said"))] = (
        None
    )
    baseline: Baseline | None = None


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over the folds."""

    mean: Number
    std: Number


@dataclass(frozen=True)
class Range:
    """A value and its 95 % interval."""

    value: Number
    low: Number
    high: Number

    @classmethod
    def of(cls, interval: Interval) -> "Range":
        return Range(interval.value, interval.low, interval.high)


@dataclass(frozen=True)
class SlideMean(Range):
    """The mean over the slides that have a value, with an interval over patients."""

    slides: Count = 0


@dataclass(frozen=True)
class Calibration:
    """Calibration in b bins of confidence: edges (b+1), all other arrays (b)."""

    ece: Number
    mce: Number
    edges: tuple[Share, ...]
    count: tuple[Count, ...]
    confidence: tuple[Number, ...]
    accuracy: tuple[Number, ...]


@dataclass(frozen=True)
class FoldFigures:
    """The figures of one test fold and seed, and the threshold of its answers, if there is one."""

    fold: Count
    seed: Count
    figures: Mapping[str, Number]
    threshold: float | None = None


@dataclass(frozen=True)
class HazardRatio:
    """The hazard ratio of a covariate, its 95 % interval, and the p-value of the hypothesis that it is 1."""

    name: str
    value: Number
    low: Number
    high: Number
    p: Number


@dataclass(frozen=True)
class Adjustment:
    """The benefit of adding the risk to covariates: C-indices of Cox models of the covariates, of the risk and of both.

    missing: the number of test cases without each covariate. gain: both minus covariates. hazard_ratios: of one model of
    all test cases.
    """

    covariates: tuple[str, ...]
    missing: Mapping[str, Count]
    c_index: Mapping[str, Range]
    gain: Range
    hazard_ratios: tuple[HazardRatio, ...]


@dataclass(frozen=True)
class ClassCoverage:
    """The prediction sets of the cases of one class. calibrated: the number of its calibration patients; expected: the
    mean coverage with this number, over calibration sets; coverage: the share of its test cases whose set contains the
    class.
    """

    calibrated: Count
    expected: Share
    cases: Count
    coverage: Range


@dataclass(frozen=True)
class PredictionSets:
    """The prediction sets of test cases: coverage, mean number of classes, shares with one class and with none; by class."""

    level: Share
    cases: Count
    coverage: Range
    size: Number
    singletons: Number
    empty: Number
    by_class: Mapping[str, ClassCoverage]


@dataclass(frozen=True)
class Metrics:
    """The figures of the test folds.

    level: whether figures are of slides or patients; rule: how the slides of a patient are combined. intervals_of: what
    the intervals describe; None in runs of 0.1.0, whose intervals belong to other values. readings: see
    `studies.cautions`.
    """

    level: Literal["slide", "patient"]
    rule: Literal["mean", "max", "one-bag"]
    summary: Mapping[str, Spread]
    intervals: Mapping[str, Range]
    calibration: Calibration | None
    by_fold: tuple[FoldFigures, ...]
    intervals_of: str | None = None
    readings: Mapping[str, Number] = field(default_factory=dict)
    adjustment: Adjustment | None = None
    prediction_sets: PredictionSets | None = None


@dataclass(frozen=True)
class Learning:
    """Learning curves: losses (e, trained models)."""

    train: Mapping[str, Sequence[Sequence[Number]]]
    validation: Sequence[Sequence[Number]]
    best_epoch: tuple[int, ...]
    epochs_run: tuple[int, ...]
