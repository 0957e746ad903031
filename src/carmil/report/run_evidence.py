"""The evidence in a run's report: what `carmil explain` and `carmil faithfulness` wrote into the run's folder. k classes."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from carmil.bags.pictures import Pictures
from carmil.errors import CarmilError
from carmil.report.cases import Cases
from carmil.report.faithfulness import FaithfulnessPart, cell, faithfulness_part
from carmil.report.gallery import GallerySlide, gallery
from carmil.runs.evidence import EvidenceSummary, NoEvidenceError, read_run_evidence
from carmil.runs.faithfulness import read_faithfulness
from carmil.runs.run import Run
from carmil.studies.subjects import open_run_store
from carmil.studies.summary import agreement_table
from carmil.tables import ResultTable

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
    """Of rightly answered slides, by label (k rows), the class whose logit grew most (k) under a counterfactual."""

    which: str
    matrix: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class EvidencePart:
    """What the page shows of RUN/evidence."""

    summary: EvidenceSummary
    agreement: ResultTable | None
    concentration: ResultTable
    moved: ResultTable | None
    shifts: list[Shift]
    slides: list[GallerySlide]

    @property
    def described(self) -> str:
        return self.summary.methods[self.summary.evidence]


def evidence_part(run: Run, cases: Cases) -> EvidencePart | str:
    """Or, in words, why there is none. cases: the run's slides."""
    try:
        evidence = read_run_evidence(run)
    except NoEvidenceError as error:
        return str(error)
    summary = evidence.summary
    on_a_plane = run.metrics.rule != "one-bag"  # a patient's slides would lie on top of each other
    return EvidencePart(
        summary,
        agreement_table(summary),
        concentration_table(summary),
        moved_table(summary),
        shifts(summary),
        gallery(cases, run.classes, evidence.folder, on_a_plane=on_a_plane, pictures=_pictures(run)),
    )


def _pictures(run: Run) -> Callable[[str], Pictures | None]:
    """Pictures of the instances of a slide; None where the run's store has none, or is not where it was."""
    try:
        store = open_run_store(run)
    except CarmilError:
        return lambda slide: None
    pictures, offsets = store.pictures(), np.cumsum([0, *(entry.rows for entry in store.entries)])
    places = {name: i for i, name in enumerate(store.ids)}

    def of(slide: str) -> Pictures | None:
        i = places.get(slide)
        return None if pictures is None or i is None else pictures.rows(offsets[i], offsets[i + 1])

    return of


def measured_faithfulness(run: Run) -> FaithfulnessPart | str:
    """What `carmil faithfulness` measured, or in words why there is nothing."""
    try:
        return faithfulness_part([read_faithfulness(run)])
    except CarmilError as error:
        return str(error).replace(str(run.folder), run.name)


def concentration_table(summary: EvidenceSummary) -> ResultTable:
    found = summary.concentration
    rows = tuple(
        (words, *(cell(found.get(f"{name}_{measure}"), DIGITS.get(measure, 2)) for measure in CONCENTRATION))
        for name, words in CONCENTRATED.items()
        if any(key.startswith(f"{name}_") for key in found)
    )
    return ResultTable("Concentration of the maps", ("map", *CONCENTRATION.values()), rows)


def moved_table(summary: EvidenceSummary) -> ResultTable | None:
    """One column per counterfactual: what it changed. None where there is none."""
    found = summary.counterfactuals
    if not found:
        return None
    rows = [("slides that get another answer", *(f"{one.turned} of {summary.slides}" for one in found.values()))]
    if any(one.reached is not None for one in found.values()):
        rows.append(("share of the slides on which one was found", *(cell(one.reached) for one in found.values())))
    rows += [(words, *(cell(getattr(one, name)) for one in found.values())) for name, words in MOVED.items()]
    for between in (summary.correlations or {}).values():  # of the learned one alone
        rows += [(words, cell(between.get(name)), *["–"] * (len(found) - 1)) for name, words in CORRELATED.items()]
    return ResultTable("Counterfactual", ("mean over slides, 95 % interval", *(WHICH[w] for w in found)), tuple(rows))


def shifts(summary: EvidenceSummary) -> list[Shift]:
    found = [(which, part.class_shift) for which, part in summary.counterfactuals.items()]
    return [Shift(WHICH[which], shift.matrix) for which, shift in found if shift is not None]
