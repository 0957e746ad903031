"""Which map finds the cancerous nuclei better, patient by patient, and which one may be fixed without a look at a test bag.

b bags, a patient each, f folds, s seeds, r = s f models: model i is of seed i // f and fold i % f.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from carmil.evidence import EXPLAINERS
from carmil.reproduce.crc import FOLDS
from carmil.reproduce.fold_bootstrap import Floats, fold_auc, fold_mean, resamples
from carmil.reproduce.table1 import Figure, figure
from carmil.statistics.bootstrap import Interval, percentiles

BASELINE = ("abmil.gated", "attention")
DEFAULT = ("car/abmil.gated", "path")
MEASURES = {"auprc": "AUPRC+", "auroc": "AUROC", "ndcg": "NDCG"}
REPEATS = 2000

Map = tuple[str, str]  # a model and an explainer


@dataclass(frozen=True)
class Folds:
    """tested and validated (f, b); labels (b)."""

    tested: NDArray[np.bool_]
    validated: NDArray[np.bool_]
    labels: NDArray


@dataclass(frozen=True)
class Measured:
    """What a model's population gave: answers (r, b), the probability of cancer; maps: explainer -> (3, r, b), a measure a
    row of MEASURES, NaN where a bag is not in the fold or not of both kinds of nuclei."""

    answers: Floats
    maps: dict[str, Floats]
    machines: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """A map: its figures in per cent over the seeds, its AUPRC+ and what it has more than the baseline over patients."""

    model: str
    evidence: str
    test: dict[str, Figure]
    validation: dict[str, Figure]
    auprc: Interval
    difference: Interval


@dataclass(frozen=True)
class Contrast:
    """How the map was fixed, the map of each fold, and these maps and their models against the baseline, in per cent."""

    fixed: str
    maps: tuple[Map, ...]
    auprc: Interval
    auprc_difference: Interval
    auc: Interval
    auc_difference: Interval


@dataclass(frozen=True)
class Result:
    rows: list[Row]
    contrasts: list[Contrast]
    aucs: dict[str, Figure]
    lines: list[str]


def compared(measured: Mapping[str, Measured], folds: Folds, lines: list[str]) -> Result:
    """A row a map; and the maps that are fixed, without a look at a test bag, against ABMIL's attention."""
    counts = resamples(folds.labels, repeats=REPEATS)
    every = [(model, method) for model, one in measured.items() for method in one.maps]
    rows = [_row(name, measured, folds, counts) for name in every]
    best = chosen([row for row in rows if _eligible((row.model, row.evidence))])
    ways = {
        "baseline": (BASELINE,) * FOLDS,
        "product default": (DEFAULT,) * FOLDS,
        "validation, all folds": (best,) * FOLDS,
        "validation, fold by fold": _chosen_by_fold([m for m in every if _eligible(m)], measured, folds),
    }
    contrasts = [_contrast(name, maps, measured, folds, counts) for name, maps in ways.items()]
    aucs = {model: figure(_seed_aucs(one, folds)) for model, one in measured.items()}
    return Result(rows, contrasts, aucs, lines)


def _eligible(name: Map) -> bool:
    """May it be the default: a map of CAR's that is signed and of a class, and not chance?"""
    model, method = name
    explainer = EXPLAINERS[method]
    return model.startswith("car/") and explainer.signed and explainer.class_conditional and method != "random"


def chosen(rows: Sequence[Row]) -> Map:
    """The map with the best mean AUPRC+ on validation bags."""
    best = max(rows, key=lambda row: row.validation["auprc"][0])
    return best.model, best.evidence


def _chosen_by_fold(names: Sequence[Map], measured: Mapping[str, Measured], folds: Folds) -> tuple[Map, ...]:
    """For each fold the best map on its own validation bags: none of them is a test bag of the same models."""
    found = np.stack([_by_fold(measured[m].maps[e][0], folds.validated).mean(0) for m, e in names])  # (maps, f)
    return tuple(names[i] for i in found.argmax(0))


def _row(name: Map, measured: Mapping[str, Measured], folds: Folds, counts: Floats) -> Row:
    values = measured[name[0]].maps[name[1]]
    test, validation = (
        {m: figure(_by_fold(one, bags).mean(1).tolist()) for m, one in zip(MEASURES, values, strict=True)}
        for bags in (folds.tested, folds.validated)
    )
    return Row(*name, test, validation, *_auprc_against((name,) * FOLDS, measured, folds, counts))


def _contrast(
    fixed: str, maps: tuple[Map, ...], measured: Mapping[str, Measured], folds: Folds, counts: Floats
) -> Contrast:
    own, other = (_answers(which, measured, folds) for which in (maps, (BASELINE,) * FOLDS))

    def area(scores: Floats, drawn: Floats) -> Floats:
        return fold_auc(scores, folds.labels, folds.tested, drawn)

    return Contrast(
        fixed,
        maps,
        *_auprc_against(maps, measured, folds, counts),
        _sure(lambda drawn: area(own, drawn), counts),
        _sure(lambda drawn: area(own, drawn) - area(other, drawn), counts, against_zero=True),
    )


def _auprc_against(
    maps: Sequence[Map], measured: Mapping[str, Measured], folds: Folds, counts: Floats
) -> tuple[Interval, Interval]:
    """AUPRC+ of each fold's map, and what it has more than the baseline's."""
    own, other = (_precisions(which, measured, folds) for which in (maps, (BASELINE,) * FOLDS))
    return (
        _sure(lambda drawn: fold_mean(own, folds.tested, drawn), counts),
        _sure(lambda drawn: fold_mean(own - other, folds.tested, drawn), counts, against_zero=True),
    )


def _sure(measure: Callable[[Floats], Floats], counts: Floats, *, against_zero: bool = False) -> Interval:
    """In per cent: the measure of counts (r, b) on the patients themselves, each once, and its interval."""
    value = 100 * measure(np.ones((1, counts.shape[1])))[0]
    return percentiles(float(value), 100 * measure(counts), against_zero=against_zero)


def _by_fold(values: Floats, bags: NDArray[np.bool_]) -> Floats:
    """(s, f) the mean over the fold's bags (f, b) that have a value; values (r, b)."""
    return np.nanmean(np.where(bags, values.reshape(-1, *bags.shape), np.nan), axis=-1)


def _tested(values: Floats, folds: Folds) -> Floats:
    """(s, b): of each patient what the models say that it is a test bag of; values (r, b)."""
    fold = folds.tested.argmax(0)
    return values.reshape(-1, *folds.tested.shape)[:, fold, np.arange(len(fold))]


def _precisions(maps: Sequence[Map], measured: Mapping[str, Measured], folds: Folds) -> Floats:
    """(b) average precision in each patient by the map of its fold, mean over the seeds."""
    fold = folds.tested.argmax(0)
    found = np.stack([_tested(measured[model].maps[method][0], folds).mean(0) for model, method in maps])  # (f, b)
    return found[fold, np.arange(len(fold))]


def _answers(maps: Sequence[Map], measured: Mapping[str, Measured], folds: Folds) -> Floats:
    """(s, b) each patient's probability of cancer by the model of its fold's map."""
    fold = folds.tested.argmax(0)
    found = np.stack([_tested(measured[model].answers, folds) for model, _ in maps])  # (f, s, b)
    return found[fold, :, np.arange(len(fold))].T


def _seed_aucs(one: Measured, folds: Folds) -> list[float]:
    once = np.ones((1, len(folds.labels)))
    return [float(fold_auc(row[None], folds.labels, folds.tested, once)[0]) for row in _tested(one.answers, folds)]
