import json

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, GroupKFold, KFold, cross_val_score

import carmil
from carmil.bags.splits import TRAIN
from carmil.errors import CarmilError
from carmil.evidence.path import path_change
from carmil.models.pooling import Offsets

RNG = np.random.default_rng(0)
Y = np.array(["no", "yes"])[RNG.integers(0, 2, 40)]
BAGS = [RNG.normal(size=(int(RNG.integers(3, 9)), 6)).astype(np.float32) for _ in Y]
for bag, label in zip(BAGS, Y, strict=True):
    bag[0, 0] = 5.0 if label == "yes" else -1.0


def classifier(**others) -> carmil.MILClassifier:
    given = dict(model="car/abmil", epochs=15, lr=5e-3, options={"hidden": 8, "attention": 4}, device="cpu")
    return carmil.MILClassifier(**{**given, **others})


@pytest.fixture(scope="module")
def fitted() -> carmil.MILClassifier:
    return classifier(seeds=2).fit(BAGS, Y)


def test_classifier_learns_and_predicts_the_original_labels(fitted):
    assert fitted.classes_.tolist() == ["no", "yes"]
    assert (fitted.predict(BAGS) == Y).mean() > 0.9
    assert fitted.score(BAGS, Y) == (fitted.predict(BAGS) == Y).mean()
    assert np.allclose(fitted.predict_proba(BAGS).sum(1), 1)


def test_classifier_supports_clone_and_cross_validation():
    estimator = classifier(model="abmil", epochs=15, lr=1e-2)
    assert clone(estimator).get_params() == estimator.get_params()
    lists = cross_val_score(clone(estimator), BAGS, Y, cv=3)
    bags = cross_val_score(clone(estimator), carmil.Bags.from_list(BAGS), Y, cv=3)
    assert np.array_equal(lists, bags)
    assert lists.mean() > 0.8


def test_validation_split_keeps_groups_together():
    groups = np.arange(40) // 2
    roles = classifier()._roles(carmil.Bags.from_list(BAGS), (Y == "yes").astype(int), ["no", "yes"], groups)[0]
    assert {1, 2} == set(roles.tolist())
    for group in range(20):
        assert len(set(roles[groups == group].tolist())) == 1
    assert cross_val_score(classifier(epochs=2), BAGS, Y, groups=groups, cv=GroupKFold(2)).shape == (2,)


def test_prediction_sets_contain_a_class_up_to_the_quantile_of_its_calibration_bags(fitted):
    chosen = np.concatenate([np.flatnonzero(name == Y)[:9] for name in ("no", "yes")])
    bags, labels = [BAGS[i] + 0.5 for i in chosen], Y[chosen]
    fitted.calibrate(bags, labels, level=0.9)
    scores = 1 - fitted.predict_proba(bags)
    largest = [scores[labels == name, c].max() for c, name in enumerate(("no", "yes"))]
    assert np.array_equal(fitted.predict_set(BAGS), 1 - fitted.predict_proba(BAGS) <= largest)
    assert fitted.predict_set(bags)[np.arange(18), np.repeat([0, 1], 9)].all()


def test_sets_without_calibration_or_with_too_few_bags_are_refused(fitted):
    with pytest.raises(CarmilError, match="class 'yes' has 0 calibration bags: a coverage of"):
        fitted.calibrate([BAGS[i] for i in np.flatnonzero(Y == "no")[:4]], np.repeat("no", 4))
    with pytest.raises(CarmilError, match="expected one of the classes of `fit`"):
        fitted.calibrate(BAGS[:2], ["no", "perhaps"])
    with pytest.raises(CarmilError, match="not calibrated: call calibrate"):
        classifier(epochs=1).fit(BAGS, Y).predict_set(BAGS)


def test_saved_classifier_predicts_the_same_after_loading(fitted, tmp_path):
    fitted.save_pretrained(tmp_path / "model")
    again = carmil.MILClassifier.from_pretrained(tmp_path / "model", device="cpu")
    assert np.array_equal(again.predict_proba(BAGS), fitted.predict_proba(BAGS))
    assert again.classes_.tolist() == ["no", "yes"]
    assert "device" not in json.loads((tmp_path / "model" / "config.json").read_text())["parameters"]


