"""The survival estimator learns planted hazards and keeps to the manners of scikit-survival."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

import carmil
from carmil.bags.splits import TRAIN
from carmil.errors import CarmilError
from carmil.statistics.hazards import breslow, mean_of_steps

RNG = np.random.default_rng(0)
SIGNAL = RNG.normal(size=90)
TIME = 12 * np.exp(-SIGNAL) * RNG.exponential(size=90) ** 0.5 + 0.1
EVENT = RNG.random(90) < 0.6
Y = np.array(list(zip(EVENT, TIME, strict=True)), dtype=[("event", bool), ("time", float)])
BAGS = [RNG.normal(size=(int(RNG.integers(4, 9)), 6)).astype(np.float32) for _ in Y]
for bag, value in zip(BAGS, SIGNAL, strict=True):
    bag[:, 0] += 2 * value
TRAINED, TESTED = slice(0, 60), slice(60, 90)


def estimator(**others) -> carmil.MILSurvival:
    given = dict(model="car/abmil", epochs=30, lr=1e-2, options={"hidden": 8, "attention": 4}, device="cpu")
    return carmil.MILSurvival(**{**given, **others})


@pytest.fixture(scope="module", params=["cox", "discrete"])
def fitted(request) -> carmil.MILSurvival:
    return estimator(loss=request.param, seeds=2).fit(BAGS[TRAINED], Y[TRAINED])


def test_survival_estimator_learns_planted_hazards(fitted):
    risk = fitted.predict(BAGS[TESTED])
    assert fitted.score(BAGS[TESTED], Y[TESTED]) > 0.7
    assert np.corrcoef(risk, SIGNAL[TESTED])[0, 1] > 0.9  # a larger risk is an earlier event


def test_evidence_correlates_with_the_feature_that_raises_the_hazard(fitted):
    maps = fitted.explain(BAGS[TESTED])
    assert [part.shape for part in maps] == [(len(bag), 1) for bag in BAGS[TESTED]]
    pairs = np.concatenate(
        [np.column_stack([bag[:, 0], part[:, 0]]) for bag, part in zip(BAGS[TESTED], maps, strict=True)]
    )
    assert np.corrcoef(pairs.T)[0, 1] > 0.3


def test_baseline_hazard_is_breslows_estimate_on_training_bags_only(fitted):
    time, event = TIME[TRAINED], EVENT[TRAINED]
    role = fitted._roles(carmil.Bags.from_list(BAGS[TRAINED]), event.astype(int), ["censored", "event"], None)[0]
    own = (role == TRAIN).numpy()
    assert set(fitted.unique_times_) == set(time[own & event])  # not rounded to the 32 bits of training
    risk = fitted._predictions(BAGS[TRAINED])[..., 0].double().numpy()
    expected = mean_of_steps([breslow(time[own], event[own], each[own]) for each in risk])
    assert np.allclose(fitted.cum_baseline_hazard_.y, expected.y, rtol=1e-5)


def test_survival_functions_are_steps_from_one_and_agree_with_hazards_and_arrays(fitted):
    times = fitted.unique_times_
    survival = fitted.predict_survival_function(BAGS[TESTED])
    hazard = fitted.predict_cumulative_hazard_function(BAGS[TESTED])
    assert survival.shape == hazard.shape == (30,)
    as_array = fitted.predict_survival_function(BAGS[TESTED], return_array=True)
    assert as_array.shape == (30, len(times))
    assert np.array_equal(np.stack([function(times) for function in survival]), as_array)
    assert np.array_equal(np.stack([function.y for function in survival]), as_array)
    assert np.array_equal(survival[0].x, times)
    cumulative = fitted.predict_cumulative_hazard_function(BAGS[TESTED], return_array=True)
    assert np.array_equal(np.stack([function(times) for function in hazard]), cumulative)
    assert np.allclose(np.exp(-cumulative), as_array)
    assert survival[0](times[0] / 2) == 1 and hazard[0](times[0] / 2) == 0
    assert (np.diff(as_array, axis=1) < 0).all()
    risk = fitted.predict(BAGS[TESTED])
    assert (np.argsort(as_array[:, 5]) == np.argsort(-risk)).all()
    assert np.allclose(cumulative[:, -1] / fitted.cum_baseline_hazard_(times[-1]), np.exp(risk))


def test_predicted_survival_of_the_training_bags_is_close_to_the_kaplan_meier_curve(fitted):
    from carmil.statistics.hazards import kaplan_meier

    predicted = fitted.predict_survival_function(BAGS[TRAINED], return_array=True).mean(0)
    observed = kaplan_meier(TIME[TRAINED], EVENT[TRAINED]).at(fitted.unique_times_)
    assert np.abs(predicted - observed).max() < 0.15


def test_saved_estimator_predicts_the_same_survival_functions(fitted, tmp_path):
    fitted.save_pretrained(tmp_path / "model")
    again = carmil.MILSurvival.from_pretrained(tmp_path / "model", device="cpu")
    assert again.loss == fitted.loss and again.batch == 32
    assert np.array_equal(again.unique_times_, fitted.unique_times_)
    for name in ("predict_survival_function", "predict_cumulative_hazard_function"):
        before, after = (getattr(one, name)(BAGS, return_array=True) for one in (fitted, again))
        assert np.array_equal(before, after)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda facts: facts.pop("baselines"), "baselines is missing"),
        (lambda facts: facts.update(baselines=[]), "baselines"),
        (lambda facts: facts["baselines"][0]["hazard"].pop(), "baselines[0]"),
        (lambda facts: facts["baselines"][0]["times"].reverse(), "baselines[0]"),
        (lambda facts: facts["parameters"].update(loss="squared"), "unknown loss 'squared'"),
    ],
)
def test_saved_estimator_with_an_invalid_value_raises_an_error_of_one_line(fitted, tmp_path, change, words):
    fitted.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    facts = json.loads(path.read_text())
    change(facts)
    path.write_text(json.dumps(facts))
    with pytest.raises(CarmilError) as refused:
        carmil.MILSurvival.from_pretrained(tmp_path / "model", device="cpu")
    assert words in str(refused.value) and len(str(refused.value).splitlines()) == 1


def test_y_may_have_its_fields_in_any_order_with_any_names_in_any_container():
    expected = estimator(epochs=2).fit(BAGS, Y).predict(BAGS)
    swapped = np.array(list(zip(TIME, EVENT, strict=True)), dtype=[("months", float), ("death", bool)])
    frame = pd.DataFrame({"months": TIME, "death": EVENT}, index=range(100, 190))
    own = carmil.Bags.from_list(BAGS, labels=torch.from_numpy(np.column_stack([TIME, EVENT])))
    for bags, y in ((BAGS, swapped), (BAGS, frame), (own, None)):
        fitted = estimator(epochs=2).fit(bags, y)
        assert np.array_equal(fitted.predict(BAGS), expected)
    assert fitted.score(BAGS, frame) == fitted.score(BAGS, swapped) == fitted.score(BAGS, Y)


def structured(event, time) -> np.ndarray:
    return np.rec.fromarrays([event, time], names="event,time")


def changed(values: np.ndarray, place: int, value: float) -> np.ndarray:
    values = values.copy()
    values[place] = value
    return values


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (TIME, r"y has no fields \(ndarray\): expected a structured array or a DataFrame of two columns"),
        (np.column_stack([EVENT, TIME]), r"y has no fields \(ndarray\)"),
        ((EVENT, TIME), r"y has no fields \(tuple\)"),
        (structured(EVENT.astype(int), TIME), r"y has the fields event \(int64\), time \(float64\): expected"),
        (structured(EVENT, EVENT), r"y has the fields event \(bool\), time \(bool\)"),
        (
            pd.DataFrame({"e": EVENT, "t": TIME, "age": TIME}),
            r"y has the fields e \(bool\), t \(float64\), age \(float64\)",
        ),
        (structured(EVENT, changed(TIME, 4, -3)), "y has the time -3 at position 4: expected 0 or more"),
        (structured(EVENT, changed(TIME, 4, np.nan)), "y has the time nan at position 4"),
        (structured(EVENT, changed(TIME, 4, np.inf)), "y has the time inf at position 4"),
        (structured(EVENT, 1.7e9 + TIME), "y has times too close to each other for their size: subtract a constant"),
        (structured(np.zeros(90, bool), TIME), "no event in y, all 90 bags are censored: expected some"),
        (structured(np.arange(90) == 3, TIME), "group 'event' has one bag"),
        (Y[:-1], "89 labels for 90 bags"),
        (None, "no labels: give y"),
    ],
)
def test_invalid_y_raises_an_error_of_one_line(y, words):
    with pytest.raises(CarmilError, match=words) as error:
        estimator().fit(BAGS, y)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "words"), [({"loss": "coxx"}, "unknown loss 'coxx'; did you mean 'cox'"), ({"batch": 1}, "batch is 1")]
)
def test_invalid_parameters_raise_an_error(given, words):
    with pytest.raises(CarmilError, match=words):
        estimator(**given).fit(BAGS, Y)


def test_bags_with_labels_of_another_kind_and_unfitted_models_raise_an_error():
    from sklearn.exceptions import NotFittedError

    classes = carmil.Bags.from_list(BAGS, labels=torch.arange(90) % 2)
    with pytest.raises(CarmilError, match=r"the bags have labels of shape \(90,\): expected the time"):
        estimator().fit(classes)
    with pytest.raises(NotFittedError):
        estimator().predict_survival_function(BAGS)


def test_score_equals_that_of_scikit_survival(fitted):
    metrics = pytest.importorskip("sksurv.metrics")
    risk = fitted.predict(BAGS[TESTED])
    expected = metrics.concordance_index_censored(Y["event"][TESTED], Y["time"][TESTED], risk)[0]
    assert fitted.score(BAGS[TESTED], Y[TESTED]) == pytest.approx(expected, abs=1e-12)


def test_scorers_of_scikit_survival_accept_the_estimator():
    metrics = pytest.importorskip("sksurv.metrics")
    from sksurv.util import Surv

    y = Surv.from_arrays(EVENT, TIME)
    times = np.quantile(TIME[TESTED][EVENT[TESTED]], np.linspace(0.1, 0.8, 8))
    model = estimator(epochs=20)
    uno = metrics.as_concordance_index_ipcw_scorer(model, tau=times[-1]).fit(BAGS[TRAINED], y[TRAINED])
    assert uno.score(BAGS[TESTED], y[TESTED]) > 0.6
    brier = metrics.as_integrated_brier_score_scorer(model, times).fit(BAGS[TRAINED], y[TRAINED])
    survival = np.tile(1 - (times - times[0]) / np.ptp(times), (30, 1))
    uninformed = metrics.integrated_brier_score(y[TRAINED], y[TESTED], survival, times)
    assert -brier.score(BAGS[TESTED], y[TESTED]) < uninformed
