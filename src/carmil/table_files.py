"""Tables of users: CSV, TSV and Parquet.

Every cell is read as text, so that an id like 00123 or a class like NA is never changed.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Collection
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from carmil.errors import CarmilError
from carmil.untrusted import one_line_errors, read_parquet
from carmil.words import plural

if TYPE_CHECKING:
    import pandas as pd

MOST_COLUMNS = 50_000
_Cells = tuple[list[str], list[tuple[int, list[str]]]]  # the header, and each further line with its number


def read_table(path: Path, *, counter: bool = False, headers: Collection[str] = ()) -> "pd.DataFrame":
    """Read a table with every cell as text, empty cells as "". The index is the line in the file.

    `attrs["notes"]` lists all guesses. A column of numbers without a name is dropped, unless `counter`. headers: the
    usual names of columns. If they are given, a table of two columns without any of them is read as slide and label
    if its first line is not a header, that is, if its second cell occurs again below.
    """
    import pandas as pd

    path, notes = Path(path), list[str]()
    header, lines = _read_lines(path, notes)
    headerless = len(header) == 2 and headers and not {plain_name(name) for name in header} & set(headers)
    if headerless and header[1] in {row[1] for _, row in lines}:
        header, lines = ["slide", "label"], [(1, header), *lines]
        notes.append(f"{path.name} has no header line: its two columns are taken as slide and label")
    if not lines:
        raise CarmilError(f"{path}: has a header but no rows; expected one row per slide")

    columns = {number: [row[number] for _, row in lines] for number in range(len(header))}
    for number, name in enumerate(header):
        if re.fullmatch(r"unnamed: \d+|__index_level_0__|", name.casefold()):
            values = columns[number]
            numbers = all(value.isdecimal() for value in values)
            if not any(values) or (numbers and not counter and len(columns) > 2):
                del columns[number]
            else:
                header[number] = f"column {number + 1}"
    names = [header[number] for number in columns]
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise CarmilError(f"{path}: column {twice[0]!r} appears twice; rename or delete one of them")
    index = pd.Index([line for line, _ in lines], name="line")
    frame = pd.DataFrame(dict(zip(names, columns.values(), strict=True)), index=index, dtype=str)
    frame.attrs["notes"] = tuple(notes)
    return frame


def read_cells(path: Path) -> list[list[str]]:
    """Return all lines of a table as text, including the first, which may be a header. Comments at the top are left out."""
    header, lines = _read_lines(Path(path), [])
    return [header, *(row for _, row in lines)]


def plain_name(name: str) -> str:
    """Return the name of a column in the form that is compared with the usual names."""
    return re.sub(r"[\s.-]+", "_", name.casefold())


def _read_lines(path: Path, notes: list[str]) -> _Cells:
    return _parquet_cells(path) if _first_bytes(path).startswith(b"PAR1") else _text_cells(path, notes)


def _first_bytes(path: Path) -> bytes:
    """Return the first bytes of a file that can be a table."""
    if path.is_dir():
        raise CarmilError(f"{path}: is a folder; expected a table (CSV, TSV or Parquet)")
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except FileNotFoundError:
        raise CarmilError(f"{path}: does not exist; expected a table (CSV, TSV or Parquet)") from None
    except OSError as error:
        raise CarmilError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    if path.suffix.casefold() in {".xlsx", ".xls", ".ods"} or head.startswith((b"PK\x03\x04", b"\xd0\xcf\x11\xe0")):
        raise CarmilError(f"{path}: is a spreadsheet; save it as CSV and give that file")
    if not head.strip():
        raise CarmilError(f"{path}: is empty; expected a header line and one row per slide")
    is_text = b"\0" not in head or head.startswith((b"\xff\xfe", b"\xfe\xff"))
    if not is_text and not head.startswith(b"PAR1"):
        raise CarmilError(f"{path}: is not a text file; expected a table (CSV, TSV or Parquet)")
    return head


def _parquet_cells(path: Path) -> _Cells:
    table = read_parquet(path, again := "write it again or save it as CSV")
    with one_line_errors(path, again):
        names = list(table.column_names)
        columns = [["" if v is None else str(v).strip() for v in column.to_pylist()] for column in table.columns]
    rows = zip(*columns, strict=True)
    return names, [(number, list(row)) for number, row in enumerate(rows, start=1)]


def _text_cells(path: Path, notes: list[str]) -> _Cells:
    """Return the header, and the cells of each line below it with its number; blank lines are left out."""
    content = path.read_bytes()
    try:
        text = content.decode("utf-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
        notes.append(f"{path.name} is not UTF-8: read as Latin-1; check ids and labels with special letters")
    comments, text = _comments_and_rest(text)
    if comments:
        notes.append(
            f"{path.name}: {plural(comments, 'comment line at its top is', 'comment lines at its top are')} left out"
        )
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text), strict=True)
    try:
        lines = [(comments + reader.line_num, [cell.strip() for cell in row]) for row in reader]
    except csv.Error as error:
        raise CarmilError(
            f"{path}: line {reader.line_num} cannot be read ({error}); look for a quotation mark that is never closed"
        ) from None
    lines = [(number, row) for number, row in lines if any(row)]
    if not lines:
        raise CarmilError(f"{path}: is empty; expected a header line and one row per slide")
    (_, header), *lines = lines
    if len(header) > MOST_COLUMNS:
        raise CarmilError(
            f"{path}: has {len(header):,} columns; expected at most {MOST_COLUMNS:,}, and one row per slide"
        )
    for number, row in lines:
        if not any(row[len(header) :]):
            del row[len(header) :]  # empty cells after the last column
        if len(row) != len(header):
            raise CarmilError(
                f"{path}: line {number} has {plural(len(row), 'cell')}, the header {len(header)}; "
                "give every line the same number of cells, and put quotation marks around a cell that holds a comma"
            )
    return header, lines


def _comments_and_rest(text: str) -> tuple[int, str]:
    """Return the number of comment lines at the top, as in tables of cBioPortal and MAF files, and the text below them.

    A single line that begins with # may also be a header.
    """
    lines = text.splitlines(keepends=True)
    count = next((i for i, line in enumerate(lines) if not line.startswith("#")), 0)
    if count == 1 and any(mark in lines[0] for mark in ",;\t"):
        count = 0
    return count, "".join(lines[count:])


def _delimiter(text: str) -> str:
    """Return the delimiter that divides the first lines into the same number of cells, more than one."""

    def fit(delimiter: str) -> tuple[bool, float, int]:
        try:
            rows = list(islice(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), 200))
        except csv.Error:
            return False, 0.0, 0
        widths = [len(row) for row in rows if any(cell.strip() for cell in row)] or [0]
        return widths[0] > 1, sum(width == widths[0] for width in widths) / len(widths), widths[0]

    return max((",", "\t", ";"), key=fit)
