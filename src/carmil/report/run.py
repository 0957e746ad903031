"""The report of a study: one HTML file with its figures, how sure they are, every answer, and how they came about.

c cases (patients, or slides where those are judged), k classes. Everything is computed from the run's folder.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from carmil.evidence.operating import answered as sure_enough
from carmil.evidence.statistics import bootstrap
from carmil.files import write_text
from carmil.report.curves import Curve, curve_svg
from carmil.report.plots import Line, colour, reliability_svg, share_svg
from carmil.report.tables import ResultTable
from carmil.studies import card
from carmil.studies.answers import by_patient, columns, numbers
from carmil.studies.figures import SHOWN, line, mean_over_seeds, percent
from carmil.studies.run_folder import StudyRun
from carmil.studies.shown import figures_lines

if TYPE_CHECKING:
    import pandas as pd

FIGURES = SHOWN | {"answered": "answered", "accuracy_answered": "accuracy of the answered"}
MOST_FOLDS = 12  # that have their learning curves apart
LONG = 200  # lines; of a longer table only the errors are printed on paper


@dataclass(frozen=True)
class OperatingPoint:
    """Where a fold's "yes" begins (two classes), and below which confidence it has no answer."""

    threshold: float | None
    cut: float | None


@dataclass(frozen=True, eq=False)
class Cases:
    """What is answered for c cases, all test folds together: p (c, k), truth, answer and whether it is sure (c)."""

    frame: "pd.DataFrame"
    p: NDArray[np.float64]
    truth: NDArray[np.int64]
    answer: NDArray[np.int64]
    sure: NDArray[np.bool_]

    @property
    def right(self) -> NDArray[np.bool_]:
        return self.answer == self.truth

    @property
    def confusion(self) -> NDArray[np.int64]:
        """(k, k) cases by truth, then answer."""
        return _confusion(self.truth, self.answer, self.p.shape[1])


@dataclass(frozen=True)
class Legend:
    """One line of a plot: its colour, whose it is, and the area below it."""

    colour: str
    name: str
    area: str


@dataclass(frozen=True)
class Row:
    """A slide in the table of answers. `patient_right` is there where a patient's answer is not the slide's."""

    cells: tuple[str, ...]
    right: bool
    patient_right: bool | None
    turned: bool


