"""The answers of a study, case by case, by the decision rule of the models that were tested on the case; tables of
answers.

c cases (patients, or slides), p predictions per case: for k classes, their probabilities.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from carmil.runs.run import DISTANCE, PATIENT_SET, SLIDE_SET, Run
from carmil.studies.figures import ABSTENTION, figure_names, figure_text, mean_over_seeds
from carmil.studies.predictions import outcomes
from carmil.tables import ResultTable
from carmil.targets import Target
from carmil.targets.decision import NO_ANSWER, Decision
from carmil.targets.target import Quantity
from carmil.words import probability_text

FOLDS = ", "  # separator of the folds that a slide was tested in, if there are several divisions


@dataclass(frozen=True, eq=False)
class Cases:
    """Answers for c cases, and the rule of each.

    p (c, p): predictions, truth (c) or (c, t): outcomes, answer (c): the leading class, sure (c): False where the rule
    abstains.
    """

    target: Target
    frame: pd.DataFrame
    p: NDArray[np.float64]
    truth: NDArray[Any]
    answer: NDArray[np.int64]
    sure: NDArray[np.bool_]
    decisions: tuple[Decision, ...]

    @property
    def names(self) -> list[str]:
        """Return the names of the cases: slides, or patients."""
        return self.frame["slide" if "slide" in self.frame else "patient"].astype(str).to_list()

    @property
    def right(self) -> NDArray[np.bool_]:
        """Return (c) whether each answer is the truth; always true if answers are neither classes nor grades."""
        return self.answer == self.truth if self.target.answer_names else np.ones(len(self.answer), dtype=bool)

    @property
    def wrong(self) -> NDArray[np.bool_]:
        """Return (c) whether each case has an answer that differs from the truth."""
        return self.sure & ~self.right

    @property
    def answers(self) -> list[str]:
        """Return the answers in words, NO_ANSWER where a rule abstains."""
        return [rule.answer(p) for rule, p in zip(self.decisions, self.p, strict=True)]

    @property
    def margin(self) -> NDArray[np.float64]:
        """Return (c) the distance of each case from another answer by its own rule: thresholds differ between folds."""
        pairs = zip(self.decisions, self.p, strict=True)
        return np.array([decision.margins(p[None])[0] for decision, p in pairs])

    @property
    def confusion(self) -> NDArray[np.int64]:
        """Return (k, k) counts of cases by truth, then by leading class."""
        return confusion(self.truth, self.answer, self.p.shape[1])


@dataclass(frozen=True, eq=False)
class TestedCases:
    """The test cases of a run.

    cases: one answer per case and division into folds; once: one answer per case, of all divisions together.
    """

    run: Run
    cases: Cases
    once: Cases


def decision_of_folds(run: Run, folds: Sequence[int]) -> Decision:
    """Return the joint rule of the models of all seeds that were tested on some folds."""
    return run.decision([row for row, fold in enumerate(run.tested_folds) if fold in folds])


def decide_cases(run: Run, frame: pd.DataFrame, prefix: str = "p") -> Cases:
    """Apply to each row of a table the decision rule of its fold or folds, and return the cases with their answers.

    frame: one case per row, with the columns `fold` and PREFIX_CLASS for each class, such as p_tumour.
    """
    p = frame[run.target.prediction_columns(prefix)].to_numpy(dtype=np.float64)
    folds = frame["fold"].astype(str).to_numpy()
    rules = {fold: decision_of_folds(run, [int(part) for part in fold.split(FOLDS)]) for fold in dict.fromkeys(folds)}
    answer, sure = np.zeros(len(p), dtype=np.int64), np.ones(len(p), dtype=bool)
    for fold, rule in rules.items():
        rows = folds == fold
        answer[rows], sure[rows] = rule.leading(p[rows]), rule.confident(p[rows])
    return Cases(run.target, frame, p, outcomes(frame, run.target), answer, sure, tuple(rules[fold] for fold in folds))


def one_row_per_slide(run: Run) -> pd.DataFrame:
    """Return the answers of all models that were tested on each slide, over folds and seeds."""
    frame = mean_over_seeds(run.predictions(), run.target)
    if len(run.data.splits) == 1:
        return frame
    keys = ["slide", "patient", *run.target.label_columns]
    values = [name for name in frame.columns if name not in (*keys, "fold")]
    grouped = frame.sort_values("fold").groupby(keys, sort=False, dropna=False)
    pooled = grouped[values].mean()
    pooled.insert(0, "fold", grouped["fold"].agg(lambda folds: FOLDS.join(map(str, folds))))
    return pooled.reset_index()


def confusion(truth: NDArray, answer: NDArray, k: int) -> NDArray[np.int64]:
    """Return (k, k) counts of cases by truth, then answer."""
    return np.bincount(truth * k + answer, minlength=k * k).reshape(k, k)


@dataclass(frozen=True)
class Row:
    """A slide in the table of answers. `patient_wrong` is set if the patient's answer differs from the slide's."""

    cells: tuple[str, ...]
    wrong: bool
    patient_wrong: bool | None
    turned: bool


@dataclass(frozen=True)
class AnswerTable:
    """The table of answers. words: the positions of the columns of text; counterfactual: the position of the
    counterfactual column, or None.

    turns: whether counterfactual answers can equal the factual ones; a predicted number always differs.
    """

    heads: tuple[str, ...]
    rows: tuple[Row, ...]
    words: tuple[int, ...]
    counterfactual: int | None
    turns: bool
    of_patients: bool
    judged: bool

    @property
    def wrong(self) -> int:
        return sum(row.wrong for row in self.rows)

    @property
    def turned(self) -> int:
        return sum(row.turned for row in self.rows)


def folds_table(run: Run, cases: Cases) -> ResultTable:
    by_fold = run.metrics.by_fold
    shown = figure_names(run.target) | ABSTENTION
    names = [name for name in shown if any(name in figures.figures for figures in by_fold)]
    tested = cases.frame["fold"].value_counts()
    lines = tuple(
        (
            str(figures.fold),
            str(figures.seed),
            str(tested[figures.fold]),
            *(figure_text(name, figures.figures.get(name)) for name in names),
        )
        for figures in by_fold
    )
    heads = ("fold", "seed", f"{run.metrics.level}s", *(shown[name] for name in names))
    return ResultTable("Fold by fold", heads, lines, names=2)


def answer_rows(run: Run, slides: Cases, patients: Cases | None) -> AnswerTable:
    """Return the table of answers.

    patients: the answers for patients, if the cases of the study are patients.
    """
    frame, target = slides.frame, run.target
    words = target.answers_in_words
    answer, alike = ("answer", "answer") if words else (f"predicted {target.quantity.name}", target.quantity.name)
    columns = [
        *((name, frame[name].astype(str).to_list(), True) for name in ("slide", "patient")),
        *(
            (name, cells, bool(target.answer_names) or not _are_numbers(cells))
            for name, cells in target.outcome_cells(slides.truth).items()
        ),
        ("fold", frame["fold"].astype(str).to_list(), False),
        *((name, cells, False) for name, cells in _prediction_columns(slides).items()),
        (answer, slides.answers, words),
    ]
    if not words:
        columns.append(("predicted − true", [f"{error:+.4g}" for error in (slides.p - slides.truth)[:, 0]], False))
    turned, counterfactual = np.zeros(len(frame), dtype=bool), None
    if all(name in frame for name in target.prediction_columns("cf")):
        elsewhere, counterfactual = decide_cases(run, frame, "cf"), len(columns)
        columns.append((f"counterfactual {alike}", _with_numbers(elsewhere), words))
        if words:
            turned = np.array(elsewhere.answers) != np.array(slides.answers)
    of_patient: list[bool | None] = [None] * len(frame)
    if patients is not None:
        at = {key: i for i, key in enumerate(zip(patients.frame["fold"], patients.frame["patient"], strict=True))}
        place = np.array([at[key] for key in zip(frame["fold"], frame["patient"], strict=True)])
        columns.append((f"patient's {answer}", np.array(patients.answers)[place].tolist(), words))
        of_patient = patients.wrong[place].tolist()
    if run.metrics.prediction_sets is not None:
        columns += [(name.replace("_", " "), cells, True) for name, cells in _prediction_sets(run, frame).items()]
    if DISTANCE in frame:
        columns.append(("distance from the training cohort", [f"{far:.2f}" for far in frame[DISTANCE]], False))
    if target.answer_names:
        results = [
            ("right" if right else "wrong") if sure else f"{NO_ANSWER}, would be {'right' if right else 'wrong'}"
            for right, sure in zip(slides.right, slides.sure, strict=True)
        ]
        columns.append(("result", results, True))
    heads, cells, texts = zip(*columns, strict=True)
    rows = zip(zip(*cells, strict=True), slides.wrong.tolist(), of_patient, turned.tolist(), strict=True)
    return AnswerTable(
        heads,
        tuple(Row(*row) for row in rows),
        tuple(i for i, text in enumerate(texts) if text),
        counterfactual,
        turns=counterfactual is not None and words,
        of_patients=patients is not None,
        judged=bool(target.answer_names),
    )


def _prediction_sets(run: Run, frame: pd.DataFrame) -> dict[str, list[str]]:
    """Return the prediction sets of the slides of a table, and those of their patients where patients have several slides."""
    predictions = run.predictions().drop_duplicates("slide").set_index("slide")
    return {
        name: predictions.loc[frame["slide"], name].to_list()
        for name in (SLIDE_SET, PATIENT_SET)
        if name in predictions
    }


def _prediction_columns(cases: Cases) -> dict[str, list[str]]:
    """Return the numbers behind the answers: probabilities or other predicted values, and thresholds."""
    target, columns = cases.target, {}
    if target.probabilities:
        names = zip(target.prediction_names, cases.p.T, strict=True)
        columns = {f"p({name}) %": [probability_text(p, "") for p in column] for name, column in names}
    if not target.quantity.share and target.answers_in_words:
        columns[target.quantity.name] = _quantities(cases)
    if any(rule.threshold is not None for rule in cases.decisions):
        factor, unit = (100, " %") if target.probabilities else (1, "")
        columns[f"threshold{unit}"] = [f"{factor * (rule.threshold or 0):.4g}" for rule in cases.decisions]
    return columns


def _with_numbers(cases: Cases) -> list[str]:
    """Return the answers, each with the number behind it where there is one: "higher risk (+0.34)"."""
    target = cases.target
    if target.words.rivals:
        likely = cases.p[np.arange(len(cases.p)), cases.answer]
        return [f"{answer} ({probability_text(p)})" for answer, p in zip(cases.answers, likely, strict=True)]
    if target.quantity.share or not target.answers_in_words:
        return cases.answers
    return [f"{answer} ({number})" for answer, number in zip(cases.answers, _quantities(cases), strict=True)]


def _quantities(cases: Cases) -> list[str]:
    return [quantity_text(cases.target.quantity, value) for value in cases.target.quantities(cases.p)[:, 0].tolist()]


def quantity_text(quantity: Quantity, value: float) -> str:
    """Format a number that is not a share."""
    return f"{value:{'+' if quantity.signed else ''}.{quantity.digits}g}"


def _are_numbers(texts: Sequence[str]) -> bool:
    return all(text == "?" or text.removeprefix("-").replace(".", "", 1).isdecimal() for text in texts)
