"""One rule turns probabilities into answers, and says so in words."""

import pytest

from carmil.errors import CarmilError
from carmil.runs.decision import NO_ANSWER, Decision

TWO, THREE = ("benign", "carcinoma"), ("a", "b", "c")


@pytest.mark.finding(n=2)
def test_two_classes_are_decided_by_the_threshold_and_more_by_the_most_probable():
    p = [[0.63, 0.37], [0.64, 0.36], [0.1, 0.9]]
    assert Decision(TWO, 0.37).answers(p) == ["carcinoma", "benign", "carcinoma"]
    assert Decision(TWO).answers(p) == ["benign", "benign", "carcinoma"]
    assert Decision(THREE).answers([[0.2, 0.5, 0.3], [0.4, 0.3, 0.3]]) == ["b", "a"]
    assert Decision(TWO, 0.37).answer([0.63, 0.37]) == "carcinoma"


@pytest.mark.finding(n=2)
def test_too_close_to_call_is_no_answer_and_still_has_a_class_that_leads():
    rule, p = Decision(TWO, 0.3, 0.1), [[0.75, 0.25], [0.65, 0.35], [0.5, 0.5]]
    assert rule.answers(p) == [NO_ANSWER, NO_ANSWER, "carcinoma"]
    assert rule.leading(p).tolist() == [0, 1, 1] and rule.leading_class(p[0]) == "benign"
    assert Decision(THREE, cut=0.2).answers([[0.5, 0.4, 0.1], [0.7, 0.2, 0.1]]) == [NO_ANSWER, "a"]


@pytest.mark.finding(n=2)
def test_the_rule_is_said_in_words():
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


def test_a_threshold_belongs_to_two_classes():
    with pytest.raises(CarmilError, match="a threshold for 3 classes"):
        Decision(THREE, 0.5)
