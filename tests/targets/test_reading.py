"""The kind of a target is guessed from its column, and values that do not fit it are refused in one clear line."""

import numpy as np
import pandas as pd
import pytest

from carmil.errors import CarmilError
from carmil.runs.settings import Settings
from carmil.studies.cohort import read_outcome_table, read_target_table
from carmil.targets import Classes, Labels, Ordinal, Survival, Value
from carmil.targets.reading import TargetColumns, columns_of, kind_of, read_outcomes, target_columns


def read(named, **cells):
    """Return the target, the outcomes and the notes of a table with these cells; its slides are s0, s1, ..."""
    frame, notes = pd.DataFrame(cells, dtype=str), []
    kind = kind_of(named, frame, notes)
    target, outcomes = read_outcomes(named, kind, frame, [f"s{i}" for i in range(len(frame))], "t.csv", notes)
    return target, outcomes, notes


def refusal(named, **cells):
    """Return the message of the error that a table with these cells raises, which has one line."""
    with pytest.raises(CarmilError) as raised:
        read(named, **cells)
    assert "\n" not in str(raised.value)
    return str(raised.value)


SURVIVAL = TargetColumns(("time",), "event", "survival")
VALUE, ORDINAL = TargetColumns(("x",), kind="value"), TargetColumns(("grade",), kind="ordinal")
LABELS = TargetColumns(("er", "pr"), kind="labels")


@pytest.mark.parametrize(
    ("cells", "kind", "note"),
    [
        (
            [f"{i}" for i in range(11)],
            "value",
            "target 'x': a number (guessed: 11 different numbers; use --kind classes if they name classes)",
        ),
        (
            ["1", "2.5", "1"],
            "value",
            "target 'x': a number (guessed: 2 different numbers; use --kind classes if they name classes)",
        ),
        (
            ["1", "2", "3.0", "NA", ""],
            "classes",
            "target 'x': classes (guessed: 3 different whole numbers; use --ordinal if they are ordered grades, --kind value "
            "if they are a quantity)",
        ),
        (
            ["low", "high", "1"],
            "classes",
            "target 'x': classes (guessed: it has words, such as 'low'; use --ordinal if they are ordered grades)",
        ),
    ],
)
def test_kind_is_guessed_from_the_values_and_the_guess_is_noted(cells, kind, note):
    notes = []
    assert kind_of(TargetColumns(("x",)), pd.DataFrame({"x": cells}), notes) == kind
    assert notes == [note]


