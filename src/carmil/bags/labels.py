"""Read label tables and match them with bags. `columns` chooses the columns; every guess is noted."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from carmil.bags.columns import KNOWN_COLUMNS, LabelColumns, choose_columns, named_column
from carmil.errors import CarmilError, unknown
from carmil.table_files import read_table
from carmil.words import examples, plural

if TYPE_CHECKING:
    import pandas as pd

_NO_LABEL = {"", "na", "n/a", "#n/a", "nan", "<na>", "null"}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_TCGA = re.compile(r"(TCGA-([A-Z0-9]{2})-[A-Z0-9]{4})(?=$|[-._])", re.IGNORECASE)
_MOST_CLASSES = 100
_MOST_FRACTIONS = 10  # 0.5, 1, 1.5 ... may be grades; a column with more of them is a measurement
_HALF = "WARNING: more than half are lost: "
_LONGEST_ID = 255  # bytes: the limit of a file name
_EXTENSIONS = {
    *(".h5", ".hdf5", ".pt", ".pth", ".npy", ".npz", ".safetensors", ".zarr", ".parquet"),
    *(".svs", ".ndpi", ".tif", ".tiff", ".qptiff", ".ome", ".mrxs", ".scn", ".vms", ".vmu", ".bif", ".svslide"),
    *(".isyntax", ".dcm", ".czi", ".png", ".jpg", ".jpeg"),
}


@dataclass(frozen=True)
class LabelTable:
    """One row per slide, with its patient and its label.

    slides   ids without folder and extension
    patients the id of the slide where the table has no patients
    labels   as text; several columns joined by commas
    classes  the distinct labels in order; the position of a label is its class number
    cells    the text of the target's columns for each slide, if the target was named
    others   the text of further columns for each slide, empty where a value is missing, and their names
    sites    the site where each slide was made, or None
    official the train, val or test part of each slide according to a column of the table, or None
    left_out slides that the table lists with an empty label, or with one that is dropped
    columns  the columns of slides and of labels, for messages: "column 'label'", "column 'label' (guessed)"
    notes    one sentence per guess, and per kind of row that is left out
    """

    path: Path
    slides: tuple[str, ...]
    patients: tuple[str, ...]
    labels: tuple[str, ...]
    classes: tuple[str, ...]
    sites: tuple[str, ...] | None = None
    official: tuple[str, ...] | None = None
    left_out: tuple[str, ...] = ()
    columns: tuple[str, str] = ("the column of slides", "the column of labels")
    cells: tuple[tuple[str, ...], ...] = ()
    others: tuple[tuple[str, ...], ...] = ()
    other_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LabelledBags:
    """The bags that have a label; `bags` are their positions, `rows` those in the table, and the fields up to
    `official` have one entry for each of them.

    unlabelled: bags that the table does not list; left_out: bags that it lists without a label; missing: labels
    without a bag.
    """

    bags: tuple[int, ...]
    rows: tuple[int, ...]
    slides: tuple[str, ...]
    patients: tuple[str, ...]
    labels: tuple[int, ...]
    sites: tuple[str, ...] | None
    official: tuple[str, ...] | None
    unlabelled: tuple[str, ...]
    left_out: tuple[str, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...]


def bare_id(text: str) -> str:
    """Return the id of a slide without folder and extension, in Unicode's composed form (macOS decomposes letters)."""
    name = re.split(r"[/\\]", unicodedata.normalize("NFC", text.strip()))[-1]
    while (dot := name.rfind(".")) > 0 and name[dot:].casefold() in _EXTENSIONS:
        name = name[:dot]
    return name


