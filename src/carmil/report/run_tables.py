"""The tables of a run's report: its figures by fold, and every answer. c cases, k classes."""

from dataclasses import dataclass

import numpy as np

from carmil.report.cases import Cases, decide_cases
from carmil.runs.decision import NO_ANSWER
from carmil.runs.run import Run
from carmil.studies.figures import FIGURES, percent
from carmil.studies.predictions import probability_columns
from carmil.tables import ResultTable


@dataclass(frozen=True)
class Row:
    """A slide in the table of answers. `patient_wrong` is set where a patient's answer is not the slide's."""

    cells: tuple[str, ...]
    wrong: bool
    patient_wrong: bool | None
    turned: bool


def folds_table(run: Run, cases: Cases) -> ResultTable:
    by_fold = run.metrics.by_fold
    names = [name for name in FIGURES if any(name in found.figures for found in by_fold)]
    tested = cases.frame["fold"].value_counts()
    lines = tuple(
        (
            str(found.fold),
            str(found.seed),
            str(tested[found.fold]),
            *(percent(found.figures.get(name)) for name in names),
        )
        for found in by_fold
    )
    heads = ("fold", "seed", f"{run.metrics.level}s", *(FIGURES[name] for name in names))
    return ResultTable("Fold by fold", heads, lines, names=2)


def answer_rows(run: Run, slides: Cases, patients: Cases | None) -> tuple[list[str], list[Row]]:
    """Headings and rows of the table of answers. patients: their answers, where these are other cases than the slides."""
    frame, two = slides.frame, len(run.classes) == 2
    heads = ["slide", "patient", "label", "fold", *(f"p({name}) %" for name in run.classes)]
    parts = [frame[name].astype(str).to_list() for name in ("slide", "patient", "label", "fold")]
    parts += [[f"{100 * value:.1f}" for value in slides.p[:, c]] for c in range(len(run.classes))]
    if two:
        heads.append("threshold %")
        parts.append([f"{100 * (rule.threshold or 0):.4g}" for rule in slides.decisions])
    heads.append("answer")
    parts.append(slides.answers(run.classes))
    turned = np.zeros(len(frame), dtype=bool)
    if all(name in frame for name in probability_columns(run.classes, "cf")):
        elsewhere = decide_cases(run, frame, "cf")
        answers = elsewhere.answers(run.classes)
        turned = np.array(answers) != np.array(slides.answers(run.classes))
        heads.append("counterfactual answer")
        likely = elsewhere.p[np.arange(len(frame)), elsewhere.answer]
        parts.append([f"{answer} ({100 * p:.1f})" for answer, p in zip(answers, likely, strict=True)])
    of_patient: list[bool | None] = [None] * len(frame)
    if patients is not None:
        at = {key: i for i, key in enumerate(zip(patients.frame["fold"], patients.frame["patient"], strict=True))}
        place = np.array([at[key] for key in zip(frame["fold"], frame["patient"], strict=True)])
        answers = patients.answers(run.classes)
        heads.append("patient's answer")
        parts.append([answers[i] for i in place])
        of_patient = patients.wrong[place].tolist()
    heads.append("result")
    parts.append(
        [
            ("right" if right else "wrong") if sure else f"{NO_ANSWER}, would be {'right' if right else 'wrong'}"
            for right, sure in zip(slides.right, slides.sure, strict=True)
        ]
    )
    lines = zip(zip(*parts, strict=True), slides.wrong.tolist(), of_patient, turned.tolist(), strict=True)
    return heads, [Row(*found) for found in lines]
