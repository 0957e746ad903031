"""Read outcomes from the columns of a label table: guess the kind of target, and refuse values that do not fit it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from carmil.errors import CarmilError
from carmil.targets import survival, value
from carmil.targets.labels import Labels
from carmil.targets.ordinal import Ordinal
from carmil.targets.survival import Survival
from carmil.targets.target import Target, check_loss, lost_in_rounding
from carmil.targets.value import Value
from carmil.words import examples, plural

if TYPE_CHECKING:
    import pandas as pd

Kind = Literal["classes", "ordinal", "labels", "value", "survival"]
FEW = 10  # more different whole numbers than this, or any fraction, are a quantity
MOST_GRADES = 20
_MISSING = {"", "na", "n/a", "#n/a", "nan", "<na>", "null"}
_YES = {"1", "1.0", "true", "yes", "y", "dead", "deceased", "died", "event", "recurred", "progressed", "positive"}
_NO = {"0", "0.0", "false", "no", "n", "alive", "living", "censored", "none", "negative"}
_CODED = re.compile(r"([01]):(.*)")  # cBioPortal's 1:DECEASED
_PLAIN = {"1", "1.0", "true", "yes", "y", "0", "0.0", "false", "no", "n"}  # words that say nothing about what happened
_NUMBERED = re.compile(r"(.*?)(\d+|[IVX]+|[A-Z])", re.IGNORECASE)  # G2, grade 2, Stage II, B
_ROMAN = {"I": 1, "II": 2, "III": 3, "IV": 4, "V": 5, "VI": 6, "VII": 7, "VIII": 8, "IX": 9}  # stage X is unknown


@dataclass(frozen=True)
class TargetColumns:
    """The target as the user names it: columns, the column of the event, the kind and the loss, None where guessed.

    grades: of an ordinal target, the lowest first; None if the values of the column have an order of their own.
    known: the target of a run, whose outcomes are read from another table; None if the target is to be determined.
    """

    columns: tuple[str, ...]
    event: str | None = None
    kind: Kind | None = None
    loss: str | None = None
    grades: tuple[str, ...] | None = None
    known: Target | None = None

    @property
    def all_columns(self) -> tuple[str, ...]:
        return self.columns if self.event is None else (*self.columns, self.event)


def target_columns(
    target: str | None,
    event: str | None,
    kind: Kind | None,
    loss: str | None,
    *,
    grades: str | None = None,
    label: str | None = None,
) -> TargetColumns | None:
    """Return the target that the settings name; None if they name none, so that classes are predicted."""
    if target is None:
        for name, given in (("event", event), ("kind", kind), ("loss", loss), ("grades", grades)):
            if given not in (None, "classes"):
                raise CarmilError(f"--{name} {given} without --target: name the column to predict with --target")
        return None
    if label is not None:
        raise CarmilError(f"--label {label} and --target {target} both name what is predicted: give one of them")
    columns = tuple(part.strip() for part in target.split(","))
    if not all(columns) or len(set(columns)) < len(columns):
        raise CarmilError(f"--target {target}: expected one column, or several different ones separated by commas")
    if event is not None and kind not in (None, "survival"):
        raise CarmilError(f"--event {event} and --kind {kind}: --event is for survival only; leave one of them out")
    if event is not None and len(columns) > 1:
        raise CarmilError(f"--target {target} with --event {event}: expected one column of times")
    if event in columns:
        raise CarmilError(f"--target {target} and --event {event} name the same column: expected a time and an event")
    names = None if grades is None else tuple(part.strip() for part in grades.split(","))
    if names is not None and (event is not None or kind not in (None, "ordinal") or len(columns) > 1):
        raise CarmilError(
            f"--grades {grades}: expected one column of ordered grades, --target COLUMN --grades LOWEST,...,HIGHEST"
        )
    if names is not None and (len(names) < 2 or not all(names) or len(set(names)) < len(names)):
        raise CarmilError(f"--grades {grades}: expected at least two different grades, the lowest first")
    if kind == "survival" and event is None:
        raise CarmilError(
            f"--kind survival without --event: name the column of events, --target {target} --event EVENT"
        )
    if len(columns) > 1 and kind not in (None, "labels"):
        raise CarmilError(
            f"--target {target} with --kind {kind}: expected one column; several columns are of the kind 'labels'"
        )
    if event is not None:
        kind = "survival"
    elif len(columns) > 1:
        kind = "labels"
    elif names is not None:
        kind = "ordinal"
    return TargetColumns(columns, event, kind, loss, names)


def columns_of(target: Target) -> TargetColumns:
    """Return the columns of a table that hold the outcomes of a run's target."""
    event = target.columns[1] if isinstance(target, Survival) else None
    columns = target.columns[:1] if event is not None else target.columns
    return TargetColumns(columns, event, known=target)


