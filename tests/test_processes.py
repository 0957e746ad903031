import copy
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from carmil import processes
from carmil.bags.sources import Bag, Source
from carmil.bags.writers import write_bag
from carmil.errors import CarmilError
from carmil.processes import in_parallel


@pytest.fixture
def jobs(tmp_path):
    def with_argument(argument):
        return [(Source(f"{i}", tmp_path / f"{i}.h5", "h5"), (argument,)) for i in range(2)]

    return with_argument


def test_reader_that_hangs_raises_an_error_naming_the_file(jobs, monkeypatch):
    monkeypatch.setattr(processes, "_PATIENCE", 2)
    with pytest.raises(CarmilError, match=r"no file was read within 2 s; one of these is damaged: .*0\.h5"):
        list(in_parallel(time.sleep, jobs(60), 2))


def test_reader_that_dies_raises_an_error_naming_the_file(jobs):
    with pytest.raises(CarmilError, match=r"a process died while it read .*\.h5: .*; slides packed so far are kept"):
        list(in_parallel(os._exit, jobs(1), 2))


def test_worker_output_is_ignored_and_exceptions_are_returned(jobs):
    results = [result for _, result in in_parallel(print, jobs("to the terminal"), 2)]
    assert results == [None, None]
    failed = [result for _, result in in_parallel(os.listdir, jobs("/no/such/folder"), 2)]
    assert [str(error) for error in failed] == [
        "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/folder'"
    ] * 2


def test_name_that_is_not_utf8_reaches_the_worker_unchanged(tmp_path):
    source = Source("a\udcff\n", tmp_path / "a\udcff.h5", "h5", (("coords", tmp_path),), "", None)
    assert [result for _, result in in_parallel(copy.copy, [(source, (source,))], 2)] == [source]


BUILD = """
with open("runs.txt", "a") as file:
    file.write("run\\n")
from pathlib import Path
from carmil.bags.building import build_store
store = build_store(Path("features"), Path("store"), workers=2)
print(*store.ids)
"""


@pytest.fixture
def cohort(tmp_path):
    for i in range(4):
        write_bag(Bag(f"{i}", np.full((3, 4), i, np.float32)), tmp_path / "features", "npy")
    return tmp_path


@pytest.mark.finding(n=11)
@pytest.mark.parametrize("way", ["script", "command", "standard input", "module"])
def test_script_without_a_main_guard_runs_once(cohort, way):
    (cohort / "script.py").write_text(BUILD)
    words, given = {
        "script": (["script.py"], None),
        "command": (["-c", BUILD], None),
        "standard input": (["-"], BUILD),
        "module": (["-m", "script"], None),
    }[way]
    done = subprocess.run(
        [sys.executable, *words], cwd=cohort, input=given, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("0 1 2 3\n", "")
    assert (cohort / "runs.txt").read_text() == "run\n"
    assert {path.name for path in cohort.iterdir()} - {"__pycache__"} == {"features", "runs.txt", "script.py", "store"}


@pytest.mark.finding(n=11)
def test_workers_import_nothing_from_the_current_folder(cohort, monkeypatch):
    (cohort / "numpy.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(cohort)
    assert [result for _, result in in_parallel(abs, [(Source("a", Path("a.h5"), "h5"), (-3,))], 2)] == [3]


def children(process: int) -> list[int]:
    result = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for path in result for child in path.read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads the children of a process from /proc")
@pytest.mark.finding(n=11)
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_an_interrupted_or_killed_script(tmp_path, sign):
    code = """
import signal, time
from pathlib import Path
from carmil.bags.sources import Source
from carmil.processes import in_parallel
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
list(in_parallel(time.sleep, [(Source(f"{i}", Path("a.h5"), "h5"), (3600 if i else 0,)) for i in range(3)], 2))
"""
    script = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while len(started := children(script.pid)) < 2 and script.poll() is None:
        time.sleep(0.05)
    script.send_signal(sign)
    _, words = script.communicate(timeout=60)
    assert script.returncode == -sign
    assert words == "" if sign == signal.SIGKILL else words.endswith("KeyboardInterrupt\n"), words
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{child}").exists() for child in started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [child for child in started if Path(f"/proc/{child}").exists()] == []
