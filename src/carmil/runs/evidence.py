"""The evidence of a run: written once by `carmil explain`, read by the report, the viewer and the drawings.

OUT/explanation.json   the request, so that an interrupted command resumes and a different one is refused
OUT/SLIDE.parquet      one row per instance, see `slide_evidence`
OUT/thresholds.json    of Dice, where instances have a truth
OUT/summary.parquet    and summary.csv: one row per slide
OUT/summary.json       over all slides; written last

k classes.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from carmil.csv_files import frame_text
from carmil.errors import CarmilError
from carmil.files import write_text
from carmil.provenance import to_json
from carmil.runs.facts import Count, Number, SlideMean
from carmil.runs.run import Run, weights_key
from carmil.runs.settings import Value
from carmil.runs.slide_evidence import SlideEvidence, evidence_file, read_slide_evidence
from carmil.runs.writing import begin, write_table
from carmil.untrusted import read_json_as

if TYPE_CHECKING:
    import pandas as pd

SUMMARY = "summary.json"


@dataclass(frozen=True)
class ClassShift:
    """matrix (k, k): of rightly answered slides, by label, how often each class's logit grew most."""

    rows: str
    matrix: tuple[tuple[Count, ...], ...]


@dataclass(frozen=True)
class CounterfactualSummary:
    """How a counterfactual attention moved the answers of all slides. class_shift is None where labels are unknown.

    turned: slides that get another answer; reached: of a searched one, the share of slides on which one was found.
    """

    turned: Count
    distance: SlideMean
    attention_moved: SlideMean
    carriers: SlideMean
    median_moved: Number
    class_shift: ClassShift | None = None
    reached: SlideMean | None = None


@dataclass(frozen=True)
class Residual:
    """How far evidence is from summing to the change of the logit, relative to it."""

    largest: Number
    mean: Number


@dataclass(frozen=True)
class TruthAgreement:
    """Agreement of the maps of one class with the truth of the instances: by explainer, then by measure."""

    class_: Annotated[str, Field(validation_alias="class")]
    negative_rule: str
    dice_threshold: str
    agreement: Mapping[str, Mapping[str, SlideMean]]


@dataclass(frozen=True)
class EvidenceSummary:
    """summary.json. run: the key of the run; evidence: the first of `methods`, which are described by name.

    concentration: by MAP_MEASURE. negligible: slides without evidence to speak of. correlations: by pair of scores, then by kind.
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

    @property
    def counterfactuals(self) -> dict[str, CounterfactualSummary]:
        """Those that were computed, by name."""
        each = {"counterfactual": self.counterfactual, "searched": self.searched}
        return {name: found for name, found in each.items() if found is not None}


@dataclass(frozen=True)
class RunEvidence:
    """The complete evidence in a folder."""

    folder: Path
    summary: EvidenceSummary

    def slide(self, name: str) -> SlideEvidence:
        return read_slide_evidence(evidence_file(self.folder, name))


class NoEvidenceError(CarmilError):
    """There is no complete evidence of this run's weights, slides and thresholds; the message says what to do."""


@dataclass(frozen=True)
class _Request:
    run: str | None = None
    weights: str | None = None
    thresholds: list[list[float | None]] | None = None


@dataclass(frozen=True)
class _Explanation:
    """explanation.json, as far as it tells models and slides apart."""

    settings: _Request
    data: str


def begin_explanation(folder: Path, run: Run, *, methods: tuple[str, ...], searched: bool, data: str) -> None:
    """Write explanation.json, or find the same request there. data: the fingerprint of the slides' store."""
    for kind in ("run", "sweep"):
        if (folder / f"{kind}.json").exists():
            raise CarmilError(
                f"--out {folder} holds a {kind}: choose another folder for the evidence, such as {folder / 'evidence'}"
            )
    request: dict[str, Value] = {"run": run.key, "weights": weights_key(run), "methods": list(methods)}
    request |= {"searched": searched, "thresholds": run.thresholds}
    begin(folder, request, {"data": data}, kind="explanation")


def check_same_models(folder: Path, run: Run, out: Path) -> None:
    """Refuse an `out` whose evidence, in `folder`, is by other models or thresholds than the run's."""
    if (folder / "explanation.json").exists():
        advice = f"choose another --out, or remove {out}"
        request = read_json_as(folder / "explanation.json", _Explanation, advice=advice).settings
        if (request.run, request.weights, request.thresholds) != (run.key, weights_key(run), run.thresholds):
            raise CarmilError(f"{out} holds answers of another run than {run.folder}: {advice}")


def write_summary(folder: Path, frame: "pd.DataFrame", summary: EvidenceSummary) -> None:
    """Write summary.parquet, summary.csv and summary.json. frame: one row per slide."""
    write_table(folder / "summary.parquet", frame)
    write_text(folder / "summary.csv", frame_text(frame))
    write_text(folder / SUMMARY, json.dumps(to_json(_without_none(asdict(summary))), indent=2))


def read_run_evidence(run: Run) -> RunEvidence:
    """Read RUN/evidence. What is missing, incomplete or of other models is a `NoEvidenceError`."""
    folder = run.folder / "evidence"
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
    if (begun.settings.run, begun.settings.weights, begun.data) != (run.key, weights_key(run), run.data.store):
        raise NoEvidenceError(
            f"{run.name}/evidence is not of this run's weights and slides: remove it, and run `carmil explain {run.name}` again."
        )
    if begun.settings.thresholds != run.thresholds:
        raise NoEvidenceError(
            f"{run.name}/evidence shows answers by another rule than this run's (carmil 0.1 took the most probable class): "
            f"remove it, and run `carmil explain {run.name}` again."
        )
    summary = read_json_as(folder / SUMMARY, EvidenceSummary, "is not as `carmil explain` writes it", again)
    k, shifts = len(run.classes), [found.class_shift for found in summary.counterfactuals.values()]
    matrices = [shift.matrix for shift in shifts if shift is not None]
    if (
        summary.run != run.key
        or summary.evidence not in summary.methods
        or any(len(matrix) != k or any(len(row) != k for row in matrix) for matrix in matrices)
    ):
        raise CarmilError(f"{folder / SUMMARY} is of another run: {again}")
    return RunEvidence(folder, summary)


def _without_none(value: object) -> object:
    """Leave out keys without a value; the key of a field such as class_ has no underscore at its end."""
    if isinstance(value, dict):
        return {name.rstrip("_"): _without_none(item) for name, item in value.items() if item is not None}
    return value