def test_numpy_parameters_are_saved_as_plain_numbers(tmp_path):
    result = classifier(seeds=np.int64(2), lr=np.float32(0.5), epochs=np.int64(1)).fit(BAGS, Y)
    result.save_pretrained(tmp_path / "model")
    again = carmil.MILClassifier.from_pretrained(tmp_path / "model", device="cpu")
    assert (again.seeds, again.lr) == (2, 0.5)
    assert np.array_equal(again.predict_proba(BAGS), result.predict_proba(BAGS))


def test_hub_download_is_limited_to_config_and_weights(fitted, tmp_path, monkeypatch):
    import huggingface_hub

    fitted.save_pretrained(tmp_path / "model")
    requested = {}

    def download(name, allow_patterns):
        requested[name] = allow_patterns
        return str(tmp_path / "model")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    again = carmil.MILClassifier.from_pretrained("someone/model", device="cpu")
    assert requested == {"someone/model": ["config.json", "weights.safetensors"]}
    assert np.array_equal(again.predict(BAGS), fitted.predict(BAGS))
    pushed = {}
    monkeypatch.setattr(huggingface_hub, "upload_folder", lambda **given: pushed.update(given))
    fitted.save_pretrained(tmp_path / "other", push_to="someone/model")
    assert pushed == {"repo_id": "someone/model", "folder_path": str(tmp_path / "other")}


def test_explain_returns_one_matrix_per_bag(fitted):
    maps = fitted.explain(BAGS[:3])
    assert [part.shape for part in maps] == [(len(bag), 2) for bag in BAGS[:3]]
    yes = [i for i, label in enumerate(Y) if label == "yes"]
    result = fitted.explain([BAGS[i] for i in yes])
    assert np.mean([part[:, 1].argmax() == 0 for part in result]) > 0.7  # the instance that makes the bag positive


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: classifier().fit(BAGS, Y[:-1]), "39 labels for 40 bags"),
        (lambda: classifier().fit(BAGS, ["no"] * 40), "the same label"),
        (lambda: classifier().fit(BAGS), "no labels"),
        (lambda: classifier(model="abmill").fit(BAGS, Y), "did you mean 'abmil'"),
        (lambda: classifier().fit(BAGS, Y, groups=[1, 2]), "2 groups for 40 bags"),
        (lambda: classifier(validation=0).fit(BAGS, Y), "validation=0: expected a share between 0 and 1"),
        (lambda: classifier().fit(BAGS[:3], ["no", "no", "yes"]), "class 'yes' has one bag"),
        (lambda: carmil.MILClassifier.from_pretrained("./nowhere"), "is not a folder"),
    ],
)
def test_invalid_arguments_raise_an_error_of_one_line(act, words):
    with pytest.raises(CarmilError, match=words) as error:
        act()
    assert "\n" not in str(error.value)


def test_predict_with_wrong_width_or_unfitted_model_raises_an_error(fitted):
    from sklearn.exceptions import NotFittedError

    with pytest.raises(CarmilError, match="bags with 5 features: expected 6, as in training"):
        fitted.predict([bag[:, :5] for bag in BAGS])
    with pytest.raises(NotFittedError):
        classifier().predict(BAGS)


@pytest.mark.finding(n=8)
@pytest.mark.parametrize(
    "y",
    [
        [*Y[:39], None],
        [*Y[:39], float("nan")],
        np.array([*(Y[:39] == "yes"), np.nan]),
        np.array([*Y[:39], np.nan], dtype=object),
        pd.Series([*Y[:39], pd.NA], dtype="string"),
        pd.Series([*Y[:39], None], dtype="category"),
    ],
    ids=["None", "nan", "float array", "object array", "string series", "category"],
)
def test_missing_label_raises_an_error(y):
    with pytest.raises(CarmilError, match=r"y has no label \(NaN or None\) for 1 of 40 bags, the first at position 39"):
        classifier().fit(BAGS, y)