def kind_of(named: TargetColumns, cells: "pd.DataFrame", notes: list[str]) -> Kind:
    """Return the kind of target, guessed from the values of its column unless it is named; the guess is noted."""
    kind = named.kind or _guess(named.columns[0], cells, notes)
    if kind == "classes":
        check_loss(named.loss, (), kind)
    return kind


def _guess(column: str, cells: "pd.DataFrame", notes: list[str]) -> Kind:
    texts = [text for text in cells[column] if text.casefold() not in _MISSING]
    numbers = {number for text in texts if (number := _number(text)) is not None}
    words = [text for text in texts if _number(text) is None]
    if len(numbers) > FEW or any(number % 1 for number in numbers):
        notes.append(
            f"target {column!r}: a number (guessed: {plural(len(numbers), 'different number')}; use --kind classes if "
            "they name classes)"
        )
        return "value"
    if words:
        notes.append(
            f"target {column!r}: classes (guessed: it has words, such as {words[0]!r}; use --ordinal if they are ordered "
            "grades)"
        )
    else:
        notes.append(
            f"target {column!r}: classes (guessed: {plural(len(numbers), 'different whole number')}; use --ordinal if they "
            "are ordered grades, --kind value if they are a quantity)"
        )
    return "classes"


def read_outcomes(
    named: TargetColumns, kind: str, cells: "pd.DataFrame", slides: Sequence[str], where: str, notes: list[str]
) -> tuple[Target, NDArray[Any]]:
    """Return the target and the outcomes (s) or (s, t) of the slides. cells: text, one row per slide, by column."""
    match kind:
        case "survival":
            return _survival(named, cells, slides, where, notes)
        case "value":
            return _value(named, cells, slides, where)
        case "ordinal":
            return _ordinal(named, cells, where, notes)
        case "labels":
            return _labels(named, cells, slides, where)
    raise ValueError(f"no outcomes of the kind {kind!r}")


def _survival(
    named: TargetColumns, cells: "pd.DataFrame", slides: Sequence[str], where: str, notes: list[str]
) -> tuple[Target, NDArray[Any]]:
    time_column, event_column = named.all_columns
    for given, missing in ((time_column, event_column), (event_column, time_column)):
        _check_complete(cells, given, missing, slides, where)
    times = _numbers(list(cells[time_column]), slides, f"{where}: column {time_column!r}")
    if (times < 0).any():
        raise CarmilError(
            f"{where}: column {time_column!r} has {times.min():g} for slide {slides[int(times.argmin())]!r}: expected a time "
            "of 0 or more; correct it, or leave the slide out"
        )
    events, inverted = _events(list(cells[event_column]), slides, event_column, where)
    if inverted:
        notes.append(
            f"column {event_column!r} names censoring: 1 is taken as censored, 0 as an event (rename the column if it is "
            "the other way round)"
        )
    count = int(events.sum())
    if named.known is None:
        _check_spread(times, f"{where}: column {time_column!r}")
        if count == 0:
            because = " (0 is an event, as the column names censoring)" if inverted else ""
            raise CarmilError(
                f"{where}: column {event_column!r} has no event, all {plural(len(events), 'slide')} are censored{because}: "
                "expected some events; check whether events and censoring are the wrong way round"
            )
    notes.append(
        f"survival: time {time_column!r}, event {event_column!r}; {count} of {plural(len(events), 'slide')} with an event, "
        f"median time {np.median(times):.4g}"
    )
    target = named.known or Survival(
        columns=(time_column, event_column), loss=check_loss(named.loss, survival.LOSSES, "survival")
    )
    return target, np.stack([times, events], axis=1)


