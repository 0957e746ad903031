import re
from html.parser import HTMLParser

from carmil.report.curves import Curve, curve_svg
from carmil.tables import ResultTable


class Reader(HTMLParser):
    """Checks that what is opened is closed, and collects what a page would fetch."""

    VOID = frozenset({"meta", "br", "img", "link", "input"})

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.titles = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href")]
        self.titles += [value for name, value in attrs if name == "title"]

    def handle_startendtag(self, tag, attrs):
        self.fetched += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_is_one_whole_page_that_fetches_nothing(demo_folder):
    text = (demo_folder / "report.html").read_text()
    page = Reader()
    page.feed(text)
    assert page.open == []
    assert page.fetched == []
    assert not re.search(r"https?://|@import", text)
    assert "RESEARCH USE ONLY" in text


def test_the_report_shows_every_digit_in_every_strip(demo_folder):
    page = Reader()
    page.feed((demo_folder / "report.html").read_text())
    cards = (demo_folder / "report.html").read_text().count('<section class="card">')
    assert cards >= 2 * 4 + 2 * 2  # two bags of every class of both tasks
    assert len(page.titles) == cards * 4 * 30
    assert sum("attention weight" in title for title in page.titles) == cards * 2 * 30
    assert sum("supports" in title or "refutes" in title for title in page.titles) == cards * 2 * 30


def test_a_table_is_the_same_in_markdown():
    table = ResultTable("Two", ("model", "AUC"), (("abmil", "99.1 ± 0.2"), ("car/abmil", "–")))
    assert table.markdown().splitlines() == [
        "## Two",
        "",
        "| model | AUC |",
        "| --- | ---: |",
        "| abmil | 99.1 ± 0.2 |",
        "| car/abmil | – |",
    ]


def test_a_curve_ends_where_its_model_stopped():
    svg = curve_svg([Curve("loss", [[1.0, 2.0], [0.5, None], [0.25, None]])], marks=[2, 0], y_label="loss")
    lines = re.findall(r'points="([^"]*)"', svg)
    assert [len(line.split()) for line in lines] == [3, 1]
    assert svg.count("<circle") == 2
