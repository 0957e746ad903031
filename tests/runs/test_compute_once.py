import json

import numpy as np
import pytest

from carmil.runs.compute_once import compute_arrays_once, compute_once


def test_stored_result_is_reused_with_the_device_that_measured_it(tmp_path):
    path = tmp_path / "a" / "one.json"
    first = compute_once(path, {"seed": 0}, lambda: [0.5, float("nan")], device="cpu")
    assert first[0] == [0.5, None]
    assert first[1].startswith("cpu: ")
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "measured_on": "cuda: elsewhere"}))
    again = compute_once(path, {"seed": 0}, lambda: pytest.fail("measured again"), device="cpu")
    assert again == ([0.5, None], "cuda: elsewhere")


def test_different_key_or_broken_file_triggers_a_new_computation(tmp_path):
    path = tmp_path / "one.json"
    compute_once(path, {"seed": 0}, lambda: 1, device="cpu")
    assert compute_once(path, {"seed": 1}, lambda: 2, device="cpu")[0] == 2
    path.write_text("half")
    assert compute_once(path, {"seed": 1}, lambda: 3, device="cpu")[0] == 3


def test_stored_arrays_are_reused_exactly_and_broken_files_are_computed_again(tmp_path):
    path = tmp_path / "a" / "one.npz"
    arrays = {"sum of a": np.random.default_rng(0).random((2, 3)), "b": np.array([np.nan, 1], dtype=np.float32)}
    compute_arrays_once(path, {"seed": 0}, lambda: arrays, device="cpu")
    again = compute_arrays_once(path, {"seed": 0}, lambda: pytest.fail("measured again"), device="cpu")
    assert again.keys() == arrays.keys()
    for name, values in arrays.items():
        np.testing.assert_array_equal(again[name], values)
        assert again[name].dtype == values.dtype
    other = {"b": np.ones(2)}
    assert compute_arrays_once(path, {"seed": 1}, lambda: other, device="cpu") is other
    for content in (path.read_bytes()[:-30], b"half", b""):
        path.write_bytes(content)
        assert compute_arrays_once(path, {"seed": 1}, lambda: other, device="cpu") is other
    np.savez(path, key=np.array({"seed": 1}, dtype=object))  # a pickle, which is not loaded
    assert compute_arrays_once(path, {"seed": 1}, lambda: other, device="cpu") is other
