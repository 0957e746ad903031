import json

import pytest

from carmil.runs.compute_once import compute_once


def test_what_was_asked_before_is_read_with_the_machine_that_measured_it(tmp_path):
    path = tmp_path / "a" / "one.json"
    first = compute_once(path, {"seed": 0}, lambda: [0.5, float("nan")], device="cpu")
    assert first[0] == [0.5, None]
    assert first[1].startswith("cpu: ")
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "measured_on": "cuda: elsewhere"}))
    again = compute_once(path, {"seed": 0}, lambda: pytest.fail("measured again"), device="cpu")
    assert again == ([0.5, None], "cuda: elsewhere")


def test_another_question_and_a_broken_file_are_measured_anew(tmp_path):
    path = tmp_path / "one.json"
    compute_once(path, {"seed": 0}, lambda: 1, device="cpu")
    assert compute_once(path, {"seed": 1}, lambda: 2, device="cpu")[0] == 2
    path.write_text("half")
    assert compute_once(path, {"seed": 1}, lambda: 3, device="cpu")[0] == 3
