"""The viewer's page and drawn maps use the same colours."""

import json
import re
from colorsys import rgb_to_hls
from pathlib import Path

import numpy as np
import pytest

import carmil.viewer
from carmil.maps.colours import ATTENTION, SIGNED

SCRIPT = (Path(carmil.viewer.__file__).parent / "page" / "colours.js").read_text(encoding="utf-8")


def stops(name, side):
    """Return the colour stops in the script as lists."""
    table = re.search(rf"const {name} = {{.*?\n}};", SCRIPT, re.DOTALL)[0]
    result = re.search(rf"{side}: (\[.*?\n  \]),", table, re.DOTALL)[1]
    return json.loads(re.sub(r",(\s*)\]", r"\1]", result))


@pytest.mark.parametrize(("name", "drawn"), [("ATTENTION", ATTENTION), ("SIGNED", SIGNED)])
def test_page_uses_the_colours_of_drawn_maps(name, drawn):
    assert stops(name, "light") == json.loads(json.dumps(drawn))


@pytest.mark.parametrize("name", ["ATTENTION", "SIGNED"])
def test_dark_theme_uses_the_same_hues(name):
    light = {np.sign(at): hue(colour) for at, colour in stops(name, "light") if 0.6 <= abs(at) <= 0.75}
    for at, colour in stops(name, "dark"):
        if at:
            assert hue(colour) == pytest.approx(light[np.sign(at)], abs=0.04), (at, colour)


def hue(colour):
    return rgb_to_hls(*(part / 255 for part in colour))[0]
