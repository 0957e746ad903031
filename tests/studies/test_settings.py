"""A YAML file with odd or hostile content is one line that names it."""

import pytest

from carmil.errors import CarmilError
from carmil.studies.settings import Settings, checked_options, read_settings

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
        ("folds: 3\nseeds: 2\nfolds: 7", "study.yaml, line 5: the key 'folds' is there already, in line 3"),
        ("options: {hidden: 8, hidden: 16}", "line 3: the key 'hidden' is there already, in line 3"),
        ("models-at-once: 3\nmodels_at_once: 4", "gives 'models_at_once' twice, spelled in two ways"),
        ("lambda: 1\nlambda_: 2", "gives 'lambda_' twice, spelled in two ways"),
        ("label: " + "x" * 200_000, "is larger than 131,072 bytes"),
        ("folds: &a [*a]", "repeats itself"),
        (BOMB, "holds more than 10,000 values, or repeats itself"),
        ("lr: " + "9" * 400, "more than 18 digits"),
        ("lr: " + "9" * 5000, "line 3: a whole number of more than 18 digits: expected"),
        ("lr: [1, " + "9" * 400 + "]", "more than 18 digits"),
        ("lr: '1e400'", "expected a finite number"),
        ("model: [a, b]", "model is a list: expected text"),
        ('label: "a\\0b"', "label holds a null character"),
        ("optimizer: [adam]", "optimizer is a list: expected one of adam, sgd"),
        ("options: {hidden: 2001-01-01}", "options: hidden is a date"),
        ("options: {hidden: 1000000000}", "options.hidden is 1000000000: expected at most 65,536"),
        ("options: {[1, 2]: 3}", "study.yaml"),
        ("options: {1: 3}", "study.yaml"),
        ("!!set {a, b}", "study.yaml"),
        ("%TAG x", "study.yaml"),
    ],
)
def test_odd_yaml_is_one_line(tmp_path, text, words):
    path = tmp_path / "study.yaml"
    path.write_text(GOOD + text)
    with pytest.raises(CarmilError) as refused:
        Settings.of(read_settings(path), where=str(path))
    assert words in str(refused.value) and "study.yaml" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1 and len(str(refused.value)) < 500


@pytest.mark.finding(n=14)
def test_anchors_and_options_that_are_meant_are_read(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(GOOD + "lr: &rates [1e-4, 2e-4]\nalpha: *rates\noptions: {hidden: 8, names: [a, 1], gated: true}\n")
    settings = Settings.of(read_settings(path), where=str(path))
    assert settings.lr == settings.alpha == [1e-4, 2e-4]
    assert settings.options == {"hidden": 8, "names": ["a", 1], "gated": True}
    assert checked_options(None, "options") is None
