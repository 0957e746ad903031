"""Label tables, and the bags they belong to.

Which column holds what is guessed where it is not named, and every guess is notes: a wrong one must not pass unseen.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from carmil.bags.tables import (
    LABEL_COLUMNS,
    PART_OF_WORD,
    PATIENT_COLUMNS,
    SLIDE_COLUMNS,
    SPLIT_COLUMNS,
    bare_id,
    plain_name,
    read_table,
)
from carmil.errors import CarmilError, unknown
from carmil.words import examples, plural

if TYPE_CHECKING:
    import pandas as pd

_TIME = re.compile(r"(.*_)?(time|months|days|years|survival|os|dss|pfs|pfi|dfs|follow_up)(_.*)?")
_EVENT = re.compile(r"(.*_)?(event|status|censor\w*|dead|death|deceased)(_.*)?")
_NO_LABEL = {"", "na", "n/a", "#n/a", "nan", "<na>", "null"}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_TCGA = re.compile(r"(TCGA-([A-Z0-9]{2})-[A-Z0-9]{4})(?=$|[-._])", re.IGNORECASE)
_MOST_CLASSES = 100
_MOST_FRACTIONS = 10  # 0.5, 1, 1.5 ... may be grades; more of them than this is a measurement
_HALF = "WARNING: more than half is lost: "
_LONGEST_ID = 255  # bytes: what a file name may have


@dataclass(frozen=True)
class LabelTable:
    """One line a slide: whose it is and what it is labelled.

    slides   ids without folder and extension
    patients the slide's own id where the table knows no patients
    labels   as text; `classes` are the different ones in order, and a label's place there is its class number
    sites    where the slide was made, or None
    official what a column of the table says about train, val and test, or None
    left_out slides that the table lists with an empty label, or with one that is dropped
    columns  the columns of slides and of labels, for messages: "column 'label'", "column 'label' (guessed)"
    notes     each guess and each thing left out, one sentence each
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
    notes: tuple[str, ...] = ()


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
    """The bags that have a label: `bags` are their positions, and the rest is aligned with it.

    unlabelled: bags that the table does not list; left_out: bags that it lists without a label; missing: labels without a bag.
    """

    bags: tuple[int, ...]
    slides: tuple[str, ...]
    patients: tuple[str, ...]
    labels: tuple[int, ...]
    sites: tuple[str, ...] | None
    official: tuple[str, ...] | None
    unlabelled: tuple[str, ...]
    left_out: tuple[str, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...]


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
) -> LabelTable:
    """The labels of a table; arguments name columns, those not named are guessed.

    `site` may also be "tcga": the tissue source site in a TCGA barcode. `positive` is the class of two that comes last.
    `classes` are those of a run: they come in its order, others after them.
    `mapping` gives labels other names; a label whose new name is "" is dropped with its slides.
    """
    path = Path(path)
    frame = read_table(path)
    notes = list(frame.attrs["notes"])
    by_barcode = site == "tcga" and "tcga" not in frame.columns
    named = {"slide": slide, "patient": patient, "label": label, "split": split, "site": None if by_barcode else site}
    columns = _columns(frame, path, named, notes)

    slide_column, label_column = (_described(columns[kind], named[kind]) for kind in ("slide", "label"))
    whole = frame
    frame = _labelled(frame, path, columns["label"], label_column, notes)
    slides, patients = _ids(frame, path, columns, notes)
    labels = _mapped(
        _tidy_labels(list(frame[columns["label"]]), notes), mapping or {}, f"{path}: {label_column}", notes
    )
    sites = _sites(frame, path, slides, columns["site"]) if site else [""] * len(frame)
    parts = list(frame[columns["split"]]) if columns["split"] else [""] * len(frame)
    rows = _once(
        [_Row(*row) for row in zip(frame.index, slides, patients, labels, sites, parts, strict=True)], path, notes
    )
    rows = [row for row in rows if row.label]
    kept = {row.slide for row in rows}
    _say_mixed_patients(rows, notes)
    return LabelTable(
        path=path,
        slides=tuple(row.slide for row in rows),
        patients=tuple(row.patient for row in rows),
        labels=tuple(row.label for row in rows),
        classes=_classes([row.label for row in rows], f"{path}: {label_column}", positive, classes, notes),
        sites=tuple(row.site for row in rows) if site else None,
        official=tuple(row.split for row in rows) if columns["split"] else None,
        left_out=tuple(sorted({bare_id(text) for text in whole[columns["slide"]]} - kept - {""})),
        columns=(slide_column, label_column),
        notes=tuple(notes),
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
    notes: list[str] = []
    rows = {slide: row for row, slide in enumerate(table.slides)}
    found = {bags[slide]: row for slide, row in rows.items() if slide in bags}
    found |= _written_as_floats(rows, bags, notes)
    own_id = {position: name for name, position in bags.items()}
    if not found:
        found = _by_beginning(rows, bags, notes)
        own_id = {position: table.slides[row] for position, row in found.items()}
    if not found:
        raise CarmilError(_no_match(table, list(bags)))

    positions = sorted(found)
    taken = [found[position] for position in positions]
    numbers = {name: number for number, name in enumerate(table.classes)}
    names = list(bags)
    without = [bag_ids[position] for position in range(len(bag_ids)) if position not in found]
    listed = set(table.left_out)
    left_out = tuple(bag for bag in without if any(name in listed for name in _beginnings(bare_id(bag))))
    unlabelled = tuple(bag for bag in without if bag not in set(left_out))
    used = set(taken)
    missing = tuple(slide for row, slide in enumerate(table.slides) if row not in used)
    _say_match(table, unlabelled=unlabelled, missing=missing, bags=len(bags), notes=notes)
    _say_alike(missing, unlabelled, notes)
    for empty in sorted(set(table.classes) - {table.labels[row] for row in used}):
        notes.append(f"WARNING: no bag has the label {empty!r}")
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
        left_out=left_out,
        missing=missing,
        notes=tuple(notes),
    )