def read_labels(
    path: Path,
    *,
    slide: str | None = None,
    patient: str | None = None,
    label: str | None = None,
    site: str | None = None,
    split: str | None = None,
    positive: str | None = None,
    classes: Sequence[str] = (),
    mapping: Mapping[str, str] | None = None,
    target: Sequence[str] = (),
    others: Sequence[str] = (),
) -> LabelTable:
    """Read the labels of a table. Arguments name columns; columns that are not named are guessed.

    `target` names the columns of a target in place of the label, and its cells are returned as they are; `others` names
    further columns.
    `site` may also be "tcga": the tissue source site in a TCGA barcode. `positive` is the one of two classes that
    comes last. `classes` are those of a run, which determine the order; other classes come after them. `mapping`
    renames labels; a label whose new name is "" is dropped with its slides.
    """
    import pandas as pd

    path = Path(path)
    table = read_table(path, headers=KNOWN_COLUMNS)
    notes = list(table.attrs["notes"])
    column = None if site == "tcga" and "tcga" not in table.columns else site
    columns = choose_columns(
        table,
        path,
        {"slide": slide, "patient": patient, "label": target[0] if target else label, "split": split, "site": column},
        notes,
    )
    predicted = [named_column(table, path, "target", name) for name in target] or [columns.label]
    further = [named_column(table, path, "adjust", name) for name in others]
    other_cells = table[further].mask(table[further].apply(_is_missing), "")
    named = columns.describe("label") if len(predicted) == 1 else f"columns {', '.join(map(repr, predicted))}"
    where = f"{path}: {named}"
    frame = _with_labels(table, predicted, path, named, notes)
    slides, patients = _ids(frame, path, columns, notes)
    if target:
        labels = list(frame[predicted].agg(", ".join, axis=1))
    else:
        labels = _map_labels(_whole_numbers(list(frame[columns.label]), notes), mapping or {}, where, notes)
    facts = {"slide": slides, "patient": patients, "label": labels}
    if site:
        facts["site"] = _sites(frame, path, slides, columns.site)
    if columns.split:
        facts["split"] = list(frame[columns.split])
    rows = _one_row_per_slide(pd.DataFrame(facts, index=frame.index), path, notes)
    rows = rows[rows["label"] != ""]
    mixed = rows.groupby("patient", sort=False)["label"].nunique()
    if len(mixed := mixed[mixed > 1]):
        has = plural(len(mixed), "patient has", "patients have")
        notes.append(f"{has} slides of different {'outcomes' if target else 'labels'} ({examples(mixed.index)})")
    labels = list(rows["label"])
    return LabelTable(
        path=path,
        slides=tuple(rows["slide"]),
        patients=tuple(rows["patient"]),
        labels=tuple(labels),
        classes=tuple(dict.fromkeys(labels)) if target else _classes(labels, where, positive, classes, notes),
        cells=tuple(frame.loc[rows.index, predicted].itertuples(index=False, name=None)) if target else (),
        others=tuple(other_cells.loc[rows.index].itertuples(index=False, name=None)),
        other_names=tuple(further),
        sites=tuple(rows["site"]) if site else None,
        official=tuple(rows["split"]) if columns.split else None,
        left_out=tuple(sorted({bare_id(text) for text in table[columns.slide]} - {*rows["slide"], ""})),
        columns=(columns.describe("slide"), columns.describe("label")),
        notes=tuple(notes),
    )


def match(table: LabelTable, bag_ids: Sequence[str]) -> LabelledBags:
    """Match labels with bags by equal ids. If no id is equal, the table may list cases whose slides are the bags."""
    bags: dict[str, int] = {}
    for position, bag in enumerate(bag_ids):
        if (name := bare_id(bag)) in bags:
            raise CarmilError(f"bags {bag_ids[bags[name]]!r} and {bag!r} are both slide {name!r}: keep one of them")
        bags[name] = position
    if not bags:
        raise CarmilError(f"no bags to match with the labels of {table.path}: expected at least one")
    notes: list[str] = []
    rows = {slide: row for row, slide in enumerate(table.slides)}
    row_of = {bags[slide]: row for slide, row in rows.items() if slide in bags}
    row_of |= _match_floats(rows, bags, notes)
    own_id = {position: name for name, position in bags.items()}
    if not row_of:
        row_of = _match_beginnings(rows, bags, notes)
        own_id = {position: table.slides[row] for position, row in row_of.items()}
    if not row_of:
        raise CarmilError(_no_match(table, list(bags)))

    positions = sorted(row_of)
    taken = [row_of[position] for position in positions]
    names, numbers = list(bags), {name: number for number, name in enumerate(table.classes)}
    without = [bag for position, bag in enumerate(bag_ids) if position not in row_of]
    listed = set(table.left_out)
    left_out = tuple(bag for bag in without if not listed.isdisjoint(_beginnings(bare_id(bag))))
    unlabelled = tuple(bag for bag in without if bag not in set(left_out))
    missing = tuple(slide for row, slide in enumerate(table.slides) if row not in set(taken))
    _note_losses(table, unlabelled, missing, len(bags), notes)
    for empty in sorted(set(table.classes) - {table.labels[row] for row in taken}) if not table.cells else ():
        notes.append(f"WARNING: no bag has the label {empty!r}")
    return LabelledBags(
        bags=tuple(positions),
        rows=tuple(taken),
        slides=tuple(names[position] for position in positions),
        patients=tuple(
            own_id[position] if table.patients[row] == table.slides[row] else table.patients[row]
            for position, row in zip(positions, taken, strict=True)
        ),
        labels=tuple(numbers[table.labels[row]] for row in taken),
        sites=None if table.sites is None else tuple(table.sites[row] for row in taken),
        official=None if table.official is None else tuple(table.official[row] for row in taken),
        unlabelled=unlabelled,
        left_out=left_out,
        missing=missing,
        notes=tuple(notes),
    )