@pytest.mark.finding(n=8)
def test_scale_is_fitted_on_training_bags_only_and_saved(tmp_path):
    bags = [bag * np.array([1e3, 1, 1, 1, 1, 1e-3], np.float32) + 7 for bag in BAGS]
    estimator = classifier(scale="own", seeds=2, epochs=3)
    assert clone(estimator).get_params()["scale"] == "own" and classifier().scale == "halfway"
    estimator.fit(bags, Y)
    role = estimator._roles(carmil.Bags.from_list(bags), (Y == "yes").astype(int), ["no", "yes"], None)[0]
    rows = np.concatenate([bag for bag, one in zip(bags, role.tolist(), strict=True) if one == TRAIN])
    state = estimator.population_.state()
    assert np.allclose(state["mean"].numpy(), rows.mean(0), rtol=1e-4)
    assert np.allclose(state["deviation"].numpy(), rows.std(0), rtol=1e-4)
    estimator.save_pretrained(tmp_path / "model")
    again = carmil.MILClassifier.from_pretrained(tmp_path / "model", device="cpu")
    assert again.scale == "own"
    assert np.array_equal(again.predict_proba(bags), estimator.predict_proba(bags))
    assert all(np.array_equal(a, b) for a, b in zip(again.explain(bags), estimator.explain(bags), strict=True))


@pytest.mark.finding(n=8)
def test_classifier_saved_without_scale_parameter_is_loaded(tmp_path):
    before = classifier(scale="none", init="own", epochs=2).fit(BAGS, Y)
    before.save_pretrained(tmp_path / "model")
    facts = json.loads((tmp_path / "model" / "config.json").read_text())
    del facts["parameters"]["scale"], facts["parameters"]["init"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(facts))
    again = carmil.MILClassifier.from_pretrained(tmp_path / "model", device="cpu")
    assert (again.scale, again.init) == ("none", "own")
    assert np.array_equal(again.predict_proba(BAGS), before.predict_proba(BAGS))


@pytest.mark.parametrize(
    ("given", "words"), [({"scale": "owm"}, "unknown scale 'owm'"), ({"init": "he"}, "unknown init 'he'")]
)
def test_unknown_scale_or_init_raises_an_error(given, words):
    with pytest.raises(CarmilError, match=words):
        classifier(**given).fit(BAGS, Y)


@pytest.mark.finding(n=2)
def test_predict_applies_the_validation_threshold_like_scikit_learn(fitted, tmp_path):
    from sklearn.frozen import FrozenEstimator
    from sklearn.model_selection import FixedThresholdClassifier

    p = fitted.predict_proba(BAGS)
    assert fitted.predict(BAGS).tolist() == ["yes" if one >= fitted.threshold_ else "no" for one in p[:, 1]]
    same = FixedThresholdClassifier(FrozenEstimator(fitted), threshold=fitted.threshold_, pos_label="yes")
    assert same.fit(BAGS, Y).predict(BAGS).tolist() == fitted.predict(BAGS).tolist()
    assert fitted.decision_.rule.endswith("(threshold chosen for balanced accuracy on validation bags)")

    rare = classifier(threshold="sensitivity=1", epochs=3, lr=1e-4).fit(BAGS, Y)
    assert rare.predict(BAGS).tolist() == [
        "yes" if one >= rare.threshold_ else "no" for one in rare.predict_proba(BAGS)[:, 1]
    ]
    rare.save_pretrained(tmp_path / "model")
    again = carmil.MILClassifier.from_pretrained(tmp_path / "model", device="cpu")
    assert again.threshold_ == rare.threshold_ and again.predict(BAGS).tolist() == rare.predict(BAGS).tolist()


@pytest.mark.finding(n=2)
def test_threshold_of_one_half_predicts_the_most_probable_class():
    half = classifier(threshold=0.5, epochs=2).fit(BAGS, Y)
    assert half.predict(BAGS).tolist() == half.classes_[half.predict_proba(BAGS).argmax(1)].tolist()
    three = classifier(epochs=2).fit(BAGS, [i % 3 for i in range(40)])
    assert three.threshold_ is None and three.decision_.rule == "the most probable class"
    assert three.predict(BAGS).tolist() == three.predict_proba(BAGS).argmax(1).tolist()


@pytest.mark.finding(n=2)
def test_unknown_threshold_rule_raises_an_error_before_training():
    with pytest.raises(CarmilError, match="threshold rule"):
        classifier(threshold="best").fit(BAGS, Y)