def _check_complete(cells: "pd.DataFrame", given: str, missing: str, slides: Sequence[str], where: str) -> None:
    """Refuse slides that have a time without an event, or the other way round."""
    alone = [
        slide
        for slide, here, there in zip(slides, cells[given], cells[missing], strict=True)
        if here.casefold() not in _MISSING and there.casefold() in _MISSING
    ]
    if alone:
        raise CarmilError(
            f"{where}: {plural(len(alone), 'slide has', 'slides have')} a value in column {given!r} but none in column "
            f"{missing!r} ({examples(alone)}): fill in both cells, or empty both to leave the slide out"
        )


def _events(texts: Sequence[str], slides: Sequence[str], column: str, where: str) -> tuple[NDArray[np.float64], bool]:
    """Return 1 for each event and 0 for each censored slide, and whether the column's values are reversed.

    They are if the column is named after censoring, unless its words state what happened, such as "dead".
    """
    events = np.array([_yes_or_no(text, slide, column, where) for text, slide in zip(texts, slides, strict=True)])
    if not survival.names_no_event(column):
        return events, False
    plain = [text for text in texts if text.casefold() in _PLAIN]
    words = [text for text in texts if text.casefold() not in _PLAIN]
    if plain and words:
        raise CarmilError(
            f"{where}: column {column!r} names censoring and has both {plain[0]!r} and {words[0]!r}: expected one or the other "
            "throughout, as the first is read the other way round"
        )
    return (1 - events if plain else events), bool(plain)


def _value(
    named: TargetColumns, cells: "pd.DataFrame", slides: Sequence[str], where: str
) -> tuple[Target, NDArray[Any]]:
    (column,) = named.columns
    guessed = named.kind is None and named.known is None
    otherwise = "; use --kind classes if the column names classes" if guessed else ""
    numbers = _numbers(list(cells[column]), slides, f"{where}: column {column!r}", otherwise)
    if named.known is None:
        _check_spread(numbers, f"{where}: column {column!r}")
    target = named.known or Value(columns=(column,), loss=check_loss(named.loss, value.LOSSES, "value"))
    return target, numbers[:, None]


def _ordinal(named: TargetColumns, cells: "pd.DataFrame", where: str, notes: list[str]) -> tuple[Target, NDArray[Any]]:
    (column,) = named.columns
    check_loss(named.loss, (), "ordinal")
    texts = [_whole(text) for text in cells[column]]
    if named.known is not None:
        grades = named.known.answer_names
        if unknown_grades := sorted(set(texts) - set(grades)):
            raise CarmilError(
                f"{where}: column {column!r} has {examples(unknown_grades)}, which the run was not trained on: expected "
                f"one of {', '.join(grades)}; correct these cells, or leave their slides out"
            )
        return named.known, np.array([grades.index(text) for text in texts])
    different = sorted(set(texts), key=lambda text: (_number(text) is None, _number(text) or 0.0, text))
    if len(different) < 2:
        raise CarmilError(
            f"{where}: column {column!r} is {different[0]!r} for every slide: expected at least two grades; name another "
            "column with --target"
        )
    if len(different) > MOST_GRADES:
        raise CarmilError(
            f"{where}: column {column!r} has {len(different)} different grades: expected at most {MOST_GRADES}; use "
            "--kind value if they are a quantity"
        )
    for first, second in combinations(different, 2):
        if first.casefold() == second.casefold() or (_number(first) is not None and _number(first) == _number(second)):
            raise CarmilError(
                f"{where}: column {column!r} has {first!r} and {second!r}, two spellings of the same grade; use one spelling"
            )
    grades = _ordered_grades(different, f"{where}: column {column!r}") if named.grades is None else named.grades
    if wrong := sorted(set(grades) ^ set(different)):
        missing = wrong[0] in different
        raise CarmilError(
            f"{where}: column {column!r} and --grades {','.join(grades)} differ: {examples(wrong)} "
            f"{'is only in the table' if missing else 'is only in --grades'}; name every grade of the table once, the lowest first"
        )
    notes.append(f"grades: {' < '.join(grades)}")
    return Ordinal(columns=(column,), names=tuple(grades)), np.array([grades.index(text) for text in texts])


