"""carmil slides tile, run from the command line."""

import csv

import numpy as np
import pytest
import tifffile

from carmil.slides.features import tiles_of
from carmil.slides.tiling import read_tiles


@pytest.fixture
def cohort(tmp_path, ellipse, make_slide):
    """Return a folder with one good slide and many kinds of broken slides."""
    folder = tmp_path / "scans"
    folder.mkdir()
    whole = ellipse.read_bytes()
    (folder / "good.tif").write_bytes(whole)
    (folder / "truncated.tif").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.svs").write_bytes(b"")
    (folder / "photo.svs").write_bytes(b"\xff\xd8\xff\xe0" + bytes(64))
    make_slide(folder / "white.tif", np.full((1200, 1200, 3), 255, np.uint8))
    make_slide(folder / "black.tif", np.zeros((1200, 1200, 3), np.uint8))
    make_slide(folder / "nompp.tif", np.zeros((600, 600, 3), np.uint8), mpp=None)
    with tifffile.TiffWriter(folder / "huge.tif", bigtiff=True) as file:
        how = {"tile": (4096, 4096), "photometric": "rgb", "compression": "deflate", "metadata": None}
        how |= {"resolution": (4e4, 4e4), "resolutionunit": "CENTIMETER"}
        file.write((b"" for _ in range(49**2)), shape=(200_000, 200_000, 3), dtype=np.uint8, **how)
    return folder


def lines_of(path):
    with path.open(newline="", encoding="utf-8") as stream:
        return {line["slide"]: line for line in csv.DictReader(stream)}


def test_broken_slides_are_skipped_and_listed(tmp_path, cohort, run_cli):
    out = tmp_path / "tiles"
    status, out_text, remarks = run_cli("slides", "tile", str(cohort), "--out", str(out))
    assert status == 1
    assert "tiles of 1 slide; 7 skipped" in out_text
    expected = {
        "truncated": "truncated",
        "empty": "is empty (0 bytes)",
        "photo": "looks like a JPEG picture",
        "white": "no tissue",
        "black": "no tissue",
        "nompp": "give it with --mpp",
        "huge": "has no overview",
    }
    skipped = [line for line in remarks.splitlines() if line.startswith("  skipped: ")]
    assert len(skipped) == 7
    table = lines_of(out / "tiles.csv")
    assert set(table) == {"good", *expected}
    for name, words in expected.items():
        assert any(f"{name}." in line and words in line for line in skipped)
        assert words in table[name]["problem"]
        assert table[name]["tiles"] == ""
    tiles = read_tiles(out / "patches" / "good_patches.h5")
    assert table["good"]["tiles"] == str(len(tiles))
    assert float(table["good"]["mpp"]) == pytest.approx(0.5)
    assert [path.name for path in (out / "patches").iterdir()] == ["good_patches.h5"]
    assert [path.name for path in (out / "sheets").iterdir()] == ["good.png"]
    assert (out / "contact_sheet.png").is_file()


def test_tiles_are_cut_again_only_if_settings_or_files_change(tmp_path, ellipse, run_cli):
    out = tmp_path / "tiles"
    written = out / "patches" / "ellipse_patches.h5"
    assert run_cli("slides", "tile", str(ellipse), "--out", str(out))[0] == 0
    first = (written.stat().st_mtime_ns, len(read_tiles(written)))
    status, out_text, _ = run_cli("slides", "tile", str(ellipse), "--out", str(out))
    assert (status, written.stat().st_mtime_ns) == (0, first[0])
    assert "yes" in out_text
    assert run_cli("slides", "tile", str(ellipse), "--out", str(out), "--overlap", "0.5")[0] == 0
    assert len(read_tiles(written)) > 3 * first[1]
    (out / "sheets" / "ellipse.png").unlink()
    assert "yes" not in run_cli("slides", "tile", str(ellipse), "--out", str(out), "--overlap", "0.5")[1]
    assert (out / "sheets" / "ellipse.png").is_file()


@pytest.mark.finding(n=1)
def test_folder_with_tiles_of_another_geometry_is_left_unchanged(tmp_path, ellipse, run_cli):
    out = tmp_path / "tiles"
    assert run_cli("slides", "tile", str(ellipse), "--out", str(out))[0] == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for words, requested in (
        (["--pixels", "224"], "224 pixels at 0.5 um/px"),
        (["--tile-mpp", "1"], "256 pixels at 1 um/px"),
    ):
        status, out_text, err = run_cli("slides", "tile", str(ellipse), "--out", str(out), *words)
        assert (status, out_text, len(err.strip().splitlines())) == (2, "", 1)
        assert (
            "tiles of 256 pixels at 0.5 um/px (ellipse_patches.h5)" in err
            and f"not of {requested}: choose another --out" in err
        )
        assert "choose another --out" in err
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    (out / "patches" / "damaged_patches.h5").write_bytes(b"no HDF5")
    assert run_cli("slides", "tile", str(ellipse), "--out", str(out))[0] == 0


