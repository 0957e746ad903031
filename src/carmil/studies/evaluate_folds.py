"""Turn trained models into a finished run: thresholds on validation bags, then answers and figures of the test
folds, once.

b bags of the store, m selected models.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from carmil.bags.splits import CALIBRATION, TEST, TRAIN, UNUSED, VALIDATION
from carmil.runs.calibration_slides import write_calibration
from carmil.runs.facts import Adjustment, Baseline, FoldFigures, FoldModel, Metrics
from carmil.runs.run import DISTANCE, fingerprint_weights
from carmil.runs.scopes import write_scopes
from carmil.runs.settings import Settings
from carmil.runs.writing import write_metrics, write_models, write_predictions
from carmil.statistics.hazards import mean_of_steps
from carmil.statistics.operating import OperatingPoint, Rule, abstention
from carmil.statistics.scope import Scope
from carmil.studies.adjustment import FoldCases, measure_adjustment
from carmil.studies.agreement import map_figures
from carmil.studies.baseline_hazards import baseline_hazards
from carmil.studies.calibrate import calibrate
from carmil.studies.cautions import readings
from carmil.studies.cohort import Cohort, Material
from carmil.studies.conformal import SetCalibration, add_sets
from carmil.studies.figures import (
    MEAN_OVER_FOLDS,
    calibration,
    fold_answers,
    intervals,
    mean_over_seeds,
    measure,
    summarise_folds,
)
from carmil.studies.predictions import ATTENTION, merge_patients, outcomes, predict_frame, predicted
from carmil.studies.scope import fit_scopes, joint_distance
from carmil.studies.subjects import JOINT, RULE, joint_answers
from carmil.targets import Survival, Target
from carmil.targets.decision import Decision
from carmil.targets.target import Training
from carmil.training.bag_moments import bag_moments
from carmil.training.history import History
from carmil.training.population import Member, Population
from carmil.training.protocol import GridPoint, SelectedModel, Selection, validation_bags


def evaluate_folds(settings: Settings, material: Material, trained: Selection, grid: list[GridPoint]) -> None:
    """Choose thresholds on validation bags, then evaluate the test folds, once, and write the files of the run."""
    groups = _groups(trained, material.roles, settings)
    points = {group: _operating_point(group, trained, material.cohort, settings) for group in groups}
    _evaluate(settings, material.cohort, trained, grid, points)


def evaluate_imported(settings: Settings, target: Target, population: Population, cohort: Cohort | None) -> None:
    """Write the files of a run whose only model was trained elsewhere.

    All labelled bags of the cohort are one test fold, in which nothing is chosen: with two classes the threshold is 0.5.
    """
    at = OperatingPoint(0.5, Rule.parse("0.5"), math.nan, math.nan) if len(target.outputs) == 2 else None
    point, grid = _Point(at, None), [GridPoint(lr=Member().lr)]
    model = SelectedModel(fold=0, inner=0, seed=0, point=0, best_epoch=0, validation_loss=math.nan)
    none = torch.zeros(1, dtype=torch.long)
    imported = Selection(population, (model,), History({}, torch.zeros(0, 1), none, none))
    if cohort is not None:
        roles = torch.full((1, len(cohort.bags)), UNUSED).index_fill(1, cohort.known, TEST)
        _evaluate(settings, cohort, imported, grid, {_Group(0, 0, (0,), roles): point})
        return
    write_models(settings.out, population, imported.history, [_fold_model(model, grid[0], point, None)])
    write_metrics(settings.out, Metrics("patient", settings.patients, {}, {}, None, ()))


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
    """The threshold, if the target has one, and the confidence below which no answer is given, as chosen on validation bags."""

    at: OperatingPoint | None
    cut: float | None


def _operating_point(group: _Group, trained: Selection, cohort: Cohort, settings: Settings) -> _Point:
    parts, target = [], cohort.target
    for row, roles in zip(group.models, group.roles, strict=True):
        part = predict_frame(trained.population, [row], cohort.bags, validation_bags(roles), target)
        parts.append(cohort.add_labels(part))
    frame = _cases(pd.concat(parts), cohort, settings)
    p = predicted(frame, target)
    at = target.operating_point(p, outcomes(frame, target), Rule.parse(settings.threshold))
    cut = None
    if settings.abstain > 0:
        cut = abstention(p if at is None else p[:, 1], settings.abstain, None if at is None else at.threshold)
    return _Point(at, cut)


@dataclass(frozen=True, eq=False)
class _Trained:
    """Facts about the training bags of grouped models. baselines: one per model, None unless the target is a time."""

    training: Training
    baselines: tuple[Baseline | None, ...]


def _training(group: _Group, trained: Selection, cohort: Cohort) -> _Trained:
    """Return the outcomes of a group's training bags and, for a time to an event, the baseline hazard of each model."""
    assert cohort.bags.labels is not None
    roles = group.roles == TRAIN
    everything = cohort.bags.labels.numpy()
    outcomes = everything[roles.any(0).numpy()]
    if not cohort.target.timed:
        return _Trained(Training(outcomes), (None,) * len(group.models))
    models = trained.population.subset(torch.tensor(group.models, device=trained.population.device))
    baselines = baseline_hazards(models, cohort.bags, everything, roles)
    return _Trained(Training(outcomes, mean_of_steps([one.function for one in baselines])), baselines)


