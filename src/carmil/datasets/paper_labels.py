"""Build labels.csv of the paper's cohorts from published tables.

Columns are recognised by their content: slide names or barcodes of the cohort, and words for its classes. A table may
have a header or not. Notes list the columns and rows that were used or left out.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from carmil.bags.columns import PART_OF_WORD
from carmil.bags.labels import bare_id
from carmil.csv_files import csv_text
from carmil.datasets.paper_cohorts import Class, Dataset
from carmil.errors import CarmilError
from carmil.table_files import read_cells
from carmil.words import examples, plural

_CASE = r"TCGA-[A-Z0-9]{2}-[A-Z0-9]{4}"
_SLIDE_OF_CASE = re.compile(_CASE + r"-\d\d[A-Z]-\d\d-[A-Z]{2}", re.IGNORECASE)
_IDS = {
    "bracs": re.compile(r"BRACS_\d+", re.IGNORECASE),
    "camelyon16": re.compile(r"(normal|tumor|test)_\d+", re.IGNORECASE),
}
_EXAMPLES = {"bracs": "BRACS_1228", "camelyon16": "normal_001"}
_TCGA = re.compile(_CASE, re.IGNORECASE)
# BRACS numbers its seven types in this order; in the paper the fourth and the fifth are swapped.
_NUMBERED = {"bracs": ("0 N", "1 PB", "2 UDH", "4 FEA", "3 ADH", "5 DCIS", "6 IC")}
_FIRST = 1000  # rows searched for ids; a MAF has hundreds of thousands of rows and a hundred columns
_GENE = "TP53"
# Variant classes of a MAF that leave the protein unchanged.
_SILENT = {"silent", "intron", "3'utr", "5'utr", "3'flank", "5'flank", "igr", "rna", "lincrna"}
_NOT_SEQUENCED = {"ns", "na", "nan", "not profiled", ""}
_WILD = {"wt", "wild type", "wild-type", "wildtype", "no mutation", "0", "no", "false"}


@dataclass(frozen=True)
class LabelRow:
    """One row of labels.csv."""

    slide: str
    patient: str
    label: str
    split: str = ""


@dataclass(frozen=True)
class PaperLabels:
    """The rows, and notes on columns and rows that were used or left out."""

    lines: tuple[LabelRow, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _SourceTable:
    """A table: its rows with an id, and the column of ids. given: the class of all rows, if the argument was CLASS=FILE."""

    path: Path
    header: list[str]
    rows: list[list[str]]
    ids: int
    given: Class | None

    def column(self, number: int) -> list[str]:
        return [row[number] for row in self.rows]


def build_labels(dataset: Dataset, given: Sequence[str], *, label: str | None = None) -> PaperLabels:
    """Build the labels from tables, each FILE, or CLASS=FILE for a table with slides of one class.

    label: the column of labels.
    """
    notes: list[str] = []
    tables = [_table(dataset, word, notes) for word in given]
    if dataset.name == "luad_tp53" and (mutations := [table for table in tables if _gene_column(table) is not None]):
        lines = _mutation_rows(dataset, mutations, [table for table in tables if table not in mutations], notes)
    else:
        lines = [line for table in tables for line in _labelled_rows(dataset, table, label, notes)]
    once = _unique(lines)
    if len({line.label for line in once}) < 2:
        raise CarmilError(
            f"{', '.join(given)}: {plural(len(once), 'slide')} of {len({line.label for line in once})} class "
            f"of {dataset.title}; expected at least two of {', '.join(one.name for one in dataset.classes)}; "
            "name the column with --label, or give another table"
        )
    if dataset.name == "camelyon16":
        once = [replace(one, split="test" if one.slide.casefold().startswith("test") else "train") for one in once]
    return PaperLabels(tuple(once), tuple(notes))


def labels_text(lines: Sequence[LabelRow]) -> str:
    """Return the text of labels.csv."""
    columns = ["slide", "patient", "label", *(["split"] if any(line.split for line in lines) else [])]
    return csv_text(
        [columns, *([getattr(line, column) for column in columns] for line in lines)],
        for_people=False,  # not shortened, since slides are looked up by these names
    )


def _table(dataset: Dataset, word: str, notes: list[str]) -> _SourceTable:
    before, sign, after = word.partition("=")
    one = dataset.class_of(before) if sign else None
    path = Path(after if one is not None else word)
    cells = read_cells(path)
    pattern = _IDS.get(dataset.name, _TCGA)
    width, first = range(len(cells[0])), cells[:_FIRST]
    matches = {n: sum(bool(pattern.match(bare_id(row[n]))) for row in first) for n in width}
    exact = {n: sum(bool(_SLIDE_OF_CASE.match(bare_id(row[n]))) for row in first) for n in width}
    # Columns of slides take precedence over those of cases, and names over paths.
    ids = max(width, key=lambda n: (exact[n], matches[n], -sum("/" in row[n] for row in first), -n))
    if not matches[ids]:
        raise CarmilError(
            f"{path}: no column with ids of {dataset.title}, such as {_EXAMPLES.get(dataset.name, 'TCGA-E2-A154')}; its first "
            f"line is {', '.join(map(repr, cells[0][:4]))}"
        )
    headed = not pattern.match(bare_id(cells[0][ids]))
    header = cells[0] if headed else [f"column {n + 1}" for n in width]
    rows = [row for row in cells[headed:] if pattern.match(bare_id(row[ids]))]
    if lost := len(cells) - headed - len(rows):
        notes.append(f"{path.name}: {plural(lost, 'row')} without an id in column {header[ids]!r} left out")
    return _SourceTable(path, header, rows, ids, one)


def _labelled_rows(dataset: Dataset, table: _SourceTable, label: str | None, notes: list[str]) -> list[LabelRow]:
    """Label the rows that contain a known word for a class."""
    if table.given is not None:
        classes: list[Class | None] = [table.given] * len(table.rows)
    elif dataset.name == "camelyon16":
        classes = _of_camelyon(dataset, table, label, notes)
    else:
        classes = _classes(dataset, table, _label_column(dataset, table, label), notes)
    splits = _splits(dataset, table)
    patient_column = _patient_column(table)
    lines = []
    for row, one, split in zip(table.rows, classes, splits, strict=True):
        if one is not None:
            lines.append(
                _line(row[table.ids], one.name, split, None if patient_column is None else row[patient_column])
            )
    return lines


def _line(name: str, label: str, split: str = "", patient: str | None = None) -> LabelRow:
    """Create a row. A TCGA barcode contains the patient; the barcode of a sample, unlike that of a slide, is cut to the case."""
    slide = bare_id(name)
    if case := _TCGA.match(slide):
        whose = case[0].upper()
        return LabelRow(slide if _SLIDE_OF_CASE.match(slide) else whose, whose, label, split)
    return LabelRow(slide, patient or slide, label, split)


def _label_column(dataset: Dataset, table: _SourceTable, label: str | None) -> int:
    if label is not None:
        alike = [n for n, name in enumerate(table.header) if name.casefold() == label.casefold()]
        if len(alike) != 1:
            raise CarmilError(f"{table.path}: no column {label!r} among {', '.join(map(repr, table.header))}")
        return alike[0]
    known = {
        n: [dataset.class_of(word) for word in table.column(n)] for n in range(len(table.header)) if n != table.ids
    }
    counts = {n: sum(one is not None for one in classes) for n, classes in known.items()}
    best = [n for n, count in counts.items() if count and count == max(counts.values())]
    named = [n for n in range(len(table.header)) if table.header[n].casefold() in ("label", "class", "target")]
    if not best and dataset.name in _NUMBERED and named:
        return named[0]
    if not best:
        raise CarmilError(
            f"{table.path}: no column with words for {', '.join(one.name for one in dataset.classes)}; name "
            "one with --label, or give CLASS=FILE if all slides of the table have one class"
        )
    for other in best[1:]:
        if known[other] != known[best[0]]:
            raise CarmilError(
                f"{table.path}: columns {table.header[best[0]]!r} and {table.header[other]!r} could both be the label, and they "
                "disagree; name one with --label"
            )
    return best[0]


def _classes(dataset: Dataset, table: _SourceTable, column: int, notes: list[str]) -> list[Class | None]:
    words = table.column(column)
    classes = [dataset.class_of(word) for word in words]
    if dataset.name in _NUMBERED and not any(classes) and set(words) <= set("0123456"):
        by_name = {one.name: one for one in dataset.classes}
        classes = [by_name[_NUMBERED[dataset.name][int(word)]] for word in words]
        notes.append(f"{table.path.name}: numbers are taken in {dataset.title}'s own order, 3 is FEA and 4 is ADH")
    notes.append(
        f"{table.path.name}: ids from column {table.header[table.ids]!r}, labels from {table.header[column]!r}"
    )
    if lost := Counter(word for word, one in zip(words, classes, strict=True) if one is None):
        kinds = ", ".join(f"{word or 'nothing'!r} {count}" for word, count in lost.most_common(3))
        notes.append(f"{table.path.name}: {plural(lost.total(), 'row')} of none of the classes left out ({kinds})")
    return classes


def _of_camelyon(dataset: Dataset, table: _SourceTable, label: str | None, notes: list[str]) -> list[Class | None]:
    """Return the class of each slide. The name of a training slide contains its class; a test slide needs a label."""
    by_name = {one.name: one for one in dataset.classes}
    kinds = [bare_id(row[table.ids]).casefold().partition("_")[0] for row in table.rows]
    tests = [i for i, kind in enumerate(kinds) if kind == "test"]
    classes = [by_name.get(kind) for kind in kinds]
    if tests:
        part = replace(table, rows=[table.rows[i] for i in tests])
        for i, one in zip(tests, _classes(dataset, part, _label_column(dataset, part, label), notes), strict=True):
            classes[i] = one
    return classes


def _splits(dataset: Dataset, table: _SourceTable) -> list[str]:
    """Return the official split of BRACS from its table; that of CAMELYON16 comes from the slides' names."""
    if dataset.name == "bracs":
        for n in range(len(table.header)):
            words = [word.casefold() for word in table.column(n)]
            if all(word in PART_OF_WORD for word in words):
                return [PART_OF_WORD[word] for word in words]
        raise CarmilError(
            f"{table.path}: no column has train, val or test; expected the official split of "
            "BRACS, which its published table has"
        )
    return [""] * len(table.rows)


