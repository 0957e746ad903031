"""Figures of risks and survival probabilities equal values computed by hand, and scikit-survival on random sets."""

import math
from dataclasses import dataclass

import numpy as np
import pytest

from carmil.errors import CarmilError
from carmil.statistics import survival as figures
from carmil.statistics.survival import (
    brier_over_time,
    concordance,
    dynamic_auc,
    integrated_brier,
    survival_calibration,
    uno_concordance,
)

SETS = 100
# By hand: a third of the training cases is censored at time 2, so that a later event counts for 3 / 2.
TRAIN = ([1, 2, 3, 4], [True, False, True, True])
CASES = ([1, 3, 4], [True, True, False])
RISK = [2, 1, 3]


@dataclass
class RandomSet:
    """train, cases: times and events. survival: probabilities at the times `at`."""

    train: tuple
    cases: tuple
    risk: np.ndarray
    at: np.ndarray
    survival: np.ndarray


def random_set(seed):
    """Draw censored cases: with ties of times and risks if the seed is even, mostly censored every third."""
    rng = np.random.default_rng(seed)

    def draw(n):
        risk = rng.normal(size=n)
        time, censored = rng.exponential(np.exp(-risk)) * 5, rng.exponential(3 if seed % 3 == 0 else 10, size=n)
        if seed % 2 == 0:
            time, censored, risk = np.ceil(time), np.ceil(censored), np.round(risk)
        return np.minimum(time, censored), time <= censored, risk

    time, event, risk = draw(int(rng.integers(8, 80)))
    train_time, train_event, _ = draw(60)
    # scikit-survival refuses times after the last training case.
    train = np.append(train_time, max(time.max(), train_time.max()) + 1), np.append(train_event, False)
    first, last = np.sort(time[event])[0], time.max()
    inner = time[(time >= first) & (time < last)]
    at = np.unique(np.concatenate([inner, np.linspace(first, last, 6)[:-1]]))
    rising = rng.exponential(0.1, size=(len(time), len(at))).cumsum(1)
    return RandomSet(train, (time, event), risk, at, np.exp(-rising))


@pytest.fixture
def sksurv():
    """Return scikit-survival's figures by name, and its array of times and events."""
    metrics = pytest.importorskip("sksurv.metrics", reason="needs scikit-survival, from the dev group")
    util = pytest.importorskip("sksurv.util", reason="needs scikit-survival, from the dev group")
    return metrics, lambda cases: util.Surv.from_arrays(cases[1], cases[0])


def test_random_sets_have_ties_and_censored_cases():
    sets = [random_set(seed) for seed in range(SETS)]
    assert all(given.cases[1].any() and not given.cases[1].all() and len(given.at) > 1 for given in sets)
    for values in (lambda given: given.cases[0], lambda given: given.risk):
        assert sum(len(np.unique(values(given))) < len(given.risk) for given in sets) == SETS // 2
    tied = [set(given.cases[0][given.cases[1]]) & set(given.cases[0][~given.cases[1]]) for given in sets]
    assert sum(map(bool, tied)) > SETS // 3  # an event and a censored case at one time


def test_concordance_equals_scikit_survival(sksurv):
    for given in map(random_set, range(SETS)):
        time, event = given.cases
        expected = sksurv[0].concordance_index_censored(event, time, given.risk)[0]
        assert concordance(time, event, given.risk) == pytest.approx(expected, abs=1e-6)


def test_uno_concordance_equals_scikit_survival(sksurv):
    metrics, outcomes = sksurv
    for given in map(random_set, range(SETS)):
        for tau in (given.at[-1], np.quantile(given.cases[0], 0.8), given.cases[0].max() + 1):
            if not (given.cases[1] & (given.cases[0] < tau)).any():
                continue
            expected = metrics.concordance_index_ipcw(outcomes(given.train), outcomes(given.cases), given.risk, tau)[0]
            ours = uno_concordance(*given.train, *given.cases, given.risk, tau=tau)
            assert ours == pytest.approx(expected, abs=1e-6)


def test_dynamic_auc_equals_scikit_survival(sksurv):
    metrics, outcomes = sksurv
    for given in map(random_set, range(SETS)):
        expected, _ = metrics.cumulative_dynamic_auc(outcomes(given.train), outcomes(given.cases), given.risk, given.at)
        assert dynamic_auc(*given.train, *given.cases, given.risk, given.at) == pytest.approx(expected, abs=1e-6)


