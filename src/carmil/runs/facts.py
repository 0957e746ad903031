"""The parts of a run: its data, models, figures and learning curves, frozen and typed as in JSON.

f folds, k classes, m models kept, e epochs. An undefined figure is NaN, and null in JSON.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from carmil.bags.geometry import TileGeometry

WIDEST = 2**24  # features per tile
Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Data:
    """The data of a run. splits: divisions (one, or one per seed) into folds, each with the role of every bag.

    fingerprint: of features, labels and patients; store: of the features alone. trained_on: the slides that train or
    validate in
    any fold, with a short checksum of their features; None in runs of 0.1.0.
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
    geometry: TileGeometry = field(default_factory=TileGeometry)


@dataclass(frozen=True)
class FoldModel:
    """A model that was kept: its fold and seed, and what its validation bags chose.

    point: its position in the grid. settings: the values of that point. rule: how the threshold was chosen.
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


@dataclass(frozen=True)
class SlideMean(Range):
    """A mean over the slides that have a value; the interval is over patients."""

    slides: Count = 0


@dataclass(frozen=True)
class Calibration:
    """Calibration in b bins of confidence: edges (b+1), the others (b)."""

    ece: Number
    mce: Number
    edges: tuple[Share, ...]
    count: tuple[Count, ...]
    confidence: tuple[Number, ...]
    accuracy: tuple[Number, ...]


@dataclass(frozen=True)
class FoldFigures:
    """The figures of one test fold and seed, and the threshold of its answers, where there is one."""

    fold: Count
    seed: Count
    figures: Mapping[str, Number]
    threshold: float | None = None


@dataclass(frozen=True)
class Metrics:
    """The figures of the test folds.

    level: what the figures are of; rule: how slides become patients. intervals_of: what the intervals are of; None in runs of
    0.1.0, whose intervals belong to other values. readings: see `studies.cautions`.
    """

    level: Literal["slide", "patient"]
    rule: Literal["mean", "max", "one-bag"]
    summary: Mapping[str, Spread]
    intervals: Mapping[str, Range]
    calibration: Calibration
    by_fold: tuple[FoldFigures, ...]
    intervals_of: str | None = None
    readings: Mapping[str, Number] = field(default_factory=dict)


@dataclass(frozen=True)
class Learning:
    """Learning curves: losses (e, models that were trained)."""

    train: Mapping[str, Sequence[Sequence[Number]]]
    validation: Sequence[Sequence[Number]]
    best_epoch: tuple[int, ...]
    epochs_run: tuple[int, ...]
