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
def test_safe_name_keeps_ordinary_names(name):
    assert safe_name(name) == name


@pytest.mark.finding(n=10)
@pytest.mark.parametrize(
    "name", [*HOSTILE, "summary", "Summary", "con:1", "e\u0301", "\udcff", "\u202egnp.exe", "\u00e4" * 200]
)
def test_safe_name_makes_any_name_valid_and_unique(name, tmp_path):
    safe = safe_name(name, taken=("summary",))
    assert safe != safe_name(name + "'", taken=("summary",))
    assert safe.casefold() not in ("summary", name)
    assert safe.partition(".")[0].casefold() not in ("con", "nul"), "reserved on Windows with any suffix"
    assert safe_name(safe) != safe, "a name derived from another text is never an ordinary name"
    (tmp_path / f"{safe}.parquet").write_text("here")
    assert [path.name for path in tmp_path.iterdir()] == [f"{safe}.parquet"]


@pytest.mark.finding(n=10)
def test_safe_names_distinguishes_names_that_file_systems_may_merge():
    composed, decomposed = "\u00e9", unicodedata.normalize("NFD", "\u00e9")
    names = safe_names(["Slide", "slide", "other", composed, decomposed])
    assert names["other"] == "other" and names[composed] == composed
    assert len({unicodedata.normalize("NFC", name).casefold() for name in names.values()}) == 5
    assert safe_names(["slide", "Slide"])["Slide"] == names["Slide"], "independent of the order"


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
def test_file_size_error_names_the_file_for_every_library(writer, tmp_path):
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
def test_write_error_names_the_file_and_the_remedy(number, remedy, tmp_path):
    with pytest.raises(CarmilError, match=remedy) as failed, atomic_folder(tmp_path / "out") as aside:
        (aside / "part").touch()
        raise OSError(number, os.strerror(number), str(aside / "part"))
    assert str(failed.value).startswith(f"{tmp_path / 'out' / 'part'} cannot be written ({os.strerror(number)}): ")
    assert os.listdir(tmp_path) == []


def test_errors_about_other_files_are_not_changed(tmp_path):
    with pytest.raises(FileNotFoundError, match="elsewhere"), atomic_file(tmp_path / "out"):
        (tmp_path / "elsewhere").read_text()
    with pytest.raises(RuntimeError, match="a bug"), atomic_file(tmp_path / "out"):
        raise RuntimeError("a bug")


def test_writing_below_a_file_raises_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CarmilError, match=r"file/out\.txt cannot be written"):
        write_text(tmp_path / "file" / "out.txt", "")


@pytest.mark.finding(n=14)
def test_pipes_and_folders_are_never_replaced_by_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")  # like /dev/stdout
    (tmp_path / "folder").mkdir()
    for name, message in (
        ("pipe", "is a pipe, socket or device: expected a file, or a new name"),
        ("link", "is a pipe, socket or device: expected a file, or a new name"),
        ("folder", "is a folder: expected the name of a file; choose another name"),
    ):
        with pytest.raises(CarmilError, match=f"{name} {message}"):
            write_text(tmp_path / name, "text")
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "pipe"], "no temporary file is left"


@pytest.mark.finding(n=14)
def test_pipes_and_files_are_never_replaced_by_a_folder(tmp_path):
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
def test_temporary_files_of_a_killed_process_are_removed_by_the_next_writer(tmp_path):
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
def test_temporary_files_of_live_processes_and_other_machines_are_kept(tmp_path):
    dead = dead_process()
    kept = [f".carmil-{files.MACHINE}-{os.getppid()}-abc.txt", f".carmil-elsewhere.1-{dead}-abc.txt", ".out.txt.abc"]
    removed = [f".carmil-{files.MACHINE}-{dead}-abc.txt", f".carmil-elsewhere.1-{dead}-old.txt"]
    for name in (*kept, *removed):
        (tmp_path / name).touch()
    os.utime(tmp_path / removed[1], (0, 0))
    write_text(tmp_path / "out.txt", "")
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "out.txt"])


def test_file_with_the_longest_name_can_be_written(tmp_path):
    write_text(tmp_path / ("x" * 250 + ".txt"), "all")
    with atomic_file(tmp_path / "a.npy") as aside:
        np.save(aside, np.ones(3))
    assert sorted(len(name) for name in os.listdir(tmp_path)) == [5, 254]