def _adjustment(
    settings: Settings, cohort: Cohort, trained: Selection, groups: Sequence[_Group], judged: pd.DataFrame
) -> Adjustment | None:
    """Measure how much the risk improves on the covariates, if there are any. judged: the predictions of all test
    cases.
    """
    covariates, target = cohort.covariates, cohort.target
    if covariates is None or not isinstance(target, Survival):
        return None
    level = "patient" if "slide" not in judged else "slide"
    of_case = covariates.set_axis(cohort.patients, axis=0) if level == "patient" else covariates
    of_case = of_case[~of_case.index.duplicated()]

    def with_covariates(frame: pd.DataFrame) -> pd.DataFrame:
        return pd.concat(
            [frame.assign(case=frame[level]).reset_index(drop=True), of_case.loc[frame[level]].reset_index(drop=True)],
            axis=1,
        )

    def outcomes_of(bags: Tensor) -> pd.DataFrame:
        frame = cohort.add_labels(pd.DataFrame({"slide": [cohort.bags.ids[i] for i in bags.tolist()]}))
        return frame.drop_duplicates(level)

    folds = []
    for group in groups:
        risks = [
            cohort.add_labels(predict_frame(trained.population, [row], cohort.bags, validation_bags(roles), target))
            for row, roles in zip(group.models, group.roles, strict=True)
        ]
        mine = (judged["fold"] == group.fold) & (judged["seed"] == group.seed)
        learned = ((group.roles == TRAIN) | (group.roles == VALIDATION)).any(0).nonzero().squeeze(-1)
        folds.append(
            FoldCases(
                group.fold,
                group.seed,
                training=with_covariates(outcomes_of(learned)),
                validation=with_covariates(_cases(pd.concat(risks), cohort, settings)),
                test=with_covariates(judged[mine]),
            )
        )
    return measure_adjustment(folds, target, list(map(str, covariates.columns)))


def _cases(frame: pd.DataFrame, cohort: Cohort, settings: Settings) -> pd.DataFrame:
    """Return one row per case that is scored: a patient, or a slide if slides of a patient have different labels."""
    if settings.patients == "one-bag" or not cohort.has_patients:
        return frame
    return merge_patients(frame, cohort.target, settings.patients)


