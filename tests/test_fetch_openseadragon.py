"""OpenSeadragon is downloaded from its npm package and verified."""

import importlib.util
import io
import tarfile
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "fetch_openseadragon.py"


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("fetch_openseadragon", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fetch_without_npm_returns_an_error_and_writes_nothing(tool, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tool.fetch(tmp_path / "page").startswith("npm is not installed")
    assert not (tmp_path / "page").exists()


def test_file_with_a_wrong_checksum_is_not_used(tool, tmp_path, monkeypatch):
    def packed(words, **_):
        with tarfile.open(Path(words[-1]) / "openseadragon.tgz", "w:gz") as package:
            for inside, _ in tool.FILES.values():
                package.addfile(tarfile.TarInfo(inside), io.BytesIO())

    monkeypatch.setattr(tool.subprocess, "run", packed)
    assert "is not the file that was expected" in tool.fetch(tmp_path / "page")
    assert not (tmp_path / "page").exists()


def test_existing_files_are_not_downloaded_again(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "FILES", {"one.js": ("package/one.js", tool.hashlib.sha256(b"ours").hexdigest())})
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "one.js").write_bytes(b"ours")
    assert tool.fetch(tmp_path) is None
