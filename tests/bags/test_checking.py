import pytest

from carmil.bags.checking import Duplicate, find_duplicates, judge_duplicates
from carmil.errors import CarmilError

SLIDES = [
    ("a", "p1", "tumor", "x"),
    ("b", "p2", "tumor", "y"),
    ("c", "p2", "tumor", "x"),
    ("d", "p1", "tumor", "x"),
    ("e", "p3", "normal", "x"),
]


@pytest.mark.finding(n=5)
def test_duplicates_are_sorted_by_different_labels_then_different_patients():
    result = find_duplicates(SLIDES)
    assert result == [
        Duplicate(("a", "e"), ("p1", "p3"), ("tumor", "normal")),
        Duplicate(("a", "c"), ("p1", "p2"), ("tumor", "tumor")),
        Duplicate(("a", "d"), ("p1", "p1"), ("tumor", "tumor")),
    ]
    assert find_duplicates(SLIDES[:2]) == []


@pytest.mark.finding(n=5)
def test_duplicate_features_of_two_patients_raise_an_error_unless_allowed():
    result = find_duplicates(SLIDES)
    with pytest.raises(CarmilError) as error:
        judge_duplicates(result, allowed=False)
    message = str(error.value)
    assert message.startswith(
        "2 pairs of slides of different patients have the same features, 1 with DIFFERENT LABELS: 'a' of patient 'p1' "
        "labelled 'tumor' and 'e' of patient 'p3' labelled 'normal'; 'a' of patient 'p1' and 'c' of patient 'p2': "
    )
    assert "--allow-duplicates" in message and "\n" not in message
    warning, note = judge_duplicates(result, allowed=True)
    assert warning.startswith("WARNING: 2 pairs of slides of different patients")
    assert note == "1 pair of slides of one patient has the same features: 'a' and 'd' of patient 'p1'"
    assert judge_duplicates([], allowed=False) == []


@pytest.mark.finding(n=5)
def test_note_about_duplicates_lists_three_pairs_and_counts_the_rest():
    (line,) = judge_duplicates(find_duplicates([(str(i), "p", "tumor", "x") for i in range(6)]), allowed=False)
    assert line.endswith("'0' and '3' of patient 'p'; and 2 more")
