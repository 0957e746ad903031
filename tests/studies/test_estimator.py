import json

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.model_selection import GroupKFold, cross_val_score

import carmil
from carmil.bags.splits import TRAIN
from carmil.errors import CarmilError

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


def test_it_learns_and_answers_in_the_labels_own_words(fitted):
    assert fitted.classes_.tolist() == ["no", "yes"]
    assert (fitted.predict(BAGS) == Y).mean() > 0.9
    assert fitted.score(BAGS, Y) == (fitted.predict(BAGS) == Y).mean()
    assert np.allclose(fitted.predict_proba(BAGS).sum(1), 1)


def test_it_is_cloned_and_cross_validated_like_any_other():
    mine = classifier(model="abmil", epochs=40, lr=1e-2)
    assert clone(mine).get_params() == mine.get_params()
    lists = cross_val_score(clone(mine), BAGS, Y, cv=3)
    bags = cross_val_score(clone(mine), carmil.Bags.from_list(BAGS), Y, cv=3)
    assert np.array_equal(lists, bags)
    assert lists.mean() > 0.8


def test_groups_stay_together_when_the_epoch_is_chosen():
    groups = np.arange(40) // 2
    roles = classifier()._roles(carmil.Bags.from_list(BAGS), (Y == "yes").astype(int), ["no", "yes"], groups)[0]
    assert {1, 2} == set(roles.tolist())
    for group in range(20):
        assert len(set(roles[groups == group].tolist())) == 1
    assert cross_val_score(classifier(epochs=2), BAGS, Y, groups=groups, cv=GroupKFold(2)).shape == (2,)


def test_what_is_saved_answers_the_same(fitted, tmp_path):
    fitted.save_pretrained(tmp_path / "model")
    again = carmil.MILClassifier.from_pretrained(tmp_path / "model", device="cpu")
    assert np.array_equal(again.predict_proba(BAGS), fitted.predict_proba(BAGS))
    assert again.classes_.tolist() == ["no", "yes"]
    assert "device" not in json.loads((tmp_path / "model" / "config.json").read_text())["parameters"]


def test_a_parameter_of_a_numpy_grid_is_saved_as_a_number(tmp_path):
    found = classifier(seeds=np.int64(2), lr=np.float32(0.5), epochs=np.int64(1)).fit(BAGS, Y)
    found.save_pretrained(tmp_path / "model")
    again = carmil.MILClassifier.from_pretrained(tmp_path / "model", device="cpu")
    assert (again.seeds, again.lr) == (2, 0.5)
    assert np.array_equal(again.predict_proba(BAGS), found.predict_proba(BAGS))


def test_the_hub_is_asked_for_two_files_and_no_more(fitted, tmp_path, monkeypatch):
    import huggingface_hub

    fitted.save_pretrained(tmp_path / "model")
    asked = {}

    def download(name, allow_patterns):
        asked[name] = allow_patterns
        return str(tmp_path / "model")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    again = carmil.MILClassifier.from_pretrained("someone/model", device="cpu")
    assert asked == {"someone/model": ["config.json", "weights.safetensors"]}
    assert np.array_equal(again.predict(BAGS), fitted.predict(BAGS))
    pushed = {}
    monkeypatch.setattr(huggingface_hub, "upload_folder", lambda **given: pushed.update(given))
    fitted.save_pretrained(tmp_path / "other", push_to="someone/model")
    assert pushed == {"repo_id": "someone/model", "folder_path": str(tmp_path / "other")}


def test_evidence_is_a_matrix_a_bag(fitted):
    maps = fitted.explain(BAGS[:3])
    assert [part.shape for part in maps] == [(len(bag), 2) for bag in BAGS[:3]]
    yes = [i for i, label in enumerate(Y) if label == "yes"]
    found = fitted.explain([BAGS[i] for i in yes])
    assert np.mean([part[:, 1].argmax() == 0 for part in found]) > 0.7  # the instance that makes the bag positive


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
        (lambda: carmil.MILClassifier.from_pretrained("./nowhere"), "is no folder"),
    ],
)
def test_what_does_not_fit_is_one_line(act, words):
    with pytest.raises(CarmilError, match=words) as error:
        act()
    assert "\n" not in str(error.value)


def test_another_width_and_an_unfitted_model_are_refused(fitted):
    from sklearn.exceptions import NotFittedError

    with pytest.raises(CarmilError, match="bags of 5 features, the model was trained on 6"):
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
def test_a_missing_label_is_refused_and_is_no_class(y):
    with pytest.raises(CarmilError, match=r"y has no label \(NaN or None\) for 1 of 40 bags, the first at position 39"):
        classifier().fit(BAGS, y)


