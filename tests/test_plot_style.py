"""Text in pictures is drawn with a font that has its letters, or says which letter is missing."""

import pytest

from carmil import plot_style
from carmil.plot_style import picture_text


@pytest.mark.parametrize("words", ["S12-004", "Gewebe ä/ö?", "Ткань", "שקופית", "شريحة", ""])
def test_text_of_common_scripts_is_drawn_unchanged(words):
    shown, font = picture_text(words, 20)
    assert shown == words
    assert "DejaVu" in font.path


def test_letters_missing_from_all_fonts_are_replaced_by_their_code_points(monkeypatch):
    monkeypatch.setattr(plot_style, "_installed_fonts", lambda: ["/nowhere/none.ttf"])
    assert picture_text("胃_1", 20)[0] == "‹80C3›_1"
    assert picture_text("a\nb\u200b", 20)[0] == "a‹000A›b‹200B›"


def test_installed_font_that_contains_the_letters_is_preferred(monkeypatch):
    own = plot_style._own_font(False)
    other = plot_style._own_font(True)
    letters = {own: frozenset(map(ord, "_1")), other: frozenset(map(ord, "胃_1"))}
    monkeypatch.setattr(plot_style, "_letters", letters.__getitem__)
    monkeypatch.setattr(plot_style, "_installed_fonts", lambda: [other])
    shown, font = picture_text("胃_1", 20)
    assert shown == "胃_1" and font.path == other


def test_installed_fonts_are_found_except_the_font_that_draws_boxes():
    fonts = plot_style._installed_fonts()
    assert any("DejaVuSans.ttf" in path for path in fonts)
    assert not any("LastResort" in path for path in fonts)
    assert picture_text("胃_1", 20)[0] in ("胃_1", "‹80C3›_1")  # whether or not this machine has a Chinese font