def _with_labels(
    frame: "pd.DataFrame", columns: Sequence[str], path: Path, named: str, notes: list[str]
) -> "pd.DataFrame":
    """Return the rows with a label in any of these columns. named: the columns in words, for messages."""
    empty = frame[[*columns]].apply(_is_missing).all(axis=1)
    if empty.all():
        raise CarmilError(
            f"{path}: {named} has no label in any of its {plural(len(frame), 'row')}; name another column"
        )
    if empty.any():
        many = plural(int(empty.sum()), "slide has", "slides have")
        be = "is" if empty.sum() == 1 else "are"
        loud = _HALF if 2 * empty.sum() > len(frame) else ""
        lines = _lines(frame.index[empty])
        notes.append(f"{loud}{many} an empty label in {named} and {be} left out ({lines})")
    return frame[~empty]


def _is_missing(cells: "pd.Series") -> "pd.Series":
    """Return whether each cell of a column holds no value."""
    return cells.str.casefold().isin(_NO_LABEL)


def _ids(frame: "pd.DataFrame", path: Path, columns: LabelColumns, notes: list[str]) -> tuple[list[str], list[str]]:
    """Return slides and their patients, from a column, from TCGA barcodes, or with each slide as its own patient."""
    slides = [bare_id(text) for text in frame[columns.slide]]
    _check_ids(slides, frame.index, path, columns.slide)
    if folders := [text for text in frame[columns.slide] if "/" in text or "\\" in text]:
        many = plural(len(folders), "slide id is a path", "slide ids are paths")
        notes.append(f"{many}: only the file name counts ({bare_id(folders[0])!r})")
    if columns.patient and columns.patient != columns.slide:
        patients = list(frame[columns.patient])
        _check_ids(patients, frame.index, path, columns.patient)
        return slides, patients
    barcodes = [_TCGA.match(slide) for slide in slides]
    if all(barcodes):
        patients = [barcode[1] for barcode in barcodes if barcode]
        if patients != slides:
            notes.append(f"no patient column: patients are read from the TCGA barcodes ({patients[0]!r})")
        return slides, patients
    if not columns.patient:
        used = (columns.slide, columns.label, columns.split, columns.site)
        others = [repr(column) for column in frame.columns if column not in used]
        alone = "no patient column: each slide is its own patient"
        notes.append(f"WARNING: {alone}; is it {' or '.join(others[:4])}? Name it with --patient" if others else alone)
    return slides, slides


def _check_ids(ids: list[str], lines: Iterable[int], path: Path, column: str) -> None:
    if empty := [line for line, name in zip(lines, ids, strict=True) if not name]:
        raise CarmilError(f"{path}: column {column!r} has no id in {_lines(empty)}; fill it in or delete the row")
    for line, name in zip(lines, ids, strict=True):
        if len(name.encode()) > _LONGEST_ID:
            raise CarmilError(
                f"{path}: the id {name[:20]!r}... in line {line}, column {column!r}, has {len(name.encode())} bytes; "
                f"expected at most {_LONGEST_ID}; shorten it, or name the column of ids"
            )


def _whole_numbers(labels: list[str], notes: list[str]) -> list[str]:
    """Return the labels, with whole numbers that were saved as 0.0 and 1.0 changed back to 0 and 1."""
    matches = [re.fullmatch(r"([+-]?\d+)(\.0*)?", label) for label in labels]
    pointed = [label for label in labels if "." in label]
    if not all(matches) or not pointed:
        return labels
    notes.append(f"labels are whole numbers written like {pointed[0]!r}: read without the point")
    return [number[1] for number in matches if number]


