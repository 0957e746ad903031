import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score, precision_score, recall_score

from carmil.errors import CarmilError
from carmil.statistics.operating import RULES, Rule, abstention, answered, at_threshold, confidence, threshold

RULE_TEXTS = ["balanced", "f1", "fixed", "0.3", "sensitivity=0.95", "sensitivity=1", "specificity=0.9", "specificity=1"]
PROBABILITY = st.sampled_from([0.0, 0.2, 0.4, 0.5, 0.7, 1.0]) | st.floats(0, 1)


@st.composite
def validation(draw):
    rows = draw(st.lists(st.tuples(st.integers(0, 1), PROBABILITY), min_size=2, max_size=25))
    labels, p = (np.array(column) for column in zip(*rows, strict=True))
    assume(0 < labels.sum() < len(labels))
    return labels, p


def distinct_thresholds(p):
    """Return one threshold for each possible set of positive predictions."""
    return [*np.unique(p), 0.5, np.nextafter(1, 2)]


def sensitivity_and_specificity(labels, answers):
    return answers[labels == 1].mean(), (~answers)[labels == 0].mean()


@settings(max_examples=60, deadline=None)
@given(cases=validation(), rule=st.sampled_from(["balanced", "f1"]))
def test_chosen_threshold_maximises_its_criterion(cases, rule):
    labels, p = cases
    worth = {"balanced": balanced_accuracy_score, "f1": lambda y, a: f1_score(y, a, average="macro", zero_division=0)}
    chosen = threshold(labels, p, rule).threshold
    best = max(worth[rule](labels, p >= t) for t in distinct_thresholds(p))
    assert worth[rule](labels, p >= chosen) == pytest.approx(best)
    if worth[rule](labels, p >= 0.5) == pytest.approx(best):
        assert chosen == 0.5


@settings(max_examples=150, deadline=None)
@given(cases=validation(), target=st.floats(0, 1))
def test_threshold_reaches_its_target_at_the_best_possible_trade_off(cases, target):
    labels, p = cases
    sensitive, specific = (threshold(labels, p, f"{name}={target}") for name in ("sensitivity", "specificity"))
    assert (sensitive.sensitivity, sensitive.specificity) == sensitivity_and_specificity(
        labels, p >= sensitive.threshold
    )
    assert (specific.sensitivity, specific.specificity) == sensitivity_and_specificity(labels, p >= specific.threshold)
    assert sensitive.sensitivity >= target and specific.specificity >= target
    for t in distinct_thresholds(p):
        sensitivity, specificity = sensitivity_and_specificity(labels, p >= t)
        assert sensitivity < target or specificity <= sensitive.specificity
        assert specificity < target or sensitivity <= specific.sensitivity


@settings(max_examples=80, deadline=None)
@given(cases=validation(), rule=st.sampled_from(RULE_TEXTS), seed=st.integers(0, 100))
def test_threshold_and_abstention_do_not_depend_on_bag_order(cases, rule, seed):
    labels, p = cases
    order = np.random.default_rng(seed).permutation(len(p))
    assert threshold(labels[order], p[order], rule) == threshold(labels, p, rule)
    assert abstention(p[order], 0.3) == abstention(p, 0.3)


def test_thresholds_equal_values_computed_by_hand():
    labels, p = [0, 0, 1, 0, 1, 1], [0.1, 0.2, 0.3, 0.6, 0.8, 0.9]
    chosen = {rule: threshold(labels, p, rule) for rule in RULE_TEXTS}
    assert {rule: point.threshold for rule, point in chosen.items()} == pytest.approx(
        {
            "balanced": 0.7,  # 0.25 is equally good but further from 0.5
            "f1": 0.7,
            "fixed": 0.5,
            "0.3": 0.3,
            "sensitivity=0.95": 0.25,
            "sensitivity=1": 0.25,
            "specificity=0.9": 0.7,
            "specificity=1": 0.7,
        }
    )
    assert chosen["specificity=0.9"].sensitivity == pytest.approx(2 / 3)
    assert chosen["sensitivity=1"].specificity == pytest.approx(2 / 3)
    assert all(point.note == "" for point in chosen.values())