def test_brier_scores_equal_scikit_survival(sksurv):
    metrics, outcomes = sksurv
    for given in map(random_set, range(SETS)):
        theirs = outcomes(given.train), outcomes(given.cases), given.survival, given.at
        ours = *given.train, *given.cases, given.survival, given.at
        assert brier_over_time(*ours) == pytest.approx(metrics.brier_score(*theirs)[1], abs=1e-6)
        assert integrated_brier(*ours) == pytest.approx(metrics.integrated_brier_score(*theirs), abs=1e-6)


def test_concordance_equals_values_computed_by_hand():
    # The first case has a larger risk than three others; of the third and the fourth the risks are equal.
    time, event = [1, 2, 3, 4], [True, False, True, False]
    assert concordance(time, event, [3, 2, 2, 2]) == pytest.approx(3.5 / 4)
    for almost in ([3, 2, 2, 2 + 1e-9], [3, 2, 2 + 1e-9, 2]):
        assert concordance(time, event, almost) == pytest.approx(3.5 / 4)
    assert concordance(time, event, [3, 2, 2, 4]) == pytest.approx(2 / 4)
    assert concordance(time, event, [3, 2, 2, 4], weights=[1, 9, 5, 9]) == pytest.approx(2 / 8)


def test_an_event_is_earlier_than_a_case_censored_at_the_same_time():
    assert concordance([2, 2], [True, False], [1, 0]) == 1
    assert concordance([2, 2], [True, False], [0, 1]) == 0
    assert math.isnan(concordance([2, 2], [True, True], [1, 0]))


def test_concordance_of_many_cases_is_summed_in_parts(monkeypatch):
    given = random_set(0)
    whole = concordance(*given.cases, given.risk)
    monkeypatch.setattr(figures, "PAIRS", 2 * len(given.risk) + 1)
    assert concordance(*given.cases, given.risk) == pytest.approx(whole, abs=1e-12)


def test_uno_concordance_equals_values_computed_by_hand():
    # Of the first case's pairs one agrees; the pair of the second does not, and has the weight (3 / 2)^2.
    assert uno_concordance(*TRAIN, *CASES, RISK, tau=4) == pytest.approx(1 / (2 + 2.25))
    assert uno_concordance(*TRAIN, *CASES, RISK, tau=3) == pytest.approx(1 / 2)
    assert math.isnan(uno_concordance(*TRAIN, *CASES, RISK, tau=1))


def test_dynamic_auc_equals_values_computed_by_hand():
    expected = [math.nan, 1 / 2, 1 / 2, 0, math.nan]  # without a case before time 1, without a control from time 4 on
    assert dynamic_auc(*TRAIN, *CASES, RISK, [0.5, 1, 2, 3, 4]) == pytest.approx(expected, nan_ok=True)
    # At time 3 the first case has a larger risk than the control, and the second, of weight 3 / 2, an equal one.
    assert dynamic_auc(*TRAIN, *CASES, [2, 1, 1], [3]) == pytest.approx([(1 + 0.75) / 2.5])


def test_brier_scores_equal_values_computed_by_hand():
    survival = [[0.5, 0.2], [0.8, 0.4], [0.9, 0.7]]
    expected = [(0.25 + 0.04 + 0.01) / 3, (0.04 + 0.16 * 1.5 + 0.09 * 1.5) / 3]
    assert brier_over_time(*TRAIN, *CASES, survival, [1, 3]) == pytest.approx(expected)
    assert integrated_brier(*TRAIN, *CASES, survival, [1, 3]) == pytest.approx(sum(expected) / 2)
    for times in ([1], [3, 1], [1, 1]):
        with pytest.raises(CarmilError, match="expected two or more, in ascending order"):
            integrated_brier(*TRAIN, *CASES, np.array(survival)[:, : len(times)], times)


def test_figures_of_only_censored_cases_are_undefined_except_the_brier_score():
    cases = ([2, 3], [False, False])
    assert math.isnan(concordance(*cases, [1, 2]))
    assert math.isnan(uno_concordance(*TRAIN, *cases, [1, 2], tau=9))
    assert np.isnan(dynamic_auc(*TRAIN, *cases, [1, 2], [1, 2])).all()
    # At time 2 the case censored then is left out, and the other has the weight 3 / 2.
    expected = [(0.01 + 0.04) / 2, 0.16 * 1.5 / 2]
    assert brier_over_time(*TRAIN, *cases, [[0.9, 0.8], [0.8, 0.6]], [1, 2]) == pytest.approx(expected)


