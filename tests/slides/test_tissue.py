import numpy as np
import pytest
from skimage.draw import polygon2mask

from carmil.errors import CarmilError
from carmil.slides.opening import open_slide
from carmil.slides.overview import OVERVIEW, read_overview
from carmil.slides.tissue import find_tissue, preset


def tissue_of(path, name="default", **how):
    with open_slide(path, **how) as slide:
        return slide, find_tissue(slide, read_overview(slide), preset(name))


def dice(one, other):
    return 2 * (one & other).sum() / (one.sum() + other.sum())


def test_hole_in_tissue_is_detected(tmp_path, make_slide, make_tissue):
    picture, truth = make_tissue(2400, 3200, hole=True)
    tissue = tissue_of(make_slide(tmp_path / "a.tif", picture))[1]
    step = int(OVERVIEW / 0.5)
    assert dice(tissue.mask, truth[step // 2 :: step, step // 2 :: step]) > 0.97
    assert tissue.mm2 == pytest.approx(truth.sum() * 0.25e-6, rel=0.04)
    assert [len(region.holes) for region in tissue.regions] == [1]
    middle, inside, glass = (800, 600), (800, 850), (20, 20)  # micrometres
    np.testing.assert_array_equal(tissue.holds(np.array([middle, inside, glass, (-5, 3), (9e9, 3)])), [0, 1, 0, 0, 0])


def test_outlines_in_level_0_pixels_enclose_the_mask(tmp_path, make_slide, make_tissue):
    slide, tissue = tissue_of(make_slide(tmp_path / "a.tif", make_tissue(2400, 3200, hole=True)[0]))
    (region,) = tissue.regions
    scale = slide.mpp / OVERVIEW
    rows_first = [outline[:, ::-1] * scale - 0.5 for outline in (region.outer, *region.holes)]
    outer, hole = (polygon2mask(tissue.mask.shape, outline) for outline in rows_first)
    assert dice(outer & ~hole, tissue.mask) > 0.99
    np.testing.assert_array_equal(region.outer[0], region.outer[-1])


def test_40x_and_20x_copies_have_the_same_tissue(copies):
    fine, coarse = (tissue_of(path)[1] for path in copies)
    assert fine.mask.shape == coarse.mask.shape
    assert dice(fine.mask, coarse.mask) > 0.998


@pytest.mark.parametrize("colour", [(255, 255, 255), (0, 0, 0), (238, 236, 240), (128, 128, 128)])
def test_slide_without_tissue_raises_an_error(tmp_path, make_slide, colour):
    noisy = np.full((1200, 1200, 3), colour) + np.random.default_rng(0).integers(-2, 3, (1200, 1200, 3))
    path = make_slide(tmp_path / "a.tif", np.clip(noisy, 0, 255).astype(np.uint8), compression="jpeg")
    with pytest.raises(CarmilError, match=r"a\.tif: no tissue"):
        tissue_of(path)


def test_slide_full_of_tissue_is_all_tissue(tmp_path, make_slide, make_tissue):
    inner = make_tissue(3600, 3600)[0][1000:2600, 1000:2600]
    assert tissue_of(make_slide(tmp_path / "a.tif", inner))[1].mask.mean() > 0.99


def test_small_piece_of_tissue_counts_only_with_the_biopsy_preset(tmp_path, make_slide, make_tissue):
    picture = np.full((2400, 2400, 3), 245, np.uint8)
    picture[1000:1600, 1000:1600] = make_tissue(1800, 1800)[0][600:1200, 600:1200]  # 0.09 mm2
    path = make_slide(tmp_path / "core.tif", picture)
    assert tissue_of(path, "biopsy")[1].mm2 == pytest.approx(0.09, rel=0.1)
    with pytest.raises(CarmilError, match=r"no tissue \(the largest piece has 0\.0[89]"):
        tissue_of(path)


@pytest.mark.finding(n=17)
def test_pieces_that_are_too_small_raise_an_error_naming_the_biopsy_preset(tmp_path, make_slide, make_tissue):
    picture = np.full((2400, 2400, 3), 245, np.uint8)
    picture[1000:1600, 1000:1600] = make_tissue(1800, 1800)[0][600:1200, 600:1200]
    path = make_slide(tmp_path / "core.tif", picture)
    with pytest.raises(CarmilError, match=r"counts is 0\.26 mm2: for small pieces use --preset biopsy, 0\.016 mm2"):
        tissue_of(path)
    picture[1000:1600, 1000:1600] = 245
    picture[1000:1100, 1000:1100] = make_tissue(1800, 1800)[0][850:950, 850:950]  # 0.0025 mm2
    with pytest.raises(CarmilError, match=r"no tissue \(.*mm2, the smallest area that counts is 0\.016 mm2\)$"):
        tissue_of(make_slide(tmp_path / "crumb.tif", picture), "biopsy")


def test_tissue_near_the_edge_does_not_extend_to_the_edge(tmp_path, make_slide, make_tissue):
    picture = np.full((2400, 2400, 3), 245, np.uint8)
    picture[200:2200, 40:1500] = make_tissue(4000, 4000)[0][1000:3000, 1000:2460]  # 20 um from the left edge
    mask = tissue_of(make_slide(tmp_path / "a.tif", picture))[1].mask
    assert not mask[:, 0].any()
    assert mask[75, 4]


def test_ink_does_not_raise_the_threshold_of_pale_tissue(tmp_path, make_slide, make_tissue):
    picture, truth = make_tissue(2400, 3200)
    picture[truth] = 245 - (245 - picture[truth].astype(int)) // 6
    picture[:, :500] = (20, 140, 60)
    mask = tissue_of(make_slide(tmp_path / "a.tif", picture))[1].mask
    assert mask[75, 100]


def test_unknown_preset_raises_an_error():
    with pytest.raises(CarmilError, match="unknown preset 'biopsi'; did you mean 'biopsy'"):
        preset("biopsi")


def test_annotated_kidney_slide_is_all_tissue(shared_data):
    _, tissue = tissue_of(shared_data / "slides" / "kidney_annotated" / "histology_image.svs", mpp=0.5)
    assert tissue.mask.mean() > 0.98