def test_equally_good_thresholds_are_resolved_towards_one_half():
    assert threshold([0, 1], [0.1, 0.3], "balanced").threshold == pytest.approx(0.2)
    assert threshold([0, 1], [0.1, 0.95], "balanced").threshold == 0.5  # not 0.525
    assert threshold([0, 1, 0, 1], [0.2, 0.4, 0.6, 0.8], "f1").threshold == pytest.approx(0.3)  # 0.7 is equally good
    # 1/1 and 1/6, or 1/2 and 4/6: equal means that differ by rounding in float64.
    ninths = np.arange(1, 9) / 9
    assert threshold([0, 1, 0, 0, 0, 1, 0, 0], ninths, "balanced").threshold == pytest.approx(5.5 / 9)


def test_threshold_exists_even_if_all_probabilities_are_zero_or_one():
    labels, p = [0, 1, 0, 1], [1.0, 1.0, 0.0, 0.0]
    everything = threshold(labels, p, "sensitivity=1")
    assert (everything.sensitivity, everything.specificity, everything.threshold) == (1, 0, 0)
    assert everything.note == "sensitivity=1.0: every validation bag is answered 1 at this threshold"
    nothing = threshold(labels, p, "specificity=1")
    assert (nothing.sensitivity, nothing.specificity) == (0, 1)
    assert "answered 0" in nothing.note
    for low in (0.2, 0.3):  # half of the last bit rounds down in one case and up in the other
        neighbours = [low, np.nextafter(low, 1)]
        assert threshold([0, 1], neighbours, "balanced").threshold == neighbours[1]


@pytest.mark.parametrize("only", [0, 1])
def test_threshold_rules_with_one_validation_class_use_the_default_or_raise_an_error(only):
    labels, p = [only] * 3, [0.2, 0.6, 0.7]
    for rule, expected in (("balanced", 0.5), ("f1", 0.5), ("fixed", 0.5), ("0.3", 0.3)):
        point = threshold(labels, p, rule)
        assert point.threshold == expected
        assert f"all validation bags are of class {only}" in point.note
        known, unknown = (point.sensitivity, point.specificity)[:: 1 if only else -1]
        assert known == pytest.approx(np.mean((np.array(p) >= expected) == only))
        assert math.isnan(unknown)
    for rule in ("sensitivity=0.9", "specificity=0.9"):
        with pytest.raises(CarmilError, match=rf"{rule} cannot be set: all validation bags are of class {only}"):
            threshold(labels, p, rule)


def test_rule_text_survives_a_round_trip():
    assert Rule.parse("sensitivity=0.95") == Rule.parse(" sensitivity = .95 ") == Rule("sensitivity", 0.95)
    assert Rule.parse("fixed") == Rule.parse("0.5") == Rule("fixed")
    for text in RULE_TEXTS:
        assert Rule.parse(str(Rule.parse(text))) == Rule.parse(text)
    assert {Rule.parse(text).name for text in RULE_TEXTS} == set(RULES)


@settings(max_examples=40, deadline=None)
@given(cases=validation(), t=PROBABILITY)
def test_metrics_at_a_threshold_equal_scikit_learn(cases, t):
    labels, p = cases
    answers = p >= t
    expected = {
        "sensitivity": recall_score(labels, answers),
        "specificity": recall_score(labels, answers, pos_label=0),
        "ppv": precision_score(labels, answers, zero_division=np.nan),
        "npv": precision_score(labels, answers, pos_label=0, zero_division=np.nan),
        "f1_macro": f1_score(labels, answers, average="macro", zero_division=0),
        "balanced_accuracy": balanced_accuracy_score(labels, answers),
        "accuracy": accuracy_score(labels, answers),
    }
    assert at_threshold(labels, p, t) == pytest.approx(expected, nan_ok=True)


def test_metrics_undefined_for_one_class_are_nan():
    measured = at_threshold([1, 1], [0.2, 0.7], 0.5)
    assert (measured["sensitivity"], measured["accuracy"], measured["ppv"], measured["npv"]) == (0.5, 0.5, 1, 0)
    assert all(math.isnan(measured[name]) for name in ("specificity", "f1_macro", "balanced_accuracy"))


