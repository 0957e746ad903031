import csv
import io

import pandas as pd
import pytest

from carmil.csv_files import csv_text, escape_formula, frame_text

FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "\uff1d1"]


@pytest.mark.finding(n=16)
@pytest.mark.parametrize("text", FORMULAS)
def test_formula_in_a_cell_for_people_is_escaped(text):
    (cells,) = csv.reader(io.StringIO(csv_text([[text]], for_people=True), newline=""))
    assert cells == [f"'{text}"]


@pytest.mark.finding(n=16)
@pytest.mark.parametrize("value", [-1, -0.5, "-0.5", "+3", "-1e-05", "a=b", "slide-1", "", None])
def test_numbers_and_ordinary_text_are_not_escaped(value):
    assert escape_formula(value) == value


@pytest.mark.finding(n=16)
def test_table_for_programs_keeps_every_name_unchanged():
    rows = [["slide", "label"], *([text, "-1"] for text in FORMULAS)]
    assert list(csv.reader(io.StringIO(csv_text(rows, for_people=False), newline=""))) == rows
    assert "=1+1\t-1\n" in csv_text(rows, delimiter="\t", for_people=False)


@pytest.mark.finding(n=16)
def test_formulas_in_cells_and_column_names_of_a_frame_are_escaped():
    frame = pd.DataFrame({"slide": ["=1", "b", None], "@class": [-0.5, 2.0, float("nan")], "n": [-1, 2, 3]})
    assert frame_text(frame) == "slide,'@class,n\n'=1,-0.5,-1\nb,2.0,2\n,,3\n"
    assert frame["slide"][0] == "=1" and list(frame.columns) == ["slide", "@class", "n"]