def _columns(
    frame: "pd.DataFrame", path: Path, named: dict[str, str | None], notes: list[str]
) -> dict[str, str | None]:
    """The column of slide, patient, label, split and site; None for what the table does not have."""
    found: dict[str, str | None] = {
        kind: None if name is None else _named(frame, path, kind, name) for kind, name in named.items()
    }

    def candidates(names: tuple[str, ...]) -> list[str]:
        free = [column for column in frame.columns if column not in found.values()]
        return sorted((c for c in free if plain_name(c) in names), key=lambda c: names.index(plain_name(c)))

    def take(kind: str, choice: list[str]) -> None:
        found[kind] = choice[0]
        others = f"; {examples(choice[1:])} would do too" if choice[1:] else ""
        notes.append(f"{kind} column: {choice[0]!r} (guessed{others})")

    if not found["slide"] and (choice := candidates(SLIDE_COLUMNS)):
        take("slide", choice)
    if not found["patient"] and (choice := candidates(PATIENT_COLUMNS)):
        take("patient", choice)
    if not found["slide"]:
        found["slide"] = _only_id(frame, path, found, notes)
    if not found["label"]:
        take("label", _label_choice(frame, path, candidates(LABEL_COLUMNS), found))
    if not found["split"]:
        parts = [c for c in candidates(SPLIT_COLUMNS) if {v.casefold() for v in frame[c]} <= {*PART_OF_WORD, ""}]
        if parts:
            take("split", parts)
    if found["label"] in (found["slide"], found["patient"]):
        raise CarmilError(f"{path}: column {found['label']!r} cannot be id and label at once; name two columns")
    return found


def _named(frame: "pd.DataFrame", path: Path, kind: str, name: str) -> str:
    if name in frame.columns:
        return name
    alike = [column for column in frame.columns if plain_name(column) == plain_name(name)]
    if len(alike) != 1:
        raise CarmilError(f"{path}: {unknown(f'{kind} column', name, frame.columns)}")
    return alike[0]


def _only_id(frame: "pd.DataFrame", path: Path, found: dict[str, str | None], notes: list[str]) -> str:
    """Without a column for slides, the patients' ids are the slides'; without those, a first column may be ids."""
    if patient := found["patient"]:
        notes.append(f"slide column: {patient!r}, the only column of ids; each one is its own patient")
        return patient
    first = frame.columns[0]
    if first in found.values() or not frame[first].is_unique or "" in set(frame[first]):
        raise CarmilError(
            f"{path}: no column of slide ids found among {', '.join(map(repr, frame.columns))}; name it with --slide"
        )
    notes.append(f"slide column: {first!r} (guessed: the first column, and all its values differ)")
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
    times = [column for column in rest if _TIME.fullmatch(plain_name(column))]
    events = [column for column in rest if _EVENT.fullmatch(plain_name(column)) and column not in times[:1]]
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


