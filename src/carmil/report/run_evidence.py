"""The evidence in a run's report: what `carmil explain` and `carmil faithfulness` left in the run's folder.

RUN/evidence and RUN/faithfulness are looked at only if they are whole and of the run's own weights and slides; if not, the
report says what to do. k classes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from carmil.errors import CarmilError
from carmil.provenance import numbers_again
from carmil.report.cases import Cases
from carmil.report.faithfulness import cell, faithfulness_parts
from carmil.report.faithfulness_file import FILE, read_judged
from carmil.report.gallery import GallerySlide, gallery
from carmil.runs.evidence_schema import EvidenceSummary
from carmil.runs.run import Run, weights_key
from carmil.studies.summary import agreement_table
from carmil.tables import ResultTable
from carmil.untrusted import parsed, read_json

CONCENTRATION = {"normalised_entropy": "entropy of log n", "gini": "Gini", "effective": "effective instances"}
DIGITS = {"effective": 0}  # of a count
CONCENTRATED = {"attention": "attention weight", "evidence": "evidence for the answer, by its size"}
MOVED = {
    "attention_moved": "attention weight that moved (2 is the most)",
    "carriers": "share of the instances on which 90 % of it moved",
    "distance": "how far the logits moved",
}
CORRELATED = {
    name: f"{name.capitalize()} of attention scores and counterfactual ones" for name in ("spearman", "pearson")
}
WHICH = {"counterfactual": "learned", "searched": "searched"}


@dataclass(frozen=True)
class Shift:
    """Of rightly answered slides, by label (k lines), the class whose logit grew most (k) under a counterfactual."""

    which: str
    matrix: list[list[int]]


@dataclass(frozen=True)
class EvidencePart:
    """What the page shows of RUN/evidence."""

    summary: dict[str, Any]
    agreement: ResultTable | None
    concentration: ResultTable
    moved: ResultTable | None
    shifts: list[Shift]
    slides: list[GallerySlide]

    @property
    def described(self) -> str:
        return self.summary["methods"][self.summary["evidence"]]


def evidence_part(run: Run, cases: Cases) -> EvidencePart | str:
    """Or, in words, why there is none. cases: the run's slides."""
    folder = run.folder / "evidence"
    if not (folder / "explanation.json").is_file():
        return f"No evidence yet: run `carmil explain {run.name}`, then `carmil report {run.name}` to show it here."
    if not (folder / "summary.json").is_file():
        return f"The evidence is incomplete: run the same `carmil explain {run.name}` command again to finish it."
    begun = read_json(folder / "explanation.json", _again(folder))
    parsed(begun, _Explanation, f"{folder / 'explanation.json'} cannot be read", _again(folder))
    asked = begun["settings"]
    if (asked.get("run"), asked.get("weights"), begun.get("data")) != (
        run.key,
        weights_key(run),
        run.data.store,
    ):
        return (
            f"{run.name}/evidence is not of this run's weights and slides: remove it, and `carmil explain {run.name}` makes "
            "its own."
        )
    if asked.get("thresholds") != run.thresholds:
        return (
            f"{run.name}/evidence shows answers by another rule than this run's (carmil 0.1 took the most probable class): "
            f"remove it, and `carmil explain {run.name}` makes it anew."
        )
    summary = _read_summary(run, folder / "summary.json")
    on_a_plane = run.metrics.rule != "one-bag"  # a patient's slides would lie on top of each other
    return EvidencePart(
        summary,
        agreement_table(summary),
        concentration_table(summary),
        moved_table(summary),
        shifts(summary),
        gallery(cases, run.classes, folder, on_a_plane=on_a_plane),
    )


def faithfulness_part(run: Run) -> dict[str, Any] | str:
    """What `carmil faithfulness` found, or in words why there is nothing."""
    path = run.folder / "faithfulness" / FILE
    if not path.is_file():
        return (
            f"Not measured yet: run `carmil faithfulness {run.name}`, then `carmil report {run.name}` to show it here."
        )
    try:
        return faithfulness_parts([read_judged(run, path)])
    except CarmilError as error:
        return str(error).replace(str(run.folder), run.name)


def concentration_table(summary: dict[str, Any]) -> ResultTable:
    found = summary["concentration"]

    def line(name: str) -> tuple[str, ...]:
        cells = (cell(found.get(f"{name}_{measure}"), DIGITS.get(measure, 2)) for measure in CONCENTRATION)
        return CONCENTRATED[name], *cells

    lines = tuple(line(name) for name in CONCENTRATED if any(one.startswith(f"{name}_") for one in found))
    return ResultTable("Concentration of the maps", ("map", *CONCENTRATION.values()), lines)


def moved_table(summary: dict[str, Any]) -> ResultTable | None:
    """A column a counterfactual: what it changed. None where there is none."""
    there = [which for which in WHICH if which in summary]
    if not there:
        return None
    turned = (f"{summary[which]['turned']} of {summary['slides']}" for which in there)
    lines = [("slides that get another answer", *turned)]
    if "reached" in summary.get("searched", {}):
        shares = (cell(summary[which].get("reached")) for which in there)
        lines.append(("share of the slides on which one was found", *shares))
    lines += [(words, *(cell(summary[which].get(name)) for which in there)) for name, words in MOVED.items()]
    for between in summary.get("correlations", {}).values():  # of the learned one alone
        lines += [(words, cell(between.get(name)), *("–" for _ in there[1:])) for name, words in CORRELATED.items()]
    return ResultTable("Counterfactual", ("mean over slides, 95 % interval", *(WHICH[w] for w in there)), tuple(lines))


def shifts(summary: dict[str, Any]) -> list[Shift]:
    there = [(which, summary[which]["class_shift"]) for which in WHICH if "class_shift" in summary.get(which, {})]
    return [Shift(WHICH[which], found["matrix"]) for which, found in there]


class _Explanation(TypedDict):
    settings: dict[str, Any]
    data: str


def _read_summary(run: Run, path: Path) -> dict[str, Any]:
    """Read summary.json, if it is as `carmil explain` writes it and of this run."""
    summary, again = read_json(path, _again(path.parent)), _again(path.parent)
    parsed(summary, EvidenceSummary, f"{path} is not as `carmil explain` writes it", again)
    matrices = [summary[which]["class_shift"]["matrix"] for which in WHICH if "class_shift" in summary.get(which, {})]
    k = len(run.classes)
    if (
        summary["run"] != run.key
        or summary["evidence"] not in summary["methods"]
        or any(len(matrix) != k or any(len(row) != k for row in matrix) for matrix in matrices)
    ):
        raise CarmilError(f"{path} is of another run: {again}")
    return numbers_again(summary)


def _again(folder: Path) -> str:
    return f"remove {folder} and run `carmil explain` again"
