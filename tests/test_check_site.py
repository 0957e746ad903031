"""tools/check_site.py finds external resources that a page would load."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "markup",
    [
        '<script src="https://elsewhere.example/a.js"></script>',
        '<img src="//elsewhere.example/a.png">',
        '<link rel="stylesheet" href="http://elsewhere.example/a.css">',
        "<p style=\"background: url('https://elsewhere.example/a.png')\">",
        '<span class="arithmatex">\\(x\\)</span>',
    ],
)
def test_external_resources_are_reported(tmp_path, markup):
    (tmp_path / "page.html").write_text(f"<html>{markup}</html>")
    assert len(tool("check_site").asked_outside(tmp_path)) == 1


def test_external_import_in_a_style_sheet_is_reported(tmp_path):
    (tmp_path / "a.css").write_text('@import "https://elsewhere.example/a.css"; p { color: red }')
    assert tool("check_site").asked_outside(tmp_path) == ['a.css: @import "https://elsewhere.example/a.css']


def test_links_and_local_files_are_accepted(tmp_path):
    page = '<a href="https://elsewhere.example">x</a><img src="a.png"><link rel="canonical" href="https://x.example">'
    (tmp_path / "page.html").write_text(page)
    assert tool("check_site").asked_outside(tmp_path) == []


def test_equations_are_converted_to_mathml():
    drawn = tool("mathml").on_page_content('<p><span class="arithmatex">\\(a &lt; b\\)</span></p>')
    assert (
        drawn.startswith("<p><math") and "<mi>a</mi>" in drawn and "<mi>b</mi>" in drawn and "arithmatex" not in drawn
    )