@pytest.mark.finding(n=1)
def test_tile_size_is_printed_and_written_to_tiles_csv(tmp_path, ellipse, run_cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "tiles"
    _, out_text, _ = run_cli("slides", "tile", str(ellipse), "--out", str(out), "--pixels", "128", "--tile-mpp", "1")
    assert "128 px at 1 um/px" in out_text
    line = lines_of(out / "tiles.csv")["ellipse"]
    assert (line["tile_pixels"], line["tile_mpp"], line["mpp"]) == ("128", "1", "0.5")


def test_mpp_of_the_table_overrides_the_file_and_is_logged(tmp_path, ellipse, run_cli):
    out, table = tmp_path / "tiles", tmp_path / "slides.csv"
    table.write_text("slide,mpp\nellipse,0.4\n")
    status, out_text, remarks = run_cli(
        "slides", "tile", str(ellipse), "--out", str(out), "--slides-table", str(table), "--pixels", "128"
    )
    assert status == 0
    assert "0.4 given" in out_text
    assert "ellipse: 0.4 um/px given; the file says 0.5" in remarks
    tiles = read_tiles(out / "patches" / "ellipse_patches.h5")
    assert (tiles.slide_mpp, tiles.size, tiles.pixels) == (0.4, 160, 128)


def test_tiles_of_disabled_rules_are_shown_as_kept(tmp_path, ellipse, run_cli):
    _, out_text, _ = run_cli("slides", "tile", str(ellipse), "--out", str(tmp_path / "t"), "--keep", "blurred,pen")
    assert out_text.count("kept") == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--preset", "biopsie"], "unknown preset 'biopsie'; did you mean 'biopsy'?"),
        (["--keep", "blurry"], "unknown rule 'blurry'; did you mean 'blurred'?"),
        (["--rule", "corner"], "unknown rule for tiles 'corner'"),
        (["--overlap", "2"], "an overlap of 2: expected a share of the side"),
        (["--tile-mpp", "0"], "expected 0.05 to 20"),
        (["nowhere"], "nowhere does not exist: expected a slide or folder"),
    ],
)
def test_invalid_options_exit_with_status_2_and_write_nothing(tmp_path, ellipse, run_cli, words, expected):
    out = tmp_path / "tiles"
    status, out_text, err = run_cli("slides", "tile", str(ellipse), "--out", str(out), *words)
    assert (status, out_text) == (2, "")
    assert expected in err
    assert len(err.strip().splitlines()) == 1
    assert not out.exists()


def test_real_slides_are_tiled(tmp_path, shared_data, run_cli):
    out = tmp_path / "tiles"
    status, _, _ = run_cli("slides", "tile", str(shared_data / "slides"), "--out", str(out), "--mpp", "0.5")
    table = lines_of(out / "tiles.csv")
    counts = {name: int(line["tiles"]) for name, line in table.items()}
    assert status == 0
    assert counts["histology_image"] == 11 * 14  # all of it is tissue
    assert 25 <= counts["CMU-1-Small-Region"] <= 40
    assert 140 <= counts["tcga-cr-7395-01a-01-ts1"] <= 165


@pytest.mark.finding(n=1)
def test_tiles_of_an_earlier_call_are_removed_for_skipped_slides(tmp_path, make_slide, make_tissue, run_cli):
    """Otherwise `slides encode` would use tiles that were cut with other settings."""
    picture = np.full((2400, 2400, 3), 245, np.uint8)
    picture[1000:1600, 1000:1600] = make_tissue(1800, 1800)[0][600:1200, 600:1200]
    core, out = make_slide(tmp_path / "core.tif", picture), tmp_path / "tiles"
    assert run_cli("slides", "tile", str(core), "--preset", "biopsy", "--out", str(out))[0] == 0
    assert (out / "patches" / "core_patches.h5").is_file()
    status, _, remarks = run_cli("slides", "tile", str(core), "--out", str(out))
    assert status == 1 and "its tiles of an earlier call were removed" in remarks
    assert not (out / "patches" / "core_patches.h5").exists() and not (out / "sheets" / "core.png").exists()
    result, broken = tiles_of([core], out)
    assert not result and "has no tiles in" in broken[core]
    assert "removed" not in run_cli("slides", "tile", str(core), "--out", str(out))[2]


@pytest.mark.finding(n=17)
def test_hidden_slides_are_skipped_and_listed(tmp_path, ellipse, run_cli):
    scans = tmp_path / "scans"
    scans.mkdir()
    for name in ("good.tif", ".hidden.tif"):
        (scans / name).write_bytes(ellipse.read_bytes())
    status, _, remarks = run_cli("slides", "tile", str(scans), "--out", str(tmp_path / "tiles"))
    assert status == 0
    assert "1 hidden file left out, whose name begins with a dot: '.hidden.tif'" in remarks
