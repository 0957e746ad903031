"""The page of `carmil faithfulness`: failures are highlighted, and no external resource is loaded."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest

from carmil.report.faithfulness import ALL_FIGURES, write_faithfulness
from carmil.report.plots import bars_svg
from carmil.runs.facts import SlideMean
from carmil.runs.faithfulness import (
    ALIKE,
    NO_GAIN,
    UNLEARNED,
    Band,
    MapFaithfulness,
    RemovalFigures,
    RunFaithfulness,
)

EVIL = "<script>alert(1)</script>"
NAMES = tuple(ALL_FIGURES)


def figure(value, half_width=0.1):
    return SlideMean(value, value - half_width, value + half_width, 9)


def curve(last):
    line = np.linspace(0.9, last, 11)
    return Band(*(tuple((line + shift).tolist()) for shift in (0, -0.05, 0.05)))


def make_map(method, randomisation, gain, learned):
    figures = {name: figure(0.31) for name in NAMES}
    auc = tuple(np.linspace(0.95, 0.5, 11).tolist())
    twin = RemovalFigures({name: figure(0.02) for name in NAMES}, curve(0.6), curve(0.5), auc)
    figures |= {"gini": figure(0.4), "randomisation": figure(randomisation), "aopc_gain": figure(gain)}
    return MapFaithfulness(figures, curve(0.2), curve(0.7), auc, method, learned, twin)


@pytest.fixture
def page(tmp_path):
    def write(*values, name="run", gain=0.3, learned=True):
        maps = tuple(make_map(f"map{i}", value, gain, learned) for i, value in enumerate(values))
        auc = tuple(np.linspace(0.95, 0.5, 11).tolist())
        run = RunFaithfulness(name, "k", "w", "d", "car/abmil", 12, 9, curve(0.5), auc, (0.4, 0.55), maps)
        write_faithfulness([run], tmp_path, command="carmil faithfulness run")
        return (tmp_path / "faithfulness.html").read_text(encoding="utf-8")

    return write


def test_only_maps_that_fail_the_randomisation_test_are_marked_as_failing(page):
    text = page(0.97, 0.05)
    assert "map0 FAILS the randomisation test" in text
    assert "map1 FAILS" not in text
    assert text.count('<rect class="bad"') == 1
    assert text.count('<rect class="good"') == 1
    assert "0.97 FAILS" in text
    first = text[text.index('id="figures"') : text.index('id="curves"')]
    assert re.search(r'<tr class="fails"><td class="name">map0</td><td class="name">FAILS', first)
    assert re.search(r'<tr class="passes"><td class="name">map1</td><td class="name">passes', first)


@pytest.mark.parametrize(
    ("given", "words"),
    [({"learned": False}, UNLEARNED), ({"gain": 0.05}, NO_GAIN), ({"randomisation": 0.6}, ALIKE)],
)
def test_failed_condition_is_explained_in_words(page, given, words):
    text = page(given.pop("randomisation", 0.05), **given)
    alarm = re.search(r'<p class="alarm">.*?</p>', text).group()
    assert words in alarm
    assert not any(other in alarm for other in {ALIKE, NO_GAIN, UNLEARNED} - {words})


def test_weight_shuffled_control_has_its_own_lines_and_rows(page, tmp_path):
    text = page(0.05, 0.05)
    assert (
        text.count('<tr class="control"><td class="name">map0, weights shuffled</td><td class="name">control') == 2
    )  # tables
    assert text.count('<polyline class="line control"') == 2 * 3
    assert "| map1, weights shuffled | control |" in (tmp_path / "faithfulness.md").read_text()


def test_table_over_correct_slides_contains_only_deletion_figures(page):
    text = page(0.05)
    first = text[text.index('id="figures"') : text.index('id="curves"')]
    assert "likeness" not in re.findall(r"<th.*?</th>", first)
    assert len(re.findall(r"<th[ >]", first)) == 2 * 2 + len(NAMES)  # two tables
    assert "likeness, all slides" in text


def test_page_without_failures_has_no_alarm(page):
    text = page(0.05, float("nan"))
    assert "FAILS" not in text
    assert 'class="alarm"' not in text
    assert "no value: a map is constant" in text
    assert "not known" in text


def test_page_loads_no_resources_and_runs_no_scripts(page):
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


def test_bar_length_is_proportional_to_its_value():
    bars = [("full", figure(1.0), True), ("half", figure(-0.5), False), (EVIL, figure(0.0), False)]
    svg = bars_svg(bars, fails=0.5)
    widths = [float(width) for width in re.findall(r'<rect[^>]* width="([\d.]+)"', svg)]
    assert widths[1] == pytest.approx(widths[0] / 2)
    assert widths[2] < 2
    assert "<script>" not in svg