def _map_labels(labels: list[str], mapping: Mapping[str, str], where: str, notes: list[str]) -> list[str]:
    """Rename the labels by `mapping`, to "" if they are to be dropped."""
    counts = Counter(labels)
    for name, new in mapping.items():
        if name not in counts:
            raise CarmilError(f"{where}: {unknown('label to map', name, counts)}")
        slides = plural(counts[name], "slide")
        notes.append(f"{slides} labelled {name!r} {f'taken as {new!r}' if new else 'left out'}")
    if all(mapping.get(label, label) == "" for label in counts):
        raise CarmilError(f"{where}: every label is dropped; expected two or more to remain")
    return [mapping.get(label, label) for label in labels]


def _sites(frame: "pd.DataFrame", path: Path, slides: list[str], column: str | None) -> list[str]:
    """Return the sites from a column, or else the tissue source sites from the TCGA barcodes of the slides."""
    if column:
        if empty := [line for line, site in zip(frame.index, frame[column], strict=True) if not site]:
            raise CarmilError(f"{path}: column {column!r} has no site in {_lines(empty)}; fill it in")
        return list(frame[column])
    sites = []
    for line, slide in zip(frame.index, slides, strict=True):
        if not (barcode := _TCGA.match(slide)):
            raise CarmilError(
                f"{path}: slide {slide!r} in line {line} is not a TCGA barcode (TCGA-site-patient-...), so "
                "that its site is unknown; name the column of sites with --site"
            )
        sites.append(barcode[2])
    return sites


def _one_row_per_slide(rows: "pd.DataFrame", path: Path, notes: list[str]) -> "pd.DataFrame":
    """Keep the first row of each slide. Further rows of the slide must agree with it."""
    repeated = rows["slide"].duplicated()
    for slide, same in rows[rows["slide"].duplicated(keep=False)].groupby("slide", sort=False):
        for kind in same.columns:
            other = same[same[kind] != same[kind].iloc[0]]
            if len(other):
                raise CarmilError(
                    f"{path}: slide {slide!r} has {kind} {same[kind].iloc[0]!r} in line {same.index[0]} and "
                    f"{other[kind].iloc[0]!r} in line {other.index[0]}; delete the wrong row"
                )
    if repeated.any():
        many = plural(int(repeated.sum()), "row repeats a slide and is", "rows repeat a slide and are")
        notes.append(f"{many} counted once ({examples(rows['slide'][repeated])})")
    return rows[~repeated]


def _classes(
    labels: list[str], where: str, positive: str | None, known: Sequence[str], notes: list[str]
) -> tuple[str, ...]:
    """Return the distinct labels in order: numbers by size, text alphabetically, the positive class last."""
    counts = Counter(labels)
    numeric = all(_NUMBER.fullmatch(label) for label in counts)
    fractions = numeric and any(float(label) % 1 for label in counts)
    if numeric and len(counts) > (_MOST_FRACTIONS if fractions else _MOST_CLASSES):
        raise CarmilError(
            f"{where} has {len(counts)} different numbers, so that it looks like a quantity, not classes: predict the "
            "number with --target COLUMN, or a time with --target TIME --event EVENT, or name a column of classes with --label"
        )
    if len(counts) > _MOST_CLASSES or len(counts) == len(labels) > 2:
        raise CarmilError(
            f"{where} has {len(counts)} different labels for {len(labels)} slides, the first {labels[0]!r}; "
            f"expected at most {_MOST_CLASSES} classes, each of several slides; name another column with "
            "--label"
        )
    if len(counts) < 2:
        raise CarmilError(
            f"{where} has one class only, {labels[0]!r}; expected at least two; name another column with --label"
        )
    classes = sorted(counts, key=lambda c: (float(c) if numeric else 0.0, c.casefold(), c))
    for first, second in pairwise(classes):
        if first.casefold() == second.casefold() or (numeric and float(first) == float(second)):
            raise CarmilError(
                f"{where} has labels {first!r} and {second!r}, two spellings of the same class; use one spelling"
            )
    if positive is not None:
        if positive not in counts:
            raise CarmilError(f"{where}: {unknown('positive class', positive, classes)}")
        if len(classes) != 2:
            raise CarmilError(
                f"{where} has {len(classes)} classes: a positive class is for two classes only; leave it out"
            )
        classes.sort(key=lambda c: c == positive)
    classes.sort(key=lambda c: known.index(c) if c in known else len(known))
    notes.append("classes: " + ", ".join(f"{c!r} ({plural(counts[c], 'slide')})" for c in classes))
    if positive is None and not known and len(classes) == 2 and not numeric:
        notes.append(
            f"positive class: {classes[1]!r} (guessed: the last in the alphabet; `carmil train --positive` names the other)"
        )
    return tuple(classes)


