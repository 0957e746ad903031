"""Without a terminal, long jobs print a line from time to time."""

import io

import pytest
from rich.console import Console

from carmil import progress


@pytest.fixture
def output_and_clock(monkeypatch):
    """Return the output when stderr is a file, and a clock that tests set."""
    stream, now = io.StringIO(), [0.0]
    monkeypatch.setattr(progress, "console", Console(file=stream, force_terminal=False, width=60))
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return stream, now


def test_only_long_training_prints_progress(output_and_clock):
    stream, now = output_and_clock
    with progress.training_progress("abmil [weak]", 100, 5) as on_epoch:
        for epoch in range(100):
            now[0] = 1.0 * epoch
            on_epoch(epoch, {"cls": 0.5}, 5 if epoch < 50 else 2)
    lines = stream.getvalue().splitlines()
    assert lines == [
        "abmil [weak]: 31 of 100 epochs, 5 of 5 models running, at most 69 s left",
        "abmil [weak]: 61 of 100 epochs, 2 of 5 models running, at most 39 s left",
        "abmil [weak]: 91 of 100 epochs, 2 of 5 models running, at most 9 s left",
    ]
    with progress.training_progress("short", 3, 1) as on_epoch:
        for epoch in range(3):
            now[0] += 5
            on_epoch(epoch, {}, 1)
    assert stream.getvalue().splitlines() == lines


def test_time_estimate_ignores_work_done_by_an_earlier_run(output_and_clock):
    stream, now = output_and_clock
    with progress.count_progress("packing", "slides") as on_slide:
        for kept in range(1, 901):
            on_slide(kept, 1000)
        now[0] = 60.0
        on_slide(901, 1000)
        now[0] = 120.0
        on_slide(902, 1000)
    *_, last = stream.getvalue().splitlines()
    assert last == "packing: 902 of 1,000 slides, about 1 h 38 min left"


def test_encoding_progress_names_slide_and_tiles(output_and_clock):
    stream, now = output_and_clock
    with progress.encoding_progress(3, 4000) as (on_slide, on_tiles):
        for number, name in enumerate(("one", "two"), 1):
            on_slide(name, number)
            for _ in range(4):
                now[0] += 10
                on_tiles(500)
    assert stream.getvalue().splitlines() == [
        "slide 1 of 3, one: 2,000 of 4,000 tiles, about 40 s left",
        "slide 2 of 3, two: 3,500 of 4,000 tiles, about 10 s left",
    ]


def test_no_lines_are_printed_to_a_terminal(output_and_clock, monkeypatch):
    stream, now = output_and_clock
    monkeypatch.setattr(progress, "console", Console(file=stream, force_terminal=True, width=60))
    line = progress._PeriodicLine("packing", "slides")
    for done in range(5):
        now[0] += 100
        line(done, 5)
    assert stream.getvalue() == ""