def test_figures_of_one_case_are_undefined_except_the_brier_score():
    case = ([3], [True])
    assert math.isnan(concordance(*case, [1]))
    assert math.isnan(uno_concordance(*TRAIN, *case, [1], tau=9))
    assert np.isnan(dynamic_auc(*TRAIN, *case, [1], [1, 3])).all()
    assert brier_over_time(*TRAIN, *case, [[0.9, 0.4]], [1, 3]) == pytest.approx([0.01, 0.16 * 1.5])


def test_censoring_weights_stay_constant_after_the_last_training_case():
    late, last = ([5], [True]), ([4], [True])
    assert brier_over_time(*TRAIN, *late, [[0.4]], [6]) == pytest.approx(brier_over_time(*TRAIN, *last, [[0.4]], [6]))
    # If all training cases are censored, nothing is known of later events.
    assert brier_over_time([1, 2], [False, False], *late, [[0.4]], [6]).tolist() == [0]


def test_calibration_equals_values_computed_by_hand():
    # Lower half: an event at time 1, then one of two at risk is censored. Upper half: no event until the horizon.
    result = survival_calibration(
        [3, 1, 2, 3, 4, 3], [True, True, False, False, True, False], [0.3, 0.1, 0.2, 0.7, 0.8, 0.9], horizon=2, groups=2
    )
    assert result.count.tolist() == [3, 3]
    assert result.predicted == pytest.approx([0.2, 0.8])
    assert result.observed == pytest.approx([2 / 3, 1])
    width = 1.959964 * math.sqrt(1 / 6) / math.log(3 / 2)
    assert result.low == pytest.approx([(2 / 3) ** math.exp(width), math.nan], nan_ok=True)
    assert result.high == pytest.approx([(2 / 3) ** math.exp(-width), math.nan], nan_ok=True)
    assert (result.horizon, result.level) == (2, 0.95)


def test_equal_predictions_share_a_group():
    time, event = [1, 2, 3, 4, 5], [True] * 5
    result = survival_calibration(time, event, [0.5, 0.5, 0.5, 0.5, 0.9], horizon=3, groups=4)
    assert result.count.tolist() == [4, 1]
    assert result.observed == pytest.approx([1 / 4, 1])
    assert survival_calibration(time, event, [0.5] * 5, horizon=3).observed == pytest.approx([2 / 5])
    for horizon, observed in ((1, 1), (2, 0), (3, 0)):
        assert survival_calibration([2], [True], [0.3], horizon=horizon).observed.tolist() == [observed]
    assert survival_calibration([2], [False], [0.3], horizon=2).observed.tolist() == [1]
    with pytest.raises(CarmilError, match="0 groups: expected at least one"):
        survival_calibration(time, event, [0.5] * 5, horizon=3, groups=0)


def test_a_group_not_followed_until_the_horizon_has_no_estimate():
    result = survival_calibration(
        [1, 2, 3, 9, 1, 2], [True, False, True, False, True, True], [0.1, 0.1, 0.5, 0.5, 0.9, 0.9], horizon=5, groups=3
    )
    assert result.observed == pytest.approx([math.nan, 1 / 2, 0], nan_ok=True)
    assert np.isnan(result.low).tolist() == np.isnan(result.high).tolist() == [True, False, True]


def test_calibration_equals_lifelines():
    lifelines = pytest.importorskip("lifelines", reason="needs lifelines, from the dev group")
    for seed in range(SETS):
        rng = np.random.default_rng(seed)
        survival = np.sort(rng.random(60))
        time, event = rng.integers(1, 12, size=60), rng.random(60) < 0.6
        result = survival_calibration(time, event, survival, horizon=6, level=0.9)
        assert result.predicted == pytest.approx(survival.reshape(4, 15).mean(1))
        for i, group in enumerate(np.arange(60).reshape(4, 15)):
            with np.errstate():  # lifelines changes NumPy's handling of errors
                fitter = lifelines.KaplanMeierFitter(alpha=0.1).fit(time[group], event[group], timeline=[6])
            observed = fitter.survival_function_.to_numpy()[-1, 0]
            assert result.observed[i] == pytest.approx(observed, abs=1e-9)
            if 0 < observed < 1:
                expected = fitter.confidence_interval_.to_numpy()[-1]
                assert np.array([result.low[i], result.high[i]]) == pytest.approx(expected, abs=1e-9)
