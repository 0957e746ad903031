"""labels.csv of the paper's cohorts, made of the tables that people have.

Columns are found by what is in them: the one with the cohort's slide names or barcodes, the one with words for its classes. A
table may have a header or not. What is left out is said.
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
_TCGA = re.compile(_CASE, re.IGNORECASE)
# BRACS numbers its seven types in this order, the paper has the fourth and the fifth the other way round.
_NUMBERED = {"bracs": ("0 N", "1 PB", "2 UDH", "4 FEA", "3 ADH", "5 DCIS", "6 IC")}
_FIRST = 1000  # lines that are looked at for ids: a MAF has hundreds of thousands, and a hundred columns
_GENE = "TP53"
# What a MAF calls changes that leave the protein as it is.
_SILENT = {"silent", "intron", "3'utr", "5'utr", "3'flank", "5'flank", "igr", "rna", "lincrna"}
_NOT_SEQUENCED = {"ns", "na", "nan", "not profiled", ""}
_WILD = {"wt", "wild type", "wild-type", "wildtype", "no mutation", "0", "no", "false"}


@dataclass(frozen=True)
class Line:
    """One line of labels.csv."""

    slide: str
    patient: str
    label: str
    split: str = ""


@dataclass(frozen=True)
class Built:
    """The lines, and in plain sentences what was taken for what and what was left out."""

    lines: tuple[Line, ...]
    said: tuple[str, ...]


@dataclass(frozen=True)
class _Table:
    """A table with the place of its ids; `rows` are those that have one. given: the class of all of them, if it was said."""

    path: Path
    header: list[str]
    rows: list[list[str]]
    ids: int
    given: Class | None

    def column(self, number: int) -> list[str]:
        return [row[number] for row in self.rows]


def build_labels(dataset: Dataset, given: Sequence[str], *, label: str | None = None) -> Built:
    """The labels in tables, each FILE or CLASS=FILE where all of a table is of one class. label: name of the column of labels."""
    said: list[str] = []
    tables = [_table(dataset, word, said) for word in given]
    if dataset.name == "luad_tp53" and (mutations := [table for table in tables if _gene_column(table) is not None]):
        lines = _from_mutations(dataset, mutations, [table for table in tables if table not in mutations], said)
    else:
        lines = [line for table in tables for line in _from_words(dataset, table, label, said)]
    once = _once(lines)
    if len({line.label for line in once}) < 2:
        raise CarmilError(
            f"{', '.join(given)}: {plural(len(once), 'slide')} of {len({line.label for line in once})} class of {dataset.title}; "
            f"expected at least two of {', '.join(one.name for one in dataset.classes)}; "
            "name the column with --label, or give another table"
        )
    return Built(tuple(_with_split(dataset, once)), tuple(said))


def labels_text(lines: Sequence[Line]) -> str:
    """What labels.csv holds."""
    columns = ["slide", "patient", "label", *(["split"] if any(line.split for line in lines) else [])]
    return csv_text(
        [columns, *([getattr(line, column) for column in columns] for line in lines)],
        for_people=False,  # slides are found by these names
    )


def _table(dataset: Dataset, word: str, said: list[str]) -> _Table:
    before, sign, after = word.partition("=")
    one = dataset.class_of(before) if sign else None
    path = Path(after if one is not None else word)
    cells = read_cells(path)
    pattern = _IDS.get(dataset.name, _TCGA)
    width, first = range(len(cells[0])), cells[:_FIRST]
    found = {n: sum(bool(pattern.match(bare_id(row[n]))) for row in first) for n in width}
    exact = {n: sum(bool(_SLIDE_OF_CASE.match(bare_id(row[n]))) for row in first) for n in width}
    # A column of slides is better than one of cases; names better than the paths that hold them.
    ids = max(width, key=lambda n: (exact[n], found[n], -sum("/" in row[n] for row in first), -n))
    if not found[ids]:
        raise CarmilError(
            f"{path}: no column with ids of {dataset.title}, such as {_example(dataset)}; its first line is "
            f"{', '.join(map(repr, cells[0][:4]))}"
        )
    headed = not pattern.match(bare_id(cells[0][ids]))
    header = cells[0] if headed else [f"column {n + 1}" for n in width]
    rows = [row for row in cells[headed:] if pattern.match(bare_id(row[ids]))]
    if lost := len(cells) - headed - len(rows):
        said.append(f"{path.name}: {plural(lost, 'line')} without an id in column {header[ids]!r} left out")
    return _Table(path, header, rows, ids, one)


def _from_words(dataset: Dataset, table: _Table, label: str | None, said: list[str]) -> list[Line]:
    """A class for each line whose label is a word for one."""
    if table.given is not None:
        classes: list[Class | None] = [table.given] * len(table.rows)
    elif dataset.name == "camelyon16":
        classes = _of_camelyon(dataset, table, label, said)
    else:
        classes = _labelled(dataset, table, _label_column(dataset, table, label), said)
    splits = _splits(dataset, table)
    whose = _patient_column(table)
    lines = []
    for row, one, split in zip(table.rows, classes, splits, strict=True):
        if one is not None:
            lines.append(_line(row[table.ids], one.name, split, None if whose is None else row[whose]))
    return lines


def _line(name: str, label: str, split: str = "", patient: str | None = None) -> Line:
    """A TCGA barcode names the patient; one of a sample, not a slide, is cut to the case."""
    slide = bare_id(name)
    if case := _TCGA.match(slide):
        whose = case[0].upper()
        return Line(slide if _SLIDE_OF_CASE.match(slide) else whose, whose, label, split)
    return Line(slide, patient or slide, label, split)


def _label_column(dataset: Dataset, table: _Table, label: str | None) -> int:
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
            f"{table.path}: no column with words for {', '.join(one.name for one in dataset.classes)}; name one with --label, "
            "or say CLASS=FILE if all of the table is of one class"
        )
    for other in best[1:]:
        if known[other] != known[best[0]]:
            raise CarmilError(
                f"{table.path}: columns {table.header[best[0]]!r} and {table.header[other]!r} could both be the label, and they "
                "disagree; name one with --label"
            )
    return best[0]


def _labelled(dataset: Dataset, table: _Table, column: int, said: list[str]) -> list[Class | None]:
    words = table.column(column)
    classes = [dataset.class_of(word) for word in words]
    if dataset.name in _NUMBERED and not any(classes) and set(words) <= set("0123456"):
        by_name = {one.name: one for one in dataset.classes}
        classes = [by_name[_NUMBERED[dataset.name][int(word)]] for word in words]
        said.append(f"{table.path.name}: numbers are taken in {dataset.title}'s own order, 3 is FEA and 4 is ADH")
    said.append(f"{table.path.name}: ids from column {table.header[table.ids]!r}, labels from {table.header[column]!r}")
    if lost := Counter(word for word, one in zip(words, classes, strict=True) if one is None):
        kinds = ", ".join(f"{word or 'nothing'!r} {count}" for word, count in lost.most_common(3))
        said.append(f"{table.path.name}: {plural(lost.total(), 'line')} of none of the classes left out ({kinds})")
    return classes


def _of_camelyon(dataset: Dataset, table: _Table, label: str | None, said: list[str]) -> list[Class | None]:
    """A training slide's name says what it is; a test slide's does not."""
    by_name = {one.name: one for one in dataset.classes}
    kinds = [bare_id(row[table.ids]).casefold().partition("_")[0] for row in table.rows]
    tests = [i for i, kind in enumerate(kinds) if kind == "test"]
    classes = [by_name.get(kind) for kind in kinds]
    if tests:
        part = replace(table, rows=[table.rows[i] for i in tests])
        for i, one in zip(tests, _labelled(dataset, part, _label_column(dataset, part, label), said), strict=True):
            classes[i] = one
    return classes


def _splits(dataset: Dataset, table: _Table) -> list[str]:
    """BRACS's table says it; CAMELYON16's slides are named so."""
    if dataset.name == "bracs":
        for n in range(len(table.header)):
            words = [word.casefold() for word in table.column(n)]
            if all(word in PART_OF_WORD for word in words):
                return [PART_OF_WORD[word] for word in words]
        raise CarmilError(f"{table.path}: no column says train, val or test; BRACS has an official split in its table")
    return [""] * len(table.rows)


def _with_split(dataset: Dataset, lines: Iterable[Line]) -> Iterable[Line]:
    if dataset.name != "camelyon16":
        return lines
    return (replace(line, split="test" if line.slide.casefold().startswith("test") else "train") for line in lines)


def _patient_column(table: _Table) -> int | None:
    names = ("case_id", "patient_id", "patient", "case", "patient id")
    return next((n for n, name in enumerate(table.header) if name.casefold() in names and n != table.ids), None)


def _gene_column(table: _Table) -> int | None:
    """Where genes are named (a MAF has a line a mutation), or what is known of TP53 (cBioPortal has a line a sample)."""
    plain = [name.casefold() for name in table.header]
    return next((plain.index(name) for name in ("hugo_symbol", "gene", _GENE.casefold()) if name in plain), None)


def _from_mutations(dataset: Dataset, tables: Sequence[_Table], lists: Sequence[_Table], said: list[str]) -> list[Line]:
    """Mutated where a table says so; wild type where a case was looked at and it does not."""
    wild, mutated = dataset.classes
    status: dict[str, bool] = {}
    for table in tables:
        for case, changed in _mutations(table):
            status[case] = status.get(case, False) or changed
    if lists:
        cases = {_line(row[table.ids], "").patient for table in lists for row in table.rows}
        if left := sorted(set(status) - cases):
            said.append(
                f"{len(left)} cases of the mutation table are in no list of cases and are left out ({examples(left)})"
            )
        status = {case: status.get(case, False) for case in sorted(cases)}
    elif all(status.values()):
        raise CarmilError(
            f"{tables[0].path}: every case in it has {_GENE} mutated, so that it does not tell who was looked at; give a list of "
            "all sequenced cases as well"
        )
    said.append(f"{_GENE}: mutated where the protein is changed; silent changes and introns do not count")
    return [Line(case, case, (mutated if changed else wild).name) for case, changed in status.items()]


def _mutations(table: _Table) -> Iterable[tuple[str, bool]]:
    """(case, whether this line has TP53 changed) of every line; samples that were not sequenced have none."""
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


def _once(lines: Iterable[Line]) -> list[Line]:
    found: dict[str, Line] = {}
    for line in lines:
        before = found.setdefault(line.slide, line)
        if (before.label, before.split) != (line.label, line.split):
            raise CarmilError(
                f"{line.slide} is {before.label!r} {before.split} and {line.label!r} {line.split}: expected one; "
                "delete the wrong line"
            )
    return list(found.values())


def _example(dataset: Dataset) -> str:
    return {"bracs": "BRACS_1228", "camelyon16": "normal_001"}.get(dataset.name, "TCGA-E2-A154")
