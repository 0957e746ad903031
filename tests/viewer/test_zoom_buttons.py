"""The buttons for zooming are beside the slide, not over it, in every size and layout of the page."""

import pytest

from .fake_server import link
from .pages import DESK, PHONE, SLIDE, TABLET, expect


@pytest.mark.parametrize("more", ["", "&split=factual"], ids=["one pane", "two panes"])
@pytest.mark.parametrize("viewport", [DESK, TABLET, PHONE], ids=["desk", "tablet", "phone"])
def test_no_button_lies_over_the_slide_when_the_tissue_fits_the_window(opened, made_up, viewport, more):
    page = opened(f"{made_up}/{link(SLIDE)}{more}", viewport=viewport)
    page.get_by_role("button", name="Fit", exact=True).click()
    stages = [one.bounding_box() for one in page.locator(".stage").all()]
    buttons = [one.bounding_box() for one in page.locator("#zooms button").all()]
    expect(page.locator("#zooms button")).to_have_count(10)
    assert len(stages) == 1 + bool(more)
    for button in buttons:
        assert min(button["width"], button["height"]) >= 24
        for stage in stages:
            assert button["y"] + button["height"] <= stage["y"] or button["y"] >= stage["y"] + stage["height"]
