"""The command line as a user meets it: whole commands in processes of their own."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch


def carmil(*words, cwd=None):
    command = [sys.executable, "-m", "carmil", *words]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env={**os.environ, "COLUMNS": "120"}, check=False
    )


def test_models_lists_them(said):
    status, out, _ = said("models")
    assert status == 0
    assert "abmil.gated" in out
    assert "car/" in out


def test_help_and_version_need_neither_torch_nor_matplotlib():
    code = "import sys; import carmil, carmil.cli; assert 'torch' not in sys.modules; assert 'matplotlib' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert carmil("--version").stdout.startswith("carmil 0.")
    assert "reproduce" in carmil("--help").stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("carmil co", "compare\ncohort"),
        ("carmil slides t", "tile"),
        ("carmil train --dev", "--device"),
        ("carmil train --device c", "cpu\ncuda"),
    ],
)
def test_a_shell_is_told_how_a_word_may_end(said, monkeypatch, typed, offered):
    monkeypatch.setenv("_CARMIL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    assert said() == (0, f"{offered}\n", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_what_a_shell_needs_for_completion_is_shown(said, monkeypatch, shell):
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: shell)
    status, out, _ = said("--show-completion")
    assert status == 0
    assert f"_CARMIL_COMPLETE=complete_{shell}" in out


def test_the_public_api_is_what_dir_shows():
    code = "import carmil; assert all(getattr(carmil, name) is not None for name in dir(carmil))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--models", "abmil,carabmil"], "unknown model 'carabmil'; did you mean 'car/abmil'?"),
        (["--mnist", "."], "has no train-images-idx3-ubyte"),
        (["--features", "features.npy"], "features.npy has 7 rows for 5,000 images"),
        (["--alpha", "-1"], "alpha is -1.0: expected a number >= 0"),
        (["--repetitions", "0"], "Invalid value for '--repetitions'"),
        (["--tasks", "five_bags"], "unknown task 'five_bags'; did you mean 'four_bags'?"),
        (["--weights", "features.npy"], "--weights belongs to --encoder resnet18"),
        (["--out", "features.npy"], "--out features.npy is a file"),
        (["--device", "cuda"], "--device cuda: torch sees no GPU here"),
        (["--pool", "both"], "'both' is not one of 'disjoint', 'shared'"),
        (["--repetitions", "ten"], "Invalid value for '--repetitions'"),
        (["--gamma", "1"], "No such option: --gamma"),
        (["--seed", "-1"], "Invalid value for '--seed'"),
        (["--out", "features.npy/x"], "--out features.npy/x cannot be written"),
        (["--lr", "inf"], "lr is inf: expected a finite number"),
    ],
)
def test_bad_input_is_one_line_and_status_2_and_leaves_nothing(tmp_path, monkeypatch, said, words, expected):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "features.npy", np.zeros((7, 3), dtype=np.float32))
    status, out, err = said("reproduce", "table1", *words)
    assert status == 2
    assert out == ""
    assert err.startswith("carmil: ")
    assert expected in err
    assert len(err.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["features.npy"]


def test_a_command_that_is_not_there_is_named(said):
    status, _, err = said("trian")
    assert status == 2
    assert "No such command 'trian'" in err


def test_a_whole_process_ends_with_status_2_on_bad_input(tmp_path):
    answer = carmil("reproduce", "table1", "--models", "nomil", cwd=tmp_path)
    assert answer.returncode == 2
    assert answer.stderr.startswith("carmil: unknown model 'nomil'")
    assert not list(tmp_path.iterdir())


def test_killed_and_started_again_it_goes_on(tmp_path):
    words = ["demo", "--fast", "--device", "cpu"]
    process = subprocess.Popen([sys.executable, "-m", "carmil", *words], cwd=tmp_path, stderr=subprocess.DEVNULL)
    first = tmp_path / "demo" / "runs" / "four_bags-fast" / "abmil" / "metrics.json"
    deadline = time.time() + 120
    while not first.exists() and time.time() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    written = first.stat().st_mtime_ns
    assert not (tmp_path / "demo" / "report.html").exists()
    answer = carmil(*words, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert first.stat().st_mtime_ns == written
    assert (tmp_path / "demo" / "report.html").exists()
    assert "car/abmil" in answer.stdout


@pytest.mark.finding(n=17)
@pytest.mark.parametrize("option", ["--out", "--bags", "--labels"])
def test_a_path_that_is_empty_is_not_the_current_folder(said, tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    status, _, err = said("train", "--bags", "b", "--labels", "l", "--out", "o", option, "")
    assert status == 2 and err == f"carmil: {option} is empty: expected a path; check that the shell variable is set\n"
    assert not list(tmp_path.iterdir())
