import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

from carmil.doctor import examine


def finding_about(what):
    return next(each for each in examine() if each.what.startswith(what))


def test_doctor_prints_versions_formats_and_device(run_cli):
    status, out, _ = run_cli("doctor")
    assert status == 0
    for words in (version("torch"), version("tifffile"), "Aperio .svs", "OME-TIFF", "cores"):
        assert words in out
    assert finding_about("GPU").well == torch.cuda.is_available()


@pytest.mark.parametrize("hidden", ["openslide", "tifffile"])
def test_doctor_lists_missing_libraries_with_the_install_command(monkeypatch, hidden):
    monkeypatch.setitem(sys.modules, hidden, None)
    name = {"openslide": "slides by OpenSlide", "tifffile": "slides by tifffile"}[hidden]
    finding = finding_about(name)
    assert not finding.well
    assert hidden in finding.seen
    assert finding.advice == "pip install 'carmil[slides]'"


def test_doctor_works_without_the_slides_extra_and_tiling_suggests_installing_it(tmp_path):
    code = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("openslide", "tifffile", "skimage", "timm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
sys.argv = ["carmil", *sys.argv[1:]]
from carmil.cli import main
main()
"""

    def run(*words):
        return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)

    doctor = run("doctor")
    assert doctor.returncode == 0
    assert "pip install 'carmil[slides]'" in doctor.stdout
    assert run("slides", "tile", "--help").returncode == 0
    tile = run("slides", "tile", str(tmp_path), "--out", str(tmp_path / "out"))
    assert tile.returncode == 2
    assert "pip install 'carmil[slides]'" in tile.stderr
    assert len(tile.stderr.strip().splitlines()) == 1
