"""All files of a DICOM series are one slide, with a name of its own."""

import numpy as np
import pytest
from tests.dicom_files import write_series

from carmil.errors import CarmilError
from carmil.slides.dicom_series import slide_name
from carmil.slides.opening import find_slides, open_slide


def noise(height=150, width=200):
    return np.random.default_rng(0).integers(0, 200, (height, width, 3)).astype(np.uint8)


def names_in(folder, log=lambda line: None):
    return sorted(slide_name(path) for path in find_slides([folder], log=log))


def test_a_series_is_one_slide_with_the_pixels_of_its_files(tmp_path):
    _, files = write_series(tmp_path / "scans", noise(), container="S12-004", levels=2)
    assert len(files) == 3
    assert find_slides([tmp_path]) == [files[0]]
    assert find_slides(files) == [files[0]]  # named one by one, as a shell does
    with open_slide(files[1]) as slide:  # any file of the series
        assert (slide.name, slide.width, slide.height, slide.mpp) == ("S12-004", 200, 150, 0.5)
        assert [level.downsample for level in slide.levels] == [1, 2]
        np.testing.assert_array_equal(slide.read(10, 20, 100, 90, (100, 90)), noise()[20:110, 10:110])


def test_series_are_named_by_container_description_folder_or_uid(tmp_path):
    write_series(tmp_path / "one", noise(), container="S1", description="H&E")
    write_series(tmp_path / "two", noise(), container="Unknown", description="Ki67")
    write_series(tmp_path / "case 3", noise(), container="unknown")
    write_series(tmp_path / "two stains", noise(), container="S4", description="H&E")
    write_series(tmp_path / "two stains", noise(), container="S4", description="Ki67")
    same = [write_series(tmp_path / "same", noise(), container="S5")[0] for _ in range(2)]
    assert names_in(tmp_path) == sorted(["S1", "Ki67", "case 3", "S4 H&E", "S4 Ki67", *same])


def test_series_of_the_same_name_in_several_folders_are_refused(tmp_path):
    for folder in ("a", "b"):
        write_series(tmp_path / folder, noise(), container="S1")
    with pytest.raises(CarmilError, match="two slides are named 'S1'"):
        find_slides([tmp_path])


def test_files_without_suffix_are_found_by_their_content(tmp_path):
    _, files = write_series(tmp_path, noise(), container="S1")
    files[0].rename(tmp_path / "IM0001")
    files[1].rename(tmp_path / "1.2.840.99")
    assert find_slides([tmp_path]) == [tmp_path / "IM0001"]
    assert names_in(tmp_path) == ["S1"]


def test_other_dicom_files_are_omitted_and_reported_in_one_line(tmp_path):
    _, files = write_series(tmp_path, noise(), container="S1")
    write_series(tmp_path / "labels only", noise(), container="S2")[1][0].unlink()
    whole = files[0].read_bytes()
    (tmp_path / "torn.dcm").write_bytes(whole[:300])
    (tmp_path / "ct.dcm").write_bytes(
        whole.replace(b"1.2.840.10008.5.1.4.1.1.77.1.6", b"1.2.840.10008.5.1.4.1.1.2\0\0\0\0\0")
    )
    lines = []
    assert names_in(tmp_path, lines.append) == ["S1"]
    assert lines == [f"{tmp_path}: 3 DICOM files left out: not a picture of a whole slide, or damaged"]


def test_damaged_series_raises_an_error_of_one_line(tmp_path):
    _, files = write_series(tmp_path, noise(), container="S1")
    whole = files[0].read_bytes()
    files[0].write_bytes(whole[: len(whole) // 2])
    with (
        pytest.raises(CarmilError, match=r"\.dcm cannot be .*; check that the file is complete"),
        open_slide(files[0]) as slide,
    ):
        slide.read(0, 0, 200, 150, (200, 150))


def test_error_without_pydicom_states_in_one_line_how_to_install_it(tmp_path, monkeypatch):
    write_series(tmp_path, noise(), container="S1")
    monkeypatch.setattr("carmil.slides.dicom_series.find_spec", lambda name: None)
    with pytest.raises(CarmilError, match=r"is DICOM, which needs pydicom: pip install 'carmil\[dicom\]'"):
        find_slides([tmp_path])


def test_tiles_of_a_series_are_saved_under_the_name_of_the_series(tmp_path, run_cli, make_tissue):
    write_series(tmp_path / "scans", make_tissue(1500, 1800)[0], container="S/1 ä", mpp=0.5)
    status, out, _ = run_cli("slides", "tile", str(tmp_path / "scans"), "--out", str(tmp_path / "tiles"))
    assert status == 0 and "S/1 ä" in out
    assert (tmp_path / "tiles" / "tiles.csv").read_text(encoding="utf-8-sig").splitlines()[1].startswith("S/1 ä,")
    (file,) = (tmp_path / "tiles" / "patches").iterdir()
    assert file.name.startswith("S_1 ä~")
