"""Curves of survival and Cox's model equal values computed by hand, and lifelines on random sets."""

import math

import numpy as np
import pytest

from carmil.errors import CarmilError
from carmil.statistics.hazards import (
    StepFunction,
    breslow,
    censoring,
    fit_cox,
    kaplan_meier,
    kaplan_meier_limits,
    mean_of_steps,
    survival_probabilities,
)

SETS = 100
TIME, EVENT = [1, 2, 2, 3], [True, True, False, False]


def random_cases(seed, covariates=3):
    """Draw covariates of different scales, and censored times: with ties if the seed is even."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(40, 100))
    x = rng.normal(size=(n, covariates)) * rng.uniform(0.5, 20, covariates) + rng.normal(size=covariates)
    time = rng.exponential(np.exp(-0.5 * (x / x.std(0)).sum(1))) * 5
    censored = rng.exponential(8, size=n)
    time, event = np.minimum(time, censored), time <= censored
    return x, np.ceil(time) if seed % 2 == 0 else time, event


@pytest.fixture
def lifelines():
    with np.errstate():  # lifelines changes NumPy's handling of errors
        yield pytest.importorskip("lifelines", reason="needs lifelines, from the dev group")


def lifelines_cox(lifelines, x, time, event, penalizer=0.0):
    """Fit Cox's model with lifelines, converged to more digits than by default."""
    pandas = pytest.importorskip("pandas")
    rows = pandas.DataFrame(x, columns=[f"x{i}" for i in range(x.shape[1])]).assign(time=time, event=event)
    fitter = lifelines.CoxPHFitter(penalizer=penalizer, l1_ratio=0.0)
    return fitter.fit(rows, "time", "event", fit_options={"precision": 1e-20, "r_precision": 0.0})


def test_kaplan_meier_equals_values_computed_by_hand():
    # 4 at risk at time 1; at time 2 a case censored then is still at risk.
    assert kaplan_meier(TIME, EVENT).at([0, 0.9, 1, 1.5, 2, 9]) == pytest.approx([1, 1, 3 / 4, 3 / 4, 1 / 2, 1 / 2])
    assert kaplan_meier([2, 1], [False, False]).at([0, 1, 2]).tolist() == [1, 1, 1]
    assert kaplan_meier([2], [True]).at([1, 2]).tolist() == [1, 0]


def test_an_event_comes_before_censoring_at_the_same_time():
    # Two are at risk of being censored at time 2, after its event, and one at time 3.
    assert censoring(TIME, EVENT).at([1, 2, 3]) == pytest.approx([1, 1 / 2, 0])
    assert censoring([1, 2], [True, True]).at([1, 2, 3]).tolist() == [1, 1, 1]
    assert censoring([1, 1], [False, True]).at([0.5, 1]).tolist() == [1, 0]


def test_limits_of_kaplan_meier_equal_values_computed_by_hand():
    low, high = kaplan_meier_limits(TIME, EVENT)
    for at, survival, variance in ((1, 3 / 4, 1 / 12), (2, 1 / 2, 1 / 12 + 1 / 6)):
        width = 1.959964 * math.sqrt(variance) / -math.log(survival)
        assert low.at(at) == pytest.approx(survival ** math.exp(width))
        assert high.at(at) == pytest.approx(survival ** math.exp(-width))
    narrow_low, narrow_high = kaplan_meier_limits(TIME, EVENT, level=0.5)
    assert low.at(2) < narrow_low.at(2) < 0.5 < narrow_high.at(2) < high.at(2)


def test_kaplan_meier_has_no_limits_at_one_and_zero():
    for limit in kaplan_meier_limits([1, 2, 3], [False, True, True]):
        assert np.isnan(limit.at([0, 1, 2, 3, 4])).tolist() == [True, True, False, True, True]
    with pytest.raises(CarmilError, match="a level of 95"):
        kaplan_meier_limits(TIME, EVENT, level=95)