def _evaluate(
    settings: Settings, cohort: Cohort, trained: Selection, grid: list[GridPoint], points: dict[_Group, _Point]
) -> None:
    """Evaluate the test folds. No parameter is chosen from here on."""
    frames, by_fold, target = [], [], cohort.target
    decisions: dict[tuple[int, int], Decision] = {}
    attention: dict[str, list[float]] = {name: [] for name in ATTENTION}
    level: Literal["slide", "patient"] = "patient" if cohort.has_patients else "slide"
    training = {group: _training(group, trained, cohort) for group in points}
    chosen = {(None if point.at is None else point.at.threshold, point.cut) for point in points.values()}
    one_rule = len(chosen) == 1 or len({group.fold for group in points}) == 1
    for group, point in points.items():
        frame = predict_frame(trained.population, group.models, cohort.bags, group.tested, target, attention=True)
        for name in set(ATTENTION) & set(frame):
            attention[name] += frame.pop(name).to_list()
        frame = cohort.add_labels(frame)
        frame.insert(0, "fold", group.fold)
        frame.insert(1, "seed", group.seed)
        at = None if point.at is None else point.at.threshold
        decision = target.decision(at, point.cut)
        folds = [] if one_rule else [group.fold]
        origin = target.rule_origin(
            settings.threshold, [decision], folds=folds, level=level, patients=settings.patients
        )
        decision = replace(decision, origin=origin)
        decisions[group.fold, group.seed] = decision
        figures = measure(_cases(frame, cohort, settings), target, decision, training[group].training)
        frame["answer"] = decision.answers(predicted(frame, target))
        frame[RULE] = decision.rule
        for name, values in map_figures(trained.population, group.models, cohort.bags, group.tested).items():
            frame[name] = values
            figures[name] = float(frame[name].mean())
        by_fold.append(FoldFigures(group.fold, group.seed, figures, at))
        frames.append(frame)
    frame = pd.concat(frames, ignore_index=True)
    scopes = _add_distances(frame, cohort, list(points), len(trained.models), str(trained.population.device))
    if frame["slide"].duplicated().any():  # several seeds, or divisions into folds
        frame[RULE] = "this model alone: " + frame[RULE]
        frame[JOINT] = joint_answers(frame, target, decisions)
    judged = _cases(frame, cohort, settings)
    rules = [decisions[fold, seed] for fold, seed in zip(judged["fold"], judged["seed"], strict=True)]
    together = _cases(mean_over_seeds(frame, target), cohort, settings)
    out = settings.out
    known = {row: point for group, point in points.items() for row in group.models}
    baselines = {row: one for group in points for row, one in zip(group.models, training[group].baselines, strict=True)}
    models = [
        _fold_model(kept, grid[kept.point], known[row], baselines[row]) for row, kept in enumerate(trained.models)
    ]
    write_models(out, trained.population, trained.history, models)
    if scopes is not None:
        write_scopes(out, scopes)
    sets = None
    if settings.conformal is not None:
        aside = _calibrate(settings, cohort, trained, list(points))
        sets = add_sets(frame, aside, {(group.fold, group.seed): group.models for group in points})
    write_predictions(out, frame)
    p, y = predicted(together, target), outcomes(together, target)
    metrics = Metrics(
        level=level,
        rule=settings.patients,
        summary=summarise_folds(by_fold),
        intervals_of=MEAN_OVER_FOLDS,
        intervals=intervals(target, fold_answers(judged, target, rules)),
        calibration=calibration(together, target),
        readings=readings(target, p, y, attention["attention_moved"], attention["attention_spread"]),
        adjustment=_adjustment(settings, cohort, trained, list(points), judged),
        by_fold=tuple(by_fold),
        prediction_sets=sets,
    )
    write_metrics(out, metrics)


def _add_distances(
    frame: pd.DataFrame, cohort: Cohort, groups: Sequence[_Group], models: int, device: str
) -> list[Scope] | None:
    """Fit the scope of every model on its own training bags, and add the distances of the test slides to their rows."""
    trained = np.zeros((models, len(cohort.bags)), dtype=bool)
    for group in groups:
        trained[list(group.models)] = (group.roles == TRAIN).numpy()
    known = cohort.known.numpy()
    moments = bag_moments(cohort.bags, cohort.known, device=device)
    scopes = fit_scopes(moments, cohort.patients, trained[:, known])
    if scopes is not None:
        place = {slide: i for i, slide in enumerate(cohort.slides)}
        for group in groups:
            rows = (frame["fold"] == group.fold) & (frame["seed"] == group.seed)
            tested = moments[np.array([place[slide] for slide in frame.loc[rows, "slide"]])]
            frame.loc[rows, DISTANCE] = joint_distance(scopes, group.models, tested)
    return scopes


def _calibrate(settings: Settings, cohort: Cohort, trained: Selection, groups: Sequence[_Group]) -> SetCalibration:
    """Predict the slides of the calibration part, which is the same in every fold, with every model, and write them."""
    assert settings.conformal is not None
    aside = (groups[0].roles[0] == CALIBRATION).nonzero().squeeze(-1)
    weights = fingerprint_weights(settings.out)
    slides = calibrate(trained.population, cohort, aside, settings.conformal, weights=weights)
    write_calibration(settings.out, slides)
    return SetCalibration(cohort.target, slides, settings.patients)


def _fold_model(kept: SelectedModel, point: GridPoint, chosen: _Point, baseline: Baseline | None) -> FoldModel:
    facts = {**asdict(kept), "lr": point.lr, "settings": dict(point.settings), "abstain_below": chosen.cut}
    facts["baseline"] = baseline
    at = chosen.at
    if at is None:
        return FoldModel(**facts, threshold=None)
    return FoldModel(
        **facts,
        threshold=at.threshold,
        rule=str(at.rule),
        validation_sensitivity=at.sensitivity,
        validation_specificity=at.specificity,
        threshold_note=at.note,
    )
