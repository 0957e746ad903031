"""A settings file with invalid or hostile content raises an error of one line that names it."""

from pathlib import Path

import pytest

from carmil.errors import CarmilError
from carmil.runs.run import OPTIONAL, key_of
from carmil.runs.settings import Settings, checked_options, preset_of, read_settings
from carmil.studies.train import recipe_of
from carmil.targets import Classes, Survival

GOOD = "bags: features\nout: run\n"
BOMB = "options:\n  a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)
)


@pytest.mark.finding(n=14)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("label: 2001-99-99", "cannot be read (ValueError: month must be in 1..12)"),
        ("label: 2001-01-01", "label is a date: expected text"),
        ("folds: 9999-12-31T23:59:59+99:99", "study.yaml"),
        ("folds: " + "[" * 3000, "line 3: nested deeper than 20 levels"),
        ("folds: " + "[" * 400 + "]" * 400, "line 3: nested deeper than 20 levels"),
        ("folds: " + "{a: " * 800 + "}" * 800, "line 3: nested deeper than 20 levels"),
        ("folds:" + "".join("\n" + " " * i + "a:" for i in range(1, 30)), "line 22: nested deeper than 20 levels"),
        ("folds: 3\nseeds: 2\nfolds: 7", "study.yaml, line 5: the key 'folds' is given already in line 3"),
        ("options: {hidden: 8, hidden: 16}", "line 3: the key 'hidden' is given already in line 3"),
        ("models-at-once: 3\nmodels_at_once: 4", "gives 'models_at_once' twice, spelled in two ways"),
        ("lambda: 1\nlambda_: 2", "gives 'lambda_' twice, spelled in two ways"),
        ("label: " + "x" * 200_000, "is larger than 131,072 bytes"),
        ("folds: &a [*a]", "repeats itself"),
        (BOMB, "holds more than 10,000 values, or repeats itself"),
        ("lr: " + "9" * 400, "more than 18 digits"),
        ("lr: " + "9" * 5000, "line 3: a whole number of more than 18 digits: expected"),
        ("lr: [1, " + "9" * 400 + "]", "more than 18 digits"),
        ("folds: 010", "line 3: 010 begins with 0, which makes it octal in YAML"),
        ("folds: -0_7", "line 3: -0_7 begins with 0"),
        ("lr: 1:30", "line 3: '1:30' is a number in base 60 in YAML"),
        ("lr: [1, 1:30.5]", "line 3: '1:30.5' is a number in base 60 in YAML"),
        ("lr: '1e400'", "expected a finite number"),
        ("model: [a, b]", "model is a list: expected text"),
        ("bags: " + "x" * 300, "expected the name of a file, at most 255 bytes long"),
        ('label: "a\\0b"', "label is 'a\\x00b': expected text without a null character"),
        ("optimizer: [adam]", "optimizer is a list: expected one of adam, sgd"),
        ("options: {hidden: 2001-01-01}", "options: expected text, numbers, lists and objects, and found a date"),
        ("options: {hidden: 1000000000}", "options.hidden is 1000000000: expected at most 65,536"),
        ("options: {[1, 2]: 3}", "study.yaml"),
        ("options: {1: 3}", "study.yaml"),
        ("!!set {a, b}", "study.yaml"),
        ("%TAG x", "study.yaml"),
    ],
)
def test_invalid_yaml_raises_an_error_of_one_line(tmp_path, text, words):
    path = tmp_path / "study.yaml"
    path.write_text((GOOD if not text.startswith("bags") else "out: run\n") + text)
    with pytest.raises(CarmilError) as refused:
        Settings.of(read_settings(path), where=str(path))
    assert words in str(refused.value) and "study.yaml" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1 and len(str(refused.value)) < 500


@pytest.mark.finding(n=14)
def test_yaml_anchors_and_nested_options_are_read(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(GOOD + "lr: &rates [1e-4, 2e-4]\nalpha: *rates\noptions: {hidden: 8, names: [a, 1], gated: true}\n")
    settings = Settings.of(read_settings(path), where=str(path))
    assert settings.lr == settings.alpha == [1e-4, 2e-4]
    assert settings.options == {"hidden": 8, "names": ["a", 1], "gated": True}
    assert checked_options(None, "options") is None


def settings_of(**given) -> Settings:
    return Settings.of({"bags": "features", "out": "run", **given}, where="study.yaml")


def test_preset_restores_settings_of_version_0_1_unless_overridden():
    before = settings_of(preset="0.1")
    names = ("epochs", "warmup", "lr", "weight_decay", "label_smoothing", "scale", "init", "distance")
    assert [getattr(before, name) for name in names] == [50, 5, 2e-4, 1e-5, 0.0, "none", "own", "l1"]
    assert settings_of(preset=0.1, lr=1e-3, scale="own").lr == 1e-3
    assert settings_of(preset="0.1", scale="own").scale == "own"
    assert settings_of(preset="0.1", model="abmil").distance is None, "a model without a branch has no distance"
    assert settings_of() == Settings(bags=Path("features"), out=Path("run"))
    with pytest.raises(CarmilError, match=r"study.yaml: unknown preset '0.3'"):
        settings_of(preset="0.3")


def test_warmup_is_half_of_the_epochs_by_default():
    assert recipe_of(settings_of(epochs=40)).warmup == 20
    assert recipe_of(settings_of(epochs=40, warmup=5)).warmup == 5
    assert recipe_of(settings_of(epochs=3, warmup=5)).warmup == 2
    assert recipe_of(settings_of(epochs=1)).warmup == 0


def test_unknown_setting_or_value_suggests_the_nearest_valid_choice():
    with pytest.raises(CarmilError, match=r"unknown setting 'presett'; did you mean 'preset'\?"):
        settings_of(presett="0.1")
    with pytest.raises(CarmilError, match=r"scale is 'half': .*none, common, halfway, own; did you mean 'halfway'\?"):
        settings_of(scale="half")


@pytest.mark.parametrize(
    ("given", "name"), [({"preset": "0.1"}, "0.1"), ({"preset": "0.1", "lr": 1e-3}, None), ({}, None)]
)
def test_preset_is_recognised_from_the_settings(given, name):
    assert preset_of(settings_of(**given)) == name


def test_settings_that_depend_on_the_target_have_its_defaults_unless_given():
    settings = Settings.of({"bags": "features", "out": "run"}, where="command line")
    classes, survival = (settings.completed(target) for target in (Classes(names=("a", "b")), Survival()))
    assert (classes.batch, classes.label_smoothing) == (1, 0.1)
    assert (survival.batch, survival.label_smoothing) == (32, 0)
    given = Settings.of({"bags": "features", "out": "run", "batch": 8, "label_smoothing": 0.0}, where="command line")
    assert given.completed(Classes(names=("a", "b"))) == given


def test_target_is_part_of_the_key_of_a_run_only_if_it_is_given():
    settings = Settings.of({"bags": "features", "out": "run"}, where="command line").lasting()
    earlier = {name: value for name, value in settings.items() if name not in OPTIONAL}  # a run of version 0.1.0
    assert key_of(settings, {"data": "0"}) == key_of(earlier, {"data": "0"})
    assert key_of({**settings, "target": "age"}, {"data": "0"}) != key_of(earlier, {"data": "0"})