def _described(column: str | None, named: str | None) -> str:
    return f"column {column!r}" if named else f"column {column!r} (guessed)"


def _labelled(
    frame: "pd.DataFrame", path: Path, column: str | None, described: str, notes: list[str]
) -> "pd.DataFrame":
    empty = frame[column].str.casefold().isin(_NO_LABEL)
    if empty.all():
        raise CarmilError(
            f"{path}: {described} has no label in any of its {plural(len(frame), 'row')}; name another with --label"
        )
    if empty.any():
        many = plural(int(empty.sum()), "slide has", "slides have")
        be = "is" if empty.sum() == 1 else "are"
        loud = _HALF if 2 * empty.sum() > len(frame) else ""
        notes.append(f"{loud}{many} an empty label in {described} and {be} left out ({_lines(frame.index[empty])})")
    return frame[~empty].copy()


def _mapped(labels: list[str], mapping: Mapping[str, str], where: str, notes: list[str]) -> list[str]:
    """Labels by their new names, "" for those that are dropped."""
    counts = Counter(labels)
    for name, new in mapping.items():
        if name not in counts:
            raise CarmilError(f"{where}: {unknown('label to map', name, counts)}")
        slides = plural(counts[name], "slide")
        notes.append(f"{slides} labelled {name!r} {f'taken as {new!r}' if new else 'left out'}")
    if all(mapping.get(label, label) == "" for label in counts):
        raise CarmilError(f"{where}: every label is dropped; expected two or more to remain")
    return [mapping.get(label, label) for label in labels]


def _ids(
    frame: "pd.DataFrame", path: Path, columns: dict[str, str | None], notes: list[str]
) -> tuple[list[str], list[str]]:
    written = list(frame[columns["slide"]])
    slides = [bare_id(text) for text in written]
    _check_ids(slides, frame.index, path, columns["slide"])
    if folders := [text for text in written if "/" in text or "\\" in text]:
        many = plural(len(folders), "slide id is a path", "slide ids are paths")
        notes.append(f"{many}: only the file name counts ({bare_id(folders[0])!r})")
    if columns["patient"] and columns["patient"] != columns["slide"]:
        patients = list(frame[columns["patient"]])
        _check_ids(patients, frame.index, path, columns["patient"])
        return slides, patients
    barcodes = [_TCGA.match(slide) for slide in slides]
    if all(barcodes):
        patients = [barcode[1] for barcode in barcodes if barcode]
        if patients != slides:
            notes.append(f"no patient column: patients are read from the TCGA barcodes ({patients[0]!r})")
        return slides, patients
    if not columns["patient"]:
        alone = "no patient column: each slide is its own patient"
        spare = [column for column in frame.columns if column not in columns.values()]
        notes.append(
            f"WARNING: {alone}; is it {' or '.join(map(repr, spare[:4]))}? Name it with --patient" if spare else alone
        )
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