def _ordered_grades(different: Sequence[str], where: str) -> tuple[str, ...]:
    """Order grades that are numbers, or end with a number, a Roman numeral or a letter after a common beginning."""
    ranks = [_number(text) for text in different]
    if None in ranks:
        parts = [_NUMBERED.fullmatch(text) for text in different]
        beginnings = {part[1].casefold() for part in parts if part}
        ends = [part[2].upper() for part in parts if part]
        alike = len(ends) == len(different) and len(beginnings) == 1
        if alike and all(end.isdigit() for end in ends):
            ranks = [float(end) for end in ends]
        elif alike and all(end in _ROMAN for end in ends):
            ranks = [float(_ROMAN[end]) for end in ends]
        elif alike and all(len(end) == 1 and end.isalpha() for end in ends):
            ranks = [float(ord(end)) for end in ends]
        else:
            raise CarmilError(
                f"{where} has grades whose order is unknown, {examples(different, 3)}: name them, the lowest first, with "
                f"--grades {','.join(different)} (in your order)"
            )
    return tuple(text for _, text in sorted(zip(ranks, different, strict=True)))


def _labels(
    named: TargetColumns, cells: "pd.DataFrame", slides: Sequence[str], where: str
) -> tuple[Target, NDArray[Any]]:
    check_loss(named.loss, (), "labels")
    columns = []
    for column in named.columns:
        values = [
            np.nan if text.casefold() in _MISSING else _yes_or_no(text, slide, column, where)
            for text, slide in zip(cells[column], slides, strict=True)
        ]
        known = {value for value in values if not np.isnan(value)}
        if len(known) < 2 and named.known is None:
            found = f"is {known.pop():g} for every slide that has a value" if known else "has no value for any slide"
            raise CarmilError(
                f"{where}: column {column!r} {found}: expected both 0 and 1; leave the column out of --target"
            )
        columns.append(values)
    return named.known or Labels(columns=named.columns), np.array(columns, dtype=np.float64).T


def _numbers(texts: Sequence[str], slides: Sequence[str], where: str, otherwise: str = "") -> NDArray[np.float64]:
    """Return the numbers of a column. otherwise: a further remedy for a cell without a number, for the message."""
    numbers = [_number(text) for text in texts]
    for text, number, slide in zip(texts, numbers, slides, strict=True):
        if number is None:
            raise CarmilError(
                f"{where} has {text!r} for slide {slide!r}: expected a number, such as 12.5; correct it, or leave the slide "
                f"out{otherwise}"
            )
    return np.array(numbers, dtype=np.float64)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if np.isfinite(number) and abs(number) < 1e15 else None


def _check_spread(numbers: NDArray[np.float64], where: str) -> None:
    """Refuse numbers that are all equal, at least in single precision: nothing can be learned from them."""
    if np.ptp(numbers) == 0:
        raise CarmilError(
            f"{where} is {numbers[0]:g} for every slide: expected different numbers; name another column with --target"
        )
    if lost_in_rounding(numbers):
        raise CarmilError(
            f"{where} has numbers from {numbers.min():.12g} to {numbers.max():.12g}, too close to each other for their size: "
            "subtract a constant, such as the smallest"
        )


def _whole(text: str) -> str:
    """Return a whole number without its decimal point: tables with missing values are saved with 1.0 for 1."""
    return text[:-2] if text.endswith(".0") and _number(text) is not None else text


def _yes_or_no(text: str, slide: str, column: str, where: str) -> float:
    word = text.strip().casefold()
    if coded := _CODED.fullmatch(word):
        number, meaning = coded.groups()
        if (number == "1" and meaning in _NO) or (number == "0" and meaning in _YES):
            raise CarmilError(
                f"{where}: column {column!r} has {text!r} for slide {slide!r}: expected a number that agrees with its word, "
                "such as 1:DECEASED and 0:LIVING; remove the numbers, and keep the words"
            )
        word = number
    if word not in _YES | _NO:
        raise CarmilError(
            f"{where}: column {column!r} has {text!r} for slide {slide!r}: expected 1 or 0, or words such as yes, no, dead or "
            "alive; correct the table"
        )
    return float(word in _YES)