def test_specified_kind_is_not_guessed():
    notes = []
    assert kind_of(VALUE, pd.DataFrame({"x": ["1", "2"]}), notes) == "value"
    assert notes == []


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, None),
        ({"kind": "classes"}, None),
        ({"target": "x"}, TargetColumns(("x",))),
        ({"target": "x", "kind": "ordinal"}, TargetColumns(("x",), kind="ordinal")),
        ({"target": "a, b"}, TargetColumns(("a", "b"), kind="labels")),
        ({"target": "a", "kind": "labels"}, TargetColumns(("a",), kind="labels")),
        ({"target": "t", "event": "e", "loss": "discrete"}, TargetColumns(("t",), "e", "survival", "discrete")),
    ],
)
def test_columns_of_a_target_are_specified_in_the_settings(settings, named):
    assert target_columns(**({"target": None, "event": None, "kind": None, "loss": None} | settings)) == named


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"event": "e"}, "--event e without --target: name the column to predict with --target"),
        ({"kind": "value"}, "--kind value without --target: name the column to predict with --target"),
        ({"loss": "cox"}, "--loss cox without --target: name the column to predict with --target"),
        (
            {"target": "x", "label": "y"},
            "--label y and --target x both name what is predicted: give one of them",
        ),
        ({"target": "a,,b"}, "--target a,,b: expected one column, or several different ones separated by commas"),
        ({"target": "a,a"}, "--target a,a: expected one column, or several different ones separated by commas"),
        ({"target": "a,b", "event": "e"}, "--target a,b with --event e: expected one column of times"),
        (
            {"target": "t", "event": "t"},
            "--target t and --event t name the same column: expected a time and an event",
        ),
        (
            {"target": "t", "event": "e", "kind": "value"},
            "--event e and --kind value: --event is for survival only; leave one of them out",
        ),
        (
            {"target": "t", "kind": "survival"},
            "--kind survival without --event: name the column of events, --target t --event EVENT",
        ),
        (
            {"target": "a,b", "kind": "ordinal"},
            "--target a,b with --kind ordinal: expected one column; several columns are of the kind 'labels'",
        ),
    ],
)
def test_options_that_contradict_each_other_raise_an_error(settings, message):
    with pytest.raises(CarmilError) as raised:
        target_columns(**({"target": None, "event": None, "kind": None, "loss": None} | settings))
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("named", "cells", "message"),
    [
        (
            TargetColumns(("time",), "event", "survival", "huber"),
            {"time": ["1", "2"], "event": ["1", "0"]},
            "--loss huber: a target of the kind 'survival' has the losses cox and discrete; name one of them",
        ),
        (
            TargetColumns(("x",), loss="cox"),
            {"x": ["1.5", "2"]},
            "--loss cox: a target of the kind 'value' has the losses squared and huber; name one of them",
        ),
        (
            TargetColumns(("grade",), kind="ordinal", loss="cox"),
            {"grade": ["1", "2"]},
            "--loss cox: a target of the kind 'ordinal' has one loss; leave the option out",
        ),
        (
            TargetColumns(("er", "pr"), kind="labels", loss="cox"),
            {"er": ["1", "0"], "pr": ["1", "0"]},
            "--loss cox: a target of the kind 'labels' has one loss; leave the option out",
        ),
        (
            TargetColumns(("x",), kind="classes", loss="cox"),
            {"x": ["1", "2"]},
            "--loss cox: a target of the kind 'classes' has one loss; leave the option out",
        ),
        (
            TargetColumns(("x",), loss="squared"),
            {"x": ["a", "b"]},
            "--loss squared: a target of the kind 'classes' has one loss; leave the option out",
        ),
    ],
)
def test_loss_of_another_kind_raises_an_error(named, cells, message):
    assert refusal(named, **cells) == message


def test_times_and_events_are_read_and_counted():
    target, outcomes, notes = read(SURVIVAL, time=["3.5", "2", "8"], event=["1", "0", "1.0"])
    assert target == Survival(columns=("time", "event"), loss="cox")
    assert outcomes.tolist() == [[3.5, 1], [2, 0], [8, 1]]
    assert notes == ["survival: time 'time', event 'event'; 2 of 3 slides with an event, median time 3.5"]


@pytest.mark.parametrize(
    ("column", "yes", "no"),
    [
        ("event", "yes", "no"),
        ("event", "TRUE", "False"),
        ("vital_status", "Dead", "Alive"),
        ("OS_STATUS", "1:DECEASED", "0:LIVING"),
        ("DFS_STATUS", "1:Recurred/Progressed", "0:DiseaseFree"),
        ("uncensored", "1", "0"),
        ("censoring", "0", "1"),
        ("Censored", "no", "yes"),
        ("censoring_status", "dead", "censored"),
        ("censor", "1:EVENT", "0:CENSORED"),
        ("censored", "EVENT", "CENSORED"),
        ("not_censored", "1", "0"),
        ("non-censored", "1", "0"),
        ("is_alive", "0", "1"),
        ("Survived", "no", "yes"),
        ("not_alive", "1", "0"),
        ("alive_or_dead", "1", "0"),
        ("overall_survival", "1", "0"),
    ],
)
def test_events_are_read_from_words_and_from_censoring_columns(column, yes, no):
    cells = {"time": ["1", "2", "3"], column: [yes, no, no]}
    assert read(TargetColumns(("time",), column, "survival"), **cells)[1][:, 1].tolist() == [1, 0, 0]


@pytest.mark.parametrize(("column", "name"), [("alive", "event"), ("not_censored", "event"), ("died", "died")])
def test_name_of_a_column_for_the_absence_of_an_event_is_not_used_for_the_event(column, name):
    assert Survival(columns=("months", column)).event_name == name


