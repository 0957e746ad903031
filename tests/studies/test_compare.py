"""Runs are compared on the same cases by any shared figure; the basis of a t-test is stated."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_rel
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score

from carmil.errors import CarmilError
from carmil.runs.facts import FoldFigures
from carmil.studies.compare import ComparedRun, compare_pairs, compare_runs, comparison_table, each_fold
from carmil.studies.predictions import outcomes as given
from carmil.studies.predictions import predicted
from carmil.targets import Classes, Labels, Ordinal, Survival, Value


def compared_run(name, measure, p, labels, by_fold, **columns):
    """Return a compared run with one patient per case; p is the probability of class b."""
    data = SimpleNamespace(splits=(((0,),),))
    target = Classes(names=("a", "b"))
    run = SimpleNamespace(name=name, target=target, outputs=target.outputs, data=data, merges_slides=False)
    slides = [f"s{i:02d}" for i in range(len(p))]
    cases = {"fold": 0, "seed": 0, "slide": slides, "patient": slides, "label": ["ab"[y] for y in labels]}
    frame = pd.DataFrame({**cases, "p_a": 1 - np.asarray(p), "p_b": p, **columns})
    return ComparedRun(name, measure, run, frame, by_fold)


LABELS = np.arange(40) % 2
RNG = np.random.default_rng(0)
GOOD, POOR = (np.clip(0.5 + s * (LABELS - 0.5) + RNG.normal(0, 0.3, 40), 0.01, 0.99) for s in (0.9, 0.2))
FOLDS = [[FoldFigures(f, s, {"f1_macro": v + s / 100}, 0.5) for f, v in enumerate(vs) for s in (0, 1)]
         for vs in ([0.9, 0.8, 0.85], [0.6, 0.7, 0.5])]  # fmt: skip


@pytest.mark.parametrize(
    ("measure", "by_hand"),
    [("balanced_accuracy", balanced_accuracy_score), ("f1_macro", lambda y, a: f1_score(y, a, average="macro"))],
)
def test_difference_equals_scikit_learn_and_lies_in_its_interval(measure, by_hand):
    first, second = (compared_run(n, measure, p, LABELS, f) for n, p, f in zip("ab", (GOOD, POOR), FOLDS, strict=True))
    (result,) = compare_pairs([(first, second)])
    assert result.difference == pytest.approx(by_hand(LABELS, GOOD > 0.5) - by_hand(LABELS, POOR > 0.5))
    assert result.low < result.difference < result.high
    assert np.isnan(result.p_delong)  # the DeLong test applies to AUC only


def test_f1_difference_uses_the_threshold_of_each_run():
    def f1(p, threshold):
        return f1_score(LABELS, p >= threshold, average="macro")

    first, second = (
        compared_run(name, "f1_macro", p, LABELS, [FoldFigures(0, 0, {"f1_macro": f1(p, at)}, at)])
        for name, p, at in (("a", GOOD, GOOD[LABELS == 1].min()), ("b", POOR, 0.7))
    )
    (result,) = compare_pairs([(first, second)])
    assert result.difference == pytest.approx(
        first.by_fold[0].figures["f1_macro"] - second.by_fold[0].figures["f1_macro"]
    )
    assert result.difference != pytest.approx(f1(GOOD, 0.5) - f1(POOR, 0.5))
    unknown = compared_run("c", "f1_macro", GOOD, LABELS, [FoldFigures(0, 0, {"f1_macro": 1.0})])
    with pytest.raises(CarmilError, match="c does not record its decision thresholds"):
        compare_pairs([(first, unknown)])


def test_paired_t_test_is_over_folds_or_over_seeds_of_a_single_fold():
    first, second = (
        compared_run(n, "f1_macro", p, LABELS, f) for n, p, f in zip("ab", (GOOD, POOR), FOLDS, strict=True)
    )
    (result,) = compare_pairs([(first, second)])
    assert (result.pairs, result.p_t) == ("folds", pytest.approx(ttest_rel([0.9, 0.8, 0.85], [0.6, 0.7, 0.5]).pvalue))
    heads = ("difference of mean macro F1", "95 % interval of that", "p paired t", "p over patients", "p DeLong")
    assert comparison_table([result]).heads[2:] == heads
    seeds = [[FoldFigures(0, s, {"f1_macro": v}, 0.5) for s, v in enumerate(vs)] for vs in ([0.9, 0.8], [0.7, 0.65])]
    first, second = (
        compared_run(n, "f1_macro", p, LABELS, f) for n, p, f in zip("ab", (GOOD, POOR), seeds, strict=True)
    )
    (result,) = compare_pairs([(first, second)])
    assert (result.pairs, result.p_t) == ("seeds", pytest.approx(ttest_rel([0.9, 0.8], [0.7, 0.65]).pvalue))
    assert comparison_table([result]).heads[4] == "p paired t over seeds"
    assert each_fold(seeds[0], "f1_macro") == {0: 0.9, 1: 0.8}
    assert each_fold(FOLDS[0], "f1_macro")[1] == pytest.approx(0.805)


def test_map_figures_are_compared_on_slides_with_known_truth():
    known = np.where(LABELS == 1, GOOD, np.nan)
    first = compared_run("a", "auprc_attention", GOOD, LABELS, [], auprc_attention=known)
    second = compared_run("b", "auprc_rollout", GOOD, LABELS, [], auprc_rollout=known - 0.1)
    (result,) = compare_pairs([(first, second)])
    assert result.difference == pytest.approx(0.1)
    assert 0 < result.low < 0.1 < result.high < 0.2
    with pytest.raises(CarmilError, match=r"c has no AUPRC\+ attention per slide"):
        compare_pairs([(first, compared_run("c", "auprc_attention", GOOD, LABELS, []))])


def test_p_values_are_corrected_for_the_number_of_requested_pairs():
    first, second = (compared_run(n, "auc", p, LABELS, []) for n, p in (("a", GOOD), ("b", POOR)))
    (alone,) = compare_pairs([(first, second)])
    together = compare_pairs([(first, second), (second, first), (first, first)])
    assert alone.holm_patients == alone.p_patients
    assert together[0].holm_patients == pytest.approx(min(1, 3 * alone.p_patients))
    assert (together[0].difference, together[0].low) == pytest.approx((-together[1].difference, -together[1].high))
    assert (together[2].difference, together[2].p_patients) == (0, 1)


def run_with_folds(name, p, **others):
    """Return a compared run with four folds of ten cases, each with its own figures."""
    fold = np.arange(40) // 10
    by_fold = [FoldFigures(f, 0, {"auc": roc_auc_score(LABELS[fold == f], p[fold == f])}, 0.5) for f in range(4)]
    return compared_run(name, "auc", p, LABELS, by_fold, fold=fold, **others)


@pytest.mark.finding(n=17)
def test_difference_is_between_means_over_folds():
    shifted = np.clip(
        GOOD * 0.25 + 0.25 * (np.arange(40) // 10), 0.001, 0.999
    )  # scores of different folds are not comparable when pooled
    first, second = run_with_folds("a", shifted), run_with_folds("b", POOR)
    means = [np.mean([line.figures["auc"] for line in one.by_fold]) for one in (first, second)]
    (result,) = compare_pairs([(first, second)])
    assert result.difference == pytest.approx(means[0] - means[1])
    pooled = roc_auc_score(LABELS, shifted) - roc_auc_score(LABELS, POOR)
    assert abs(result.difference - pooled) > 0.05
    assert result.low < result.difference < result.high
    assert not np.isnan(result.p_delong)
    table = comparison_table([result])
    assert table.title.startswith("Pairs of runs: first minus second of the means over folds above")
    assert table.heads[2:4] == ("difference of mean AUC", "95 % interval of that")
    assert table.lines[0][2] == f"{100 * (means[0] - means[1]):+.1f}"


@pytest.mark.finding(n=4)
def test_difference_of_two_perfect_runs_has_a_nonzero_interval():
    perfect = run_with_folds("a", 0.1 + 0.8 * LABELS), run_with_folds("b", 0.2 + 0.6 * LABELS)
    for measure in ("auc", "balanced_accuracy", "f1_macro"):
        ((result),) = compare_pairs([tuple(replace(one, measure=measure) for one in perfect)])
        assert (result.difference, result.p_patients) == (0, 1)
        assert result.low < -0.02 and result.high > 0.02


@pytest.mark.finding(n=17)
def test_zero_difference_is_printed_with_a_plus_sign():
    (result,) = compare_pairs([(run_with_folds("a", GOOD), run_with_folds("b", GOOD))])
    line = comparison_table([replace(result, difference=-0.0, low=-0.0004, high=0.0004)]).lines[0]
    assert line[2:4] == ("+0.0", "+0.0 to +0.0")


TIMES = RNG.exponential(np.exp(-RNG.normal(size=40)))
RISKS = {"first": -np.log(TIMES) + RNG.normal(0, 0.5, 40), "second": RNG.normal(size=40)}
EVENTS = (RNG.random(40) < 0.7).astype(int)


def run_of(target, name, frame, outcomes):
    """Return a run of 2 folds with these predictions, each case a patient of its own."""
    slides = [f"s{i:02d}" for i in range(len(frame))]
    cases = pd.DataFrame({"fold": np.arange(len(frame)) % 2, "seed": 0, "slide": slides, "patient": slides, **outcomes})
    whole = pd.concat([cases, frame], axis=1)
    by_fold = [
        FoldFigures(fold, 0, {target.key_figure: target.key_measure(predicted(part, target), given(part, target))})
        for fold, part in whole.groupby("fold")
    ]
    data = SimpleNamespace(splits=(((0,), (1,)),))
    return SimpleNamespace(
        name=name,
        target=target,
        outputs=target.outputs,
        data=data,
        merges_slides=False,
        predictions=lambda: whole,
        metrics=SimpleNamespace(by_fold=by_fold),
    )


@pytest.mark.parametrize(
    ("target", "outcomes", "predictions"),
    [
        (Survival(), {"time": TIMES, "event": EVENTS}, lambda r: {"risk": r}),
        (Value(columns=("age",)), {"label": -TIMES}, lambda r: {"predicted": r}),
        (
            Labels(columns=("node", "her2")),
            {"label_node": EVENTS, "label_her2": TIMES < 1},
            lambda r: {"p_node": np.exp(r) / (1 + np.exp(r)), "p_her2": np.exp(r) / (1 + np.exp(r))},
        ),
        (
            Ordinal(columns=("grade",), names=("a", "b")),
            {"label": np.where(TIMES < 1, "b", "a")},
            lambda r: {"p_a": 1 / (1 + np.exp(r)), "p_b": np.exp(r) / (1 + np.exp(r))},
        ),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_runs_of_every_target_are_compared_by_its_key_figure(target, outcomes, predictions):
    runs = [run_of(target, name, pd.DataFrame(predictions(risk)), outcomes) for name, risk in RISKS.items()]
    (result,) = compare_runs(runs)
    means = [np.mean([one.figures[target.key_figure] for one in run.metrics.by_fold]) for run in runs]
    assert result.measure == target.key_figure
    assert result.difference == pytest.approx(means[0] - means[1])
    assert result.low < result.difference < result.high
    assert 0 < result.p_patients < 0.2 and np.isnan(result.p_delong)
    assert not np.isnan(result.p_t)
