import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tifffile

from carmil.errors import CarmilError
from carmil.maps.annotations import read_annotations
from carmil.slides.opening import find_slides, open_slide


def noise(height, width, channels=3, dtype=np.uint8):
    return np.random.default_rng(0).integers(0, 200, (height, width, channels), dtype=dtype)


def opening_error(path, **how):
    """Return the one-line error raised by opening or reading the slide."""
    with pytest.raises(CarmilError) as error, open_slide(path, **how) as slide:
        slide.read(0, 0, slide.width, slide.height, (64, 64))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_pyramidal_tiff_gives_levels_and_micrometres_per_pixel(tmp_path, make_slide):
    with open_slide(make_slide(tmp_path / "a.tif", noise(600, 900), mpp=0.25, levels=3)) as slide:
        assert (slide.name, slide.width, slide.height) == ("a", 900, 600)
        assert [(level.width, level.height, level.downsample) for level in slide.levels] == [
            (900, 600, 1),
            (450, 300, 2),
            (225, 150, 4),
        ]
        assert slide.mpp == pytest.approx(0.25)
        assert "TIFF resolution" in slide.mpp_from


@pytest.mark.parametrize(("size", "unit", "mpp"), [(0.5, "µm", 0.5), (250, "nm", 0.25), (0.0005, "mm", 0.5)])
def test_ome_tiff_gives_sub_levels_and_converts_units(tmp_path, size, unit, mpp):
    path, picture = tmp_path / "b.ome.tif", noise(512, 768)
    physical = {f"PhysicalSize{axis}": size for axis in "XY"} | {f"PhysicalSize{axis}Unit": unit for axis in "XY"}
    with tifffile.TiffWriter(path) as file:
        how = {"tile": (256, 256), "photometric": "rgb"}
        file.write(picture, subifds=1, metadata={"axes": "YXS", **physical}, **how)
        file.write(picture[::2, ::2], subfiletype=1, **how)
    with open_slide(path) as slide:
        assert [level.downsample for level in slide.levels] == [1, 2]
        assert slide.mpp == pytest.approx(mpp)
        np.testing.assert_array_equal(slide.read(0, 0, 768, 512, (384, 256)), picture[::2, ::2])


def test_pixels_equal_those_of_the_file_and_are_white_outside(tmp_path, make_slide):
    picture = noise(600, 900)
    with open_slide(make_slide(tmp_path / "a.tif", picture)) as slide:
        np.testing.assert_array_equal(slide.read(100, 50, 300, 200, (300, 200)), picture[50:250, 100:400])
        edge = slide.read(-10, 590, 40, 30, (40, 30))
        np.testing.assert_array_equal(edge[:10, 10:], picture[590:, :30])
        assert (edge[10:] == 255).all()
        assert (edge[:, :10] == 255).all()
        assert (slide.read(5000, 5000, 10, 10, (4, 4)) == 255).all()


def test_reading_at_fractional_positions_shifts_the_picture_accordingly(tmp_path, make_slide):
    ramp = np.repeat(np.arange(0, 250, dtype=np.uint8)[None, :, None], 60, axis=0).repeat(3, axis=2)
    with open_slide(make_slide(tmp_path / "ramp.tif", ramp)) as slide:
        whole, half = slide.read(20, 10, 80, 20, (40, 10)), slide.read(21, 10, 80, 20, (40, 10))
        inner = np.s_[2:-2, 2:-2, 0]
        np.testing.assert_allclose(half[inner].astype(int) - whole[inner], 1, atol=1)
        np.testing.assert_allclose(whole[5, 2:-2, 0], 20 + np.arange(40)[2:-2] * 2 + 0.5, atol=1)