def test_kaplan_meier_and_its_limits_equal_lifelines(lifelines):
    for seed in range(SETS):
        _, time, event = random_cases(seed)
        fitter = lifelines.KaplanMeierFitter().fit(time, event)
        at = fitter.survival_function_.index.to_numpy()
        expected = fitter.survival_function_.to_numpy()[:, 0]
        assert kaplan_meier(time, event).at(at) == pytest.approx(expected, abs=1e-9)
        inside = (expected > 0) & (expected < 1)
        for limit, theirs in zip(
            kaplan_meier_limits(time, event), fitter.confidence_interval_.to_numpy().T, strict=True
        ):
            assert limit.at(at[inside]) == pytest.approx(theirs[inside], abs=1e-9)


def test_breslow_equals_values_computed_by_hand():
    hazard = breslow([2, 1, 3, 2], [True, True, False, True], np.log([2, 1, 4, 3]))
    assert hazard.at([0.5, 1, 2, 3]) == pytest.approx([0, 1 / 10, 1 / 10 + 2 / 9, 1 / 10 + 2 / 9])
    assert breslow(TIME, EVENT, np.zeros(4)).at([1, 2]) == pytest.approx([1 / 4, 1 / 4 + 1 / 3])  # Nelson and Aalen
    assert breslow([1, 2], [False, False], [0.0, 1.0]).at([0, 5]).tolist() == [0, 0]


@pytest.mark.filterwarnings("ignore:Starting with pandas version 4.0")
def test_breslow_equals_the_baseline_of_lifelines(lifelines):
    """The baseline of lifelines is that of a case with mean covariates."""
    for seed in range(20):
        x, time, event = random_cases(seed)
        fitter = lifelines_cox(lifelines, x, time, event)
        expected = fitter.baseline_cumulative_hazard_
        ours = breslow(time, event, (x - x.mean(0)) @ fitter.params_.to_numpy())
        assert ours.at(expected.index.to_numpy()) == pytest.approx(expected.to_numpy()[:, 0], abs=1e-9)


def test_survival_is_computed_from_a_cumulative_hazard_and_risks():
    hazard = StepFunction(np.array([1.0, 2.0]), np.array([0.5, 1.5]), 0.0)
    survival = survival_probabilities(hazard, np.log([1, 2]), [0, 1, 2])
    assert survival == pytest.approx(np.exp([[0, -0.5, -1.5], [0, -1, -3]]))


def test_mean_of_step_functions_has_steps_at_the_times_of_all_functions():
    first = StepFunction(np.array([1.0, 3.0]), np.array([2.0, 4.0]), 0.0)
    mean = mean_of_steps([first, StepFunction(np.array([2.0]), np.array([6.0]), 1.0)])
    assert mean.times.tolist() == [1, 2, 3]
    assert mean.at([0, 1, 2, 3]).tolist() == [0.5, 1.5, 4, 5]


def test_cox_coefficients_and_variance_equal_values_computed_by_hand():
    """With u = exp(beta) the likelihood is u / (2 u + 1) * 1 / (u + 1), largest where u^2 = 1/2."""
    fit = fit_cox([[1], [0], [1]], [1, 2, 3], [True, True, True])
    u = math.sqrt(0.5)
    assert fit.coefficients == pytest.approx([math.log(u)])
    assert 1 / fit.covariance == pytest.approx(np.array([[2 * u / (2 * u + 1) ** 2 + u / (u + 1) ** 2]]))


def test_tied_events_are_handled_by_efrons_method():
    """The likelihood is u / (u + 2) * 1 / (u + 2 - (u + 1) / 2), largest where u^2 = 6. The rows are unsorted."""
    assert fit_cox([[0], [1], [0]], [2, 1, 1], [False, True, True]).coefficients == pytest.approx([math.log(6) / 2])
    # A case censored at the time of the events is at risk with them.
    assert fit_cox([[0], [1], [0]], [1, 1, 1], [False, True, True]).coefficients == pytest.approx([math.log(6) / 2])


