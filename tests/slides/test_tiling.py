import h5py
import numpy as np
import pytest
from scipy import ndimage

from carmil.errors import CarmilError
from carmil.slides.opening import open_slide
from carmil.slides.overview import read_overview
from carmil.slides.quality import apply_rules
from carmil.slides.slide import Tiles
from carmil.slides.tiling import cut, read_more, read_tiles, write_tiles
from carmil.slides.tissue import find_tissue


def opened_tissue(path, **how):
    with open_slide(path, **how) as slide:
        overview = read_overview(slide)
        return slide, overview, find_tissue(slide, overview)


def cut_of(path, **how):
    slide, _, tissue = opened_tissue(path)
    return cut(slide, tissue, **how)


def test_tiles_are_on_a_grid_with_their_centres_in_tissue(ellipse):
    slide, _, tissue = opened_tissue(ellipse)
    tiles = cut(slide, tissue)
    assert (tiles.pixels, tiles.size, tiles.width, tiles.height) == (256, pytest.approx(256), 3000, 2400)
    assert (tiles.corners % 256 == 0).all()
    grid = np.stack(np.meshgrid(np.arange(0, 3000 - 255, 256), np.arange(0, 2400 - 255, 256)), -1).reshape(-1, 2)
    inside = tissue.holds((grid + 128) * 0.5)
    np.testing.assert_array_equal(tiles.corners, grid[inside])
    assert 0 < inside.sum() < len(grid)


def test_40x_and_20x_copies_have_the_same_tiles_to_one_pixel(copies):
    fine, coarse = (cut_of(path, pixels=64) for path in copies)
    assert (fine.size, coarse.size) == (pytest.approx(128), pytest.approx(64))
    assert len(fine) > 100
    np.testing.assert_allclose(fine.corners * fine.slide_mpp, coarse.corners * coarse.slide_mpp, atol=0.5)


def test_tiles_with_a_fractional_side_do_not_drift(tmp_path, make_slide, make_tissue):
    tiles = cut_of(make_slide(tmp_path / "a.tif", make_tissue(2400, 3000)[0], mpp=0.499), pixels=64)
    assert tiles.size == pytest.approx(64 * 0.5 / 0.499)
    steps = tiles.corners / tiles.size
    assert np.abs(steps - np.rint(steps)).max() * tiles.size <= 0.5


def test_overlap_and_four_point_rule_give_more_tiles(ellipse):
    plain, half, four = cut_of(ellipse), cut_of(ellipse, overlap=0.5), cut_of(ellipse, rule="four-point")
    assert (half.corners % 128 == 0).all()
    assert len(half) > 3 * len(plain)
    assert {tuple(c) for c in plain.corners} < {tuple(c) for c in four.corners}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"pixels": 2}, "tiles of 2 pixels: expected 8 to 16384"),
        ({"overlap": 1.0}, "an overlap of 1: expected a share of the side"),
        ({"mpp": 0.0}, "expected 0.05 to 20"),
        ({"mpp": 0.25}, r"has 0\.5 um/px, too coarse for tiles of 0\.25 um/px"),
        ({"rule": "center"}, "unknown rule for tiles 'center'; did you mean 'centre'"),
    ],
)
def test_invalid_tile_settings_raise_an_error(ellipse, how, words):
    with pytest.raises(CarmilError, match=words):
        cut_of(ellipse, **how)


@pytest.fixture
def spoiled(tmp_path, make_slide, make_tissue):
    """Return a slide full of tissue whose first columns of 128 um tiles are blurred, inked and almost blank."""
    inner = make_tissue(5200, 5200)[0][1300:3860, 1300:3860].copy()
    soft = ndimage.gaussian_filter(inner[:, :512].astype(np.float32), (8, 8, 0))  # 4 um
    inner[:, :256] = np.rint(soft[:, :256])
    inner[:, 280:424] = (30, 90, 160)
    inner[:, 512:768] = (236, 233, 238)
    inner[64:192, 600:700] = (225, 130, 180)
    return make_slide(tmp_path / "spoiled.tif", inner)


