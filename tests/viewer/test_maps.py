"""Maps that the run holds are shown as they are; the models compute only those that it does not hold."""

import shutil

import numpy as np
import pytest

from carmil.studies.explain import explain_run
from carmil.viewer import maps
from carmil.viewer.maps import CaseMaps
from carmil.viewer.run_cases import read_cases


@pytest.fixture
def explained(study_folder, tmp_path):
    """A copy of the run with its evidence."""
    shutil.copytree(study_folder / "run", tmp_path / "run")
    explain_run(tmp_path / "run", None, bags=None, methods=(), searched=False, device="cpu", log=lambda line: None)
    return tmp_path / "run"


def test_a_map_in_the_run_is_shown_without_asking_the_models(explained, run, monkeypatch):
    computed, stored = CaseMaps(run), CaseMaps(read_cases(explained))
    expected = {name: computed.values(3, name, 1) for name in computed.kinds}
    monkeypatch.setattr(maps, "explain_bag", lambda *words, **others: pytest.fail("computed again"))
    assert stored.kinds == computed.kinds
    for name, values in expected.items():
        np.testing.assert_allclose(stored.values(3, name, 1), values, rtol=1e-6, atol=1e-7, err_msg=name)


def test_a_slide_whose_file_is_gone_is_computed_and_other_evidence_is_named(explained, run):
    (explained / "evidence" / "s3.parquet").unlink()
    found = CaseMaps(read_cases(explained))
    np.testing.assert_array_equal(found.values(3, "evidence", 0), CaseMaps(run).values(3, "evidence", 0))
    (explained / "evidence" / "summary.json").unlink()
    lines = []
    assert read_cases(explained, log=lines.append).evidence is None
    assert len(lines) == 1 and "The evidence is incomplete" in lines[0]
