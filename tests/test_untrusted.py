import json
import os
import signal
import threading
from typing import Any, Literal, NotRequired

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typing_extensions import TypedDict

from carmil.errors import CarmilError
from carmil.maps.annotations import read_annotations
from carmil.runs.yaml_files import read_yaml
from carmil.training.checkpoint import read_keyed
from carmil.untrusted import one_line_errors, parse_as, read_json, read_parquet


class Inner(TypedDict):
    mean: float | None


class Outer(TypedDict):
    name: str
    level: Literal["slide", "patient"]
    figures: dict[str, Inner]
    counts: list[int]
    more: NotRequired[Any]


GOOD: dict[str, Any] = {"name": "x", "level": "slide", "figures": {"auc": {"mean": 0.5}}, "counts": [1, 2], "new": 3}


@pytest.mark.finding(n=14)
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, None),
        ({"figures": {"auc": {"mean": None}}, "more": [1]}, None),
        ({"name": 3}, "run.json: name is 3: expected text"),
        ({"level": "fold"}, "run.json: level is 'fold': expected one of slide, patient"),
        ({"level": []}, "run.json: level is a list: expected one of slide, patient"),
        ({"figures": {"auc": {"mean": "x"}}}, "run.json: figures.auc.mean is 'x': expected a number"),
        ({"figures": {"auc": {}}}, "run.json: figures.auc.mean is missing"),
        ({"figures": {"auc": {"mean": float("nan")}}}, "run.json: it contains NaN or an infinite number"),
        ({"figures": {"auc": 3}}, "run.json: figures.auc is 3: expected an object"),
        ({"figures": []}, "run.json: figures is a list: expected an object"),
        ({"counts": [1, True]}, "run.json: counts[1] is True: expected a whole number"),
    ],
)
def test_value_of_the_wrong_type_raises_an_error_naming_its_location(changed, message):
    if message is None:
        parse_as(GOOD | changed, Outer, "run.json")
        return
    with pytest.raises(CarmilError) as refused:
        parse_as(GOOD | changed, Outer, "run.json")
    assert str(refused.value) == message


@pytest.mark.finding(n=14)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "cannot be read"),
        ('{"ids": ["\\ud800"]}', "surrogates not allowed"),
    ],
)
def test_unreadable_json_raises_an_error_of_one_line(tmp_path, text, words):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(CarmilError, match=words) as refused:
        read_json(tmp_path / "a.json", "train again")
    assert str(refused.value).startswith(str(tmp_path / "a.json")) and str(refused.value).endswith(": train again")


def test_json_with_surrogate_pair_escapes_is_read(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps("\N{GRINNING FACE}"), encoding="ascii")
    assert read_json(tmp_path / "a.json") == "\N{GRINNING FACE}"


def test_json_with_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"a": [1.5]}), encoding="utf-8-sig")
    assert read_json(tmp_path / "a.json") == {"a": [1.5]}


@pytest.mark.parametrize(
    "error", [KeyError("x"), ValueError("a\nb"), MemoryError(), FileNotFoundError(), PermissionError()]
)
def test_library_errors_are_converted_to_one_line_naming_the_file(tmp_path, error):
    with pytest.raises(CarmilError) as refused, one_line_errors(tmp_path / "a.bin"):
        raise error
    assert str(tmp_path / "a.bin") in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.finding(n=14)
@pytest.mark.parametrize(
    ("rows", "word", "declared"), [(100_000, "x" * 10_000, "1,000,000,000"), (10**7, "", "80,000,000")]
)
def test_parquet_file_that_expands_too_much_raises_an_error_before_allocation(tmp_path, rows, word, declared):
    path = tmp_path / "a.parquet"
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([word]))
    pq.write_table(pa.table({"slide": column}), path)
    assert path.stat().st_size < 50_000
    with pytest.raises(
        CarmilError, match=rf"a\.parquet.* declares {declared} bytes, but the file holds at most 67,108,864"
    ):
        read_parquet(path)


@pytest.mark.finding(n=14)
def test_parquet_table_is_read_back_unchanged(tmp_path):
    table = pa.table({"slide": ["a", None, "a"], "n": [1, 2, 3], "x.y": pa.array(["x", "y", "x"]).dictionary_encode()})
    pq.write_table(table.replace_schema_metadata({b"carmil": b"{}"}), tmp_path / "a.parquet")
    again = read_parquet(tmp_path / "a.parquet")
    assert again.to_pydict() == table.to_pydict() and again.schema.metadata[b"carmil"] == b"{}"
    assert again.schema.field("slide").type == pa.string()


@pytest.mark.finding(n=17)
def test_json_number_with_too_many_digits_raises_a_clear_error(tmp_path):
    (tmp_path / "a.json").write_text('{"a": ' + "9" * 5000 + "}")
    with pytest.raises(CarmilError, match=r"cannot be read .ValueError: a whole number of too many digits."):
        read_json(tmp_path / "a.json")


@pytest.mark.finding(n=14)
def test_parquet_table_with_lists_or_duplicate_columns_raises_an_error(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"slide": ["a"], "x": [[1, 2]]}), path)
    with pytest.raises(CarmilError, match=r"a\.parquet: x holds list<element: int64>: expected numbers or text"):
        read_parquet(path)
    pq.write_table(pa.table([["a"], ["b"]], names=["slide", "slide"]), path)
    with pytest.raises(CarmilError, match=r"a\.parquet has the column 'slide' twice"):
        read_parquet(path)


@pytest.fixture
def pipe(tmp_path):
    """Yield a pipe without a writer; a reader that waits for it fails after a minute."""

    def wake(*_):
        raise TimeoutError("a reader waited for the pipe")

    os.mkfifo(tmp_path / "pipe")
    signal.signal(signal.SIGALRM, wake)
    signal.setitimer(signal.ITIMER_REAL, 60)
    yield tmp_path / "pipe"
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def library(path):
    with one_line_errors(path):
        path.read_bytes()


@pytest.mark.finding(n=14)
@pytest.mark.parametrize(
    "read",
    [
        library,
        read_json,
        read_parquet,
        lambda path: read_annotations(path, width=10, height=10),
        lambda path: read_keyed(path, "key"),
    ],
    ids=["library", "json", "parquet", "annotations", "checkpoint"],
)
def test_pipe_raises_an_error_without_waiting(read, pipe):
    with pytest.raises(CarmilError, match=r"pipe is a pipe, socket or device: expected a file; save the data to one"):
        read(pipe)


def test_settings_can_be_read_from_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("folds: 3",))
    writer.start()
    assert read_yaml(tmp_path / "pipe", expected="settings") == {"folds": 3}
    writer.join()
