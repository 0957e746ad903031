import os
import sys
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # a worker a core already; torch asks when it is imported, processes inherit it

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # kernels are run by Triton's interpreter; it must know before they are imported
    )

from carmil.cli import main

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture
def shared_data() -> Path:
    if not SHARED.is_dir():
        pytest.skip("needs ../shared/data, which is not part of the repository")
    return SHARED


@pytest.fixture(autouse=True)
def _same_every_time() -> None:
    torch.manual_seed(0)
    torch.set_flush_denormal(False)  # a training before this test may have set it, for the whole process


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `carmil demo --fast` leaves behind."""
    from carmil.reproduce.demo import run_demo

    out = tmp_path_factory.mktemp("demo")
    run_demo(out, fast=True)
    return out


@pytest.fixture
def said(capsys, monkeypatch):
    """Runs a command line in this process: its exit status, and what it said on stdout and stderr."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["carmil", *words])
        with pytest.raises(SystemExit) as left:
            main()
        return (left.value.code or 0, *capsys.readouterr())

    return run
