import errno
import os
import resource
import subprocess
import sys
import unicodedata
from contextlib import contextmanager

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import save_file

from carmil import files
from carmil.errors import CarmilError
from carmil.files import atomic_file, atomic_folder, safe_name, safe_names, write_text

HOSTILE = [
    "../../x",
    "/abs/x",
    "a/b",
    "..",
    ".",
    "",
    "con",
    "NUL.txt",
    "x" * 300,
    "a\0b",
    "a\nb",
    "\u00e4/\u00f6",
    ".hidden",
    "a~b",
]


@pytest.fixture(autouse=True)
def fresh_folders(monkeypatch):
    monkeypatch.setattr(files, "_SWEPT", set())


@pytest.mark.parametrize("name", ["TCGA-AA-3489-01Z-00-DX1.4f9e 2", "Fall 3 (\u00e4)", "-1", "a=b,c"])
def test_an_ordinary_name_stays_as_it_is(name):
    assert safe_name(name) == name


@pytest.mark.finding(n=10)
@pytest.mark.parametrize(
    "name", [*HOSTILE, "summary", "Summary", "con:1", "e\u0301", "\udcff", "\u202egnp.exe", "\u00e4" * 200]
)
def test_any_name_becomes_one_that_a_folder_takes_and_no_two_the_same(name, tmp_path):
    safe = safe_name(name, taken=("summary",))
    assert safe != safe_name(name + "'", taken=("summary",))
    assert safe.casefold() not in ("summary", name)
    assert safe.partition(".")[0].casefold() not in ("con", "nul"), "reserved on Windows, whatever the ending"
    assert safe_name(safe) != safe, "a name that was made of another text is never an ordinary one"
    (tmp_path / f"{safe}.parquet").write_text("here")
    assert [path.name for path in tmp_path.iterdir()] == [f"{safe}.parquet"]


@pytest.mark.finding(n=10)
def test_names_that_a_file_system_may_take_for_one_are_told_apart():
    composed, decomposed = "\u00e9", unicodedata.normalize("NFD", "\u00e9")
    names = safe_names(["Slide", "slide", "other", composed, decomposed])
    assert names["other"] == "other" and names[composed] == composed
    assert len({unicodedata.normalize("NFC", name).casefold() for name in names.values()}) == 5
    assert safe_names(["slide", "Slide"])["Slide"] == names["Slide"], "whatever the order"


@contextmanager
def no_file_larger_than(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def by_numpy(path):
    with path.open("wb") as stream:
        np.save(stream, np.zeros(100_000))


def by_h5py(path):
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros(100_000)


WRITERS = {
    "text": lambda path: path.write_text("x" * 100_000),
    "numpy": by_numpy,
    "h5py": by_h5py,
    "parquet": lambda path: pq.write_table(pa.table({"x": np.arange(100_000)}), path),
    "torch": lambda path: torch.save(torch.rand(100_000), path),
    "safetensors": lambda path: save_file({"x": np.zeros(100_000)}, path),
}


@pytest.mark.finding(n=16)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_too_large_is_named_whichever_library_writes_it(writer, tmp_path):
    with (
        pytest.raises(CarmilError) as failed,
        no_file_larger_than(4096),
        atomic_file(tmp_path / "out.bin") as aside,
    ):
        WRITERS[writer](aside)
    assert str(failed.value).startswith(f"{tmp_path / 'out.bin'} cannot be written (")
    assert "\n" not in str(failed.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.finding(n=13)
@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "check that there is room"), (errno.EROFS, "writable folder"), (errno.EFBIG, "ulimit -f")],
)
def test_a_failure_to_write_names_the_file_and_what_to_do(number, remedy, tmp_path):
    with pytest.raises(CarmilError, match=remedy) as failed, atomic_folder(tmp_path / "out") as aside:
        (aside / "part").touch()
        raise OSError(number, os.strerror(number), str(aside / "part"))
    assert str(failed.value).startswith(f"{tmp_path / 'out' / 'part'} cannot be written ({os.strerror(number)}): ")
    assert os.listdir(tmp_path) == []


def test_an_error_about_another_file_passes_as_it_is(tmp_path):
    with pytest.raises(FileNotFoundError, match="elsewhere"), atomic_file(tmp_path / "out"):
        (tmp_path / "elsewhere").read_text()
    with pytest.raises(RuntimeError, match="a bug"), atomic_file(tmp_path / "out"):
        raise RuntimeError("a bug")


def test_a_folder_that_is_a_file_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CarmilError, match=r"file/out\.txt cannot be written"):
        write_text(tmp_path / "file" / "out.txt", "")


@pytest.mark.finding(n=14)
def test_a_pipe_or_a_folder_is_never_replaced_by_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")  # as /dev/stdout is
    (tmp_path / "folder").mkdir()
    for name, message in (
        ("pipe", "is a pipe, socket or device: expected a file, or a new name"),
        ("link", "is a pipe, socket or device: expected a file, or a new name"),
        ("folder", "is a folder: expected the name of a file; choose another name"),
    ):
        with pytest.raises(CarmilError, match=f"{name} {message}"):
            write_text(tmp_path / name, "text")
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "pipe"], "nothing was written aside"


@pytest.mark.finding(n=14)
def test_a_pipe_or_a_file_is_never_replaced_by_a_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("text")
    for name in ("pipe", "file"):
        with pytest.raises(CarmilError, match=f"{name} is not a folder"), atomic_folder(tmp_path / name):
            pass
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "file").read_text() == "text"


def dead_process() -> int:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


@pytest.mark.finding(n=13)
def test_what_a_killed_process_left_is_removed_by_the_next_that_writes_there(tmp_path):
    code = """
import os
from pathlib import Path
from carmil.files import atomic_file, atomic_folder
with atomic_folder(Path("store")) as folder, atomic_file(Path("out.txt")) as file:
    (folder / "part").touch()
    os._exit(9)
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False)
    assert len(os.listdir(tmp_path)) == 2
    write_text(tmp_path / "other.txt", "")
    assert os.listdir(tmp_path) == ["other.txt"]


@pytest.mark.finding(n=13)
def test_what_a_living_process_or_another_machine_writes_is_left_alone(tmp_path):
    dead = dead_process()
    kept = [f".carmil-{files.MACHINE}-{os.getppid()}-abc.txt", f".carmil-elsewhere.1-{dead}-abc.txt", ".out.txt.abc"]
    gone = [f".carmil-{files.MACHINE}-{dead}-abc.txt", f".carmil-elsewhere.1-{dead}-old.txt"]
    for name in (*kept, *gone):
        (tmp_path / name).touch()
    os.utime(tmp_path / gone[1], (0, 0))
    write_text(tmp_path / "out.txt", "")
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "out.txt"])


def test_the_longest_name_can_be_written_aside(tmp_path):
    write_text(tmp_path / ("x" * 250 + ".txt"), "all")
    with atomic_file(tmp_path / "a.npy") as aside:
        np.save(aside, np.ones(3))
    assert sorted(len(name) for name in os.listdir(tmp_path)) == [5, 254]
