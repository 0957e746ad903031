"""Tables as CSV. A spreadsheet takes a cell that begins with = + - or @ for a formula, and would run it.

In a table for people such a text gets an apostrophe in front; numbers stay numbers, negative ones too. A table that carmil or
another tool reads again (labels, splits, instances) keeps every name as it is: import
them into a spreadsheet as text.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

_FORMULA = (
    "=",
    "+",
    "-",
    "@",
    "\t",
    "\r",
    "\n",
    "\uff1d",
    "\uff0b",
    "\uff0d",
    "\uff20",
)  # the last four: of full width


def csv_text(rows: Iterable[Sequence[object]], *, delimiter: str = ",", for_people: bool) -> str:
    """One line per row, None as an empty cell. for_people: no cell is a formula."""
    return "".join(_line([escape_formula(cell) for cell in row] if for_people else row, delimiter) for row in rows)


def frame_text(frame: "pd.DataFrame") -> str:
    """A frame as CSV for people: names of columns first, then one line per row."""
    cells = frame.astype(object).where(frame.notna(), None)
    return csv_text([list(frame.columns), *cells.itertuples(index=False, name=None)], for_people=True)


def _line(row: Sequence[object], delimiter: str) -> str:
    """A line that ends in a line feed. Asked for both, the writer puts quotes around every cell that holds either character."""
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, lineterminator="\r\n").writerow(row)
    return text.getvalue().removesuffix("\r\n") + "\n"


def escape_formula(cell: object) -> object:
    """The cell with an apostrophe in front, if a spreadsheet would take it for a formula."""
    if not isinstance(cell, str) or not cell.startswith(_FORMULA) or _is_number(cell):
        return cell
    return f"'{cell}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