@pytest.mark.parametrize("cells", [["0:DECEASED", "1:LIVING"], ["1:CENSORED", "0:EVENT"]])
def test_a_number_that_contradicts_its_word_raises_an_error(cells):
    assert refusal(SURVIVAL, time=["1", "2"], event=cells) == (
        f"t.csv: column 'event' has {cells[0]!r} for slide 's0': expected a number that agrees with its word, such as 1:DECEASED "
        "and 0:LIVING; remove the numbers, and keep the words"
    )


def test_censoring_column_with_numbers_and_words_raises_an_error():
    assert refusal(
        TargetColumns(("time",), "censored", "survival"), time=["1", "2", "3"], censored=["1", "0", "dead"]
    ) == (
        "t.csv: column 'censored' names censoring and has both '1' and 'dead': expected one or the other throughout, as the "
        "first is read the other way round"
    )


def test_interpretation_of_a_censoring_column_is_noted():
    _, _, notes = read(TargetColumns(("time",), "censored", "survival"), time=["1", "2"], censored=["0", "1"])
    assert notes[0] == (
        "column 'censored' names censoring: 1 is taken as censored, 0 as an event (rename the column if it is the other way "
        "round)"
    )


@pytest.mark.parametrize(
    ("time", "event", "message"),
    [
        (
            ["1", "2", "3"],
            ["1", "", "NA"],
            "t.csv: 2 slides have a value in column 'time' but none in column 'event' ('s1', 's2'): fill in both cells, or "
            "empty both to leave the slide out",
        ),
        (
            ["1", "", "3"],
            ["1", "0", "0"],
            "t.csv: 1 slide has a value in column 'event' but none in column 'time' ('s1'): fill in both cells, or empty both "
            "to leave the slide out",
        ),
        (
            ["1", "-2", "3"],
            ["1", "0", "0"],
            "t.csv: column 'time' has -2 for slide 's1': expected a time of 0 or more; correct it, or leave the slide out",
        ),
        (
            ["1", "2 years", "3"],
            ["1", "0", "0"],
            "t.csv: column 'time' has '2 years' for slide 's1': expected a number, such as 12.5; correct it, or leave the "
            "slide out",
        ),
        (
            ["1", "inf", "3"],
            ["1", "0", "0"],
            "t.csv: column 'time' has 'inf' for slide 's1': expected a number, such as 12.5; correct it, or leave the slide "
            "out",
        ),
        (
            ["5", "5", "5"],
            ["1", "0", "1"],
            "t.csv: column 'time' is 5 for every slide: expected different numbers; name another column with --target",
        ),
        (
            ["1", "2", "3"],
            ["1", "2", "1"],
            "t.csv: column 'event' has '2' for slide 's1': expected 1 or 0, or words such as yes, no, dead or alive; correct "
            "the table",
        ),
        (
            ["1", "2", "3"],
            ["0", "0", "0"],
            "t.csv: column 'event' has no event, all 3 slides are censored: expected some events; check whether events and "
            "censoring are the wrong way round",
        ),
    ],
)
def test_invalid_times_and_events_raise_an_error(time, event, message):
    assert refusal(SURVIVAL, time=time, event=event) == message


def test_censoring_column_without_any_event_raises_an_error_explaining_its_interpretation():
    named = TargetColumns(("time",), "censored", "survival")
    assert refusal(named, time=["1", "2"], censored=["1", "1"]) == (
        "t.csv: column 'censored' has no event, all 2 slides are censored (0 is an event, as the column names censoring): "
        "expected some events; check whether events and censoring are the wrong way round"
    )


def test_numbers_are_read():
    target, outcomes, notes = read(TargetColumns(("x",), loss="huber"), x=["1.5", "-2", "1e3"])
    assert target == Value(columns=("x",), loss="huber")
    assert outcomes.tolist() == [[1.5], [-2], [1000]] and len(notes) == 1


