"""From trained models to a finished run: thresholds on validation bags, then answers and figures of the test folds, once.

b bags of the store, m models that were kept.
"""

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from carmil.bags.splits import TEST
from carmil.runs.decision import Decision, rule_origin
from carmil.runs.facts import FoldFigures, FoldModel, Metrics
from carmil.runs.settings import Settings
from carmil.runs.writing import write_metrics, write_models, write_predictions
from carmil.statistics.operating import OperatingPoint, Rule, abstention, threshold
from carmil.studies.agreement import map_figures
from carmil.studies.cautions import readings
from carmil.studies.cohort import Cohort, Material
from carmil.studies.decisions import JOINT, RULE, joint_answers
from carmil.studies.figures import (
    MEAN_OVER_FOLDS,
    calibration,
    fold_answers,
    intervals,
    mean_over_seeds,
    measure,
    summarise_folds,
)
from carmil.studies.predictions import ATTENTION, class_numbers, merge_patients, predict_frame, probabilities
from carmil.training.protocol import GridPoint, SelectedModel, Selection, validation_bags

if TYPE_CHECKING:
    import pandas as pd


def evaluate_folds(settings: Settings, material: Material, trained: Selection, grid: list[GridPoint]) -> None:
    """Choose thresholds on validation bags, then evaluate the test folds, once, and write the files of the run."""
    groups = _groups(trained, material.roles, settings)
    points = {group: _operating_point(group, trained, material.cohort, settings) for group in groups}
    _evaluate(settings, material.cohort, trained, grid, points)


@dataclass(frozen=True, eq=False)
class _Group:
    """The models that answer together for a test fold: one, or the inner models of a nested fold."""

    fold: int
    seed: int
    models: tuple[int, ...]
    roles: Tensor  # (inner, b)

    @property
    def tested(self) -> Tensor:
        return (self.roles[0] == TEST).nonzero().squeeze(-1)


def _groups(trained: Selection, roles: Tensor, settings: Settings) -> list[_Group]:
    inner = settings.inner
    folds = roles.shape[1] // inner
    seeds = sorted({kept.seed for kept in trained.models})
    groups: dict[tuple[int, int], list[int]] = {}
    for row, kept in enumerate(trained.models):
        groups.setdefault((seeds.index(kept.seed), kept.fold), []).append(row)
    return [
        _Group(
            fold=fold + (division * folds if len(roles) > 1 else 0),
            seed=seeds[division],
            models=tuple(rows),
            roles=roles[division if len(roles) > 1 else 0, fold * inner : (fold + 1) * inner],
        )
        for (division, fold), rows in groups.items()
    ]


@dataclass(frozen=True)
class _Point:
    """What validation bags chose: the threshold (two classes), and the confidence below which there is no answer."""

    at: OperatingPoint | None
    cut: float | None


def _operating_point(group: _Group, trained: Selection, cohort: Cohort, settings: Settings) -> _Point:
    import pandas as pd

    parts = []
    for row, roles in zip(group.models, group.roles, strict=True):
        chosen = validation_bags(roles)
        part = predict_frame(trained.population, [row], cohort.bags, chosen, cohort.classes)
        parts.append(_with_labels(part, cohort, chosen))
    frame = _cases(pd.concat(parts), cohort, settings)
    p, rule = probabilities(frame, cohort.classes), Rule.parse(settings.threshold)
    at = threshold(class_numbers(frame, cohort.classes), p[:, 1], rule) if len(cohort.classes) == 2 else None
    cut = None
    if settings.abstain > 0:
        cut = abstention(p if at is None else p[:, 1], settings.abstain, None if at is None else at.threshold)
    return _Point(at, cut)


def _with_labels(frame: "pd.DataFrame", cohort: Cohort, chosen: Tensor) -> "pd.DataFrame":
    assert cohort.bags.labels is not None
    patient = dict(zip(cohort.slides, cohort.patients, strict=True))
    frame.insert(1, "patient", [patient[slide] for slide in frame["slide"]])
    frame.insert(2, "label", [cohort.classes[i] for i in cohort.bags.labels[chosen].tolist()])
    return frame