def _patient_column(table: _SourceTable) -> int | None:
    names = ("case_id", "patient_id", "patient", "case", "patient id")
    return next((n for n, name in enumerate(table.header) if name.casefold() in names and n != table.ids), None)


def _gene_column(table: _SourceTable) -> int | None:
    """Return the column of genes (a MAF has one row per mutation), or of TP53 (cBioPortal has one row per sample)."""
    plain = [name.casefold() for name in table.header]
    return next((plain.index(name) for name in ("hugo_symbol", "gene", _GENE.casefold()) if name in plain), None)


def _mutation_rows(
    dataset: Dataset, tables: Sequence[_SourceTable], lists: Sequence[_SourceTable], notes: list[str]
) -> list[LabelRow]:
    """Return mutated for cases with a mutation in a table, and wild type for other sequenced cases."""
    wild, mutated = dataset.classes
    status: dict[str, bool] = {}
    for table in tables:
        for case, changed in _mutations(table):
            status[case] = status.get(case, False) or changed
    if lists:
        cases = {_line(row[table.ids], "").patient for table in lists for row in table.rows}
        if left := sorted(set(status) - cases):
            notes.append(
                f"{len(left)} cases of the mutation table are in no list of cases and are left out ({examples(left)})"
            )
        status = {case: status.get(case, False) for case in sorted(cases)}
    elif all(status.values()):
        raise CarmilError(
            f"{tables[0].path}: {_GENE} is mutated in every case of the table, so that it does not show which "
            "cases were sequenced; give a list of all sequenced cases as well"
        )
    notes.append(f"{_GENE}: mutated where the protein is changed; silent changes and introns do not count")
    return [LabelRow(case, case, (mutated if changed else wild).name) for case, changed in status.items()]


def _mutations(table: _SourceTable) -> Iterable[tuple[str, bool]]:
    """Yield (case, whether the row changes TP53) of every row; samples that were not sequenced have no row."""
    column = _gene_column(table)
    assert column is not None
    plain = [name.casefold() for name in table.header]
    kind = plain.index("variant_classification") if "variant_classification" in plain else None
    for row in table.rows:
        case, word = _line(row[table.ids], "").patient, row[column]
        if plain[column] == _GENE.casefold():
            if word.casefold() not in _NOT_SEQUENCED:
                yield case, word.casefold() not in _WILD
        else:
            counts = kind is None or row[kind].casefold() not in _SILENT
            yield case, word.upper() == _GENE and counts


def _unique(lines: Iterable[LabelRow]) -> list[LabelRow]:
    rows: dict[str, LabelRow] = {}
    for line in lines:
        before = rows.setdefault(line.slide, line)
        if (before.label, before.split) != (line.label, line.split):
            raise CarmilError(
                f"{line.slide} is {before.label!r} {before.split} and {line.label!r} {line.split}: expected "
                "one label and split; delete the wrong row"
            )
    return list(rows.values())