def _match_floats(rows: dict[str, int], bags: dict[str, int], notes: list[str]) -> dict[int, int]:
    """Match rows with bags by ids like 123.0, which pandas writes for ids read as numbers. Return row by bag."""
    matched = {
        slide: row
        for slide, row in rows.items()
        if slide.endswith(".0") and slide not in bags and slide[:-2] in bags and slide[:-2] not in rows
    }
    if matched:
        first, many = next(iter(matched)), plural(len(matched), "slide id ends", "slide ids end")
        notes.append(f"{many} in '.0' (saved as numbers): {first!r} read as {first[:-2]!r}")
    return {bags[slide[:-2]]: row for slide, row in matched.items()}


def _beginnings(bag: str) -> list[str]:
    """Return the name and its prefixes that end before a dash, underscore or dot, longest first."""
    return [bag, *(bag[:cut] for cut in range(len(bag) - 1, 0, -1) if bag[cut] in "-_.")]


def _match_beginnings(rows: dict[str, int], bags: dict[str, int], notes: list[str]) -> dict[int, int]:
    """Match bags like TCGA-A2-A0CM-01Z-00-DX1 with a table of TCGA-A2-A0CM, by the longest prefix in the table.
    Return row by bag.
    """
    matched = {}
    for bag, position in bags.items():
        row = next((rows[name] for name in _beginnings(bag) if name in rows), None)
        if row is not None:
            matched[position] = row
    if matched:
        many, ids = plural(len(matched), "bag begins", "bags begin"), len(set(matched.values()))
        notes.append(f"the table lists patients: the names of {many} with {ids} of its ids")
    return matched


def _no_match(table: LabelTable, bags: list[str]) -> str:
    without_zeros = {bag.lstrip("0") for bag in bags if bag.isdecimal()}
    if any(slide.removesuffix(".0") in without_zeros for slide in table.slides):
        advice = "the table has lost its leading zeros: save its ids as text"
    else:
        advice = "expected equal ids, or ids with which the names of bags begin; name the right column with --slide"
    return (
        f"{table.path}: none of its {plural(len(table.slides), 'slide')} is among the {plural(len(bags), 'bag')}; "
        f"{table.columns[0]} has ids like {table.slides[0]!r}, the bags like {bags[0]!r}; {advice}"
    )


def _note_losses(
    table: LabelTable, unlabelled: Sequence[str], missing: Sequence[str], bags: int, notes: list[str]
) -> None:
    """Note bags without a label, labels without a bag, and pairs of these that differ in spelling only."""
    ids = f"labelled ids of {table.path.name}"
    for lost, total, singular, several in (
        (unlabelled, bags, "bags has no label and is left out", "bags have no label and are left out"),
        (missing, len(table.slides), f"{ids} has no bag", f"{ids} have no bag"),
    ):
        if lost:
            loud = _HALF if 2 * len(lost) > total else ""
            notes.append(f"{loud}{len(lost)} of {total} {singular if len(lost) == 1 else several} ({examples(lost)})")

    def spelling(name: str) -> str:
        """Normalise an id: lower case, without separators and without leading zeros of numbers."""
        return re.sub(r"[\W_]+", "-", re.sub(r"(?<!\d)0+(?=\d)", "", bare_id(name).casefold()))

    spelled = {spelling(bag): bag for bag in unlabelled}
    if alike := [(name, spelled[spelling(name)]) for name in missing if spelling(name) in spelled]:
        (label, bag), many = alike[0], plural(len(alike), "label has", "labels have")
        notes.append(
            f"WARNING: {many} no bag, and a bag with nearly the same id has no label: {label!r} in the table, "
            f"{bag!r} among the bags; write them alike"
        )


def _lines(numbers: Iterable[int], most: int = 5) -> str:
    numbers = list(numbers)
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return f"line{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:most]))}{more}"
