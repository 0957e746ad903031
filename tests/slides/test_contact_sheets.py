import numpy as np
import pytest
from PIL import Image

from carmil.slides.contact_sheets import write_contact_sheets, write_sheet
from carmil.slides.opening import open_slide
from carmil.slides.overview import read_overview
from carmil.slides.tiling import cut
from carmil.slides.tissue import find_tissue

BLUE, ORANGE = np.array((0, 114, 178)), np.array((230, 159, 0))
MARGIN = 20


@pytest.fixture(scope="module")
def drawn(ellipse, tmp_path_factory):
    """Return a sheet with every second tile excluded as pen, the kept and excluded tiles, and its path."""
    from dataclasses import replace

    with open_slide(ellipse) as slide:
        overview = read_overview(slide)
        tissue = find_tissue(slide, overview)
        tiles = cut(slide, tissue)
    kept, excluded = (replace(tiles, corners=tiles.corners[start::2]) for start in (0, 1))
    path = tmp_path_factory.mktemp("sheets") / "ellipse.png"
    write_sheet(path, slide, overview, tissue, kept, {"pen": excluded})
    with Image.open(path) as sheet:
        return np.asarray(sheet), kept, excluded, path


def near(sheet, point, colour):
    """Return whether a pixel of about this colour lies within 2 pixels of the point (x, y) of the sheet."""
    x, y = (round(v) for v in point)
    patch = sheet[y - 2 : y + 3, x - 2 : x + 3].reshape(-1, 3).astype(int)
    return np.abs(patch - colour).sum(axis=1).min() < 120


def test_tiles_are_drawn_at_their_position_on_the_slide(drawn):
    sheet, kept, excluded, _ = drawn
    scale = 1000 / 3008  # the overview's 376 pixels of 16 level-0 pixels are 1000 on the sheet
    for tiles, colour in ((kept, BLUE), (excluded, ORANGE)):
        middle_of_left_side = tiles.corners * scale + MARGIN + (0, tiles.size * scale / 2)
        assert all(near(sheet, point, colour) for point in middle_of_left_side)
    assert not near(sheet, (MARGIN + 30, MARGIN + 30), BLUE)


def test_tissue_is_outlined_in_black(drawn):
    sheet = drawn[0]
    top_of_ellipse = (MARGIN + 1500 / 3008 * 1000, MARGIN + 240 / 3008 * 1000)
    strip = sheet[round(top_of_ellipse[1]) - 8 : round(top_of_ellipse[1]) + 8, round(top_of_ellipse[0])]
    assert strip.max(axis=1).min() < 40


def test_contact_sheet_shows_every_slide_on_pages_of_sixty(tmp_path, drawn):
    cells = [(f"slide {i}", "3 tiles", drawn[3] if i % 2 == 0 else None) for i in range(63)]
    first, second = write_contact_sheets(tmp_path / "contact_sheet.png", cells)
    assert (first.name, second.name) == ("contact_sheet.png", "contact_sheet_2.png")
    with Image.open(first) as page, Image.open(second) as rest:
        assert page.size == (6 * 300, 10 * 352)
        assert rest.size == (3 * 300, 352)
        shown = np.asarray(rest)
    assert (shown[:300, :300] < 250).mean() > 0.2
    assert (shown[:300, 300:600] == 255).all()
    assert (shown[300:, 300:600] < 100).any()  # the name is drawn even without a picture


@pytest.mark.finding(n=17)
def test_contact_sheet_draws_non_ascii_letters(tmp_path):
    """Letters missing from the font would all be drawn as the same box."""
    pictures = []
    for name in ("ü", "ł", "Ω"):
        (path,) = write_contact_sheets(tmp_path / "contact_sheet.png", [(name, "", None)])
        with Image.open(path) as page:
            pictures.append(np.asarray(page).tobytes())
    assert len(set(pictures)) == 3
