"""Tables as CSV, without formulas: a spreadsheet runs a cell that begins with = + - or @ as a formula.

In a table for people such text is preceded by an apostrophe; numbers, including negative ones, are unchanged. Tables
that carmil or another tool reads again (labels, splits, instances) keep every name unchanged: import them into a
spreadsheet as text.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from carmil.words import number_in

if TYPE_CHECKING:
    import pandas as pd

# The last four are full-width characters.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def csv_text(rows: Iterable[Sequence[object]], *, delimiter: str = ",", for_people: bool) -> str:
    """Return one line per row, with None as an empty cell. for_people: escape formulas."""
    return "".join(_line([escape_formula(cell) for cell in row] if for_people else row, delimiter) for row in rows)


def frame_text(frame: "pd.DataFrame") -> str:
    """Return a frame as CSV for people: the column names, then one line per row."""
    cells = frame.astype(object).where(frame.notna(), None)
    return csv_text([list(frame.columns), *cells.itertuples(index=False, name=None)], for_people=True)


def _line(row: Sequence[object], delimiter: str) -> str:
    """Return a line that ends in a line feed. With \\r\\n as terminator, the writer would quote cells that contain
    either character.
    """
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, lineterminator="\r\n").writerow(row)
    return text.getvalue().removesuffix("\r\n") + "\n"


def escape_formula(cell: object) -> object:
    """Put an apostrophe in front of text that a spreadsheet would run as a formula."""
    if not isinstance(cell, str) or not cell.startswith(_FORMULA) or number_in(cell) is not None:
        return cell
    return f"'{cell}"
