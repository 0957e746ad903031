"""The regressor learns a planted number, in its own unit, and refuses y that is none."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import r2_score

import carmil
from carmil.errors import CarmilError

RNG = np.random.default_rng(0)
SIGNAL = RNG.normal(size=60)
Y = 1000 + 40 * SIGNAL
BAGS = [RNG.normal(size=(int(RNG.integers(4, 9)), 6)).astype(np.float32) for _ in Y]
for bag, value in zip(BAGS, SIGNAL, strict=True):
    bag[:, 0] += 2 * value
TRAINED = slice(0, 45)
TESTED = slice(45, 60)


def regressor(**others) -> carmil.MILRegressor:
    options = {"hidden": 8, "attention": 4}
    given = dict(model="car/abmil", epochs=40, batch=4, lr=1e-2, options=options, device="cpu")
    return carmil.MILRegressor(**{**given, **others})


@pytest.fixture(scope="module")
def fitted() -> carmil.MILRegressor:
    return regressor(seeds=2).fit(BAGS[TRAINED], Y[TRAINED])


def test_regressor_learns_a_planted_number_in_its_own_unit(fitted):
    predicted = fitted.predict(BAGS[TESTED])
    assert predicted.shape == (15,) and predicted.dtype == np.float64
    assert fitted.score(BAGS[TESTED], Y[TESTED]) == r2_score(Y[TESTED], predicted)
    assert fitted.score(BAGS[TESTED], Y[TESTED]) > 0.8
    assert np.abs(predicted - Y[TESTED]).mean() < 15


def test_prediction_is_the_mean_over_the_seeds(fitted):
    each = fitted._predictions(BAGS[TESTED])[..., 0].double().numpy()
    assert each.shape == (2, 15) and not np.array_equal(*each)
    assert np.array_equal(fitted.predict(BAGS[TESTED]), each.mean(0))


def test_evidence_in_standard_deviations_does_not_depend_on_the_unit_of_y():
    small, large = (regressor(epochs=3).fit(BAGS, y).explain(BAGS[:3]) for y in (SIGNAL, 4 * SIGNAL + 64))
    assert [part.shape for part in small] == [(len(bag), 1) for bag in BAGS[:3]]
    assert all(np.allclose(a, b, atol=1e-4) for a, b in zip(small, large, strict=True))


def test_huber_loss_follows_outliers_less_than_the_squared_loss():
    y = Y.copy()
    y[:6] += 2000
    errors = {
        loss: np.median(np.abs(regressor(loss=loss).fit(BAGS[TRAINED], y[TRAINED]).predict(BAGS[TESTED]) - Y[TESTED]))
        for loss in ("squared", "huber")
    }
    assert errors["huber"] < 0.7 * errors["squared"]


def test_y_may_be_a_list_a_series_a_column_or_the_labels_of_the_bags():
    whole = np.round(Y)
    expected = regressor(epochs=2).fit(BAGS, whole).predict(BAGS)
    own = carmil.Bags.from_list(BAGS, labels=torch.from_numpy(whole)[:, None])
    for bags, y in [
        (BAGS, whole.astype(int).tolist()),
        (BAGS, pd.Series(whole, index=range(100, 160))),
        (BAGS, pd.Series(whole).astype("Int64")),
        (BAGS, whole[:, None]),
        (own, None),
    ]:
        assert np.array_equal(regressor(epochs=2).fit(bags, y).predict(BAGS), expected)


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (["low"] * 60, "y has values that are not numbers: expected one number per bag"),
        ([*Y[:59], np.nan], r"y has no label \(NaN or None\) for 1 of 60 bags, the first at position 59"),
        ([*Y[:59], None], r"y has no label \(NaN or None\) for 1 of 60 bags, the first at position 59"),
        ([*Y[:3], np.inf, *Y[4:]], "y is inf at position 3: expected a finite number"),
        ([*Y[:3], -1e30, *Y[4:]], "y is -1e[+]30 at position 3: expected a finite number"),
        (np.stack([Y, Y], axis=1), r"y has shape \(60, 2\): expected one number per bag"),
        (Y[:, None, None], r"y has shape \(60, 1, 1\): expected one number per bag"),
        (1.7e9 + SIGNAL, "y has numbers too close to each other for their size: subtract a constant"),
        (np.full(60, 3.0), "y is 3 for all bags: expected different numbers"),
        (Y[:-1], "59 labels for 60 bags"),
        (None, "no labels: give y"),
    ],
)
def test_invalid_y_raises_an_error_of_one_line(y, words):
    with pytest.raises(CarmilError, match=words) as error:
        regressor().fit(BAGS, y)
    assert "\n" not in str(error.value)


def test_unknown_loss_raises_an_error_before_training_and_after_loading(fitted, tmp_path):
    with pytest.raises(CarmilError, match="unknown loss 'l1'; expected one of huber, squared"):
        regressor(loss="l1").fit(BAGS, Y)
    fitted.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    facts = json.loads(path.read_text())
    facts["parameters"]["loss"] = "l1"
    path.write_text(json.dumps(facts))
    with pytest.raises(CarmilError, match=r"config.json: unknown loss 'l1'.*: save the model again"):
        carmil.MILRegressor.from_pretrained(tmp_path / "model")