@pytest.mark.finding(n=8)
def test_scale_divides_by_the_training_bags_alone_and_is_saved(tmp_path):
    bags = [bag * np.array([1e3, 1, 1, 1, 1, 1e-3], np.float32) + 7 for bag in BAGS]
    mine = classifier(scale="own", seeds=2, epochs=3)
    assert clone(mine).get_params()["scale"] == "own" and classifier().scale == "halfway"
    mine.fit(bags, Y)
    role = mine._roles(carmil.Bags.from_list(bags), (Y == "yes").astype(int), ["no", "yes"], None)[0]
    rows = np.concatenate([bag for bag, one in zip(bags, role.tolist(), strict=True) if one == TRAIN])
    state = mine.population_.state()
    assert np.allclose(state["mean"].numpy(), rows.mean(0), rtol=1e-4)
    assert np.allclose(state["deviation"].numpy(), rows.std(0), rtol=1e-4)
    mine.save_pretrained(tmp_path / "model")
    again = carmil.MILClassifier.from_pretrained(tmp_path / "model", device="cpu")
    assert again.scale == "own"
    assert np.array_equal(again.predict_proba(bags), mine.predict_proba(bags))
    assert all(np.array_equal(a, b) for a, b in zip(again.explain(bags), mine.explain(bags), strict=True))


@pytest.mark.finding(n=8)
def test_a_classifier_saved_before_there_was_scale_is_read(tmp_path):
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
def test_words_that_it_does_not_know_are_one_line(given, words):
    with pytest.raises(CarmilError, match=words):
        classifier(**given).fit(BAGS, Y)


@pytest.mark.finding(n=2)
def test_it_answers_by_the_threshold_of_its_validation_bags_as_scikit_learn_would(fitted, tmp_path):
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
def test_with_a_threshold_of_one_half_it_answers_the_most_probable_class():
    half = classifier(threshold=0.5, epochs=2).fit(BAGS, Y)
    assert half.predict(BAGS).tolist() == half.classes_[half.predict_proba(BAGS).argmax(1)].tolist()
    three = classifier(epochs=2).fit(BAGS, [i % 3 for i in range(40)])
    assert three.threshold_ is None and three.decision_.rule == "the most probable class"
    assert three.predict(BAGS).tolist() == three.predict_proba(BAGS).argmax(1).tolist()


@pytest.mark.finding(n=2)
def test_a_threshold_rule_nobody_knows_is_refused_before_the_training():
    with pytest.raises(CarmilError, match="threshold rule"):
        classifier(threshold="best").fit(BAGS, Y)


@pytest.mark.finding(n=14)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda facts: facts.update(features=10**6), "weights, and the models they belong to have"),
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
def test_a_saved_classifier_with_an_odd_value_is_refused_in_one_line(fitted, tmp_path, change, words):
    fitted.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    facts = json.loads(path.read_text())
    change(facts)
    path.write_text(json.dumps(facts))
    with pytest.raises(carmil.CarmilError) as refused:
        carmil.MILClassifier.from_pretrained(tmp_path / "model", device="cpu")
    assert words in str(refused.value) and len(str(refused.value).splitlines()) == 1


@pytest.mark.finding(n=17)
def test_bags_of_words_and_labels_of_two_types_are_refused_in_plain_words():
    bags = [np.ones((3, 2), np.float32)] * 4
    with pytest.raises(CarmilError, match="bag 1 does not hold numbers only: expected an array"):
        carmil.MILClassifier().fit([bags[0], np.array([["a"]])], ["x", "y"])
    with pytest.raises(CarmilError, match="y has labels of different types"):
        carmil.MILClassifier().fit(bags, np.array(["x", 1, "x", 1], dtype=object))


def test_a_preset_gives_the_settings_of_train_and_parameters_beside_it_win():
    before = carmil.MILClassifier.from_preset("0.1", seeds=2, epochs=7)
    assert (before.scale, before.init, before.lr, before.distance) == ("none", "own", 2e-4, "l1")
    assert (before.seeds, before.epochs) == (2, 7)
    assert carmil.MILClassifier.from_preset("0.1", model="abmil").distance is None
    with pytest.raises(CarmilError, match=r"MILClassifier: unknown preset '0.7'; .*there is: 0.1"):
        carmil.MILClassifier.from_preset("0.7")


@pytest.mark.parametrize("model", [name for name in carmil.list_models() if "/" not in name])
def test_every_model_is_trained_and_explained_with_the_defaults(model):
    classifier = carmil.MILClassifier(model, epochs=1, device="cpu").fit(BAGS[:16], Y[:16])
    (evidence,) = classifier.explain(BAGS[:1])
    assert evidence.shape == (len(BAGS[0]), 2)
    assert np.isfinite(evidence).all()
