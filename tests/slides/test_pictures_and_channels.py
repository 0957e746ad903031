"""Slides that are pictures, have their channels first or 16 bits; micrometres per pixel from the user."""

import numpy as np
import pytest
import tifffile
from PIL import Image

from carmil.errors import CarmilError
from carmil.slides.mpp_table import read_mpps
from carmil.slides.opening import find_slides, open_slide


def noise(height=300, width=400):
    return np.random.default_rng(0).integers(0, 255, (height, width, 3)).astype(np.uint8)


def test_png_and_jpeg_are_slides_once_their_mpp_is_given(tmp_path):
    picture = noise()
    Image.fromarray(picture).save(tmp_path / "a.png", dpi=(300, 300))
    Image.fromarray(np.full((50, 60, 3), 90, np.uint8)).save(tmp_path / "b.JPG", quality=95)
    for name in ("a.png", "b.JPG"):
        with pytest.raises(CarmilError, match=f"{name} does not record its micrometres per pixel: give it with --mpp"):
            open_slide(tmp_path / name)
    with open_slide(tmp_path / "a.png", missing_mpp=0.5) as slide:
        assert (slide.width, slide.height, slide.mpp) == (400, 300, 0.5)
        np.testing.assert_array_equal(slide.read(10, 20, 100, 90, (100, 90)), picture[20:110, 10:110])
    with open_slide(tmp_path / "b.JPG", missing_mpp=0.5) as slide:
        assert np.abs(slide.read(0, 0, 60, 50, (60, 50)).astype(int) - 90).max() <= 2