def test_picture_is_read_from_the_smallest_sufficient_level(tmp_path):
    path = tmp_path / "colours.tif"
    with tifffile.TiffWriter(path) as file:
        for level, colour in enumerate([(200, 0, 0), (0, 200, 0), (0, 0, 200)]):
            plain = np.full((512 >> level, 1024 >> level, 3), colour, np.uint8)
            file.write(plain, tile=(128, 128), photometric="rgb", subfiletype=int(level > 0), metadata=None)
    with open_slide(path, mpp=0.5) as slide:
        shown = {scale: slide.read(0, 0, 512, 512, (512 // scale,) * 2)[5, 5].argmax() for scale in (1, 2, 4, 8)}
    assert shown == {1: 0, 2: 1, 4: 2, 8: 2}


def test_large_level_read_in_pieces_equals_the_downscaled_picture(tmp_path, make_slide, make_tissue, halve_picture):
    picture = make_tissue(2304, 3072)[0]
    with open_slide(make_slide(tmp_path / "a.tif", picture)) as slide:
        shown = slide.read(0, 0, 3072, 2304, (768, 576)).astype(int)
    assert np.abs(shown - halve_picture(halve_picture(picture))).mean() < 3


def test_given_mpp_overrides_the_file_and_is_reported(tmp_path, make_slide):
    with open_slide(make_slide(tmp_path / "a.tif", noise(64, 64), mpp=0.25), mpp=0.5) as slide:
        assert slide.mpp == 0.5
        assert slide.mpp_from == "given; the file says 0.25"


@pytest.mark.parametrize(
    ("resolution", "words"),
    [
        (None, "does not record its micrometres per pixel: give it with --mpp"),
        ((72, 72, "INCH"), "352.8 x 352.8 um/px (its TIFF resolution), which is impossible"),
        ((20000, 19000, "CENTIMETER"), "x and y differ by more than 2%"),
        ((20000, 20000, "NONE"), "does not record its micrometres per pixel"),
    ],
)
def test_missing_or_implausible_mpp_raises_an_error(tmp_path, make_slide, resolution, words):
    how = {} if resolution is None else {"resolution": resolution[:2], "resolutionunit": resolution[2]}
    path = make_slide(tmp_path / "a.tif", noise(64, 64), mpp=None, **how)
    assert words in opening_error(path)
    assert opening_error(path).endswith("`slides tile`, `slides run` and `view` take --slides-table")
    with open_slide(path, mpp=0.5) as slide:
        assert slide.mpp == 0.5
    assert "expected 0.05 to 20" in opening_error(path, mpp=50)


def test_transparent_pixels_are_blended_with_white(tmp_path, make_slide):
    picture = np.full((64, 64, 4), 100, np.uint8)
    picture[:32, :, 3], picture[32:, :, 3] = 0, 255
    path = make_slide(tmp_path / "a.tif", picture, extrasamples=["unassalpha"])
    with open_slide(path) as slide:
        shown = slide.read(0, 0, 64, 64, (64, 64))
    assert (shown[:32] == 255).all()
    assert (shown[32:] == 100).all()


def test_grayscale_and_separate_planes_are_read_as_rgb(tmp_path, make_slide):
    grey = noise(300, 300, 1)[..., 0]
    with open_slide(make_slide(tmp_path / "grey.tif", grey, photometric="minisblack")) as slide:
        np.testing.assert_array_equal(slide.read(0, 0, 300, 300, (300, 300)), grey[..., None].repeat(3, axis=2))
    picture = noise(300, 400)
    planes = np.ascontiguousarray(picture.transpose(2, 0, 1))
    tifffile.imwrite(tmp_path / "planes.tif", planes, photometric="rgb", planarconfig="separate", tile=(128, 128))
    with open_slide(tmp_path / "planes.tif", mpp=1) as slide:
        np.testing.assert_array_equal(slide.read(100, 100, 280, 190, (280, 190)), picture[100:290, 100:380])


def test_striped_tiff_with_another_suffix_is_read(tmp_path):
    picture = noise(300, 400)
    tifffile.imwrite(tmp_path / "plain.svs", picture, photometric="rgb", rowsperstrip=7)
    with open_slide(tmp_path / "plain.svs", mpp=1) as slide:
        assert len(slide.levels) == 1
        np.testing.assert_array_equal(slide.read(10, 10, 300, 200, (300, 200)), picture[10:210, 10:310])


def test_unsupported_pixel_formats_raise_an_error_naming_them(tmp_path):
    tifffile.imwrite(tmp_path / "deep.tif", noise(64, 64).astype(np.float32), photometric="rgb")
    assert "has 32 bits per sample (float32): expected RGB (or grayscale) of 8 or 16 bits" in opening_error(
        tmp_path / "deep.tif", mpp=1
    )
    tifffile.imwrite(tmp_path / "many.tif", np.zeros((5, 64, 64), np.uint8), photometric="minisblack")
    assert "is a stack of 5 pictures" in opening_error(tmp_path / "many.tif", mpp=1)


def test_files_that_are_not_slides_raise_an_error_describing_them(tmp_path):
    files = {
        "empty.svs": (b"", "is empty (0 bytes)"),
        "photo.svs": (b"\xff\xd8\xff\xe0" + bytes(100), "looks like a JPEG picture"),
        "words.tif": (b"not a slide at all", "is not a slide that OpenSlide or tifffile can read"),
        "head.tif": (b"II*\0" + struct.pack("<I", 8), "check that the file is complete"),
    }
    for name, (content, words) in files.items():
        (tmp_path / name).write_bytes(content)
        assert words in opening_error(tmp_path / name)
    assert "does not exist: expected a slide" in opening_error(tmp_path / "nowhere.svs")
    assert "is a folder" in opening_error(tmp_path)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.99])
def test_truncated_tiff_raises_an_error_of_one_line(tmp_path, make_slide, share):
    whole = make_slide(tmp_path / "whole.tif", noise(800, 800), levels=2).read_bytes()
    (tmp_path / "part.tif").write_bytes(whole[: int(len(whole) * share)])
    line = opening_error(tmp_path / "part.tif")
    assert "truncated" in line or "check that the file is complete" in line


def test_truncated_openslide_file_raises_an_error_of_one_line(tmp_path, shared_data):
    whole = (shared_data / "slides" / "CMU-1-Small-Region.svs").read_bytes()
    (tmp_path / "part.svs").write_bytes(whole[: len(whole) // 2])
    assert "check that the file is complete" in opening_error(tmp_path / "part.svs", mpp=0.5)


def test_huge_slide_without_overview_is_never_read_into_memory(tmp_path):
    path, side, tile = tmp_path / "huge.tif", 200_000, 4096
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        nothing = (b"" for _ in range((-(-side // tile)) ** 2))
        how = {"tile": (tile, tile), "photometric": "rgb", "compression": "deflate", "metadata": None}
        file.write(nothing, shape=(side, side, 3), dtype=np.uint8, **how)
    tracemalloc.start()
    with open_slide(path, mpp=0.25) as slide:
        assert (slide.read(150_000, 150_000, 512, 512, (256, 256)) == 255).all()
        with pytest.raises(CarmilError, match="has no overview: its smallest sufficient level is 200,000 x 200,000"):
            slide.read(0, 0, side, side, (1000, 1000))
        with pytest.raises(CarmilError, match="has no overview"):
            slide.read(0, 0, side, side, (10, 10))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6


def test_page_stored_as_one_huge_piece_raises_an_error(tmp_path):
    path = tmp_path / "piece.tif"
    tifffile.imwrite(path, np.zeros((64, 64, 3), np.uint8), photometric="rgb", metadata=None, rowsperstrip=64)
    with tifffile.TiffFile(path, mode="r+b") as file:
        for name in ("ImageWidth", "ImageLength", "RowsPerStrip"):
            file.pages[0].tags[name].overwrite(60_000)
    assert "in one piece" in opening_error(path, mpp=1)


def test_concurrent_reads_return_the_right_pixels(tmp_path, make_slide):
    picture = noise(1024, 1024)
    corners = [(x, y) for x in range(0, 1000, 100) for y in range(0, 1000, 100)]
    with open_slide(make_slide(tmp_path / "a.tif", picture, tile=(64, 64))) as slide, ThreadPoolExecutor(8) as threads:
        for (x, y), tile in zip(
            corners, threads.map(lambda at: slide.read(*at, 24, 24, (24, 24)), corners), strict=True
        ):
            np.testing.assert_array_equal(tile, picture[y : y + 24, x : x + 24])


def test_slide_and_tifffile_share_one_file_lock(tmp_path, make_slide):
    """tifffile reads tags lazily, which would move the file position while another thread reads pixels."""
    with open_slide(make_slide(tmp_path / "a.tif", noise(64, 64))) as slide:
        assert slide._file.filehandle.has_lock
        assert slide._lock is slide._file.filehandle.lock


def test_aperio_slide_is_read_by_openslide(shared_data):
    import openslide

    path = shared_data / "slides" / "CMU-1-Small-Region.svs"
    with open_slide(path) as slide, openslide.OpenSlide(path) as reference:
        assert (slide.width, slide.height, slide.mpp) == (2220, 2967, 0.499)
        expected = np.asarray(reference.read_region((300, 400), 0, (500, 300)).convert("RGB"))
        np.testing.assert_array_equal(slide.read(300, 400, 500, 300, (500, 300)), expected)


def test_slides_are_found_in_folders_and_duplicate_names_raise_an_error(tmp_path, make_slide):
    (tmp_path / "deep").mkdir()
    one = make_slide(tmp_path / "one.tif", noise(64, 64))
    two = make_slide(tmp_path / "deep" / "two.TIFF", noise(64, 64))
    (tmp_path / "notes.txt").write_text("none")
    (tmp_path / ".hidden.tif").write_bytes(b"x")
    assert find_slides([tmp_path, one]) == [two, one]
    make_slide(tmp_path / "deep" / "one.svs", noise(64, 64))
    with pytest.raises(CarmilError, match="two slides are named 'one'"):
        find_slides([tmp_path])
    (tmp_path / "none").mkdir()
    with pytest.raises(CarmilError, match="contains no slide"):
        find_slides([tmp_path / "none"])
    with pytest.raises(CarmilError, match="does not exist: expected a slide or folder"):
        find_slides([tmp_path / "away.svs"])


def with_tag(path, tag, *, kind=None, count=None, value=None):
    """Change the entry of a tag in the first directory of a little-endian TIFF."""
    content = bytearray(path.read_bytes())
    (at,) = struct.unpack_from("<I", content, 4)
    (entries,) = struct.unpack_from("<H", content, at)
    entry = next(
        at + 2 + 12 * i for i in range(entries) if struct.unpack_from("<H", content, at + 2 + 12 * i)[0] == tag
    )
    for offset, form, number in ((2, "<H", kind), (4, "<I", count), (8, "<I", value)):
        if number is not None:
            struct.pack_into(form, content, entry + offset, number)
    path.write_bytes(bytes(content))
    return path


WIDTH, HEIGHT, TILE_WIDTH, TILE_OFFSETS, TILE_COUNTS = 256, 257, 322, 324, 325


@pytest.mark.finding(n=14)
@pytest.mark.parametrize(
    ("tag", "change"),
    [
        (WIDTH, {"value": 0}),
        (WIDTH, {"value": 2**31}),
        (HEIGHT, {"value": 2**20}),
        (WIDTH, {"kind": 2}),
        (WIDTH, {"kind": 11}),
        (WIDTH, {"kind": 8, "value": 2**16 - 96}),
        (TILE_WIDTH, {"value": 0}),
        (TILE_WIDTH, {"value": 2**31 - 1}),
        (TILE_OFFSETS, {"count": 1}),
        (TILE_OFFSETS, {"kind": 11}),
        (TILE_OFFSETS, {"kind": 99}),
        (TILE_OFFSETS, {"value": 2**32 - 1}),
        (TILE_COUNTS, {"count": 2**31}),
        (TILE_COUNTS, {"kind": 12}),
    ],
)
def test_tiff_with_a_damaged_tag_raises_an_error_of_one_line(tmp_path, make_slide, tag, change):
    path = with_tag(make_slide(tmp_path / "a.tif", np.full((96, 160, 3), 200, np.uint8), tile=(32, 32)), tag, **change)
    with pytest.raises(CarmilError) as error, open_slide(path) as slide:
        slide.read(0, 0, slide.width, slide.height, (16, 16))
    assert str(path) in str(error.value) and len(str(error.value).splitlines()) == 1


@pytest.mark.finding(n=14)
def test_tiles_too_large_for_openslide_raise_an_error_instead_of_crashing(tmp_path):
    path = tmp_path / "a.svs"
    words = "Aperio Image Library v11.2.1\r\n160x96 (32x32) JPEG/RGB Q=70|AppMag = 20|MPP = 0.5"
    tifffile.imwrite(
        path,
        np.full((96, 160, 3), 200, np.uint8),
        tile=(32, 32),
        photometric="rgb",
        compression="jpeg",
        description=words,
        metadata=None,
    )
    with open_slide(path) as slide:
        assert slide.read(0, 0, 160, 96, (10, 6)).shape == (6, 10, 3)
    with pytest.raises(CarmilError, match="stores tiles of 2147483647 x 32 pixels"):
        open_slide(with_tag(path, TILE_WIDTH, kind=4, value=2**31 - 1))


def empty_pages(path, count, last):
    """Write a TIFF of `count` pages without tags, the last followed by page number `last` (None: the end)."""
    offsets = [8 + 6 * i for i in range(count)]
    following = [*offsets[1:], 0 if last is None else offsets[last]]
    path.write_bytes(b"II*\0" + struct.pack("<I", 8) + b"".join(struct.pack("<HI", 0, one) for one in following))
    return path


@pytest.mark.finding(n=14)
@pytest.mark.parametrize(
    ("count", "last", "words"),
    [
        (3, 1, "whose pages form a cycle"),
        (150, 120, "whose pages form a cycle"),
        (2000, None, "with more than 1,000 pages"),
    ],
)
def test_tiff_with_cyclic_or_too_many_pages_raises_an_error(tmp_path, count, last, words):
    path = empty_pages(tmp_path / "a.tif", count, last)
    with pytest.raises(CarmilError, match=f"a.tif is a TIFF {words}"):
        open_slide(path)
    with pytest.raises(CarmilError, match=f"a.tif is a TIFF {words}"):
        read_annotations(path, width=100, height=100)


@pytest.mark.finding(n=14)
@pytest.mark.parametrize(
    ("tag", "change", "words"),
    [
        (TILE_COUNTS, {"kind": 4, "value": 8}, "page 0 stores pieces that are larger than the file"),
        (TILE_COUNTS, {"count": 2}, "page 0 has 2 tiles where its size needs 15"),
        (WIDTH, {"value": 0}, "page 0 has a size that is not a positive whole number"),
    ],
)
def test_damaged_slide_raises_an_error_instead_of_crashing_openslide(tmp_path, tag, change, words):
    path = tmp_path / "a.svs"
    description = "Aperio Image Library v11.2.1\r\n160x96 (32x32) JPEG/RGB Q=70|AppMag = 20|MPP = 0.5"
    how = {"tile": (32, 32), "photometric": "rgb", "compression": "jpeg", "metadata": None}
    tifffile.imwrite(path, np.full((96, 160, 3), 200, np.uint8), description=description, **how)
    with pytest.raises(CarmilError, match=rf"a\.svs: {words}.*; check that the file is complete"):
        open_slide(with_tag(path, tag, **change))
