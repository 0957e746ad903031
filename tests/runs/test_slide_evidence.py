"""Damaged or modified files of `carmil explain` raise an error of one line."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from carmil.errors import CarmilError
from carmil.runs.slide_evidence import ABOUT, read_slide_evidence

COLUMNS = {"x": [0.0, 1.0], "y": [0.0, 1.0], "u": [0.5, 0.1], "evidence_a": [1.0, -1.0], "evidence_b": [-1.0, 1.0]}
METADATA = {"line": {"prediction": "a", "p_a": 0.7, "p_b": 0.3}, "coordinate_unit": "level0_px"}


def write(path, metadata=None, **others):
    table = pa.table({**COLUMNS, **others})
    words = json.dumps(METADATA) if metadata is None else metadata
    pq.write_table(table.replace_schema_metadata({ABOUT: words.encode()}), path)
    return path


def test_written_slide_evidence_is_read_back(tmp_path):
    result = read_slide_evidence(write(tmp_path / "s.parquet"))
    assert len(result) == 2 and result.coordinates.tolist() == [[0, 0], [1, 1]] and result.unit == "level0_px"
    assert result.maps()


@pytest.mark.finding(n=3)
def test_negligibility_considers_all_classes_even_if_one_map_is_requested(tmp_path):
    both = {"evidence_a": [5.0, -5.0], "evidence_b": [5.001, -5.001]}
    (one,) = read_slide_evidence(write(tmp_path / "s.parquet", **both)).maps(["b"])
    assert one.apart == pytest.approx(0.002) and one.negligible
    (one,) = read_slide_evidence(write(tmp_path / "t.parquet")).maps(["a"])
    assert one.apart == 4 and not one.negligible


@pytest.mark.finding(n=3)
def test_attention_explainer_gives_no_evidence_maps(tmp_path):
    def names(explainer: str) -> list[tuple[str, str]]:
        metadata = METADATA | {"line": METADATA["line"] | {"explainer": explainer}}
        result = read_slide_evidence(write(tmp_path / f"{explainer}.parquet", json.dumps(metadata), a=[0.9, 0.1]))
        return [(one.name, one.kind) for one in result.maps()]

    assert names("attention") == [("factual", "factual")]
    assert names("path") == [("a", "evidence"), ("factual", "factual")]
    metadata = json.dumps(METADATA | {"line": METADATA["line"] | {"explainer": "attention"}})
    with pytest.raises(CarmilError, match="unknown map 'a'"):
        read_slide_evidence(write(tmp_path / "s.parquet", metadata, a=[0.9, 0.1])).maps(["a"])


@pytest.mark.finding(n=3)
def test_answer_lines_state_answer_probability_label_and_rule(tmp_path):
    line = {
        "prediction": "a",
        "explained_class": "a",
        "p_a": 0.7,
        "p_b": 0.3,
        "label": "b",
        "answer_rule": "a if p(a) >= 0.5",
    }
    known = read_slide_evidence(write(tmp_path / "s.parquet", json.dumps({"line": line})))
    assert known.answer_lines == ["Answer: a; probability of a: 70.0 %; label: b", "Decision rule: a if p(a) >= 0.5"]
    none = line | {"prediction": "no answer", "label": None}
    known = read_slide_evidence(write(tmp_path / "t.parquet", json.dumps({"line": none})))
    assert known.answer_lines[0] == "Answer: no answer; probability of a: 70.0 %"
    assert read_slide_evidence(write(tmp_path / "u.parquet")).answer_lines == ["Answer: a; probability of a: 70.0 %"]
    assert read_slide_evidence(write(tmp_path / "v.parquet", "{}")).answer_lines == []


@pytest.mark.finding(n=14)
@pytest.mark.parametrize(
    ("metadata", "others", "words"),
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
def test_invalid_slide_evidence_raises_an_error_of_one_line(tmp_path, metadata, others, words):
    path = write(tmp_path / "s.parquet", metadata, **others)
    with pytest.raises(CarmilError) as refused:
        read_slide_evidence(path).maps()
    assert words in str(refused.value) and str(path) in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
