"""Label tables as people have them, and the bags they belong to.

Which column holds what is guessed where it is not named, and every guess is said: a wrong one must not pass unseen.
Everything is read as text, so that an id like 00123 or a class like NA is never turned into a number on the way.
"""

import csv
import io
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from carmil.errors import CarmilError

if TYPE_CHECKING:
    import pandas as pd

PART_OF_WORD = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}

# Names are compared in small letters with _ for blanks, dashes and dots; the first of a list is preferred.
_SLIDE = (
    *("slide_id", "slide", "slide_name", "slideid", "filename", "file_name", "bag_name", "bag_id", "bag"),
    *("image_id", "image_name", "image", "wsi_id", "wsi_name", "wsi", "slide_submitter_id"),
)
_PATIENT = (
    *("case_id", "patient_id", "patient", "case", "patientid", "caseid", "submitter_id", "case_submitter_id"),
    *("bcr_patient_barcode", "subject_id", "subject"),
)
_LABEL = (
    *("label", "labels", "target", "class", "category", "diagnosis", "y", "subtype", "oncotree_code", "oncotreecode"),
    *("histological_type", "isup_grade"),
)
_SPLIT = ("split", "split_info", "subset", "set", "partition")
_TIME = re.compile(r"(.*_)?(time|months|days|years|survival|os|dss|pfs|pfi|dfs|follow_up)(_.*)?")
_EVENT = re.compile(r"(.*_)?(event|status|censor\w*|dead|death|deceased)(_.*)?")

_EXTENSIONS = {
    *(".h5", ".hdf5", ".pt", ".pth", ".npy", ".npz", ".safetensors", ".zarr", ".parquet"),
    *(".svs", ".ndpi", ".tif", ".tiff", ".qptiff", ".ome", ".mrxs", ".scn", ".vms", ".vmu", ".bif", ".svslide"),
    *(".isyntax", ".dcm", ".czi", ".png", ".jpg", ".jpeg"),
}
_NO_LABEL = {"", "na", "n/a", "#n/a", "nan", "<na>", "null"}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_TCGA = re.compile(r"(TCGA-([A-Z0-9]{2})-[A-Z0-9]{4})(?=$|[-._])", re.IGNORECASE)
_MOST_CLASSES = 100
_MOST_FRACTIONS = 10  # 0.5, 1, 1.5 ... may be grades; more of them than this is a measurement
_LONGEST_ID = 255  # bytes: what a file name may have


@dataclass(frozen=True)
class LabelTable:
    """One line a slide: whose it is and what it is labelled.

    slides   ids without folder and extension
    patients the slide's own id where the table knows no patients
    labels   as text; `classes` are the different ones in order, and a label's place there is its class number
    sites    where the slide was made, or None
    official what a column of the table says about train, val and test, or None
    said     each guess and each thing left out, one sentence each
    """

    path: Path
    slides: tuple[str, ...]
    patients: tuple[str, ...]
    labels: tuple[str, ...]
    classes: tuple[str, ...]
    sites: tuple[str, ...] | None = None
    official: tuple[str, ...] | None = None
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Row:
    line: int
    slide: str
    patient: str
    label: str
    site: str
    split: str


@dataclass(frozen=True)
class Matched:
    """The bags that have a label: `bags` are their positions, and the rest is aligned with it."""

    bags: tuple[int, ...]
    slides: tuple[str, ...]
    patients: tuple[str, ...]
    labels: tuple[int, ...]
    sites: tuple[str, ...] | None
    official: tuple[str, ...] | None
    unlabelled: tuple[str, ...]
    missing: tuple[str, ...]
    said: tuple[str, ...]


