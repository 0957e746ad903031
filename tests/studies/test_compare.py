"""Runs are compared on the same cases by any figure they have; what a t-test rests on is said."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_rel
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score

from carmil.errors import CarmilError
from carmil.runs.facts import FoldFigures
from carmil.studies.compare import ComparedRun, compare_pairs, comparison_table, each_fold


def judged(name, measure, p, labels, by_fold, **columns):
    """Answers of one model to cases of their own patients; p is that of class b."""
    data = SimpleNamespace(splits=(((0,),),))
    run = SimpleNamespace(name=name, classes=("a", "b"), data=data, merges_slides=False)
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
def test_a_difference_is_scikit_learns_and_its_interval_is_around_it(measure, by_hand):
    first, second = (judged(n, measure, p, LABELS, f) for n, p, f in zip("ab", (GOOD, POOR), FOLDS, strict=True))
    (found,) = compare_pairs([(first, second)])
    assert found.difference == pytest.approx(by_hand(LABELS, GOOD > 0.5) - by_hand(LABELS, POOR > 0.5))
    assert found.low < found.difference < found.high
    assert np.isnan(found.p_delong)  # DeLong is about AUC


def test_f1_is_of_the_answers_that_were_given_from_each_runs_own_threshold_on():
    def f1(p, threshold):
        return f1_score(LABELS, p >= threshold, average="macro")

    first, second = (
        judged(name, "f1_macro", p, LABELS, [FoldFigures(0, 0, {"f1_macro": f1(p, at)}, at)])
        for name, p, at in (("a", GOOD, GOOD[LABELS == 1].min()), ("b", POOR, 0.7))
    )
    (found,) = compare_pairs([(first, second)])
    assert found.difference == pytest.approx(
        first.by_fold[0].figures["f1_macro"] - second.by_fold[0].figures["f1_macro"]
    )
    assert found.difference != pytest.approx(f1(GOOD, 0.5) - f1(POOR, 0.5))
    unknown = judged("c", "f1_macro", GOOD, LABELS, [FoldFigures(0, 0, {"f1_macro": 1.0})])
    with pytest.raises(CarmilError, match="c does not say where its answers begin"):
        compare_pairs([(first, unknown)])


def test_t_is_over_folds_and_of_one_fold_over_its_seeds_which_the_table_says():
    first, second = (judged(n, "f1_macro", p, LABELS, f) for n, p, f in zip("ab", (GOOD, POOR), FOLDS, strict=True))
    (found,) = compare_pairs([(first, second)])
    assert (found.pairs, found.p_t) == ("folds", pytest.approx(ttest_rel([0.9, 0.8, 0.85], [0.6, 0.7, 0.5]).pvalue))
    heads = ("difference of mean macro F1", "95 % interval of that", "p paired t", "p over patients", "p DeLong")
    assert comparison_table([found]).heads[2:] == heads
    seeds = [[FoldFigures(0, s, {"f1_macro": v}, 0.5) for s, v in enumerate(vs)] for vs in ([0.9, 0.8], [0.7, 0.65])]
    first, second = (judged(n, "f1_macro", p, LABELS, f) for n, p, f in zip("ab", (GOOD, POOR), seeds, strict=True))
    (found,) = compare_pairs([(first, second)])
    assert (found.pairs, found.p_t) == ("seeds", pytest.approx(ttest_rel([0.9, 0.8], [0.7, 0.65]).pvalue))
    assert comparison_table([found]).heads[4] == "p paired t over seeds"
    assert each_fold(seeds[0], "f1_macro") == {0: 0.9, 1: 0.8}
    assert each_fold(FOLDS[0], "f1_macro")[1] == pytest.approx(0.805)


def test_maps_are_compared_on_the_slides_they_can_be_judged_on_each_by_its_own_map():
    known = np.where(LABELS == 1, GOOD, np.nan)
    first = judged("a", "auprc_attention", GOOD, LABELS, [], auprc_attention=known)
    second = judged("b", "auprc_rollout", GOOD, LABELS, [], auprc_rollout=known - 0.1)
    (found,) = compare_pairs([(first, second)])
    assert found.difference == pytest.approx(0.1)
    assert 0 < found.low < 0.1 < found.high < 0.2
    with pytest.raises(CarmilError, match=r"c has no AUPRC\+ attention of single slides"):
        compare_pairs([(first, judged("c", "auprc_attention", GOOD, LABELS, []))])


def test_p_values_are_corrected_for_the_pairs_that_were_asked_for():
    first, second = (judged(n, "auc", p, LABELS, []) for n, p in (("a", GOOD), ("b", POOR)))
    (alone,) = compare_pairs([(first, second)])
    together = compare_pairs([(first, second), (second, first), (first, first)])
    assert alone.holm_patients == alone.p_patients
    assert together[0].holm_patients == pytest.approx(min(1, 3 * alone.p_patients))
    assert (together[0].difference, together[0].low) == pytest.approx((-together[1].difference, -together[1].high))
    assert (together[2].difference, together[2].p_patients) == (0, 1)


def folds_of(name, p, **others):
    """Four folds of ten cases, each with its threshold and its figures; the scores of a fold lie elsewhere than another's."""
    fold = np.arange(40) // 10
    by_fold = [FoldFigures(f, 0, {"auc": roc_auc_score(LABELS[fold == f], p[fold == f])}, 0.5) for f in range(4)]
    return judged(name, "auc", p, LABELS, by_fold, fold=fold, **others)


@pytest.mark.finding(n=17)
def test_compare_gives_the_difference_of_the_fold_means_that_it_prints_and_its_table_says_so():
    shifted = np.clip(GOOD * 0.25 + 0.25 * (np.arange(40) // 10), 0.001, 0.999)  # pooled, the folds do not compare
    first, second = folds_of("a", shifted), folds_of("b", POOR)
    means = [np.mean([line.figures["auc"] for line in one.by_fold]) for one in (first, second)]
    (found,) = compare_pairs([(first, second)])
    assert found.difference == pytest.approx(means[0] - means[1])
    pooled = roc_auc_score(LABELS, shifted) - roc_auc_score(LABELS, POOR)
    assert abs(found.difference - pooled) > 0.05
    assert found.low < found.difference < found.high
    assert not np.isnan(found.p_delong)
    table = comparison_table([found])
    assert table.title.startswith("Pairs of runs: first minus second of the means over folds above")
    assert table.heads[2:4] == ("difference of mean AUC", "95 % interval of that")
    assert table.lines[0][2] == f"{100 * (means[0] - means[1]):+.1f}"


@pytest.mark.finding(n=4)
def test_two_runs_that_answer_everything_right_are_not_certainly_the_same():
    perfect = folds_of("a", 0.1 + 0.8 * LABELS), folds_of("b", 0.2 + 0.6 * LABELS)
    for measure in ("auc", "balanced_accuracy", "f1_macro"):
        ((found),) = compare_pairs([tuple(replace(one, measure=measure) for one in perfect)])
        assert (found.difference, found.p_patients) == (0, 1)
        assert found.low < -0.02 and found.high > 0.02


@pytest.mark.finding(n=17)
def test_no_difference_is_printed_as_plus_zero():
    (found,) = compare_pairs([(folds_of("a", GOOD), folds_of("b", GOOD))])
    line = comparison_table([replace(found, difference=-0.0, low=-0.0004, high=0.0004)]).lines[0]
    assert line[2:4] == ("+0.0", "+0.0 to +0.0")
