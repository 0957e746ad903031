"""The page of `carmil faithfulness`: what fails is plain to see, and nothing is fetched."""

import re
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest

from carmil.report.faithfulness import write_faithfulness
from carmil.report.plots import bars_svg
from carmil.studies.faithfulness import JudgedMap, JudgedRun
from carmil.studies.gathered import Curve

EVIL = "<script>alert(1)</script>"
NAMES = ("deletion_area", "insertion_area", "aopc_over_random", "monotonicity", "necessity", "sufficiency")


def figure(value, reach=0.1):
    return {"value": value, "low": value - reach, "high": value + reach, "slides": 9}


def curve(last):
    line = np.linspace(0.9, last, 11)
    return Curve(line, line - 0.05, line + 0.05)


def judged_map(run, method, randomisation):
    figures = {name: figure(0.31) for name in NAMES} | {"aopc_shuffled": figure(0.02), "gini": figure(0.4)}
    figures["randomisation"] = figure(randomisation)
    return JudgedMap(run, method, figures, curve(0.2), curve(0.7), np.linspace(0.95, 0.5, 11))


@pytest.fixture
def page(tmp_path):
    def write(*values, name="run"):
        maps = tuple(judged_map(name, f"map{i}", value) for i, value in enumerate(values))
        about = SimpleNamespace(settings={"model": "car/abmil"}, facts={"key": "k", "data": "d"})
        run = JudgedRun(about, name, 12, 9, maps, curve(0.5), np.linspace(0.95, 0.5, 11))
        write_faithfulness([run], tmp_path, command="carmil faithfulness run")
        return (tmp_path / "faithfulness.html").read_text(encoding="utf-8")

    return write


def test_a_failing_map_is_plain_to_see_and_a_passing_one_is_not_blamed(page):
    text = page(0.97, 0.05)
    assert "map0 fails the randomisation test" in text
    assert "map1 fails" not in text
    assert text.count('<rect class="bad"') == 1
    assert text.count('<rect class="good"') == 1
    assert "0.97 FAILS" in text
    assert re.search(r"map0</td><td class=\"name\">FAILS", text)
    assert re.search(r"map1</td><td class=\"name\">passes", text)


def test_no_alarm_where_nothing_fails(page):
    text = page(0.05, float("nan"))
    assert "FAILS" not in text
    assert 'class="alarm"' not in text
    assert "no value: a map is constant" in text


def test_one_file_for_light_and_dark_that_fetches_nothing_and_runs_nothing(page):
    text = page(0.97, name=EVIL)
    fetched, scripts = [], []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            fetched.extend(value for name, value in attrs if name in ("src", "href") and not value.startswith("#"))
            scripts.extend([tag] * (tag == "script"))

    Reader().feed(text)
    assert (fetched, scripts) == ([], [])
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert "RESEARCH USE ONLY" in text


def test_a_bar_is_as_long_as_its_value():
    bars = [("full", figure(1.0), True), ("half", figure(-0.5), False), (EVIL, figure(0.0), False)]
    svg = bars_svg(bars, fails=0.5)
    widths = [float(width) for width in re.findall(r'<rect[^>]* width="([\d.]+)"', svg)]
    assert widths[1] == pytest.approx(widths[0] / 2)
    assert widths[2] < 2
    assert "<script>" not in svg