def read_labels(
    path: Path,
    *,
    slide: str | None = None,
    patient: str | None = None,
    label: str | None = None,
    site: str | None = None,
    split: str | None = None,
    positive: str | None = None,
) -> LabelTable:
    """The labels of a table; arguments name columns, those not named are guessed.

    `site` may also be "tcga": the tissue source site in a TCGA barcode. `positive` is the class of two that comes last.
    """
    path = Path(path)
    frame = read_table(path)
    said = list(frame.attrs["said"])
    by_barcode = site == "tcga" and "tcga" not in frame.columns
    named = {"slide": slide, "patient": patient, "label": label, "split": split, "site": None if by_barcode else site}
    columns = _columns(frame, path, named, said)

    frame = _labelled(frame, path, columns["label"], said)
    slides, patients = _ids(frame, path, columns, said)
    labels = _tidy_labels(list(frame[columns["label"]]), said)
    sites = _sites(frame, path, slides, columns["site"]) if site else [""] * len(frame)
    parts = list(frame[columns["split"]]) if columns["split"] else [""] * len(frame)
    rows = _once(
        [_Row(*row) for row in zip(frame.index, slides, patients, labels, sites, parts, strict=True)], path, said
    )
    _say_mixed_patients(rows, said)
    return LabelTable(
        path=path,
        slides=tuple(row.slide for row in rows),
        patients=tuple(row.patient for row in rows),
        labels=tuple(row.label for row in rows),
        classes=_classes([row.label for row in rows], path, columns["label"], positive, said),
        sites=tuple(row.site for row in rows) if site else None,
        official=tuple(row.split for row in rows) if columns["split"] else None,
        said=tuple(said),
    )


def match(table: LabelTable, bag_ids: Sequence[str]) -> Matched:
    """Which bag has which label: ids must be equal; if none is, the table may be of cases, the bags of slides."""
    bags: dict[str, int] = {}
    for position, bag in enumerate(bag_ids):
        if (name := bare_id(bag)) in bags:
            raise CarmilError(f"bags {bag_ids[bags[name]]!r} and {bag!r} are both slide {name!r}: keep one of them")
        bags[name] = position
    if not bags:
        raise CarmilError(f"no bags to match with the labels of {table.path}: expected at least one")
    said: list[str] = []
    rows = {slide: row for row, slide in enumerate(table.slides)}
    found = {bags[slide]: row for slide, row in rows.items() if slide in bags}
    found |= _written_as_floats(rows, bags, said)
    own_id = {position: name for name, position in bags.items()}
    if not found:
        found = _by_beginning(rows, bags, said)
        own_id = {position: table.slides[row] for position, row in found.items()}
    if not found:
        raise CarmilError(_no_match(table, list(bags)))

    positions = sorted(found)
    taken = [found[position] for position in positions]
    numbers = {name: number for number, name in enumerate(table.classes)}
    names = list(bags)
    unlabelled = tuple(bag_ids[position] for position in range(len(bag_ids)) if position not in found)
    used = set(taken)
    missing = tuple(slide for row, slide in enumerate(table.slides) if row not in used)
    _say_match(table, unlabelled=unlabelled, missing=missing, bags=len(bags), said=said)
    for empty in sorted(set(table.classes) - {table.labels[row] for row in used}):
        said.append(f"WARNING: no bag has the label {empty!r}")
    return Matched(
        bags=tuple(positions),
        slides=tuple(names[position] for position in positions),
        patients=tuple(
            own_id[position] if table.patients[row] == table.slides[row] else table.patients[row]
            for position, row in zip(positions, taken, strict=True)
        ),
        labels=tuple(numbers[table.labels[row]] for row in taken),
        sites=None if table.sites is None else tuple(table.sites[row] for row in taken),
        official=None if table.official is None else tuple(table.official[row] for row in taken),
        unlabelled=unlabelled,
        missing=missing,
        said=tuple(said),
    )


