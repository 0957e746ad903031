"""The types of evidence/summary.json, as `carmil explain` writes it. Keys that are not listed are ignored. k classes."""

from typing import NotRequired

from typing_extensions import TypedDict


class Interval(TypedDict):
    value: float | None
    low: float | None
    high: float | None


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
