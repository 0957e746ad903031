import errno
import json
import os
import subprocess
import sys

import pytest

from carmil.errors import CarmilError
from carmil.files import MACHINE
from carmil.locks import folder_lock

HOLD = """
import sys
from pathlib import Path
from carmil.locks import folder_lock
with folder_lock(Path("out.lock"), Path("out")):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Yield another process that holds the lock until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "locked\n"
    yield process
    process.communicate()


@pytest.fixture
def lock(tmp_path):
    return folder_lock(tmp_path / "out.lock", tmp_path / "out")


@pytest.mark.finding(n=13)
def test_lock_error_names_the_process_that_holds_it(holder, lock, tmp_path):
    words = rf"out is being written by process {holder.pid} \({MACHINE}, since 20.*\): wait until it ends"
    with pytest.raises(CarmilError, match=words), lock:
        pass
    assert json.loads((tmp_path / "out.lock").read_text())["process"] == holder.pid


@pytest.mark.finding(n=13)
def test_lock_of_a_killed_process_is_taken_over(holder, lock, tmp_path):
    holder.kill()
    holder.wait()
    assert (tmp_path / "out.lock").exists()
    with lock:
        assert json.loads((tmp_path / "out.lock").read_text())["process"] == os.getpid()
    assert os.listdir(tmp_path) == []


def test_lock_excludes_threads_of_the_same_process(lock, tmp_path):
    with (
        lock,
        pytest.raises(CarmilError, match=f"process {os.getpid()} "),
        folder_lock(tmp_path / "out.lock", tmp_path / "out"),
    ):
        pass


@pytest.mark.finding(n=13)
@pytest.mark.parametrize(
    ("machine", "process", "refused"), [(MACHINE, 1, True), (MACHINE, 2**30, False), ("other", 1, False)]
)
def test_without_file_system_locks_the_lock_file_decides(machine, process, refused, lock, tmp_path, monkeypatch):
    def unsupported(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", unsupported)
    (tmp_path / "out.lock").write_text(json.dumps({"process": process, "machine": machine, "since": "then"}))
    if refused:
        with pytest.raises(CarmilError, match="is being written by process 1 "), lock:
            pass
    else:
        with lock:
            pass
    assert (tmp_path / "out.lock").exists() == refused


@pytest.mark.parametrize("content", ["", "[1]", "not json"])
def test_invalid_content_of_a_lock_file_is_ignored(content, lock, tmp_path):
    (tmp_path / "out.lock").write_text(content)
    with lock:
        pass
    assert os.listdir(tmp_path) == []