def read_table(path: Path, *, counter: bool = False) -> "pd.DataFrame":
    """CSV, TSV or Parquet with every cell as text, empty ones as "". The index is the line in the file.

    `attrs["said"]` holds what had to be guessed. A column of numbers without a name is dropped, unless `counter`.
    """
    import pandas as pd

    path = Path(path)
    said: list[str] = []
    head = _first_bytes(path)
    if head.startswith(b"PAR1"):
        header, lines = _parquet_cells(path)
    else:
        header, lines = _text_cells(path, said)
        if _is_headerless(header, [row for _, row in lines]):
            header, lines = ["slide", "label"], [(1, header), *lines]
            said.append(f"{path.name} has no header line: its two columns are taken as slide and label")
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
    frame.attrs["said"] = tuple(said)
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


def an_example(what: Sequence[str]) -> str:
    """'a', 'b' and 7 more"""
    shown = ", ".join(repr(name) for name in what[:2])
    return shown + (f" and {len(what) - 2} more" if len(what) > 2 else "")


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
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise CarmilError(f"{path}: cannot be read as Parquet ({reason}); write it again or save it as CSV") from None
    columns = [["" if v is None else str(v).strip() for v in column.to_pylist()] for column in table.columns]
    rows = zip(*columns, strict=True)
    return list(table.column_names), [(number, list(row)) for number, row in enumerate(rows, start=1)]


