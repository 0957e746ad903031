"""Commands never overwrite their inputs, and output errors are reported in one line."""

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
def test_split_does_not_overwrite_its_labels(name, out, form, tmp_path, run_cli):
    labels = tmp_path / name
    labels.write_text(LABELS)
    (tmp_path / "alias.csv").symlink_to(labels)
    words = ("--labels", str(labels), "--folds", "2", "--form", form)
    status, _, error = run_cli("split", *words, "--out", str(tmp_path / out))
    assert status == 2 and f"is the input {labels}: choose another name" in error
    assert labels.read_text() == LABELS
    assert run_cli("split", *words, "--out", str(tmp_path / "new"))[0] == 0


@pytest.mark.finding(n=13)
@pytest.mark.parametrize(
    "name",
    ["run.json", "models.json", "weights.safetensors", "predictions.csv", "predictions.parquet", "splits_1.tsv"],
)
def test_report_and_compare_do_not_overwrite_files_of_a_run(name, tmp_path, run_cli):
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
        status, _, error = run_cli(*words, "--out", str(run / name))
        assert status == 2 and f"--out {run / name} is a file of the run in {run}: choose another name" in error
    assert (run / name).read_text() == "{}"


@pytest.mark.finding(n=14)
def test_report_to_a_folder_exits_with_an_error(tmp_path, run_cli):
    status, _, error = run_cli("report", str(tmp_path), "--out", str(tmp_path))
    assert status == 2 and f"--out {tmp_path} is a folder: expected the name of a file" in error


@pytest.mark.finding(n=14)
def test_output_to_an_ascii_terminal_is_escaped():
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
def test_system_error_is_reported_in_one_line(error, message, capsys):
    def fail(**_):
        raise error

    with pytest.raises(SystemExit) as left:
        main(fail)
    err = capsys.readouterr().err
    assert left.value.code == 2 and err.startswith(f"carmil: {message}") and len(err.splitlines()) == 1
