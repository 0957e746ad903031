"""The command line: whole commands, partly in separate processes."""

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


def test_models_command_lists_models_and_branches(run_cli):
    status, out, _ = run_cli("models")
    assert status == 0
    assert "abmil.gated" in out
    assert "car/" in out


def test_help_and_version_import_neither_torch_nor_matplotlib():
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
def test_shell_completion_offers_commands_options_and_values(run_cli, monkeypatch, typed, offered):
    monkeypatch.setenv("_CARMIL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    assert run_cli() == (0, f"{offered}\n", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_show_completion_prints_the_completion_script(run_cli, monkeypatch, shell):
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: shell)
    status, out, _ = run_cli("--show-completion")
    assert status == 0
    assert f"_CARMIL_COMPLETE=complete_{shell}" in out


def test_every_name_in_dir_is_available():
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
        (["--weights", "features.npy"], "--weights without --encoder resnet18"),
        (["--out", "features.npy"], "--out features.npy is a file"),
        (["--device", "cuda"], "--device cuda: torch finds no GPU"),
        (["--pool", "both"], "'both' is not one of 'disjoint', 'shared'"),
        (["--repetitions", "ten"], "Invalid value for '--repetitions'"),
        (["--gamma", "1"], "No such option: --gamma"),
        (["--seed", "-1"], "Invalid value for '--seed'"),
        (["--out", "features.npy/x"], "--out features.npy/x cannot be written"),
        (["--lr", "inf"], "lr is inf: expected a finite number"),
    ],
)
def test_invalid_options_exit_with_one_line_and_status_2_and_write_nothing(
    tmp_path, monkeypatch, run_cli, words, expected
):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "features.npy", np.zeros((7, 3), dtype=np.float32))
    status, out, err = run_cli("reproduce", "table1", *words)
    assert status == 2
    assert out == ""
    assert err.startswith("carmil: ")
    assert expected in err
    assert len(err.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["features.npy"]


def test_error_names_an_unknown_command(run_cli):
    status, _, err = run_cli("trian")
    assert status == 2
    assert "No such command 'trian'" in err


def test_process_exits_with_status_2_on_invalid_input(tmp_path):
    answer = carmil("reproduce", "table1", "--models", "nomil", cwd=tmp_path)
    assert answer.returncode == 2
    assert answer.stderr.startswith("carmil: unknown model 'nomil'")
    assert not list(tmp_path.iterdir())


def test_killed_demo_resumes_when_started_again(tmp_path, run_cli, monkeypatch):
    words = ["demo", "--fast", "--device", "cpu"]
    process = subprocess.Popen([sys.executable, "-m", "carmil", *words], cwd=tmp_path, stderr=subprocess.DEVNULL)
    first = tmp_path / "demo" / "runs" / "four_bags-fast" / "abmil" / "metrics.json"
    while not first.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    written = first.stat().st_mtime_ns
    assert not (tmp_path / "demo" / "report.html").exists()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    status, out, err = run_cli(*words)
    assert status == 0, err
    assert first.stat().st_mtime_ns == written
    assert (tmp_path / "demo" / "report.html").exists()
    assert "car/abmil" in out


@pytest.mark.finding(n=17)
@pytest.mark.parametrize("option", ["--out", "--bags", "--labels"])
def test_empty_path_is_rejected(run_cli, tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    status, _, err = run_cli("train", "--bags", "b", "--labels", "l", "--out", "o", option, "")
    assert status == 2 and err == f"carmil: {option} is empty: expected a path; check that the shell variable is set\n"
    assert not list(tmp_path.iterdir())