@pytest.mark.finding(n=14)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda facts: facts.update(features=10**6), "weights: expected"),
        (lambda facts: facts.update(features="4"), "features is '4': expected a whole number"),
        (lambda facts: facts.update(classes=[[]]), "classes[0]"),
        (lambda facts: facts["parameters"].update(seeds=10**9), "outside its range"),
        (lambda facts: facts["parameters"].update(options={"hidden": 10**9}), "expected at most 65,536"),
        (lambda facts: facts["parameters"].update(options=[]), "options is a list: expected names with values"),
        (lambda facts: facts["parameters"].update(model=3), "model is 3: expected text"),
        (lambda facts: facts["parameters"].update(nonsense=3), "unknown parameter 'nonsense'"),
        (lambda facts: facts.pop("parameters"), "parameters is missing"),
    ],
)
def test_saved_classifier_with_an_invalid_value_raises_an_error_of_one_line(fitted, tmp_path, change, words):
    fitted.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    facts = json.loads(path.read_text())
    change(facts)
    path.write_text(json.dumps(facts))
    with pytest.raises(carmil.CarmilError) as refused:
        carmil.MILClassifier.from_pretrained(tmp_path / "model", device="cpu")
    assert words in str(refused.value) and len(str(refused.value).splitlines()) == 1


@pytest.mark.finding(n=17)
def test_non_numeric_bags_and_mixed_label_types_raise_an_error():
    bags = [np.ones((3, 2), np.float32)] * 4
    with pytest.raises(CarmilError, match="bag 1 contains values that are not numbers: expected an array"):
        carmil.MILClassifier().fit([bags[0], np.array([["a"]])], ["x", "y"])
    with pytest.raises(CarmilError, match="y has labels of different types"):
        carmil.MILClassifier().fit(bags, np.array(["x", 1, "x", 1], dtype=object))


def test_preset_sets_parameters_unless_overridden():
    before = carmil.MILClassifier.from_preset("0.1", seeds=2, epochs=7)
    assert (before.scale, before.init, before.lr, before.distance) == ("none", "own", 2e-4, "l1")
    assert (before.seeds, before.epochs) == (2, 7)
    assert carmil.MILClassifier.from_preset("0.1", model="abmil").distance is None
    with pytest.raises(CarmilError, match=r"MILClassifier: unknown preset '0.7'; .*expected one of 0.1"):
        carmil.MILClassifier.from_preset("0.7")


@pytest.mark.parametrize("model", [name for name in carmil.list_models() if "/" not in name])
def test_every_model_trains_and_explains_with_default_parameters(model):
    classifier = carmil.MILClassifier(model, epochs=1, device="cpu").fit(BAGS[:8], Y[:8])
    (evidence,) = classifier.explain(BAGS[:1])
    assert evidence.shape == (len(BAGS[0]), 2)
    assert np.isfinite(evidence).all()


SIGNAL = np.where(Y == "yes", 5.0, -1.0)
SURVIVAL_Y = np.array(
    [(place % 3 > 0, float(10 - value + place % 5)) for place, value in enumerate(SIGNAL)],
    dtype=[("event", bool), ("time", float)],
)
NUMBERS = 20 + 3 * SIGNAL + np.arange(40) % 7
KINDS = {
    "classes": (carmil.MILClassifier, Y),
    "value": (carmil.MILRegressor, NUMBERS),
    "huber": (carmil.MILRegressor, NUMBERS),
    "cox": (carmil.MILSurvival, SURVIVAL_Y),
    "discrete": (carmil.MILSurvival, SURVIVAL_Y),
}


def estimator_of(kind: str, **others):
    made, _ = KINDS[kind]
    given = dict(model="car/abmil", epochs=3, batch=8, lr=5e-3, options={"hidden": 8, "attention": 4}, device="cpu")
    loss = {"loss": kind} if kind in ("huber", "cox", "discrete") else {}
    return made(**{**given, **loss, **others})