def test_confidence_is_the_margin_to_another_prediction():
    assert confidence([0.1, 0.8], 0.3) == pytest.approx([0.2, 0.5])
    assert confidence([[0.9, 0.1], [0.2, 0.8]]) == pytest.approx([0.4, 0.3])
    assert confidence([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]) == pytest.approx([0.2, 0.7])


def test_abstention_withholds_the_least_confident_predictions():
    p = np.array([0.05, 0.45, 0.52, 0.7, 0.9])
    cut = abstention(p, 0.4)
    assert cut == pytest.approx(0.125)  # halfway between 0.05 and 0.2
    assert answered(p, cut).tolist() == [True, False, False, True, True]
    assert abstention(p, 0) == 0
    assert abstention([0.7], 1 - 1e-12) == 0
    assert (~answered(np.linspace(0.6, 1, 100), abstention(np.linspace(0.6, 1, 100), 0.29))).sum() == 29
    three = np.array([[0.4, 0.35, 0.25], [0.1, 0.1, 0.8], [0.3, 0.6, 0.1]])
    assert answered(three, abstention(three, 0.34)).tolist() == [False, True, True]


@settings(max_examples=100, deadline=None)
@given(p=st.lists(PROBABILITY, min_size=1, max_size=30), share=st.floats(0, 1, exclude_max=True), t=PROBABILITY)
def test_abstention_withholds_at_most_the_requested_share(p, share, t):
    withheld = (~answered(p, abstention(p, share, t), t)).sum()
    assert withheld <= share * len(p) + 1e-6
    if len(np.unique(confidence(p, t))) == len(p):
        assert withheld > share * len(p) - 1


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda: Rule.parse("balansed"), "unknown threshold rule 'balansed'; did you mean 'balanced'"),
        (lambda: Rule.parse("sensitivty=0.9"), "did you mean 'sensitivity'"),
        (lambda: Rule.parse("youden"), "unknown threshold rule 'youden'; expected one of balanced, f1"),
        (lambda: Rule.parse(""), "unknown threshold rule ''"),
        (lambda: Rule.parse("sensitivity"), "expected a number to reach, such as sensitivity=0.95"),
        (lambda: Rule.parse("specificity=high"), "'specificity=high': expected a number"),
        (lambda: Rule.parse("specificity=90"), "'specificity=90.0': expected a number from 0 to 1"),
        (lambda: Rule.parse("balanced=0.5"), "balanced takes no number"),
        (lambda: Rule.parse("1.5"), "'1.5': expected a number from 0 to 1"),
        (lambda: Rule.parse("nan"), "expected a number from 0 to 1"),
        (lambda: threshold([0, 1], [0.2], "f1"), "labels has 2 entries, p 1"),
        (lambda: threshold([0, 1], [0.2, math.nan], "f1"), "p is nan at case 1"),
        (lambda: threshold([0, 1], [0.2, 1.7], "f1"), "p is 1.7 at bag 1"),
        (lambda: threshold([0, 2], [0.2, 0.7], "f1"), "label 2 of case 1: expected 0 or 1"),
        (lambda: threshold([], [], "f1"), "no cases"),
        (lambda: threshold([0, 1], np.eye(2), "f1"), r"p has shape \(2, 2\)"),
        (lambda: at_threshold([0, 1], [0.2, 0.7], math.nan), "threshold is nan"),
        (lambda: abstention([0.2, 0.7], 1.2), "a share of 1.2 answers withheld"),
        (lambda: abstention([0.2, 0.7], 1.0), "a share of 1 answers withheld"),
        (lambda: abstention([0.2, 0.7], math.nan), "a share of nan"),
        (lambda: abstention([], 0.1), "p is empty"),
        (lambda: abstention(np.eye(3), 0.1, 0.5), "a threshold for 3 classes"),
        (lambda: answered([0.2, 0.7], math.nan), "cut is nan"),
        (lambda: answered([[0.2, 0.2]], 0.1), "sum to 0.4"),
    ],
)
def test_invalid_arguments_raise_an_error_of_one_line(broken, says):
    with pytest.raises(CarmilError, match=says) as error:
        broken()
    assert "\n" not in str(error.value)
