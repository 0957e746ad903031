import numpy as np
import pytest

from carmil.evidence import bag_auc
from carmil.reproduce.fold_bootstrap import fold_auc, fold_mean, resamples
from carmil.statistics.bootstrap import bootstrap, percentiles

FOLD = np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1])
TESTED = np.arange(2)[:, None] == FOLD
LABELS = np.array([0, 1, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0])
ONCE = np.ones((1, 12))


@pytest.fixture
def scores():
    return np.random.default_rng(1).normal(size=(3, 12)).round(1)  # with ties


def drawn(count):
    """Which patients are in a resample, one by one."""
    return np.repeat(np.arange(len(count)), count.astype(int))


def test_a_resample_has_as_many_patients_as_there_are():
    counts = resamples(LABELS, repeats=500)
    assert counts.shape == (500, 12)
    assert (counts.sum(1) == 12).all()
    assert (counts[:, LABELS == 1].sum(1) == 6).all()  # each class among itself
    assert abs(counts.mean(0) - 1).max() < 0.2


def test_the_mean_over_folds_leaves_out_patients_without_a_value():
    values = np.arange(12.0)
    values[[0, 7]] = np.nan
    assert fold_mean(values, TESTED, ONCE) == pytest.approx((np.mean([1, 2, 3, 4]) + np.mean([5, 6, 8, 9, 10, 11])) / 2)


def test_the_mean_of_each_resample_is_that_of_its_patients_one_by_one():
    values, counts = np.random.default_rng(0).normal(size=12), resamples(LABELS, repeats=50)
    counts = counts[(counts @ TESTED.T > 0).all(1)]  # of patients of both folds
    for found, count in zip(fold_mean(values, TESTED, counts), counts, strict=True):
        rows = drawn(count)
        assert found == pytest.approx(np.mean([values[rows[FOLD[rows] == f]].mean() for f in (0, 1)]))


def test_the_auc_of_each_resample_is_the_mean_of_its_folds_and_seeds_one_by_one(scores):
    counts = resamples(LABELS, repeats=50)
    for found, count in zip(fold_auc(scores, LABELS, TESTED, counts), counts, strict=True):
        rows = drawn(count)
        one_by_one = [
            bag_auc(np.stack([-s, s], axis=1)[mine], LABELS[mine])
            for f in (0, 1)
            for mine in [rows[FOLD[rows] == f]]
            for s in scores
        ]
        assert found == pytest.approx(np.mean(one_by_one), nan_ok=True)


def test_a_fold_without_a_patient_leaves_the_resample_out():
    counts = np.ones((3, 12))
    counts[1, FOLD == 0] = 0
    found = fold_mean(np.arange(12.0), TESTED, counts)
    assert np.isnan(found).tolist() == [False, True, False]
    assert percentiles(5.0, found).left_out == 1


@pytest.mark.finding(n=4)
def test_the_interval_is_that_of_the_librarys_stratified_bootstrap(scores):
    first, second = np.stack([-scores[0], scores[0]], 1), np.stack([-scores[1], scores[1]], 1)

    def difference(first, second, labels):
        return bag_auc(first, labels) - bag_auc(second, labels)

    ours = bootstrap(difference, first, second, LABELS, strata=LABELS, repeats=60)
    everyone, counts = np.ones((1, 12), dtype=bool), resamples(LABELS, repeats=60)

    def less(drawn):
        return fold_auc(scores[:1], LABELS, everyone, drawn) - fold_auc(scores[1:2], LABELS, everyone, drawn)

    found = percentiles(float(less(ONCE)[0]), less(counts), against_zero=True)
    assert found.value == pytest.approx(ours.value)
    assert (found.low, found.high) == pytest.approx((ours.low, ours.high))
    assert found.left_out == ours.left_out == 0
    assert 0 < found.p <= 1
    assert np.isnan(percentiles(0.5, less(counts)).p)