@pytest.mark.filterwarnings("ignore:Starting with pandas version 4.0")
@pytest.mark.parametrize("penalizer", [0.0, 0.01, 0.5])
def test_cox_coefficients_and_covariance_equal_lifelines(lifelines, penalizer):
    for seed in range(SETS):
        x, time, event = random_cases(seed)
        fitter = lifelines_cox(lifelines, x, time, event, penalizer)
        fit = fit_cox(x, time, event, penalizer=penalizer)
        assert fit.coefficients == pytest.approx(fitter.params_.to_numpy(), abs=1e-6)
        assert fit.covariance == pytest.approx(fitter.variance_matrix_.to_numpy(), rel=1e-6, abs=1e-9)


@pytest.mark.filterwarnings("ignore:Starting with pandas version 4.0")
def test_hazard_ratios_equal_lifelines(lifelines):
    x, time, event = random_cases(0)
    summary = lifelines_cox(lifelines, x, time, event).summary
    columns = ["exp(coef)", "exp(coef) lower 95%", "exp(coef) upper 95%", "p"]
    ratios = [[ratio.value, ratio.low, ratio.high, ratio.p] for ratio in fit_cox(x, time, event).hazard_ratios()]
    assert np.array(ratios) == pytest.approx(summary[columns].to_numpy(), rel=1e-6)


def test_a_covariate_with_one_large_value_is_fitted():
    """A full step of Newton's method from 0 leads away from the maximum, where the derivative of the likelihood is 0."""
    x, event = np.array([8192.0, 8, 128, 8, 4, 8, 128, 512]), np.array([1, 1, 1, 1, 1, 0, 1, 1], dtype=bool)
    weight = np.exp(x * fit_cox(x[:, None], np.arange(8), event).coefficients)
    derivative = [x[i] - np.average(x[i:], weights=weight[i:]) for i in np.flatnonzero(event)]
    assert sum(derivative) == pytest.approx(0, abs=1e-4)


def test_penalty_shrinks_coefficients_equally_in_any_unit():
    x, time, event = random_cases(1)
    free, fit = fit_cox(x, time, event), fit_cox(x, time, event, penalizer=0.1)
    assert (np.abs(fit.coefficients) < np.abs(free.coefficients)).all()
    unit = np.array([1000, 1, 0.01])
    assert fit_cox(x * unit - 7, time, event, penalizer=0.1).coefficients * unit == pytest.approx(fit.coefficients)


def test_a_covariate_that_separates_the_events_needs_a_penalizer():
    x, time = np.arange(8.0)[:, None], 8 - np.arange(8)
    with pytest.raises(CarmilError, match="did not converge"):
        fit_cox(x, time, np.ones(8, bool))
    fit = fit_cox(x, time, np.ones(8, bool), penalizer=0.01)
    assert 0 < fit.coefficients[0] < 5
    ratio = fit.hazard_ratios(0.9)[0]
    assert ratio.low < ratio.value < ratio.high
    assert ratio.level == 0.9


def test_cases_that_cox_regression_cannot_fit_raise_an_error():
    x, time, event = random_cases(2)
    with pytest.raises(CarmilError, match="no event"):
        fit_cox(x, time, np.zeros(len(x), bool))
    with pytest.raises(CarmilError, match="not finite"):
        fit_cox(np.where(x == x[0, 0], np.nan, x), time, event)
    with pytest.raises(CarmilError, match="covariate 3 is the same for all cases"):
        fit_cox(np.column_stack([x, np.full(len(x), 0.1)]), time, event)
    with pytest.raises(CarmilError, match="follows from the others"):
        fit_cox(np.column_stack([x, x[:, 0] - x[:, 1]]), time, event)
    with pytest.raises(CarmilError, match="covariate 0 is the same"):
        fit_cox([[1.0]], [1], [True])