def write_report(run: StudyRun, path: Path) -> None:
    from jinja2 import Environment, PackageLoader

    slides = mean_over_seeds(run.predictions(), run.classes)
    merged = run.metrics["level"] == "patient" and run.metrics["rule"] != "one-bag"
    by_slide = decided(run, slides)
    cases = decided(run, by_patient(slides, run.classes, run.metrics["rule"])) if merged else by_slide
    heads, rows = answer_rows(run, by_slide, cases if merged and len(cases.truth) < len(slides) else None)
    page = Environment(
        loader=PackageLoader("carmil.report", "pages"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    html = page.get_template("run.html").render(
        run=run,
        lead=figures_lines(run),
        protocol=card.protocol(run),
        limits=card.LIMITS,
        figures=figures_table(run, cases),
        folds=folds_table(run, cases),
        roc=roc(run, cases),
        pr=precision_recall(run, cases),
        matrix=cases.confusion.tolist(),
        cases=cases,
        withheld=int((~cases.sure).sum()),
        answered_right=percent(float(cases.right[cases.sure].mean()) if cases.sure.any() else None),
        calibration=run.metrics["calibration"],
        reliability=reliability_svg(run.metrics["calibration"]),
        curves=learning_curves(run),
        heads=heads,
        rows=rows,
        long=LONG,
        settings=card.settings_shown(run),
        facts=card.trained(run) | card.data(run) | card.machine(run),
        command=card.command(run),
        yaml=card.yaml_part(run),
        remarks=card.remarks(run),
        choices=card.choices(run),
        percent=percent,
    )
    write_text(path, html)


def operating_points(run: StudyRun) -> dict[int, OperatingPoint]:
    """Of each fold as predictions count them. Seeds answer together, so theirs is the median, as in `carmil evaluate`."""
    found: dict[int, list[dict]] = {}
    for fold, model in zip(card.tested_folds(run), run.models, strict=True):
        found.setdefault(fold, []).append(model)

    def median(models: Sequence[dict], name: str) -> float | None:
        values = [model[name] for model in models if model[name] is not None]
        return float(np.median(values)) if values else None

    return {
        fold: OperatingPoint(median(models, "threshold"), median(models, "abstain_below"))
        for fold, models in found.items()
    }


def decided(run: StudyRun, frame: "pd.DataFrame", prefix: str = "p") -> Cases:
    """The answers: of two classes by the threshold of each case's fold, of more the likeliest."""
    p = frame[columns(run.classes, prefix)].to_numpy(dtype=np.float64)
    fold = frame["fold"].to_numpy()
    answer, sure = p.argmax(1), np.ones(len(p), dtype=bool)
    for number, point in operating_points(run).items():
        rows = fold == number
        if point.threshold is not None:
            answer[rows] = p[rows, 1] >= point.threshold
        if point.cut is not None and rows.any():
            sure[rows] = sure_enough(p[rows] if point.threshold is None else p[rows, 1], point.cut, point.threshold)
    return Cases(frame, p, numbers(frame, run.classes), answer, sure)


def figures_table(run: StudyRun, cases: Cases) -> ResultTable:
    """Mean ± standard deviation over the folds; all test folds together with 95 % intervals."""
    summary, sure = run.metrics["summary"], run.metrics["intervals"]
    together = {"ece": (run.metrics["calibration"]["ece"], "–")}
    for name, measure in _measures(len(run.classes)).items():
        if name in summary:
            found = bootstrap(measure, cases.truth, cases.answer, groups=cases.frame["patient"].to_numpy())
            together[name] = (found.value, _interval(found.low, found.high))
    together["auc"] = (sure["auc"]["value"], _interval(sure["auc"]["low"], sure["auc"]["high"]))
    lines = []
    for name, words in FIGURES.items():
        if name not in summary:
            continue
        value, interval = together.get(name, (None, "–"))
        lines.append((words, line(summary, name), percent(value), interval))
        if name == "auc" and "auc_delong" in sure:
            exact = sure["auc_delong"]
            lines.append(("AUC, DeLong", "", percent(exact["value"]), _interval(exact["low"], exact["high"])))
    heads = ("figure, per cent", "mean ± sd over folds", "folds together", "95 % interval")
    return ResultTable("Test folds", heads, tuple(lines))


def folds_table(run: StudyRun, cases: Cases) -> ResultTable:
    by_fold = run.metrics["by_fold"]
    names = [name for name in FIGURES if any(name in found for found in by_fold)]
    tested = cases.frame["fold"].value_counts()
    lines = tuple(
        (
            str(found["fold"]),
            str(found["seed"]),
            str(tested[found["fold"]]),
            *(percent(found.get(name)) for name in names),
        )
        for found in by_fold
    )
    heads = ("fold", "seed", f"{run.metrics['level']}s", *(FIGURES[name] for name in names))
    return ResultTable("Fold by fold", heads, lines, names=2)


def roc(run: StudyRun, cases: Cases) -> tuple[str, list[Legend]]:
    """The curve of class 1, or of each class against the rest; the dot is where the answers are."""
    from sklearn.metrics import roc_auc_score, roc_curve

    lines, legends = [], []
    for i, (c, positive) in enumerate(_against_the_rest(cases)):
        wrong, found, _ = roc_curve(positive, cases.p[:, c])
        said = cases.answer == c
        dot = (float(said[~positive].mean()), float(said[positive].mean()))
        lines.append(Line(list(zip(wrong.tolist(), found.tolist(), strict=True)), dot))
        legends.append(Legend(colour(i), run.classes[c], percent(roc_auc_score(positive, cases.p[:, c]))))
    labels = {"x_label": "1 − specificity", "y_label": "sensitivity"}
    return share_svg(lines, guide=[(0, 0), (1, 1)], **labels), legends


def precision_recall(run: StudyRun, cases: Cases) -> tuple[str, list[Legend]]:
    """As `roc`; chance (for two classes) is the share of class 1."""
    from sklearn.metrics import average_precision_score, precision_recall_curve

    lines, legends, chance = [], [], []
    for i, (c, positive) in enumerate(_against_the_rest(cases)):
        precision, recall, _ = precision_recall_curve(positive, cases.p[:, c])
        said = cases.answer == c
        dot = (float(said[positive].mean()), float(positive[said].mean())) if said.any() else None
        lines.append(Line(_steps(recall[::-1].tolist(), precision[::-1].tolist()), dot))
        area = average_precision_score(positive, cases.p[:, c])
        legends.append(Legend(colour(i), run.classes[c], percent(area)))
        chance.append(float(positive.mean()))
    guide = [(0, chance[0]), (1, chance[0])] if len(chance) == 1 else []
    return share_svg(lines, guide=guide, x_label="recall (sensitivity)", y_label="precision"), legends


def learning_curves(run: StudyRun) -> list[tuple[str, str]]:
    """(heading, svg): training and validation loss of the models that were kept, a figure a fold if these are few."""
    history = run.history()
    grid = len(history["best_epoch"]) // len(run.models)  # all its points were trained, one a fold and seed is kept
    trained = {i: i * grid + model["point"] for i, model in enumerate(run.models)}
    groups: dict[str, list[int]] = {}
    for i, fold in enumerate(card.tested_folds(run)):
        groups.setdefault(f"fold {fold}", []).append(i)
    if len(groups) > MOST_FOLDS:
        groups = {"all folds": list(trained)}
    found = []
    for heading, models in groups.items():
        rows = [trained[i] for i in models]
        curves = [
            Curve("training", [[epoch[row] for row in rows] for epoch in history["train"]["cls"]]),
            Curve("validation", [[epoch[row] for row in rows] for epoch in history["validation"]], dashed=True),
        ]
        marks = [run.models[i]["best_epoch"] for i in models]
        found.append((heading, curve_svg(curves, marks=marks, y_label="cross-entropy")))
    return found


def answer_rows(run: StudyRun, slides: Cases, patients: Cases | None) -> tuple[list[str], list[Row]]:
    """Heads and lines of the table of answers. patients: their answers, where these are other cases than the slides."""
    names = np.array(run.classes, dtype=object)
    frame = slides.frame
    heads = ["slide", "patient", "label", "fold", *(f"p({name}) %" for name in run.classes), "answer"]
    parts = [frame[name].astype(str).to_list() for name in ("slide", "patient", "label", "fold")]
    parts += [[f"{100 * value:.1f}" for value in slides.p[:, c]] for c in range(len(names))]
    parts.append(names[slides.answer].tolist())
    turned = np.zeros(len(frame), dtype=bool)
    if all(name in frame for name in columns(run.classes, "cf")):
        elsewhere = decided(run, frame, "cf")
        turned = elsewhere.answer != slides.answer
        heads.append("counterfactual answer")
        likely = elsewhere.p[np.arange(len(frame)), elsewhere.answer]
        parts.append([f"{names[c]} ({100 * p:.1f})" for c, p in zip(elsewhere.answer, likely, strict=True)])
    of_patient: list[bool | None] = [None] * len(frame)
    if patients is not None:
        at = {key: i for i, key in enumerate(zip(patients.frame["fold"], patients.frame["patient"], strict=True))}
        place = np.array([at[key] for key in zip(frame["fold"], frame["patient"], strict=True)])
        heads.append("patient's answer")
        parts.append(names[patients.answer[place]].tolist())
        of_patient = patients.right[place].tolist()
    heads.append("result")
    parts.append(
        [
            ("right" if right else "wrong") + ("" if sure else ", too close to call")
            for right, sure in zip(slides.right, slides.sure, strict=True)
        ]
    )
    lines = zip(zip(*parts, strict=True), slides.right.tolist(), of_patient, turned.tolist(), strict=True)
    return heads, [Row(*found) for found in lines]


def _against_the_rest(cases: Cases) -> list[tuple[int, NDArray[np.bool_]]]:
    """(class, its cases), of two classes the second only; a class without cases, or with all, has no curve."""
    k = cases.p.shape[1]
    each = [(c, cases.truth == c) for c in (range(k) if k > 2 else (1,))]
    return [(c, positive) for c, positive in each if 0 < positive.sum() < len(positive)]


def _steps(recall: Sequence[float], precision: Sequence[float]) -> list[tuple[float, float]]:
    """From recall to recall at the precision reached there: the area below is the average precision."""
    points = [(recall[0], precision[0])]
    for i in range(1, len(recall)):
        points += [(recall[i - 1], precision[i]), (recall[i], precision[i])]
    return points


def _measures(k: int) -> dict[str, Callable[..., float]]:
    """Figures of (truth, answer), each (c); NaN where they rest on no case."""

    def accuracy(truth: NDArray, answer: NDArray) -> float:
        return float((truth == answer).mean())

    def recall(c: int) -> Callable[..., float]:
        def of_class(truth: NDArray, answer: NDArray) -> float:
            return float((answer[truth == c] == c).mean()) if (truth == c).any() else float("nan")

        return of_class

    def balanced_accuracy(truth: NDArray, answer: NDArray) -> float:
        counts = _confusion(truth, answer, k)
        there = counts.sum(1) > 0
        return float((counts.diagonal()[there] / counts.sum(1)[there]).mean())

    def f1_macro(truth: NDArray, answer: NDArray) -> float:
        counts = _confusion(truth, answer, k)
        sizes = counts.sum(0) + counts.sum(1)
        return float((2 * counts.diagonal()[sizes > 0] / sizes[sizes > 0]).mean())

    found = {"accuracy": accuracy, "balanced_accuracy": balanced_accuracy, "f1_macro": f1_macro}
    return found | ({"sensitivity": recall(1), "specificity": recall(0)} if k == 2 else {})


def _confusion(truth: NDArray, answer: NDArray, k: int) -> NDArray[np.int64]:
    return np.bincount(truth * k + answer, minlength=k * k).reshape(k, k)


def _interval(low: float | None, high: float | None) -> str:
    return "–" if low is None or high is None else f"{percent(low)} to {percent(high)}"