def test_blurred_inked_and_blank_tiles_are_excluded_and_counted(spoiled):
    slide, overview, tissue = opened_tissue(spoiled)
    everywhere = np.stack(np.meshgrid(np.arange(10) * 256, np.arange(10) * 256), -1).reshape(-1, 2)
    all_of_it = Tiles("spoiled", everywhere, 256.0, 256, 0.5, slide.width, slide.height, slide.mpp)
    good, left_out = apply_rules(all_of_it, overview, tissue)
    assert {name: set(some.corners[:, 0].tolist()) for name, some in left_out.items()} == {
        "blank": {512},
        "pen": {256},
        "blurred": {0},
    }
    assert {name: len(some) for name, some in left_out.items()} == {"blank": 9, "pen": 10, "blurred": 10}
    assert len(good) == 71
    kept, others = apply_rules(all_of_it, overview, tissue, keep=("blank", "pen", "blurred"))
    assert (len(kept), others) == (100, {})
    assert set(apply_rules(all_of_it, overview, tissue, keep=("pen",))[1]) == {"blank", "blurred"}
    with pytest.raises(CarmilError, match="unknown rule 'blury'; did you mean 'blurred'"):
        apply_rules(all_of_it, overview, tissue, keep=("blury",))


def test_rules_keep_every_tile_of_sharp_stained_tissue(ellipse):
    slide, overview, tissue = opened_tissue(ellipse)
    tiles = cut(slide, tissue)
    good, left_out = apply_rules(tiles, overview, tissue)
    assert len(good) == len(tiles)
    assert sum(len(some) for some in left_out.values()) == 0


def test_rules_keep_nearly_every_tile_of_a_real_slide(shared_data):
    slide, overview, tissue = opened_tissue(shared_data / "slides" / "tcga-cr-7395-01a-01-ts1.svs", mpp=0.5)
    tiles = cut(slide, tissue)
    assert len(tiles) > 140
    assert len(apply_rules(tiles, overview, tissue)[0]) >= 0.98 * len(tiles)


def test_tiles_are_written_like_trident_and_read_back_unchanged(tmp_path, make_slide, make_tissue):
    tiles = cut_of(make_slide(tmp_path / "a.tif", make_tissue(2400, 3000)[0], mpp=0.499))
    path = write_tiles(tiles, tmp_path / "out", overlap=0.25, more={"why": "test"})
    assert path == tmp_path / "out" / "patches" / "a_patches.h5"
    with h5py.File(path) as file:
        attributes = dict(file["coords"].attrs)
        assert file["coords"].dtype == np.int64
    assert attributes["patch_size"] == 256
    assert attributes["patch_size_level0"] == tiles.size
    assert attributes["target_magnification"] == 20
    assert attributes["level0_magnification"] == pytest.approx(10 / 0.499)
    assert (attributes["overlap"], attributes["name"], attributes["level0_width"], attributes["level0_height"]) == (
        64,
        "a",
        3000,
        2400,
    )
    back = read_tiles(path)
    np.testing.assert_array_equal(back.corners, tiles.corners)
    assert [getattr(back, name) for name in ("slide", "size", "pixels", "mpp", "width", "height", "slide_mpp")] == [
        getattr(tiles, name) for name in ("slide", "size", "pixels", "mpp", "width", "height", "slide_mpp")
    ]
    assert read_more(path) == {"why": "test"}


def test_tile_file_of_trident_is_read(tmp_path):
    path = tmp_path / "s1_patches.h5"
    with h5py.File(path, "w") as file:
        coords = file.create_dataset("coords", data=np.array([[0, 512], [512, 0]]))
        coords.attrs.update(patch_size=256, patch_size_level0=512, level0_magnification=40, target_magnification=20)
        coords.attrs.update(overlap=0, name="s1", savetodir="x", level0_width=9000, level0_height=8000)
    tiles = read_tiles(path)
    assert (tiles.slide, tiles.size, tiles.mpp, tiles.slide_mpp, tiles.width) == ("s1", 512, 0.5, 0.25, 9000)
    assert read_more(path) == {}


def test_file_without_valid_tiles_raises_an_error(tmp_path):
    (tmp_path / "a_patches.h5").write_bytes(b"nothing")
    with h5py.File(tmp_path / "b_patches.h5", "w") as file:
        file["coords"] = np.zeros((3, 2), int)
    with h5py.File(tmp_path / "c_patches.h5", "w") as file:
        file["coords"] = np.zeros((3, 3), int)
    for name, words in (
        ("a", "cannot be read"),
        ("b", "has no patch_size"),
        ("c", "expected whole numbers"),
    ):
        with pytest.raises(CarmilError, match=words):
            read_tiles(tmp_path / f"{name}_patches.h5")