@pytest.mark.parametrize("kind", KINDS)
def test_path_evidence_of_every_target_sums_to_the_output_minus_the_output_of_the_reference(kind):
    estimator = estimator_of(kind, precision="float32", seeds=2).fit(BAGS, KINDS[kind][1])
    bags = carmil.Bags.from_list(BAGS[:6])
    members = [estimator.population_.member(row) for row in range(2)]
    state = estimator.population_.state()
    outputs = torch.stack([member(bags.features, Offsets(bags.offsets)).logits for member in members]).detach()
    if kind in ("value", "huber"):
        name = next(name for name in state if name.endswith("link.deviation"))
        mean, deviation = (state[name.replace("deviation", part)][0].item() for part in ("mean", "deviation"))
        assert np.allclose((estimator.predict(BAGS[:6]) - mean) / deviation, outputs.mean(0)[:, 0], atol=1e-5)
    elif kind in ("cox", "discrete"):
        centre = state[next(name for name in state if name.endswith("centre"))]
        assert np.allclose(estimator.predict(BAGS[:6]), (outputs[..., 0] - centre).mean(0), atol=1e-5)
    else:
        assert np.allclose(estimator.predict_proba(BAGS[:6]), outputs.softmax(-1).mean(0), atol=1e-5)
    changes = [path_change(member, bags.features, bags.offsets) for member in members]
    sums = np.stack([part.sum(0) for part in estimator.explain(BAGS[:6], "path")])
    assert sums.shape == (6, outputs.shape[-1])
    assert np.abs(sums).max() > 1e-3
    assert np.allclose(sums, torch.stack(changes).mean(0).detach(), atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_every_estimator_is_cloned_cross_validated_and_tuned(kind):
    estimator, y = estimator_of(kind, epochs=2), KINDS[kind][1]
    assert clone(estimator).get_params() == estimator.get_params()
    lists = cross_val_score(clone(estimator), BAGS, y, cv=KFold(2))
    bags = cross_val_score(clone(estimator), carmil.Bags.from_list(BAGS), y, cv=KFold(2))
    assert np.array_equal(lists, bags) and np.isfinite(lists).all()
    tuned = GridSearchCV(estimator, {"lr": [1e-6, 1e-2]}, cv=KFold(2)).fit(BAGS, y)
    assert tuned.best_estimator_.lr in (1e-6, 1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_every_estimator_predicts_the_same_after_loading(kind, tmp_path):
    estimator = estimator_of(kind, seeds=2).fit(BAGS, KINDS[kind][1])
    estimator.save_pretrained(tmp_path / "model")
    again = type(estimator).from_pretrained(tmp_path / "model", device="cpu")
    assert again.get_params() == estimator.get_params()
    assert np.array_equal(again.predict(BAGS), estimator.predict(BAGS))
    assert all(np.array_equal(a, b) for a, b in zip(again.explain(BAGS), estimator.explain(BAGS), strict=True))
    for other in {made for made, _ in KINDS.values()} - {type(estimator)}:
        with pytest.raises(CarmilError, match=rf"config.json is a model of the target '\w+': {other.__name__} loads"):
            other.from_pretrained(tmp_path / "model")


def test_saved_classifier_without_target_is_loaded(fitted, tmp_path):
    fitted.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    facts = json.loads(path.read_text())
    assert facts.pop("target") == "classes"
    path.write_text(json.dumps(facts))
    again = carmil.MILClassifier.from_pretrained(tmp_path / "model", device="cpu")
    assert np.array_equal(again.predict_proba(BAGS), fitted.predict_proba(BAGS))


@pytest.mark.parametrize("made", [carmil.MILRegressor, carmil.MILSurvival])
def test_preset_leaves_out_parameters_of_classifiers(made):
    before = made.from_preset("0.1", seeds=2)
    assert (before.scale, before.lr, before.seeds) == ("none", 2e-4, 2)
    assert not hasattr(before, "label_smoothing")
    with pytest.raises(CarmilError, match=f"{made.__name__}: unknown preset"):
        made.from_preset("0.7")


def test_class_labels_in_several_columns_raise_an_error():
    with pytest.raises(CarmilError, match=r"y has shape \(40, 2\): expected one class per bag"):
        classifier().fit(BAGS, np.zeros((40, 2), dtype=int))


@pytest.mark.parametrize("kind", ["value", "cox"])
def test_validation_bags_of_any_target_are_split_by_group(kind):
    estimator = estimator_of(kind, epochs=1)
    seen = []
    estimator._roles = lambda *given: seen.append(type(estimator)._roles(estimator, *given)) or seen[0]
    estimator.fit(BAGS, KINDS[kind][1], groups=np.arange(40) // 2)
    roles = seen[0][0].reshape(20, 2)
    assert (roles[:, 0] == roles[:, 1]).all() and set(roles.flatten().tolist()) == {1, 2}
