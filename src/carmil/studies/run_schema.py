"""The types of a run's JSON files, as `carmil train` writes them. Keys that are not listed are ignored.

Only what is read is listed; `run_folder` checks it once, when a run is opened. f folds, k classes, m models kept, e epochs.
"""

from typing import Any, Literal, NotRequired, TypedDict


class RunFacts(TypedDict):
    """run.json. splits: divisions (one, or one per seed) of folds of roles."""

    carmil: str
    key: str
    machine: dict[str, str]
    settings: dict[str, Any]
    data: str
    truth: str | None
    store: str
    encoder: str | None
    width: int
    classes: list[str]
    slides: int
    patients: int
    class_counts: list[int]
    splits: list[list[list[int]]]
    said: list[str]
    trained_on: NotRequired[dict[str, str]]
    store_type: NotRequired[str]
    pooling: NotRequired[str | None]
    tile_pixels: NotRequired[int | None]
    tile_mpp: NotRequired[float | None]


class ModelFacts(TypedDict):
    """One of models.json."""

    fold: int
    inner: int
    seed: int
    point: int
    best_epoch: int
    validation_loss: float | None
    lr: float
    settings: dict[str, float | str | bool | None]
    threshold: float | None
    rule: NotRequired[str | None]
    validation_sensitivity: NotRequired[float | None]
    validation_specificity: NotRequired[float | None]
    threshold_said: NotRequired[str | None]
    abstain_below: float | None


class Spread(TypedDict):
    mean: float | None
    std: float | None


class Interval(TypedDict):
    value: float | None
    low: float | None
    high: float | None


class Calibration(TypedDict):
    """Of b bins: edges (b+1), the others (b)."""

    ece: float | None
    mce: float | None
    edges: list[float]
    count: list[int]
    confidence: list[float | None]
    accuracy: list[float | None]


class Metrics(TypedDict):
    """metrics.json."""

    level: Literal["slide", "patient"]
    rule: Literal["mean", "max", "one-bag"]
    summary: dict[str, Spread]
    intervals: dict[str, Interval]
    calibration: Calibration
    by_fold: list[dict[str, float | None]]
    intervals_of: NotRequired[str]
    readings: NotRequired[dict[str, float | None]]


class Learning(TypedDict):
    """history.json: losses (e, models that were trained)."""

    train: dict[str, list[list[float | None]]]
    validation: list[list[float | None]]
    best_epoch: list[int]
    epochs_run: list[int]


class CounterfactualSummary(TypedDict):
    """How a counterfactual moved the answers of all slides. class_shift is absent where labels are unknown."""

    turned: int
    class_shift: NotRequired["ClassShift"]
    distance: NotRequired[Interval]
    attention_moved: NotRequired[Interval]
    carriers: NotRequired[Interval]
    reached: NotRequired[Interval]


class ClassShift(TypedDict):
    """matrix (k, k)."""

    matrix: list[list[int]]


# By map, then by measure. `class` is a word of Python, so this type is not written as a class.
EvidenceTruth = TypedDict("EvidenceTruth", {"class": str, "agreement": dict[str, dict[str, Interval]]})


class EvidenceSummary(TypedDict):
    """evidence/summary.json."""

    run: str
    slides: int
    evidence: str
    methods: dict[str, str]
    concentration: dict[str, Interval]
    counterfactual: NotRequired[CounterfactualSummary]
    searched: NotRequired[CounterfactualSummary]
    correlations: NotRequired[dict[str, dict[str, Interval]]]
    truth: NotRequired[EvidenceTruth]
