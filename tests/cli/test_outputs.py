"""What a command writes never takes the place of what it reads, and what cannot be written is one line."""

import os
import subprocess
import sys

import pytest

from carmil.cli.app import main

LABELS = "slide,patient,label\n" + "".join(f"s{i},p{i},{'ab'[i % 2]}\n" for i in range(12))


def carmil(*words, **environment):
    command = [sys.executable, "-m", "carmil", *words]
    return subprocess.run(command, capture_output=True, env={**os.environ, **environment}, check=False)


@pytest.mark.finding(n=13)
@pytest.mark.parametrize(
    ("name", "out", "form"),
    [
        ("l.csv", "l.csv", "carmil"),
        ("l.csv", "alias.csv", "carmil"),
        ("splits.tsv", ".", "carmil"),
        ("splits.json", ".", "stamp"),
        ("k=all.tsv", "k=all.tsv", "patho-bench"),
        ("splits_0.csv", ".", "clam"),
    ],
)
def test_a_split_is_not_written_over_its_labels(name, out, form, tmp_path, said):
    labels = tmp_path / name
    labels.write_text(LABELS)
    (tmp_path / "alias.csv").symlink_to(labels)
    words = ("--labels", str(labels), "--folds", "2", "--form", form)
    status, _, error = said("split", *words, "--out", str(tmp_path / out))
    assert status == 2 and f"is the input {labels}: choose another name" in error
    assert labels.read_text() == LABELS
    assert said("split", *words, "--out", str(tmp_path / "new"))[0] == 0


@pytest.mark.finding(n=13)
@pytest.mark.parametrize(
    "name",
    ["run.json", "models.json", "weights.safetensors", "predictions.csv", "predictions.parquet", "splits_1.tsv"],
)
def test_no_page_or_table_is_written_over_a_file_of_a_run(name, tmp_path, said):
    run = tmp_path / "run"
    run.mkdir()
    for file in ("run.json", name):
        (run / file).write_text("{}")
    (tmp_path / "labels.csv").write_text(LABELS)
    for words in (
        ("report", str(run)),
        ("compare", str(run), str(run)),
        *((("split", "--labels", str(tmp_path / "labels.csv")),) if name.endswith(".tsv") else ()),
    ):
        status, _, error = said(*words, "--out", str(run / name))
        assert status == 2 and f"--out {run / name} is a file of the run in {run}: choose another name" in error
    assert (run / name).read_text() == "{}"


@pytest.mark.finding(n=14)
def test_a_page_cannot_be_a_folder(tmp_path, said):
    status, _, error = said("report", str(tmp_path), "--out", str(tmp_path))
    assert status == 2 and f"--out {tmp_path} is a folder: expected the name of a file" in error


@pytest.mark.finding(n=14)
def test_a_terminal_of_ascii_gets_escapes():
    ended = carmil("models", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert ended.returncode == 0 and ended.stderr == b""
    assert b"abmil.gated" in ended.stdout and ended.stdout.isascii()


@pytest.mark.finding(n=14)
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "the output cannot be written (No space left on device): check free"),
        (
            FileNotFoundError(2, "No such file", "/proc/run"),
            "/proc/run cannot be used (No such file): check free space",
        ),
        (OSError("odd\nlines"), "the output cannot be written (odd lines): check free space"),
    ],
)
def test_an_error_of_the_system_is_told_in_words(error, message, capsys):
    def fail(**_):
        raise error

    with pytest.raises(SystemExit) as left:
        main(fail)
    told = capsys.readouterr().err
    assert left.value.code == 2 and told.startswith(f"carmil: {message}") and len(told.splitlines()) == 1
