"""The evidence of a run, written by `carmil explain` and read by the report, the viewer and the drawings.

OUT/explanation.json   the request, so that an interrupted command resumes and a different one is refused
OUT/SLIDE.parquet      one row per instance, see `slide_evidence`
OUT/thresholds.json    thresholds of Dice, if the instances have a truth
OUT/summary.parquet    and summary.csv: one row per slide
OUT/summary.json       a summary of all slides; written last

k classes.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from pydantic import Field, GetPydanticSchema

from carmil.csv_files import frame_text
from carmil.errors import CarmilError
from carmil.files import write_text
from carmil.provenance import to_json
from carmil.runs.facts import Count, Number, SlideMean
from carmil.runs.run import Run, weights_key
from carmil.runs.settings import Value
from carmil.runs.slide_evidence import SlideEvidence, evidence_file, read_slide_evidence
from carmil.runs.writing import begin, write_table
from carmil.targets.target import FOR_AND_AGAINST, EvidenceWords
from carmil.untrusted import read_json_as

SUMMARY = "summary.json"
GivenCount = Annotated[
    Count | None, GetPydanticSchema(lambda _, schema_of: schema_of(Count))
]  # may be missing, not null


@dataclass(frozen=True)
class ClassShift:
    """matrix (k, k): among correctly answered slides, by label (rows), how often the logit of each class grew most."""

    rows: str
    matrix: tuple[tuple[Count, ...], ...]


@dataclass(frozen=True)
class CounterfactualSummary:
    """How a counterfactual attention changed the answers of all slides. class_shift is None if labels are unknown.

    turned: number of slides whose answer changes, None if any number can be an answer; reached: for a searched
    counterfactual, the share of slides for which it was found.
    """

    distance: SlideMean
    attention_moved: SlideMean
    carriers: SlideMean
    median_moved: Number
    turned: GivenCount = None
    class_shift: ClassShift | None = None
    reached: SlideMean | None = None


@dataclass(frozen=True)
class Residual:
    """The deviation of the sum of evidence from the change of the output, relative to that change."""

    largest: Number
    mean: Number


@dataclass(frozen=True)
class TruthAgreement:
    """Agreement of the maps of one class, or of a single output, with the truth of the instances, by explainer, then by measure."""

    class_: Annotated[str, Field(validation_alias="class")]
    negative_rule: str
    dice_threshold: str
    agreement: Mapping[str, Mapping[str, SlideMean]]


@dataclass(frozen=True)
class EvidenceSummary:
    """The contents of summary.json. run: the key of the run; evidence: the first of `methods`, which maps names to
    descriptions.

    concentration: by MAP_MEASURE. negligible: number of slides with negligible evidence. correlations: by pair of
    scores, then by kind. classes: the outputs; words and output: the terms for evidence, and for one of the outputs.
    """

    run: str
    model: str
    classes: tuple[str, ...]
    slides: Count
    answer_rules: tuple[str, ...]
    evidence: str
    methods: Mapping[str, str]
    several_models: str
    concentration: Mapping[str, SlideMean]
    negligible: Count
    residual: Residual | None = None
    counterfactual: CounterfactualSummary | None = None
    searched: CounterfactualSummary | None = None
    correlations: Mapping[str, Mapping[str, SlideMean]] | None = None
    truth: TruthAgreement | None = None
    words: EvidenceWords = FOR_AND_AGAINST
    output: str = "class"

    @property
    def counterfactuals(self) -> dict[str, CounterfactualSummary]:
        """Return the computed counterfactuals by name."""
        each = {"counterfactual": self.counterfactual, "searched": self.searched}
        return {name: summary for name, summary in each.items() if summary is not None}


@dataclass(frozen=True)
class RunEvidence:
    """The complete evidence in a folder."""

    folder: Path
    summary: EvidenceSummary

    def slide(self, name: str) -> SlideEvidence:
        return read_slide_evidence(evidence_file(self.folder, name))


class NoEvidenceError(CarmilError):
    """Raised if there is no complete evidence of this run's weights, slides and thresholds; the message says what to do."""


@dataclass(frozen=True)
class _Request:
    run: str | None = None
    weights: str | None = None
    thresholds: list[list[float | None]] | None = None


