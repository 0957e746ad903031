"""Evidence as a DICOM segmentation of the slide's series."""

from dataclasses import replace

import highdicom
import numpy as np
import pydicom
import pytest
from tests.dicom_files import write_series

from carmil.errors import CarmilError
from carmil.maps.dicom_maps import write_segmentation
from carmil.maps.drawing import draw_maps
from carmil.maps.tile_maps import TileMap
from carmil.slides.opening import find_slides, open_slide


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("series")
    write_series(folder, np.full((400, 600, 3), 220, np.uint8), container="S1", levels=2)
    return folder


@pytest.fixture
def slide(folder):
    with open_slide(find_slides([folder])[0]) as slide:
        yield slide


def evidence(tiles, name="tumour", scale=1.0):
    values = np.linspace(-1, 2, len(tiles)) * scale
    return TileMap(name, values, "evidence", apart=float(np.abs(values).sum()))


def test_segments_hold_the_evidence_for_and_against_every_class(tmp_path, slide, grid_of_tiles):
    tiles = grid_of_tiles(slide, 100)
    maps = [evidence(tiles), evidence(tiles, "normal", -0.5)]
    file = pydicom.dcmread(write_segmentation(slide, tiles, maps, tmp_path / "e.dcm"))
    source = pydicom.dcmread(slide.path)
    assert file.ReferencedSeriesSequence[0].SeriesInstanceUID == source.SeriesInstanceUID
    assert (file.FrameOfReferenceUID, file.StudyInstanceUID) == (source.FrameOfReferenceUID, source.StudyInstanceUID)
    assert file.PatientID == "P1" and file.SeriesInstanceUID != source.SeriesInstanceUID
    assert "research use only" in file.SeriesDescription
    labels = [segment.SegmentLabel for segment in file.SegmentSequence]
    assert labels == ["for tumour", "against tumour", "for normal", "against normal"]
    stated = [segment.SegmentDescription for segment in file.SegmentSequence]
    assert all("not a probability; research use only" in words for words in stated)
    assert "1 is 2 in the unit of the evidence" in stated[0] and "1 is 1 in the unit" in stated[3]
    matrix = highdicom.seg.segread(tmp_path / "e.dcm").get_total_pixel_matrix(rescale_fractional=True)
    assert matrix.shape == (8, 12, 4)  # half a tile per pixel
    signed = (matrix[..., 0] - matrix[..., 1])[::2, ::2].ravel() * 2
    np.testing.assert_allclose(signed, maps[0].values, atol=2 / 255)
    np.testing.assert_array_equal(matrix[..., 1], matrix[..., 2])


def test_pixels_lie_where_the_tiles_do(tmp_path, slide, grid_of_tiles):
    tiles = grid_of_tiles(slide, 100)
    file = pydicom.dcmread(write_segmentation(slide, tiles, [evidence(tiles)], tmp_path / "e.dcm"))
    measures = file.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    assert [float(value) for value in measures.PixelSpacing] == pytest.approx([0.025, 0.025])  # mm: 50 pixels of 0.5 um
    origin = file.TotalPixelMatrixOriginSequence[0]
    # Rows run along -y and columns along -x. The edges are at 20 + 0.00025 and 40 + 0.00025 mm, as those of the slide.
    assert float(origin.XOffsetInSlideCoordinateSystem) == pytest.approx(20 + 0.00025 - 0.0125)
    assert float(origin.YOffsetInSlideCoordinateSystem) == pytest.approx(40 + 0.00025 - 0.0125)


