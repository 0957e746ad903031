"""The viewer's page and drawn maps have one set of colours."""

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
    """The stops in the script, as JSON has them."""
    table = re.search(rf"const {name} = {{.*?\n}};", SCRIPT, re.DOTALL)[0]
    found = re.search(rf"{side}: (\[.*?\n  \]),", table, re.DOTALL)[1]
    return json.loads(re.sub(r",(\s*)\]", r"\1]", found))


@pytest.mark.parametrize(("name", "drawn"), [("ATTENTION", ATTENTION), ("SIGNED", SIGNED)])
def test_the_page_has_the_colours_of_drawn_maps(name, drawn):
    assert stops(name, "light") == json.loads(json.dumps(drawn))


@pytest.mark.parametrize("name", ["ATTENTION", "SIGNED"])
def test_in_the_dark_the_hues_are_the_same(name):
    light = {np.sign(at): hue(colour) for at, colour in stops(name, "light") if 0.6 <= abs(at) <= 0.75}
    for at, colour in stops(name, "dark"):
        if at:
            assert hue(colour) == pytest.approx(light[np.sign(at)], abs=0.04), (at, colour)


def hue(colour):
    return rgb_to_hls(*(part / 255 for part in colour))[0]