def _text_cells(path: Path, said: list[str]) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Header, and the cells of each line under it with its number; blank lines are left out."""
    content = path.read_bytes()
    try:
        text = content.decode("utf-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
        said.append(f"{path.name} is not UTF-8: read as Latin-1; look at ids and labels with special letters")
    comments, text = _comments_and_rest(text)
    if comments:
        said.append(f"{path.name}: {comments} lines of comments at its top are left out")
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
    for number, row in lines:
        if not any(row[len(header) :]):
            del row[len(header) :]  # empty cells behind the last column mean nothing
        if len(row) != len(header):
            raise CarmilError(
                f"{path}: line {number} has {len(row)} cells, the header {len(header)}; "
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
    known = {*_SLIDE, *_PATIENT, *_LABEL, *_SPLIT}
    return not known & {_plain(name) for name in header} and header[1] in {row[1] for row in rows}


def _plain(name: str) -> str:
    return re.sub(r"[\s.-]+", "_", name.casefold())


def _columns(frame: "pd.DataFrame", path: Path, named: dict[str, str | None], said: list[str]) -> dict[str, str | None]:
    """The column of slide, patient, label, split and site; None for what the table does not have."""
    found: dict[str, str | None] = {
        kind: None if name is None else _named(frame, path, kind, name) for kind, name in named.items()
    }

    def candidates(names: tuple[str, ...]) -> list[str]:
        free = [column for column in frame.columns if column not in found.values()]
        return sorted((c for c in free if _plain(c) in names), key=lambda c: names.index(_plain(c)))

    def take(kind: str, choice: list[str]) -> None:
        found[kind] = choice[0]
        others = f"; {an_example(choice[1:])} would do too" if choice[1:] else ""
        said.append(f"{kind} column: {choice[0]!r} (guessed{others})")

    if not found["slide"] and (choice := candidates(_SLIDE)):
        take("slide", choice)
    if not found["patient"] and (choice := candidates(_PATIENT)):
        take("patient", choice)
    if not found["slide"]:
        found["slide"] = _only_id(frame, path, found, said)
    if not found["label"]:
        take("label", _label_choice(frame, path, candidates(_LABEL), found))
    if not found["split"]:
        parts = [c for c in candidates(_SPLIT) if {v.casefold() for v in frame[c]} <= {*PART_OF_WORD, ""}]
        if parts:
            take("split", parts)
    if found["label"] in (found["slide"], found["patient"]):
        raise CarmilError(f"{path}: column {found['label']!r} cannot be id and label at once; name two columns")
    return found


def _named(frame: "pd.DataFrame", path: Path, kind: str, name: str) -> str:
    if name in frame.columns:
        return name
    alike = [column for column in frame.columns if _plain(column) == _plain(name)]
    if len(alike) != 1:
        from carmil.errors import unknown

        raise CarmilError(f"{path}: {unknown(f'{kind} column', name, frame.columns)}")
    return alike[0]


def _only_id(frame: "pd.DataFrame", path: Path, found: dict[str, str | None], said: list[str]) -> str:
    """Without a column for slides, the patients' ids are the slides'; without those, a first column may be ids."""
    if patient := found["patient"]:
        said.append(f"slide column: {patient!r}, the only column of ids; each one is its own patient")
        return patient
    first = frame.columns[0]
    if first in found.values() or not frame[first].is_unique or "" in set(frame[first]):
        raise CarmilError(
            f"{path}: no column of slide ids found among {', '.join(map(repr, frame.columns))}; name it with --slide"
        )
    said.append(f"slide column: {first!r} (guessed: the first column, and all its values differ)")
    return first


def _label_choice(frame: "pd.DataFrame", path: Path, candidates: list[str], found: dict[str, str | None]) -> list[str]:
    """A wrong label would be the worst guess: several are only taken if they say the same in other words."""
    varied = [column for column in candidates if frame[column].nunique() > 1]
    for other in varied[1:]:
        pairs = set(zip(frame[varied[0]], frame[other], strict=True))
        if not len(pairs) == frame[varied[0]].nunique() == frame[other].nunique():
            raise CarmilError(
                f"{path}: columns {varied[0]!r} and {other!r} could both be the label, and they disagree; "
                "name one with --label"
            )
    if varied or candidates:
        return varied or candidates
    rest = [column for column in frame.columns if column not in found.values()]
    times = [column for column in rest if _TIME.fullmatch(_plain(column))]
    events = [column for column in rest if _EVENT.fullmatch(_plain(column)) and column not in times[:1]]
    if times and events:
        raise CarmilError(
            f"{path}: columns {times[0]!r} and {events[0]!r} look like survival, and there is no label column; "
            "carmil classifies: regression and survival are not supported; name a column of classes with --label"
        )
    if len(rest) != 1:
        raise CarmilError(
            f"{path}: no label column found among {', '.join(map(repr, frame.columns))}; name it with --label"
        )
    return rest


def _labelled(frame: "pd.DataFrame", path: Path, column: str | None, said: list[str]) -> "pd.DataFrame":
    empty = frame[column].str.casefold().isin(_NO_LABEL)
    if empty.all():
        raise CarmilError(f"{path}: column {column!r} has no label in any of its {len(frame)} rows; name another")
    if empty.any():
        said.append(f"{int(empty.sum())} rows without a label are left out ({_lines(frame.index[empty])})")
    return frame[~empty].copy()


def _ids(
    frame: "pd.DataFrame", path: Path, columns: dict[str, str | None], said: list[str]
) -> tuple[list[str], list[str]]:
    written = list(frame[columns["slide"]])
    slides = [bare_id(text) for text in written]
    _check_ids(slides, frame.index, path, columns["slide"])
    if folders := [text for text in written if "/" in text or "\\" in text]:
        said.append(f"{len(folders)} slide ids are paths: only the file name counts ({bare_id(folders[0])!r})")
    if columns["patient"] and columns["patient"] != columns["slide"]:
        patients = list(frame[columns["patient"]])
        _check_ids(patients, frame.index, path, columns["patient"])
        return slides, patients
    barcodes = [_TCGA.match(slide) for slide in slides]
    if all(barcodes):
        patients = [barcode[1] for barcode in barcodes if barcode]
        if patients != slides:
            said.append(f"no patient column: patients are read from the TCGA barcodes ({patients[0]!r})")
        return slides, patients
    if not columns["patient"]:
        said.append("no patient column: each slide is its own patient")
    return slides, slides


def _check_ids(ids: list[str], lines: Iterable[int], path: Path, column: str | None) -> None:
    if empty := [line for line, name in zip(lines, ids, strict=True) if not name]:
        raise CarmilError(f"{path}: column {column!r} has no id in {_lines(empty)}; fill it in or delete the row")
    for line, name in zip(lines, ids, strict=True):
        if len(name.encode()) > _LONGEST_ID:
            raise CarmilError(
                f"{path}: the id {name[:20]!r}... in line {line}, column {column!r}, has {len(name.encode())} bytes; "
                f"expected at most {_LONGEST_ID}; shorten it, or name the column of ids"
            )


def _tidy_labels(labels: list[str], said: list[str]) -> list[str]:
    """Whole numbers that went through pandas as floats, 0.0 and 1.0, are 0 and 1 again."""
    whole = [re.fullmatch(r"([+-]?\d+)(\.0*)?", label) for label in labels]
    if not all(whole) or not any("." in label for label in labels):
        return labels
    said.append(
        f"labels are whole numbers written like {next(la for la in labels if '.' in la)!r}: read without the point"
    )
    return [number[1] for number in whole if number]


def _sites(frame: "pd.DataFrame", path: Path, slides: list[str], column: str | None) -> list[str]:
    """What the column says; without one, the tissue source site in the slides' TCGA barcodes."""
    if column:
        if empty := [line for line, site in zip(frame.index, frame[column], strict=True) if not site]:
            raise CarmilError(f"{path}: column {column!r} has no site in {_lines(empty)}; fill it in")
        return list(frame[column])
    sites = []
    for line, slide in zip(frame.index, slides, strict=True):
        if not (barcode := _TCGA.match(slide)):
            raise CarmilError(
                f"{path}: slide {slide!r} in line {line} is no TCGA barcode (TCGA-site-patient-...), so that its site "
                "is unknown; name a column of sites with --site"
            )
        sites.append(barcode[2])
    return sites


