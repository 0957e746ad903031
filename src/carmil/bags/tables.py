"""Tables as people have them: CSV, TSV and Parquet, and the words that they use.

Everything is read as text, so that an id like 00123 or a class like NA is never turned into a number on the way.
"""

import csv
import io
import re
import unicodedata
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from carmil.errors import CarmilError
from carmil.untrusted import one_line_errors, read_parquet
from carmil.words import plural

if TYPE_CHECKING:
    import pandas as pd

MOST_COLUMNS = 50_000
PART_OF_WORD = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}

# Names are compared in small letters with _ for blanks, dashes and dots; the first of a list is preferred.
SLIDE_COLUMNS = (
    *("slide_id", "slide", "slide_name", "slideid", "filename", "file_name", "bag_name", "bag_id", "bag"),
    *("image_id", "image_name", "image", "wsi_id", "wsi_name", "wsi", "slide_submitter_id"),
)
PATIENT_COLUMNS = (
    *("case_id", "patient_id", "patient", "case", "patientid", "caseid", "submitter_id", "case_submitter_id"),
    *("bcr_patient_barcode", "subject_id", "subject", "pat_id", "pat"),
)
LABEL_COLUMNS = (
    *("label", "labels", "target", "class", "category", "diagnosis", "y", "subtype", "oncotree_code", "oncotreecode"),
    *("histological_type", "isup_grade"),
)
SPLIT_COLUMNS = ("split", "split_info", "subset", "set", "partition")

_EXTENSIONS = {
    *(".h5", ".hdf5", ".pt", ".pth", ".npy", ".npz", ".safetensors", ".zarr", ".parquet"),
    *(".svs", ".ndpi", ".tif", ".tiff", ".qptiff", ".ome", ".mrxs", ".scn", ".vms", ".vmu", ".bif", ".svslide"),
    *(".isyntax", ".dcm", ".czi", ".png", ".jpg", ".jpeg"),
}


def read_table(path: Path, *, counter: bool = False) -> "pd.DataFrame":
    """CSV, TSV or Parquet with every cell as text, empty ones as "". The index is the line in the file.

    `attrs["notes"]` holds what had to be guessed. A column of numbers without a name is dropped, unless `counter`.
    """
    import pandas as pd

    path = Path(path)
    notes: list[str] = []
    head = _first_bytes(path)
    if head.startswith(b"PAR1"):
        header, lines = _parquet_cells(path)
    else:
        header, lines = _text_cells(path, notes)
        if _is_headerless(header, [row for _, row in lines]):
            header, lines = ["slide", "label"], [(1, header), *lines]
            notes.append(f"{path.name} has no header line: its two columns are taken as slide and label")
    if not lines:
        raise CarmilError(f"{path}: has a header but no rows; expected one row a slide")

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
        raise CarmilError(f"{path}: column {twice[0]!r} is there twice; rename or delete one of them")
    index = pd.Index([line for line, _ in lines], name="line")
    frame = pd.DataFrame(dict(zip(names, columns.values(), strict=True)), index=index, dtype=str)
    frame.attrs["notes"] = tuple(notes)
    return frame


def read_cells(path: Path) -> list[list[str]]:
    """All lines of a table as text, the first too: it may be a header or not. Comments at its top are left out."""
    path = Path(path)
    if _first_bytes(path).startswith(b"PAR1"):
        header, lines = _parquet_cells(path)
    else:
        header, lines = _text_cells(path, [])
    return [header, *(row for _, row in lines)]


def bare_id(text: str) -> str:
    """A slide's id without folder and extension. One spelling for letters that can be written in two ways (macOS)."""
    name = re.split(r"[/\\]", unicodedata.normalize("NFC", text.strip()))[-1]
    while (dot := name.rfind(".")) > 0 and name[dot:].casefold() in _EXTENSIONS:
        name = name[:dot]
    return name


def plain_name(name: str) -> str:
    """A column's name as it is compared with those we know."""
    return re.sub(r"[\s.-]+", "_", name.casefold())


