import os
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

import carmil
from carmil.errors import CarmilError
from carmil.weights import read_weights, write_tensors


def test_written_tensors_are_read_back_unchanged(tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3).T, "b": torch.ones(2, dtype=torch.bfloat16)}
    write_tensors(tmp_path / "w.safetensors", tensors, {"key": "value"})
    result = read_weights(tmp_path / "w.safetensors")
    assert all(torch.equal(result[name], tensors[name]) for name in tensors)


@pytest.mark.finding(n=13)
def test_writing_weights_to_a_full_disk_raises_an_error_of_one_line(tmp_path, monkeypatch):
    def disk_full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", disk_full)
    with pytest.raises(CarmilError) as failed:
        write_tensors(tmp_path / "weights.safetensors", {"a": torch.ones(3)})
    assert str(failed.value) == (
        f"{tmp_path / 'weights.safetensors'} cannot be written (No space left on device): "
        "check that there is room on the disk, or choose another folder"
    )
    assert os.listdir(tmp_path) == []


@pytest.mark.finding(n=13)
def test_only_the_weights_module_writes_safetensors():
    files = Path(carmil.__file__).parent.rglob("*.py")
    assert [path.name for path in files if re.search(r"\bsave_file\b", path.read_text(encoding="utf-8"))] == [
        "weights.py"
    ]
