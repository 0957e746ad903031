"""Maps stored in the run are shown unchanged; only missing maps are computed."""

import shutil

import numpy as np
import pytest

from carmil.explanations.explain import explain_run
from carmil.viewer import maps
from carmil.viewer.cases import read_cases
from carmil.viewer.maps import CaseMaps


@pytest.fixture
def explained(study_folder, tmp_path):
    """Return a copy of the run with its evidence."""
    shutil.copytree(study_folder / "run", tmp_path / "run")
    explain_run(tmp_path / "run", None, bags=None, methods=(), searched=False, device="cpu", log=lambda line: None)
    return tmp_path / "run"


def test_stored_maps_are_shown_without_computing_them(explained, run, monkeypatch):
    computed, stored = CaseMaps(run), CaseMaps(read_cases(explained))
    expected = {name: computed.values(3, name, 1) for name in computed.kinds}
    monkeypatch.setattr(maps, "explain_bag", lambda *words, **others: pytest.fail("computed again"))
    assert stored.kinds == computed.kinds
    for name, values in expected.items():
        np.testing.assert_allclose(stored.values(3, name, 1), values, rtol=1e-6, atol=1e-7, err_msg=name)


def test_missing_evidence_file_is_computed_and_incomplete_evidence_is_logged(explained, run):
    (explained / "evidence" / "s3.parquet").unlink()
    result = CaseMaps(read_cases(explained))
    np.testing.assert_array_equal(result.values(3, "evidence", 0), CaseMaps(run).values(3, "evidence", 0))
    (explained / "evidence" / "summary.json").unlink()
    lines = []
    assert read_cases(explained, log=lines.append).evidence is None
    assert len(lines) == 1 and "The evidence is incomplete" in lines[0]