def test_frames_of_a_large_segmentation_lie_where_the_tiles_do(tmp_path, slide, grid_of_tiles):
    """Frames are read in DICOM order, segment by segment and row by row, and placed by pydicom and highdicom only."""
    tiles = grid_of_tiles(slide, 2)
    assert len(tiles) == 300 * 200
    path = write_segmentation(slide, tiles, [evidence(tiles)], tmp_path / "e.dcm")
    file, source = pydicom.dcmread(path), pydicom.dcmread(slide.path, stop_before_pixels=True)
    assert (file.TotalPixelMatrixColumns, file.TotalPixelMatrixRows) == (600, 400)
    assert (file.Rows, file.Columns, file.NumberOfFrames) == (256, 256, 2 * 3 * 2)  # two segments
    frames = file.pixel_array.reshape(2, 2, 3, 256, 256) / 255
    matrix = frames.transpose(0, 1, 3, 2, 4).reshape(2, 512, 768)[:, :400, :600]
    to_mm = highdicom.spatial.ImageToReferenceTransformer.for_image(file, for_total_pixel_matrix=True)
    to_source = highdicom.spatial.ReferenceToImageTransformer.for_image(source, for_total_pixel_matrix=True)
    values = evidence(tiles).values
    for i in (0, 127, 128, 299, 300 * 127 + 130, 300 * 128 + 256, len(tiles) - 1):
        column, row = tiles.corners[i]  # a pixel of the segmentation is one of the slide here
        corners = np.array([[column, row], [column + 2, row + 2]], dtype=float)
        placed = to_source(to_mm(corners))[:, :2]
        np.testing.assert_allclose(placed, [tiles.corners[i], tiles.corners[i] + 2], atol=1e-3)
        shown = matrix[:, row : row + 2, column : column + 2]
        np.testing.assert_allclose((shown[0] - shown[1]) * 2, values[i], atol=2 / 255)


def test_pixels_have_the_spacing_of_the_source(tmp_path, folder, grid_of_tiles):
    with open_slide(find_slides([folder])[0], mpp=0.25) as slide:
        tiles = grid_of_tiles(slide, 100)
        file = pydicom.dcmread(write_segmentation(slide, tiles, [evidence(tiles)], tmp_path / "e.dcm"))
    measures = file.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    assert [float(value) for value in measures.PixelSpacing] == pytest.approx([0.025, 0.025])


def test_faint_evidence_does_not_reach_1(tmp_path, slide, grid_of_tiles):
    tiles = grid_of_tiles(slide, 100)
    one = evidence(tiles)
    faint = replace(one, turning=20 * one.apart)  # fills half of the colours
    write_segmentation(slide, tiles, [faint], tmp_path / "e.dcm")
    read = highdicom.seg.segread(tmp_path / "e.dcm")
    assert read.get_total_pixel_matrix(rescale_fractional=True).max() == pytest.approx(0.5, abs=1 / 255)
    assert "1 is 4 in the unit of the evidence, more than" in read.SegmentSequence[0].SegmentDescription


def test_negligible_evidence_is_written_as_zero(tmp_path, slide, grid_of_tiles):
    tiles = grid_of_tiles(slide, 100)
    write_segmentation(slide, tiles, [evidence(tiles, scale=1e-6)], tmp_path / "e.dcm")
    read = highdicom.seg.segread(tmp_path / "e.dcm")
    assert not read.get_total_pixel_matrix(rescale_fractional=True).any()
    assert "negligible, written as 0" in read.SegmentSequence[0].SegmentDescription


def test_draw_writes_the_segmentation_beside_the_pictures(tmp_path, slide, grid_of_tiles, plain_slide):
    tiles = grid_of_tiles(slide, 100)
    written = draw_maps(slide, tiles, [evidence(tiles)], tmp_path, longest=64, top=0, dicom=True)
    assert written[-1] == tmp_path / "S1.evidence.dcm" and written[-1].is_file()
    with pytest.raises(CarmilError, match=r"plain\.svs is not DICOM, and a DICOM segmentation names the series"):
        draw_maps(plain_slide(600, 400), tiles, [evidence(tiles)], tmp_path / "no", dicom=True)
    weights = TileMap("factual", np.ones(len(tiles)), "factual")
    with pytest.raises(CarmilError, match="S1: none of the maps is signed evidence"):
        draw_maps(slide, tiles, [weights], tmp_path / "no", dicom=True)
    assert not (tmp_path / "no").exists()