def _tidy_labels(labels: list[str], notes: list[str]) -> list[str]:
    """Whole numbers that went through pandas as floats, 0.0 and 1.0, are 0 and 1 again."""
    whole = [re.fullmatch(r"([+-]?\d+)(\.0*)?", label) for label in labels]
    if not all(whole) or not any("." in label for label in labels):
        return labels
    notes.append(
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


def _once(rows: list[_Row], path: Path, notes: list[str]) -> list[_Row]:
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
        many = plural(len(repeated), "row repeats a slide and is", "rows repeat a slide and are")
        notes.append(f"{many} counted once ({examples(repeated)})")
    return list(first.values())


def _say_mixed_patients(rows: list[_Row], notes: list[str]) -> None:
    labels: dict[str, set[str]] = {}
    for row in rows:
        labels.setdefault(row.patient, set()).add(row.label)
    if mixed := [patient for patient, different in labels.items() if len(different) > 1]:
        notes.append(
            f"{plural(len(mixed), 'patient has', 'patients have')} slides of different labels ({examples(mixed)})"
        )


def _classes(
    labels: list[str], where: str, positive: str | None, known: Sequence[str], notes: list[str]
) -> tuple[str, ...]:
    counts = Counter(labels)
    numeric = all(_NUMBER.fullmatch(label) for label in counts)
    fractions = numeric and any(float(label) % 1 for label in counts)
    if numeric and len(counts) > (_MOST_FRACTIONS if fractions else _MOST_CLASSES):
        raise CarmilError(
            f"{where} has {len(counts)} different numbers: looks like a number to predict; "
            "carmil classifies: regression and survival are not supported; name a column of classes with --label"
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
            raise CarmilError(f"{where}: {unknown('positive class', positive, classes)}")
        if len(classes) != 2:
            raise CarmilError(f"{where} has {len(classes)} classes: a positive one can be named of two; leave it out")
        classes.sort(key=lambda c: c == positive)
    classes.sort(key=lambda c: known.index(c) if c in known else len(known))
    notes.append("classes: " + ", ".join(f"{c!r} ({plural(counts[c], 'slide')})" for c in classes))
    if positive is None and not known and len(classes) == 2 and not numeric:
        notes.append(
            f"positive class: {classes[1]!r} (guessed: the last in the alphabet; `carmil train --positive` names the other)"
        )
    return tuple(classes)


def _written_as_floats(rows: dict[str, int], bags: dict[str, int], notes: list[str]) -> dict[int, int]:
    """Ids like 123.0, which a table gets when pandas takes its ids for numbers."""
    found = {
        bags[slide[:-2]]: row
        for slide, row in rows.items()
        if slide.endswith(".0") and slide not in bags and slide[:-2] in bags and slide[:-2] not in rows
    }
    if found:
        example = next(slide for slide, row in rows.items() if row in found.values())
        many = plural(len(found), "slide id ends", "slide ids end")
        notes.append(f"{many} in '.0' (saved as numbers): {example!r} read as {example[:-2]!r}")
    return found


def _beginnings(bag: str) -> list[str]:
    """The name, and its beginnings up to a dash, underscore or dot, the longest first."""
    return [bag, *(bag[:cut] for cut in range(len(bag) - 1, 0, -1) if bag[cut] in "-_.")]


def _by_beginning(rows: dict[str, int], bags: dict[str, int], notes: list[str]) -> dict[int, int]:
    """Bags named like TCGA-A2-A0CM-01Z-00-DX1 for a table of TCGA-A2-A0CM: the longest beginning in the table."""
    found = {}
    for bag, position in bags.items():
        row = next((rows[name] for name in _beginnings(bag) if name in rows), None)
        if row is not None:
            found[position] = row
    if found:
        notes.append(
            f"the table's ids are taken as patients: {plural(len(found), 'bag is', 'bags are')} named after "
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
        f"{table.path}: none of its {plural(len(table.slides), 'slide')} is among the {plural(len(bags), 'bag')}; "
        f"{table.columns[0]} has ids like {table.slides[0]!r}, the bags like {bags[0]!r}; {advice}"
    )


def _say_match(
    table: LabelTable, *, unlabelled: Sequence[str], missing: Sequence[str], bags: int, notes: list[str]
) -> None:
    for lost, of, one, many in (
        (unlabelled, bags, "bags has no label and is left out", "bags have no label and are left out"),
        (
            missing,
            len(table.slides),
            f"labelled ids of {table.path.name} has no bag",
            f"labelled ids of {table.path.name} have no bag",
        ),
    ):
        if lost:
            loud = _HALF if 2 * len(lost) > of else ""
            notes.append(f"{loud}{len(lost)} of {of} {one if len(lost) == 1 else many} ({examples(lost)})")


def _say_alike(missing: Sequence[str], unlabelled: Sequence[str], notes: list[str]) -> None:
    """Ids that are the same but for the case of letters, the signs between them and zeros before a number."""

    def bare(name: str) -> str:
        return re.sub(r"[\W_]+", "-", re.sub(r"(?<!\d)0+(?=\d)", "", bare_id(name).casefold()))

    bags = {bare(bag): bag for bag in unlabelled}
    if alike := [(name, bags[bare(name)]) for name in missing if bare(name) in bags]:
        (label, bag), many = alike[0], plural(len(alike), "label has", "labels have")
        notes.append(
            f"WARNING: {many} no bag, and a bag with nearly their id has no label: {label!r} in the table, "
            f"{bag!r} among the bags; write them alike"
        )


def _lines(numbers: Iterable[int], most: int = 5) -> str:
    numbers = list(numbers)
    shown = ", ".join(str(number) for number in numbers[:most])
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return f"line{'s' if len(numbers) > 1 else ''} {shown}{more}"