@pytest.mark.parametrize(
    ("named", "cells", "message"),
    [
        (
            VALUE,
            ["4", "4.0"],
            "t.csv: column 'x' is 4 for every slide: expected different numbers; name another column with --target",
        ),
        (
            VALUE,
            ["4", "4,5"],
            "t.csv: column 'x' has '4,5' for slide 's1': expected a number, such as 12.5; correct it, or leave the slide out",
        ),
        (
            TargetColumns(("x",)),
            ["4.5", "unknown"],
            "t.csv: column 'x' has 'unknown' for slide 's1': expected a number, such as 12.5; correct it, or leave the slide "
            "out; use --kind classes if the column names classes",
        ),
        (
            VALUE,
            ["1700000000", "1700000005", "1700000009"],
            "t.csv: column 'x' has numbers from 1700000000 to 1700000009, too close to each other for their size: subtract a "
            "constant, such as the smallest",
        ),
    ],
)
def test_invalid_numbers_raise_an_error(named, cells, message):
    assert refusal(named, x=cells) == message


@pytest.mark.parametrize(
    ("cells", "ordered"),
    [
        (["10", "2", "3.0", "2"], ("2", "3", "10")),
        (["G10", "g2", "G1"], ("G1", "g2", "G10")),
        (["Stage IV", "Stage I", "stage II"], ("Stage I", "stage II", "Stage IV")),
        (["IX", "V", "I"], ("I", "V", "IX")),
        (["C", "A", "D"], ("A", "C", "D")),
    ],
)
def test_grades_with_numbers_numerals_or_letters_are_ordered(cells, ordered):
    target, outcomes, notes = read(ORDINAL, grade=cells)
    assert target == Ordinal(columns=("grade",), names=ordered)
    assert outcomes.tolist() == [ordered.index(cell.removesuffix(".0")) for cell in cells]
    assert notes == [f"grades: {' < '.join(ordered)}"]


@pytest.mark.parametrize(
    "cells", [["low", "high", "medium"], ["G1", "T2"], ["1", "2", "high"], ["IA", "IB", "II"], ["II", "III", "X"]]
)
def test_unknown_order_of_grades_is_never_guessed(cells):
    message = refusal(ORDINAL, grade=cells)
    assert message.startswith("t.csv: column 'grade' has grades whose order is unknown, ")
    assert f"--grades {','.join(sorted(cells, key=lambda cell: (not cell.isdigit(), cell)))} (in your order)" in message


def test_specified_grades_have_the_given_order():
    named = target_columns("grade", None, None, None, grades="low, medium,high")
    target, outcomes, notes = read(named, grade=["low", "high", "medium", "low"])
    assert target.answer_names == ("low", "medium", "high") and outcomes.tolist() == [0, 2, 1, 0]
    assert notes == ["grades: low < medium < high"]
    assert refusal(named, grade=["low", "high"]) == (
        "t.csv: column 'grade' and --grades low,medium,high differ: 'medium' is only in --grades; name every grade of the table "
        "once, the lowest first"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"grades": "low"}, "--grades low: expected at least two different grades, the lowest first"),
        ({"grades": "a,b,a"}, "--grades a,b,a: expected at least two different grades, the lowest first"),
        (
            {"grades": "a,b", "kind": "value"},
            "--grades a,b: expected one column of ordered grades, --target COLUMN --grades LOWEST,...,HIGHEST",
        ),
        ({"grades": "a,b", "target": None}, "--grades a,b without --target: name the column to predict with --target"),
    ],
)
def test_grades_of_another_target_raise_an_error(given, message):
    named = {"target": "grade", "event": None, "kind": None, "loss": None} | given
    with pytest.raises(CarmilError) as refused:
        target_columns(**named)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (
            ["1", "1.0"],
            "t.csv: column 'grade' is '1' for every slide: expected at least two grades; name another column with --target",
        ),
        (
            [f"{i}" for i in range(21)],
            "t.csv: column 'grade' has 21 different grades: expected at most 20; use --kind value if they are a quantity",
        ),
        (
            ["1", "01", "2"],
            "t.csv: column 'grade' has '01' and '1', two spellings of the same grade; use one spelling",
        ),
        (
            ["Low", "low", "high"],
            "t.csv: column 'grade' has 'Low' and 'low', two spellings of the same grade; use one spelling",
        ),
    ],
)
def test_invalid_grades_raise_an_error(cells, message):
    assert refusal(ORDINAL, grade=cells) == message


