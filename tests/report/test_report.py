import base64
import io
import re
from html.parser import HTMLParser

from PIL import Image

from carmil.report.run_plots import Curve, curve_svg
from carmil.tables import ResultTable


class Reader(HTMLParser):
    """Checks that every opened tag is closed, and collects the resources that a page would load."""

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


def test_report_is_valid_html_that_loads_no_resources(demo_folder):
    text = (demo_folder / "report.html").read_text()
    page = Reader()
    page.feed(text)
    assert page.open == []
    assert all(value.startswith(("#", "data:")) for value in page.fetched)
    assert not re.search(r"https?://|@import", text)
    assert "RESEARCH USE ONLY" in text


def test_report_shows_instance_pictures_framed_by_each_map(demo_folder):
    text = (demo_folder / "report.html").read_text()
    bags = text.count('<figure class="slide row pictures">')
    assert 4 <= bags <= 12
    rows = re.findall(r'<img src="data:image/png;base64,([^"]+)" alt="([^"]+): slide', text)
    assert len(rows) == 4 * bags
    assert [title.split(" ")[0] for _, title in rows[:2]] == ["attention", "counterfactual"]
    assert len({title for _, title in rows[2:4]}) == 2  # evidence for the answer and for the second most probable class
    width, height = Image.open(io.BytesIO(base64.b64decode(rows[0][0]))).size
    assert (width, height) == (30 * (28 + 8 + 4), 28 + 8 + 4)


def test_table_is_written_as_markdown():
    table = ResultTable("Two", ("model", "AUC"), (("abmil", "99.1 ± 0.2"), ("car/abmil", "–")))
    assert table.markdown().splitlines() == [
        "## Two",
        "",
        "| model | AUC |",
        "| --- | ---: |",
        "| abmil | 99.1 ± 0.2 |",
        "| car/abmil | – |",
    ]


def test_learning_curve_ends_where_training_stopped():
    svg = curve_svg([Curve("loss", [[1.0, 2.0], [0.5, None], [0.25, None]])], marks=[2, 0], y_label="loss")
    lines = re.findall(r'points="([^"]*)"', svg)
    assert [len(line.split()) for line in lines] == [3, 1]
    assert svg.count("<circle") == 2
