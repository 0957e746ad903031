"""A decision rule turns probabilities into answers and describes itself in words."""

import numpy as np
import pytest

from carmil.errors import CarmilError
from carmil.targets.decision import (
    HIGHER,
    LOWER,
    NO_ANSWER,
    Decision,
    EachLabel,
    MedianGrade,
    NumberItself,
    RiskGroups,
)

TWO, THREE = ("benign", "carcinoma"), ("a", "b", "c")


@pytest.mark.finding(n=2)
def test_two_classes_are_decided_by_the_threshold_and_more_by_the_highest_probability():
    p = [[0.63, 0.37], [0.64, 0.36], [0.1, 0.9]]
    assert Decision(TWO, 0.37).answers(p) == ["carcinoma", "benign", "carcinoma"]
    assert Decision(TWO).answers(p) == ["benign", "benign", "carcinoma"]
    assert Decision(THREE).answers([[0.2, 0.5, 0.3], [0.4, 0.3, 0.3]]) == ["b", "a"]
    assert Decision(TWO, 0.37).answer([0.63, 0.37]) == "carcinoma"


@pytest.mark.finding(n=2)
def test_uncertain_predictions_give_no_answer_but_a_leading_class():
    rule, p = Decision(TWO, 0.3, 0.1), [[0.75, 0.25], [0.65, 0.35], [0.5, 0.5]]
    assert rule.answers(p) == [NO_ANSWER, NO_ANSWER, "carcinoma"]
    assert rule.leading(p).tolist() == [0, 1, 1] and rule.explained(p[0]) == "benign"
    assert Decision(THREE, cut=0.2).answers([[0.5, 0.4, 0.1], [0.7, 0.2, 0.1]]) == [NO_ANSWER, "a"]


@pytest.mark.finding(n=2)
def test_decision_rule_is_described_in_words():
    assert Decision(TWO, 0.37, origin="threshold given").rule == (
        "carcinoma if p(carcinoma) >= 0.37, else benign (threshold given)"
    )
    assert Decision(TWO, 0.3, 0.1).rule == (
        "carcinoma if p(carcinoma) >= 0.3, else benign; no answer if p is within 0.1 of 0.3"
    )
    assert Decision(THREE, cut=0.2).rule == (
        "the most probable class; no answer if the two most probable are less than 0.2 apart"
    )
    assert Decision(TWO, 1.0000000000000002).rule == "always benign"


def test_threshold_for_three_classes_raises_an_error():
    with pytest.raises(CarmilError, match="a threshold for 3 classes"):
        Decision(THREE, 0.5)


CUTS = np.array([-1.0, 0.4, 2.0])  # between four grades


def grades(logit):
    at_most = np.concatenate([1 / (1 + np.exp(logit - CUTS)), [1.0]])
    return np.diff(at_most, prepend=0.0)


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum()


def sigmoid(logits):
    return 1 / (1 + np.exp(-np.asarray(logits)))


@pytest.mark.parametrize(
    ("rule", "predicted", "outputs", "direction"),
    [
        (Decision(THREE), softmax, [0.2, 1.9, -0.7], [1, 0, 0]),
        (Decision(TWO), softmax, [0.2, 1.9], [1, 0]),
        (Decision(TWO, 0.37), softmax, [0.2, 1.9], [1, 0]),
        (Decision(TWO, 0.91), softmax, [0.2, 1.9], [0, 1]),
        (RiskGroups((LOWER, HIGHER), 0.3), np.asarray, [-0.5], [1]),
        (MedianGrade(("1", "2", "3", "4")), lambda outputs: grades(outputs[0]), [0.9], [-1]),
        (MedianGrade(("1", "2", "3", "4")), lambda outputs: grades(outputs[0]), [1.5], [1]),
        (EachLabel(("node", "her2")), sigmoid, [0.8, -3.0], [-1, 0]),
    ],
)
def test_answer_changes_at_the_distance_given_by_the_rule(rule, predicted, outputs, direction):
    outputs, direction = np.array(outputs), np.array(direction)
    at = rule.turning(predicted(outputs), 0)
    assert at > 0.1
    answer = rule.answer(predicted(outputs))
    assert rule.answer(predicted(outputs + 0.999 * at * direction)) == answer
    assert rule.answer(predicted(outputs + 1.001 * at * direction)) != answer


def test_rule_whose_answer_no_output_changes_has_no_distance():
    assert NumberItself(("",)).turning([54.1], 0) is None
    assert Decision(TWO, 1.0000000000000002).turning([0.2, 0.8], 0) is None