def test_labels_may_be_missing_for_some_slides():
    target, outcomes, notes = read(LABELS, er=["1", "", "negative"], pr=["NA", "no", "yes"])
    assert target == Labels(columns=("er", "pr")) and notes == []
    np.testing.assert_array_equal(outcomes, [[1, np.nan], [np.nan, 0], [0, 1]])


@pytest.mark.parametrize(
    ("pr", "message"),
    [
        (
            ["1", "", "yes"],
            "t.csv: column 'pr' is 1 for every slide that has a value: expected both 0 and 1; leave the column out of "
            "--target",
        ),
        (
            ["", "", ""],
            "t.csv: column 'pr' has no value for any slide: expected both 0 and 1; leave the column out of --target",
        ),
        (
            ["1", "0", "weak"],
            "t.csv: column 'pr' has 'weak' for slide 's2': expected 1 or 0, or words such as yes, no, dead or alive; correct "
            "the table",
        ),
    ],
)
def test_invalid_labels_raise_an_error(pr, message):
    assert refusal(LABELS, er=["1", "0", "1"], pr=pr) == message


@pytest.mark.parametrize(
    ("target", "cells", "outcomes"),
    [
        (Survival(columns=("time", "event")), {"time": ["2", "2"], "event": ["0", "0"]}, [[2, 0], [2, 0]]),
        (Value(columns=("x",)), {"x": ["7", "7"]}, [[7], [7]]),
        (Ordinal(columns=("grade",), names=("1", "2", "3")), {"grade": ["3.0", "3"]}, [2, 2]),
        (Labels(columns=("er", "pr")), {"er": ["1", "1"], "pr": ["0", "0"]}, [[1, 0], [1, 0]]),
    ],
)
def test_table_of_new_slides_for_a_run_may_have_equal_outcomes(target, cells, outcomes):
    named = columns_of(target)
    assert set(named.all_columns) == set(cells)
    frame, notes = pd.DataFrame(cells), []
    known, result = read_outcomes(named, target.kind, frame, ["a", "b"], "t.csv", notes)
    assert known is target and result.tolist() == outcomes


def test_grade_on_which_a_run_was_not_trained_raises_an_error():
    named = columns_of(Ordinal(columns=("grade",), names=("1", "2")))
    with pytest.raises(CarmilError) as raised:
        read_outcomes(named, "ordinal", pd.DataFrame({"grade": ["2", "4"]}), ["a", "b"], "t.csv", [])
    assert str(raised.value) == (
        "t.csv: column 'grade' has '4', which the run was not trained on: expected one of 1, 2; correct these cells, or leave "
        "their slides out"
    )


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("slide,months,died,grade,age\na,3,1,1,40.5\nb,9,0,2,61\nc,,,2,\nd,4.5,1,1,55\n")
    return path


def settings_of(table, **options):
    return Settings.of({"bags": str(table.parent), "out": str(table.parent / "run"), **options}, where="command line")


def test_slides_without_any_outcome_are_omitted(table):
    result = read_outcome_table(settings_of(table, target="months", event="died"), table)
    assert result.table.slides == ("a", "b", "d") and result.outcomes.tolist() == [[3, 1], [9, 0], [4.5, 1]]
    again = read_target_table(table, result.target, slide=None, patient=None)
    assert again.target is result.target and again.outcomes.tolist() == result.outcomes.tolist()


def test_classes_given_as_a_target_are_read_like_a_label_column(table):
    as_target = read_outcome_table(settings_of(table, target="grade"), table)
    as_label = read_outcome_table(settings_of(table, label="grade"), table)
    assert as_target.target == as_label.target == Classes(names=("1", "2"))
    assert as_target.outcomes.tolist() == as_label.outcomes.tolist() == [0, 1, 1, 0]
    assert as_target.table.notes[-1].startswith("target 'grade': classes (guessed: 2 different whole numbers")


def test_guess_is_among_the_notes_of_the_table(table):
    result = read_outcome_table(settings_of(table, target="age"), table)
    assert isinstance(result.target, Value)
    assert result.table.notes[-1].startswith("target 'age': a number (guessed: 3 different numbers")