def test_transparent_png_is_blended_with_white_and_truncated_png_is_refused(tmp_path):
    clear = np.dstack([noise(), np.zeros((300, 400), np.uint8)])
    Image.fromarray(clear).save(tmp_path / "clear.png")
    with open_slide(tmp_path / "clear.png", missing_mpp=1) as slide:
        assert (slide.read(0, 0, 400, 300, (40, 30)) == 255).all()
    (tmp_path / "torn.png").write_bytes((tmp_path / "clear.png").read_bytes()[:900])
    with pytest.raises(CarmilError, match=r"torn\.png cannot be read .*check that the file is complete"):
        open_slide(tmp_path / "torn.png", missing_mpp=1)
    Image.fromarray(np.zeros((9, 9), np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(CarmilError, match="more than 8 bits per pixel"):
        open_slide(tmp_path / "deep.png", missing_mpp=1)


def test_pictures_in_a_folder_are_slides_only_if_it_has_no_other_slides(tmp_path, make_slide):
    Image.fromarray(noise()).save(tmp_path / "thumbnail.png")
    assert find_slides([tmp_path]) == [tmp_path / "thumbnail.png"]
    slide = make_slide(tmp_path / "slide.tif", noise())
    assert find_slides([tmp_path]) == [slide]


def write_ome(path, samples, *, names=("Red", "Green", "Blue"), **more):
    """Write an OME-TIFF with the channels first, one page each, and a smaller level."""
    metadata = {"axes": "CYX", "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5, "Channel": {"Name": list(names)}, **more}
    with tifffile.TiffWriter(path, ome=True) as file:
        file.write(samples, subifds=1, photometric="minisblack", tile=(64, 64), metadata=metadata)
        file.write(samples[:, ::2, ::2], subfiletype=1, photometric="minisblack", tile=(64, 64))
    return path


@pytest.mark.parametrize("names", [("Red", "Green", "Blue"), ("r", "g", "b"), ("Channel 0", "Channel 1", "Channel 2")])
def test_picture_with_channels_first_is_read_as_red_green_and_blue(tmp_path, names):
    picture = noise()
    with open_slide(write_ome(tmp_path / "a.ome.tif", picture.transpose(2, 0, 1), names=names)) as slide:
        assert (slide.width, slide.height, slide.mpp) == (400, 300, 0.5)
        assert [level.downsample for level in slide.levels] == [1, 2]
        np.testing.assert_array_equal(slide.read(100, 50, 280, 190, (280, 190)), picture[50:240, 100:380])


def test_channels_that_are_not_colours_are_refused(tmp_path):
    path = write_ome(tmp_path / "a.ome.tif", noise().transpose(2, 0, 1), names=("DAPI", "CD3", "CD8"))
    with pytest.raises(CarmilError, match="has the channels DAPI, CD3, CD8: expected red, green, blue"):
        open_slide(path)


@pytest.mark.parametrize(("bits", "stated"), [(16, {}), (12, {"SignificantBits": 12})])
def test_sixteen_bit_pictures_are_converted_to_eight_bits_by_their_stated_range(tmp_path, bits, stated):
    picture = noise()
    largest = 2**bits - 1
    deep = np.rint(picture / 255 * largest).astype(np.uint16)
    with open_slide(write_ome(tmp_path / "a.ome.tif", deep.transpose(2, 0, 1), **stated)) as slide:
        np.testing.assert_array_equal(slide.read(0, 0, 400, 300, (400, 300)), picture)
        assert (slide.read(500, 0, 9, 9, (9, 9)) == 255).all()  # outside
    tifffile.imwrite(
        tmp_path / "b.tif", deep, photometric="rgb", extratags=[(281, 3, 3, (largest,) * 3, True)], metadata=None
    )
    with open_slide(tmp_path / "b.tif", missing_mpp=1) as slide:
        np.testing.assert_array_equal(slide.read(0, 0, 400, 300, (400, 300)), picture)


def test_sixteen_bit_pictures_with_an_unstated_smaller_range_are_refused(tmp_path):
    deep = noise().astype(np.uint16) * 16  # 12 bits
    with pytest.raises(CarmilError, match=r"its brightest pixel uses 6.3% \(of 0 to 65,535\): state the range"):
        open_slide(write_ome(tmp_path / "a.ome.tif", deep.transpose(2, 0, 1)))


def test_mpp_option_replaces_only_missing_values_and_a_table_overrides_the_file(
    tmp_path, make_slide, make_tissue, run_cli
):
    picture = make_tissue(1200, 1500)[0]
    (tmp_path / "scans").mkdir()
    for name, mpp in (("own", 0.5), ("none", None), ("wrong", 0.25)):
        make_slide(tmp_path / "scans" / f"{name}.tif", picture, mpp=mpp)
    (tmp_path / "slides.csv").write_text("wsi,mpp\nC:\\scans\\wrong.tif,0.5\nown.tif,\nother.svs,0.3\n")
    words = (
        "slides",
        "tile",
        str(tmp_path / "scans"),
        "--out",
        str(tmp_path / "tiles"),
        "--mpp",
        "0.4",
        "--preset",
        "biopsy",
    )
    status, _, said = run_cli(*words, "--slides-table", str(tmp_path / "slides.csv"))
    assert status == 0
    lines = (tmp_path / "tiles" / "tiles.csv").read_text(encoding="utf-8-sig").splitlines()
    heads = lines[0].split(",")
    mpps = {row[0]: float(row[heads.index("mpp")]) for row in (line.split(",") for line in lines[1:])}
    assert mpps == {"own": 0.5, "none": 0.4, "wrong": 0.5}
    assert "own: 0.5 um/px from the file (its TIFF resolution); --mpp 0.4 is for slides that record none" in said
    assert "wrong: 0.5 um/px given; the file says 0.25" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("wsi,mpp\na.tif,x\n", "line 2: mpp is 'x': expected 0.05 to 20 micrometres per pixel"),
        ("wsi,mpp\na.tif,0.5\na.tif,0.25\n", r"a.tif has 0.5 in line 2 and 0.25 in line 3"),
        ("wsi,mpp\nb.tif,0.5\n", "has the micrometres per pixel of none of the slides: expected names like a.tif"),
        ("wsi,size\na.tif,0.5\n", "has the columns wsi, size: expected one of mpp"),
    ],
)
def test_invalid_slides_tables_are_refused(tmp_path, text, words):
    (tmp_path / "slides.csv").write_text(text)
    with pytest.raises(CarmilError, match=words):
        read_mpps(tmp_path / "slides.csv", [tmp_path / "a.tif"])