def _once(rows: list[_Row], path: Path, said: list[str]) -> list[_Row]:
    """One row a slide. Rows that repeat a slide must agree about it."""
    first: dict[str, _Row] = {}
    repeated = []
    for row in rows:
        before = first.setdefault(row.slide, row)
        if before is row:
            continue
        repeated.append(row.slide)
        for kind in ("label", "patient", "site", "split"):
            if getattr(before, kind) != getattr(row, kind):
                raise CarmilError(
                    f"{path}: slide {row.slide!r} has {kind} {getattr(before, kind)!r} in line {before.line} and "
                    f"{getattr(row, kind)!r} in line {row.line}; delete the wrong row"
                )
    if repeated:
        said.append(f"{len(repeated)} rows repeat a slide and are counted once ({an_example(repeated)})")
    return list(first.values())


def _say_mixed_patients(rows: list[_Row], said: list[str]) -> None:
    labels: dict[str, set[str]] = {}
    for row in rows:
        labels.setdefault(row.patient, set()).add(row.label)
    if mixed := [patient for patient, different in labels.items() if len(different) > 1]:
        said.append(f"{len(mixed)} patients have slides of different labels ({an_example(mixed)})")


def _classes(
    labels: list[str], path: Path, column: str | None, positive: str | None, said: list[str]
) -> tuple[str, ...]:
    counts = Counter(labels)
    numeric = all(_NUMBER.fullmatch(label) for label in counts)
    where = f"{path}: column {column!r}"
    fractions = numeric and any(float(label) % 1 for label in counts)
    if numeric and len(counts) > (_MOST_FRACTIONS if fractions else _MOST_CLASSES):
        raise CarmilError(
            f"{where} has {len(counts)} different numbers: looks like a number to predict; "
            "carmil classifies: regression and survival are not supported"
        )
    if len(counts) > _MOST_CLASSES or len(counts) == len(labels) > 2:
        raise CarmilError(
            f"{where} has {len(counts)} different labels for {len(labels)} slides, the first {labels[0]!r}; "
            f"expected at most {_MOST_CLASSES} classes, each of several slides; name another with --label"
        )
    if len(counts) < 2:
        raise CarmilError(
            f"{where} has one class only, {labels[0]!r}; expected at least two; name another with --label"
        )
    classes = sorted(counts, key=lambda c: (float(c) if numeric else 0.0, c.casefold(), c))
    for one, other in pairwise(classes):
        if one.casefold() == other.casefold() or (numeric and float(one) == float(other)):
            raise CarmilError(
                f"{where} has labels {one!r} and {other!r}, the same but for their spelling; write them alike"
            )
    if positive is not None:
        if positive not in counts:
            from carmil.errors import unknown

            raise CarmilError(f"{where}: {unknown('positive class', positive, classes)}")
        if len(classes) != 2:
            raise CarmilError(f"{where} has {len(classes)} classes: a positive one can be named of two; leave it out")
        classes.sort(key=lambda c: c == positive)
    said.append("classes: " + ", ".join(f"{c!r} ({counts[c]} slides)" for c in classes))
    if positive is None and len(classes) == 2 and not numeric:
        said.append(
            f"positive class: {classes[1]!r} (guessed: the last in the alphabet; name the other with --positive)"
        )
    return tuple(classes)


