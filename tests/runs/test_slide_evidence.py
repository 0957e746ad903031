"""Files of `carmil explain` that were damaged or changed are refused in one line."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from carmil.errors import CarmilError
from carmil.runs.slide_evidence import ABOUT, read_slide_evidence

COLUMNS = {"x": [0.0, 1.0], "y": [0.0, 1.0], "u": [0.5, 0.1], "evidence_a": [1.0, -1.0], "evidence_b": [-1.0, 1.0]}
TOLD = {"line": {"prediction": "a", "p_a": 0.7, "p_b": 0.3}, "coordinate_unit": "level0_px"}


def write(path, told=None, **others):
    table = pa.table({**COLUMNS, **others})
    words = json.dumps(TOLD) if told is None else told
    pq.write_table(table.replace_schema_metadata({ABOUT: words.encode()}), path)
    return path


def test_what_was_written_is_read(tmp_path):
    found = read_slide_evidence(write(tmp_path / "s.parquet"))
    assert len(found) == 2 and found.coordinates.tolist() == [[0, 0], [1, 1]] and found.unit == "level0_px"
    assert found.maps()


@pytest.mark.finding(n=3)
def test_maps_of_a_file_are_judged_over_its_classes_whichever_is_asked_for(tmp_path):
    both = {"evidence_a": [5.0, -5.0], "evidence_b": [5.001, -5.001]}
    (one,) = read_slide_evidence(write(tmp_path / "s.parquet", **both)).maps(["b"])
    assert one.apart == pytest.approx(0.002) and one.negligible
    (one,) = read_slide_evidence(write(tmp_path / "t.parquet")).maps(["a"])
    assert one.apart == 4 and not one.negligible


@pytest.mark.finding(n=3)
def test_attention_of_a_model_that_has_no_evidence_is_not_drawn_as_for_and_against(tmp_path):
    def names(explainer: str) -> list[tuple[str, str]]:
        told = TOLD | {"line": TOLD["line"] | {"explainer": explainer}}
        found = read_slide_evidence(write(tmp_path / f"{explainer}.parquet", json.dumps(told), a=[0.9, 0.1]))
        return [(one.name, one.kind) for one in found.maps()]

    assert names("attention") == [("factual", "factual")]
    assert names("path") == [("a", "evidence"), ("factual", "factual")]
    told = json.dumps(TOLD | {"line": TOLD["line"] | {"explainer": "attention"}})
    with pytest.raises(CarmilError, match="unknown map 'a'"):
        read_slide_evidence(write(tmp_path / "s.parquet", told, a=[0.9, 0.1])).maps(["a"])


@pytest.mark.finding(n=3)
def test_a_file_says_the_answer_its_probability_the_label_and_the_rule(tmp_path):
    line = {
        "prediction": "a",
        "explained_class": "a",
        "p_a": 0.7,
        "p_b": 0.3,
        "label": "b",
        "answer_rule": "a if p(a) >= 0.5",
    }
    known = read_slide_evidence(write(tmp_path / "s.parquet", json.dumps({"line": line})))
    assert known.answer_lines == ["Answer: a; probability of a: 70.0%; label: b", "Decision rule: a if p(a) >= 0.5"]
    none = line | {"prediction": "no answer", "label": None}
    known = read_slide_evidence(write(tmp_path / "t.parquet", json.dumps({"line": none})))
    assert known.answer_lines[0] == "Answer: no answer; probability of a: 70.0%"
    assert read_slide_evidence(write(tmp_path / "u.parquet")).answer_lines == ["Answer: a; probability of a: 70.0%"]
    assert read_slide_evidence(write(tmp_path / "v.parquet", "{}")).answer_lines == []


@pytest.mark.finding(n=14)
@pytest.mark.parametrize(
    ("told", "others", "words"),
    [
        ("{", {}, "cannot be read"),
        ("[" * 100_000, {}, "cannot be read"),
        ("[]", {}, "expected an object"),
        ('{"line": 3}', {}, "line is 3: expected an object"),
        ('{"line": {"p_a": [1]}}', {}, "line.p_a is a list"),
        ('{"coordinate_unit": 3}', {}, "coordinate_unit is 3: expected text"),
        (None, {"x": ["a", "b"]}, "x holds object: expected numbers"),
        (None, {"u": [[1], [2]]}, "u holds list<element: int64>: expected numbers or text"),
        (None, {"evidence_a": [b"a", b"b"]}, "evidence_a holds object: expected numbers"),
        (None, {"u": pa.array([1, 2], pa.timestamp("s"))}, "expected numbers"),
    ],
)
def test_odd_evidence_is_one_line(tmp_path, told, others, words):
    path = write(tmp_path / "s.parquet", told, **others)
    with pytest.raises(CarmilError) as refused:
        read_slide_evidence(path).maps()
    assert words in str(refused.value) and str(path) in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