def _cases(frame: "pd.DataFrame", cohort: Cohort, settings: Settings) -> "pd.DataFrame":
    """One row per case that figures are of: a patient, or a slide where slides of a patient have different labels."""
    if settings.patients == "one-bag" or not cohort.has_patients:
        return frame
    return merge_patients(frame, cohort.classes, settings.patients)


def _evaluate(
    settings: Settings, cohort: Cohort, trained: Selection, grid: list[GridPoint], points: dict[_Group, _Point]
) -> None:
    """Evaluate the test folds. Nothing is chosen from here on."""
    import pandas as pd

    frames, by_fold = [], []
    decisions: dict[tuple[int, int], Decision] = {}
    attention: dict[str, list[float]] = {name: [] for name in ATTENTION}
    level: Literal["slide", "patient"] = "patient" if cohort.has_patients else "slide"
    chosen = {(None if point.at is None else point.at.threshold, point.cut) for point in points.values()}
    one_rule = len(chosen) == 1 or len({group.fold for group in points}) == 1
    for group, point in points.items():
        frame = predict_frame(
            trained.population, group.models, cohort.bags, group.tested, cohort.classes, attention=True
        )
        for name in set(ATTENTION) & set(frame):
            attention[name] += frame.pop(name).to_list()
        frame = _with_labels(frame, cohort, group.tested)
        frame.insert(0, "fold", group.fold)
        frame.insert(1, "seed", group.seed)
        at = None if point.at is None else point.at.threshold
        decision = Decision(cohort.classes, at, point.cut)
        folds = [] if one_rule else [group.fold]
        origin = rule_origin(settings.threshold, [decision], folds=folds, level=level, patients=settings.patients)
        decision = replace(decision, origin=origin)
        decisions[group.fold, group.seed] = decision
        figures = measure(_cases(frame, cohort, settings), cohort.classes, decision)
        frame["answer"] = decision.answers(probabilities(frame, cohort.classes))
        frame[RULE] = decision.rule
        for name, values in map_figures(trained.population, group.models, cohort.bags, group.tested).items():
            frame[name] = values
            figures[name] = float(frame[name].mean())
        by_fold.append(FoldFigures(group.fold, group.seed, figures, at))
        frames.append(frame)
    frame = pd.concat(frames, ignore_index=True)
    if frame["slide"].duplicated().any():  # several seeds, or divisions into folds
        frame[RULE] = "this model alone: " + frame[RULE]
        frame[JOINT] = joint_answers(frame, decisions)
    judged = _cases(frame, cohort, settings)
    rules = [decisions[fold, seed] for fold, seed in zip(judged["fold"], judged["seed"], strict=True)]
    together = _cases(mean_over_seeds(frame, cohort.classes), cohort, settings)
    out = settings.out
    write_predictions(out, frame)
    known = {row: point for group, point in points.items() for row in group.models}
    models = [_fold_model(kept, grid[kept.point], known[row]) for row, kept in enumerate(trained.models)]
    write_models(out, trained.population, trained.history, models)
    p, y = probabilities(together, cohort.classes), class_numbers(together, cohort.classes)
    metrics = Metrics(
        level=level,
        rule=settings.patients,
        summary=summarise_folds(by_fold),
        intervals_of=MEAN_OVER_FOLDS,
        intervals=intervals(fold_answers(judged, cohort.classes, rules)),
        calibration=calibration(together, cohort.classes),
        readings=readings(p, y, attention["attention_moved"], attention["attention_spread"]),
        by_fold=tuple(by_fold),
    )
    write_metrics(out, metrics)


def _fold_model(kept: SelectedModel, point: GridPoint, chosen: _Point) -> FoldModel:
    at = chosen.at
    decided: dict[str, Any] = (
        {}
        if at is None
        else {
            "rule": str(at.rule),
            "validation_sensitivity": at.sensitivity,
            "validation_specificity": at.specificity,
            "threshold_note": at.note,
        }
    )
    return FoldModel(
        **asdict(kept),
        lr=point.lr,
        settings=dict(point.settings),
        threshold=None if at is None else at.threshold,
        abstain_below=chosen.cut,
        **decided,
    )