def _written_as_floats(rows: dict[str, int], bags: dict[str, int], said: list[str]) -> dict[int, int]:
    """Ids like 123.0, which a table gets when pandas takes its ids for numbers."""
    found = {
        bags[slide[:-2]]: row
        for slide, row in rows.items()
        if slide.endswith(".0") and slide not in bags and slide[:-2] in bags and slide[:-2] not in rows
    }
    if found:
        example = next(slide for slide, row in rows.items() if row in found.values())
        said.append(f"{len(found)} slide ids end in '.0' (saved as numbers): {example!r} read as {example[:-2]!r}")
    return found


def _by_beginning(rows: dict[str, int], bags: dict[str, int], said: list[str]) -> dict[int, int]:
    """Bags named like TCGA-A2-A0CM-01Z-00-DX1 for a table of TCGA-A2-A0CM: the longest beginning in the table."""
    found = {}
    for bag, position in bags.items():
        cuts = [cut for cut in range(len(bag) - 1, 0, -1) if bag[cut] in "-_."]
        row = next((rows[bag[:cut]] for cut in cuts if bag[:cut] in rows), None)
        if row is not None:
            found[position] = row
    if found:
        said.append(
            f"the table's ids are taken as patients: {len(found)} bags are named after "
            f"{len(set(found.values()))} of them"
        )
    return found


def _no_match(table: LabelTable, bags: list[str]) -> str:
    without_zeros = {bag.lstrip("0") for bag in bags if bag.isdecimal()}
    if any(slide.removesuffix(".0") in without_zeros for slide in table.slides):
        advice = "the table has lost its leading zeros: save its ids as text"
    else:
        advice = "expected equal ids, or ids that the bags' begin with; name the right column with --slide"
    return (
        f"{table.path}: none of its {len(table.slides)} slides is among the {len(bags)} bags; "
        f"the table has ids like {table.slides[0]!r}, the bags like {bags[0]!r}; {advice}"
    )


def _say_match(
    table: LabelTable, *, unlabelled: Sequence[str], missing: Sequence[str], bags: int, said: list[str]
) -> None:
    for lost, of, what in (
        (unlabelled, bags, "bags have no label and are left out"),
        (missing, len(table.slides), f"labelled ids of {table.path.name} have no bag"),
    ):
        if lost:
            loud = "WARNING: more than half is lost: " if 2 * len(lost) > of else ""
            said.append(f"{loud}{len(lost)} of {of} {what} ({an_example(lost)})")


def _lines(numbers: Iterable[int], most: int = 5) -> str:
    numbers = list(numbers)
    shown = ", ".join(str(number) for number in numbers[:most])
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return f"line{'s' if len(numbers) > 1 else ''} {shown}{more}"