@dataclass(frozen=True)
class _Explanation:
    """The part of explanation.json that identifies models and slides."""

    settings: _Request
    data: str


def begin_explanation(folder: Path, run: Run, *, methods: tuple[str, ...], searched: bool, data: str) -> None:
    """Write explanation.json, or check that the folder has the same request. data: the fingerprint of the slides' store."""
    for kind in ("run", "sweep"):
        if (folder / f"{kind}.json").exists():
            raise CarmilError(
                f"--out {folder} holds a {kind}: choose another folder for the evidence, such as {folder / 'evidence'}"
            )
    request: dict[str, Value] = {"run": run.key, "weights": weights_key(run), "methods": list(methods)}
    request |= {"searched": searched, "thresholds": run.thresholds}
    begin(folder, request, {"data": data}, kind="explanation")


def check_same_models(folder: Path, run: Run, out: Path, advice: str = "") -> None:
    """Refuse an `out` whose evidence, in `folder`, was computed by models or thresholds that differ from the run's."""
    if (folder / "explanation.json").exists():
        advice = advice or f"choose another --out, or remove {out}"
        request = read_json_as(folder / "explanation.json", _Explanation, advice=advice).settings
        if (request.run, request.weights, request.thresholds) != (run.key, weights_key(run), run.thresholds):
            raise CarmilError(f"{out} holds answers of another run than {run.folder}: {advice}")


def write_summary(folder: Path, frame: pd.DataFrame, summary: EvidenceSummary) -> None:
    """Write summary.parquet, summary.csv and summary.json. frame: one row per slide."""
    write_table(folder / "summary.parquet", frame)
    write_text(folder / "summary.csv", frame_text(frame))
    facts = _without_none(asdict(summary))
    if summary.words == FOR_AND_AGAINST:
        for name in ("words", "output"):
            del facts[name]
    write_text(folder / SUMMARY, json.dumps(to_json(facts), indent=2))


def read_run_evidence(run: Run, folder: Path | None = None, *, data: str | None = None) -> RunEvidence:
    """Read the evidence in a folder, by default RUN/evidence. If it is missing, incomplete or of other models, raise a
    `NoEvidenceError`.

    data: the fingerprint of the slides' store, by default the run's.
    """
    folder, data = folder or run.folder / "evidence", data or run.data.store
    if not (folder / "explanation.json").is_file():
        raise NoEvidenceError(
            f"No evidence yet: run `carmil explain {run.name}`, then `carmil report {run.name}` to show it here."
        )
    if not (folder / SUMMARY).is_file():
        raise NoEvidenceError(
            f"The evidence is incomplete: run the same `carmil explain {run.name}` command again to finish it."
        )
    again = f"remove {folder} and run `carmil explain` again"
    begun = read_json_as(folder / "explanation.json", _Explanation, advice=again)
    if (begun.settings.run, begun.settings.weights, begun.data) != (run.key, weights_key(run), data):
        raise NoEvidenceError(
            f"{run.name}/evidence is not of this run's weights and slides: remove it, and run `carmil explain {run.name}` again."
        )
    if begun.settings.thresholds != run.thresholds:
        raise NoEvidenceError(
            f"{run.name}/evidence shows answers by another rule than this run's (carmil 0.1 took the most probable class): "
            f"remove it, and run `carmil explain {run.name}` again."
        )
    summary = read_json_as(folder / SUMMARY, EvidenceSummary, "is not as `carmil explain` writes it", again)
    k, shifts = len(run.outputs), [counterfactual.class_shift for counterfactual in summary.counterfactuals.values()]
    matrices = [shift.matrix for shift in shifts if shift is not None]
    if (
        summary.run != run.key
        or summary.evidence not in summary.methods
        or any(len(matrix) != k or any(len(row) != k for row in matrix) for matrix in matrices)
    ):
        raise CarmilError(f"{folder / SUMMARY} is of another run: {again}")
    return RunEvidence(folder, summary)


def _without_none(value: Any) -> Any:
    """Leave out keys without a value, and remove the trailing underscore of keys such as class_."""
    if isinstance(value, dict):
        return {name.rstrip("_"): _without_none(item) for name, item in value.items() if item is not None}
    return value