def _first_bytes(path: Path) -> bytes:
    """The beginning of the file, after a look at whether it can be a table at all."""
    if path.is_dir():
        raise CarmilError(f"{path}: is a folder; expected a table (CSV, TSV or Parquet)")
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except FileNotFoundError:
        raise CarmilError(f"{path}: there is no such file; expected a table (CSV, TSV or Parquet)") from None
    except OSError as error:
        raise CarmilError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    if path.suffix.casefold() in {".xlsx", ".xls", ".ods"} or head.startswith((b"PK\x03\x04", b"\xd0\xcf\x11\xe0")):
        raise CarmilError(f"{path}: is a spreadsheet; save it as CSV and give that file")
    if not head.strip():
        raise CarmilError(f"{path}: is empty; expected a header line and one row a slide")
    is_text = b"\0" not in head or head.startswith((b"\xff\xfe", b"\xfe\xff"))
    if not is_text and not head.startswith(b"PAR1"):
        raise CarmilError(f"{path}: is not a text file; expected a table (CSV, TSV or Parquet)")
    return head


def _parquet_cells(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    table = read_parquet(path, again := "write it again or save it as CSV")
    with one_line_errors(path, again):
        names = list(table.column_names)
        columns = [["" if v is None else str(v).strip() for v in column.to_pylist()] for column in table.columns]
    rows = zip(*columns, strict=True)
    return names, [(number, list(row)) for number, row in enumerate(rows, start=1)]


def _text_cells(path: Path, notes: list[str]) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Header, and the cells of each line under it with its number; blank lines are left out."""
    content = path.read_bytes()
    try:
        text = content.decode("utf-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
        notes.append(f"{path.name} is not UTF-8: read as Latin-1; look at ids and labels with special letters")
    comments, text = _comments_and_rest(text)
    if comments:
        notes.append(
            f"{path.name}: {plural(comments, 'line of comments at its top is', 'lines of comments at its top are')} left out"
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
        raise CarmilError(f"{path}: is empty; expected a header line and one row a slide")
    (_, header), *lines = lines
    if len(header) > MOST_COLUMNS:
        raise CarmilError(
            f"{path}: has {len(header):,} columns; expected at most {MOST_COLUMNS:,}, and one row a slide"
        )
    for number, row in lines:
        if not any(row[len(header) :]):
            del row[len(header) :]  # empty cells behind the last column mean nothing
        if len(row) != len(header):
            raise CarmilError(
                f"{path}: line {number} has {plural(len(row), 'cell')}, the header {len(header)}; "
                "give every line the same number of cells, and quotation marks to a cell with a comma in it"
            )
    return header, lines


def _comments_and_rest(text: str) -> tuple[int, str]:
    """How many lines of comments stand at the top, as in cBioPortal's tables and MAF files, and what follows.

    One line that begins with # may also be a header.
    """
    lines = text.splitlines(keepends=True)
    count = next((i for i, line in enumerate(lines) if not line.startswith("#")), 0)
    if count == 1 and any(mark in lines[0] for mark in ",;\t"):
        count = 0
    return count, "".join(lines[count:])


def _delimiter(text: str) -> str:
    """The one that cuts the first lines into equally many cells, and more than one."""

    def fit(delimiter: str) -> tuple[bool, float, int]:
        try:
            rows = list(islice(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), 200))
        except csv.Error:
            return False, 0.0, 0
        widths = [len(row) for row in rows if any(cell.strip() for cell in row)] or [0]
        return widths[0] > 1, sum(width == widths[0] for width in widths) / len(widths), widths[0]

    return max((",", "\t", ";"), key=fit)


def _is_headerless(header: list[str], rows: list[list[str]]) -> bool:
    """Two columns, no name we know, and what would be the label column's name is itself a label further down."""
    if len(header) != 2:
        return False
    known = {*SLIDE_COLUMNS, *PATIENT_COLUMNS, *LABEL_COLUMNS, *SPLIT_COLUMNS}
    return not known & {plain_name(name) for name in header} and header[1] in {row[1] for row in rows}
