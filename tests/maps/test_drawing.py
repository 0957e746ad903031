"""Heat maps are drawn onto slides of any size, in the colours of the legend."""

import io

import numpy as np
import pytest
import shapely
from PIL import Image
from shapely import MultiPolygon, Polygon, box

from carmil.errors import CarmilError
from carmil.maps import comparison, legend, painting
from carmil.maps.annotations import read_annotations
from carmil.maps.colours import to_colours
from carmil.maps.comparison import extreme_tiles, zoom_boxes
from carmil.maps.drawing import PngWriter, draw_maps, write_pngs
from carmil.maps.mosaic import picture_size
from carmil.maps.painting import Painter
from carmil.maps.regions import Region
from carmil.maps.tile_labels import POSITIVE, label_tiles
from carmil.maps.tile_maps import tile_maps
from carmil.slides.opening import open_slide


def opened(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(int)


@pytest.fixture
def words(monkeypatch):
    """Return the list of texts drawn into pictures."""
    written = []

    def recording_draw_text(draw, at, text, size, **how):
        written.append(text)
        return draw_text(draw, at, text, size, **how)

    draw_text = legend.draw_text
    for module in (legend, comparison):
        monkeypatch.setattr(module, "draw_text", recording_draw_text)
    return written


def test_png_written_in_parts_is_read_back_unchanged():
    picture = np.random.default_rng(0).integers(0, 256, (37, 23, 3), dtype=np.uint8)
    file = io.BytesIO()
    writer = PngWriter(file, 23, 37, words={"Title": "µ"}, mpp=0.5)
    for top in range(0, 37, 10):
        writer.write(picture[top : top + 10])
    writer.close()
    with Image.open(file) as image:
        np.testing.assert_array_equal(np.asarray(image), picture)
        assert image.text["Title"] == "µ"
        assert image.info["dpi"][0] == pytest.approx(25_400 / 0.5, rel=1e-3)


def test_supporting_tiles_are_blue_refuting_tiles_orange_and_others_uncoloured(tmp_path, plain_slide, grid_of_tiles):
    slide = plain_slide(2000, 1000)
    tiles = grid_of_tiles(slide, 250)
    values = np.zeros(len(tiles))
    values[0], values[1], values[2] = 2.0, -2.0, np.nan
    draw_maps(slide, tiles, {"DCIS": values}, tmp_path, longest=1000, top=0)
    result = opened(tmp_path / "evidence_DCIS.png")
    blue, orange, no_value, zero = (result[60, x] for x in (60, 185, 310, 435))
    assert blue[2] > blue[0] + 60
    assert orange[0] > orange[2] + 60
    assert (no_value == no_value[0]).all() and no_value[0] == 255 - (255 - 200) * 3 // 4
    assert zero.max() - zero.min() < 12
    assert result.shape[1] == 1000 and result.shape[0] > 500


def test_attention_colours_darken_monotonically():
    light = to_colours(np.linspace(0, 1, 50), signed=False) @ np.array([0.21, 0.72, 0.07])
    assert (np.diff(light) < 0).all()


def test_legend_states_class_scaling_and_research_use_only(tmp_path, plain_slide, grid_of_tiles, words):
    slide = plain_slide(2000, 1000)
    tiles = grid_of_tiles(slide, 250)
    values = np.linspace(-3, 1, len(tiles))
    contour = [Region("carcinoma", Polygon([(10, 10), (900, 10), (900, 900)]))]
    painter = Painter(slide, tiles, tile_maps({"DCIS": values}), annotations=contour)
    write_pngs(painter, [tmp_path / "a.png"], longest=1200)
    assert {"evidence for DCIS", "research use only", "against DCIS (−3)", "for DCIS (+3)", "0"} <= set(words)
    assert "annotated: carcinoma" in words
    assert any(text.startswith("up to the largest value for or against") for text in words)
    assert "200 µm" in words or "500 µm" in words
    words.clear()
    write_pngs(Painter(slide, tiles, tile_maps({"factual": values})), [tmp_path / "c.png"], longest=1200)
    assert any(text.startswith("from 0 to the largest weight") for text in words)
    words.clear()
    write_pngs(Painter(slide, tiles, tile_maps({"factual": values}), "rank"), [tmp_path / "b.png"], longest=1200)
    assert {"attention weight", "looked at most (1)"} <= set(words)
    assert any(text.startswith("by rank") for text in words)
    with Image.open(tmp_path / "b.png") as image:
        assert "research use only" in image.text["Description"]


def test_large_picture_reads_one_strip_of_the_slide_at_a_time(tmp_path, plain_slide, grid_of_tiles, monkeypatch):
    monkeypatch.setattr(painting, "STRIP", 50_000)
    slide = plain_slide(40_000, 30_000)
    tiles = grid_of_tiles(slide, 500)
    maps = tile_maps({"DCIS": np.sin(np.arange(len(tiles))), "factual": np.cos(np.arange(len(tiles)))})
    painter = Painter(slide, tiles, maps)
    write_pngs(painter, [tmp_path / "a.png", tmp_path / "b.png"], longest=1999)
    assert max(width * height for width, height in slide.reads) <= 50_000
    assert sum(height for _, height in slide.reads) == 1499  # once, for both maps
    whole = painter.paint((0, 0, 40_000, 30_000), (1999, 1499))
    for name, picture in zip("ab", whole, strict=True):
        np.testing.assert_array_equal(opened(tmp_path / f"{name}.png")[:1499, :1999], picture)


def test_contours_are_drawn_at_the_annotation(plain_slide, grid_of_tiles):
    slide = plain_slide(1000, 1000)
    square = [Region("t", box(200, 200, 800, 800))]
    painter = Painter(slide, grid_of_tiles(slide, 100), tile_maps({"factual": np.zeros(100)}), annotations=square)
    (picture,) = painter.paint((0, 0, 1000, 1000), (500, 500), line=3)
    dark = picture.sum(-1) < 200
    assert dark[100, 120:380].all() and dark[120:380, 400].all()
    assert not dark[110:390, 110:390].any() and not dark[:90].any()


def test_every_part_of_a_multipolygon_is_outlined(plain_slide, grid_of_tiles):
    slide = plain_slide(1000, 1000)
    parts = [Region("t", MultiPolygon([box(100, 100, 300, 300), box(600, 600, 800, 800)]))]
    painter = Painter(slide, grid_of_tiles(slide, 100), tile_maps({"factual": np.zeros(100)}), annotations=parts)
    (picture,) = painter.paint((0, 0, 1000, 1000), (500, 500), line=3)
    dark = picture.sum(-1) < 200
    assert dark[50, 60:140].all() and dark[300, 310:390].all()


@pytest.mark.finding(n=3)
def test_tiles_with_little_evidence_are_not_extreme_tiles():
    """As in GeoJSON, evidence below 5 % of the largest is neither for nor against."""
    (one,) = tile_maps({"DCIS": np.array([4.0, 0.21, 0.19, 0.0, np.nan, -0.19, -0.21])})
    assert one.signs.tolist() == [1, 1, 0, 0, 0, 0, -1]
    assert [high_low.tolist() for high_low in extreme_tiles(one, 4)] == [[0, 1], [6]]
    (attention,) = tile_maps({"factual": np.array([0.9, 0.09, 0.01])})
    assert [high_low.tolist() for high_low in extreme_tiles(attention, 2)] == [[0, 1], [2, 1]]


def test_extreme_tiles_are_drawn_with_values_and_coordinates(tmp_path, plain_slide, grid_of_tiles, words):
    slide = plain_slide(1000, 500)
    tiles = grid_of_tiles(slide, 100)
    values = np.full(50, 0.01)
    values[12], values[37], values[5] = 4.0, 3.0, -1.5
    (one,) = tile_maps({"DCIS": values})
    comparison.draw_extreme_tiles(slide, tiles, one, tmp_path / "tiles.png", top=2)
    assert [high_low.tolist() for high_low in extreme_tiles(one, 2)] == [[12, 37], [5]]
    expected = [
        "for DCIS: 2 tiles",
        "+4",
        "x 200",
        "y 100",
        "+3",
        "x 700",
        "y 300",
        "against DCIS: one tile",
        "−1.5",
    ]
    assert [text for text in words if text in expected] == expected
    assert any("research use only" in text and "50 µm wide" in text for text in words)


@pytest.mark.finding(n=3)
def test_negligible_map_has_no_extreme_tiles_and_the_picture_explains_why(tmp_path, plain_slide, grid_of_tiles, words):
    slide = plain_slide(1000, 500)
    tiles = grid_of_tiles(slide, 100)
    large = np.linspace(-2, 2, 50)
    (one, _) = tile_maps({"DCIS": large, "benign": large + 1e-5})
    comparison.draw_extreme_tiles(slide, tiles, one, tmp_path / "tiles.png", top=2)
    assert {"for DCIS: no tile", "against DCIS: no tile"} <= set(words)
    assert any(
        "negligible: all tiles together change the difference between any two class logits" in text for text in words
    )


def test_zooms_show_the_highest_values_and_never_overlap(plain_slide, grid_of_tiles):
    tiles = grid_of_tiles(plain_slide(4000, 3000), 100)
    values = np.zeros(len(tiles))
    values[[0, 1, 620]] = 3, 2, 1
    first, second = zoom_boxes(tiles, values, 2)
    assert first == (0, 0, 600, 600)
    x, y = tiles.corners[620]
    assert second[0] <= x < second[2] and second[1] <= y < second[3]
    assert second[0] >= first[2] or second[1] >= first[3]


@pytest.mark.finding(n=3)
def test_comparison_zooms_show_the_largest_evidence_for_or_against(tmp_path, plain_slide, grid_of_tiles, monkeypatch):
    slide = plain_slide(4000, 3000)
    tiles = grid_of_tiles(slide, 100)
    evidence, moved = np.zeros(len(tiles)), np.zeros(len(tiles))
    evidence[[0, 620]] = 1, -3
    moved[1199] = 1
    marked = []
    monkeypatch.setattr(comparison, "_mark", lambda draw, at, regions, scale: marked.extend(regions))
    maps = tile_maps({"factual": moved, "difference": moved, "DCIS": evidence})
    comparison.draw_comparison(Painter(slide, tiles, maps), tmp_path / "comparison.png")
    (x, y), first = tiles.corners[620], marked[0]
    assert first[0] <= x < first[2] and first[1] <= y < first[3] and marked[1] == (0, 0, 600, 600)
    marked.clear()
    evidence[0] = 0.1  # too small compared with the largest
    comparison.draw_comparison(Painter(slide, tiles, tile_maps({"DCIS": evidence})), tmp_path / "comparison.png")
    assert set(marked) == {first}
    marked.clear()
    flat = Painter(slide, tiles, tile_maps({"DCIS": np.full(len(tiles), 1e-7)}))
    comparison.draw_comparison(flat, tmp_path / "flat.png")
    assert marked == []


@pytest.mark.finding(n=3)
def test_comparison_shows_answer_rule_and_legible_text(tmp_path, plain_slide, grid_of_tiles, monkeypatch):
    slide = plain_slide(4000, 3000)
    tiles = grid_of_tiles(slide, 100)
    large = np.linspace(-1, 1, len(tiles))
    maps = tile_maps(
        {"DCIS": large, "benign": -large, "factual": np.full(len(tiles), 1.0), "difference": np.zeros(len(tiles))}
    )
    rule = "Decision rule: DCIS if p(DCIS) >= 0.37, else benign (" + "chosen with care " * 12 + "on validation slides)"
    drawn = []
    monkeypatch.setattr(
        comparison, "draw_text", lambda draw, at, text, size, *, room, **how: drawn.append((text, size, room))
    )
    monkeypatch.setattr(comparison, "_outlined", lambda *given: None)
    comparison.draw_comparison(Painter(slide, tiles, maps), tmp_path / "c.png", answers=["Answer: DCIS", rule])
    words = " ".join(text for text, _, _ in drawn)
    assert "Answer: DCIS" in words and rule in words
    for one in maps:
        assert f"Colours: {one.scaling('minmax')}" in words
    for text, size, room in drawn:
        large = comparison.ANSWER if text.startswith("Answer") else comparison.LEGEND
        assert legend.text_width(text, size) <= room and (size >= large or text in "12"), text


@pytest.mark.parametrize(("width", "height"), [(9000, 2000), (3000, 3000), (2000, 9000)])
@pytest.mark.parametrize("classes", [1, 3, 8])
def test_comparison_is_a_grid_on_one_page(tmp_path, plain_slide, grid_of_tiles, width, height, classes, monkeypatch):
    slide = plain_slide(width, height)
    tiles = grid_of_tiles(slide, 250)
    values = np.linspace(-1, 1, len(tiles))
    maps = tile_maps({"factual": values + 1} | {f"class {i}": values for i in range(classes)})
    places = []
    paste = comparison._paste
    monkeypatch.setattr(
        comparison, "_paste", lambda *given: (places.append((*given[3], *given[2].shape[1::-1])), paste(*given))
    )
    comparison.draw_comparison(Painter(slide, tiles, maps), tmp_path / "c.png", answers=["Answer: class 0"])
    wide, tall = comparison.PAGE
    assert opened(tmp_path / "c.png").shape[:2] == (tall, wide)
    assert len(places) == 3 * (2 + classes)  # the slide and every map, each with two zooms
    boxes = [shapely.box(x, y, x + across, y + down) for x, y, across, down in places]
    assert all(x >= 0 and y >= 0 and x + across <= wide and y + down <= tall for x, y, across, down in places)
    tree = shapely.STRtree(boxes)
    assert tree.query(boxes, predicate="intersects").shape[1] == len(boxes)  # none overlaps another


@pytest.mark.finding(n=3)
@pytest.mark.parametrize(
    ("width", "height", "side"), [(2220, 2967, 740), (1300, 1300, 512), (1000, 900, None), (9000, 9000, 1536)]
)
def test_zoom_is_a_small_part_of_the_slide_or_omitted(plain_slide, grid_of_tiles, width, height, side):
    tiles = grid_of_tiles(plain_slide(width, height), 256)
    result = zoom_boxes(tiles, np.arange(float(len(tiles))), 2)
    assert [round(box[2] - box[0]) for box in result[:1]] == ([] if side is None else [side])
    assert all(box[0] >= 0 and box[2] <= width and box[1] >= 0 and box[3] <= height for box in result)


def test_models_are_compared_in_one_figure_with_given_zooms(tmp_path, plain_slide, grid_of_tiles, words):
    slide = plain_slide(2000, 1000)
    tiles = grid_of_tiles(slide, 250)
    values = np.linspace(-1, 1, len(tiles))
    maps = [one for name in ("abmil", "car") for one in tile_maps({"factual": values, "DCIS": values}, model=name)]
    written = draw_maps(slide, tiles, maps, tmp_path, longest=300, regions=[(0, 0, 500, 500)], top=1)
    assert {"abmil: attention weight", "car: evidence for DCIS"} <= set(words)
    names = ["abmil_factual", "abmil_evidence_DCIS", "car_factual", "car_evidence_DCIS"]
    files = [f"{name}.png" for name in names] + ["comparison.png"] + [f"tiles_{name}.png" for name in names]
    assert [path.name for path in written] == files
    assert opened(tmp_path / "comparison.png").shape[:2] == comparison.PAGE[::-1]


def test_class_with_any_name_gets_a_valid_file_name(tmp_path, plain_slide, grid_of_tiles):
    slide = plain_slide(500, 500)
    tiles = grid_of_tiles(slide, 250)
    written = draw_maps(slide, tiles, {"../evil": np.arange(4.0), "über/all": np.arange(4.0)}, tmp_path, longest=100)
    assert all(path.parent == tmp_path and path.is_file() for path in written)
    assert len({path.name for path in written}) == len(written) == 5


def test_drawing_without_maps_raises_an_error(tmp_path, plain_slide, grid_of_tiles):
    slide = plain_slide(500, 500)
    with pytest.raises(CarmilError, match=r"nothing to draw \(0 maps of 4 tiles\)"):
        draw_maps(slide, grid_of_tiles(slide, 250), {}, tmp_path)


def dice(first, second):
    return 2 * (first & second).sum() / (first.sum() + second.sum())


@pytest.mark.parametrize("size", [64, 274.285])  # the latter is 256 pixels at 20x
def test_map_of_tiles_inside_a_polygon_shows_the_polygon(tmp_path, shared_data, grid_of_tiles, size):
    from skimage.draw import polygon2mask

    folder = shared_data / "slides" / "kidney_annotated"
    with open_slide(folder / "histology_image.svs", mpp=0.466667) as slide:
        tiles = grid_of_tiles(slide, size)
        regions = read_annotations(
            folder / "histology_annotationsLayer1.geojson", width=slide.width, height=slide.height
        )
        labels = label_tiles(tiles, regions, complete=True).labels
        draw_maps(slide, tiles, {"glomerulus": np.where(labels == POSITIVE, 1.0, -1.0)}, tmp_path, longest=1000, top=0)
        width, height = picture_size(slide.width, slide.height, 1000)
        scale = width / slide.width
    drawn = opened(tmp_path / "evidence_glomerulus.png")[:height, :width]
    blue = drawn[..., 2] > drawn[..., 0] + 40
    truth = np.zeros((height, width), bool)
    for region in regions:
        truth |= polygon2mask((height, width), region.rings[0][:, ::-1] * scale)
    corners = (tiles.corners * scale).round().astype(int)
    side = round(size * scale)
    by_tile = [
        np.array([picture[y : y + side, x : x + side].mean() >= 0.5 for x, y in corners]) for picture in (blue, truth)
    ]
    assert by_tile[1].sum() >= 5
    assert dice(*by_tile) >= 0.9
    if size == 64:
        assert dice(blue, truth) >= 0.9
