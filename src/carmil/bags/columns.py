"""Choose the columns of a label table: by known names, or by a guess where the user names none.

Every guess is noted, so that the user can see a wrong one. `_choose_label` alone chooses the column to predict.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from carmil.errors import CarmilError, unknown
from carmil.table_files import plain_name
from carmil.words import examples

if TYPE_CHECKING:
    import pandas as pd

# Names are compared in lower case, with _ for blanks, dashes and dots; the first name of a list is preferred.
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
KNOWN_COLUMNS = (*SLIDE_COLUMNS, *PATIENT_COLUMNS, *LABEL_COLUMNS, *SPLIT_COLUMNS)

PART_OF_WORD = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("cal", "calibration"), "cal"),
}

_TIME = re.compile(r"(.*_)?(time|months|days|years|survival|os|dss|pfs|pfi|dfs|follow_up)(_.*)?")
_EVENT = re.compile(r"(.*_)?(event|status|censor\w*|dead|death|deceased)(_.*)?")


@dataclass(frozen=True)
class LabelColumns:
    """The names of the columns of a label table, None for missing ones. `guessed` are the kinds that the user did not name."""

    slide: str
    patient: str | None
    label: str
    split: str | None
    site: str | None
    guessed: tuple[str, ...]

    def describe(self, kind: str) -> str:
        """Describe the column of a kind for a message."""
        return f"column {getattr(self, kind)!r}{' (guessed)' if kind in self.guessed else ''}"


def choose_columns(
    frame: "pd.DataFrame", path: Path, named: Mapping[str, str | None], notes: list[str]
) -> LabelColumns:
    """Return the columns that the user names, by kind, and guesses for the others."""
    chosen = {kind: None if name is None else named_column(frame, path, kind, name) for kind, name in named.items()}

    def candidates(names: Sequence[str]) -> list[str]:
        free = [column for column in frame.columns if column not in chosen.values()]
        return sorted((c for c in free if plain_name(c) in names), key=lambda c: names.index(plain_name(c)))

    def take(kind: str, columns: list[str]) -> None:
        if chosen[kind] is None and columns:
            chosen[kind] = columns[0]
            others = f"; {examples(columns[1:])} would do too" if columns[1:] else ""
            notes.append(f"{kind} column: {columns[0]!r} (guessed{others})")

    take("slide", candidates(SLIDE_COLUMNS))
    take("patient", candidates(PATIENT_COLUMNS))
    slide = chosen["slide"] = chosen["slide"] or _only_id(frame, path, chosen, notes)
    if not chosen["label"]:
        take("label", _choose_label(frame, path, candidates(LABEL_COLUMNS), chosen))
    parts = [c for c in candidates(SPLIT_COLUMNS) if {v.casefold() for v in frame[c]} <= {*PART_OF_WORD, ""}]
    take("split", parts)
    label = str(chosen["label"])
    if label in (slide, chosen["patient"]):
        raise CarmilError(f"{path}: column {label!r} cannot be both id and label; name two columns")
    guessed = tuple(kind for kind, name in named.items() if not name)
    return LabelColumns(slide, chosen["patient"], label, chosen["split"], chosen["site"], guessed)


def named_column(frame: "pd.DataFrame", path: Path, kind: str, name: str) -> str:
    """Return the column that a name refers to; separators and case may differ."""
    if name in frame.columns:
        return name
    alike = [column for column in frame.columns if plain_name(column) == plain_name(name)]
    if len(alike) != 1:
        raise CarmilError(f"{path}: {unknown(f'{kind} column', name, frame.columns)}")
    return alike[0]


def _only_id(frame: "pd.DataFrame", path: Path, chosen: Mapping[str, str | None], notes: list[str]) -> str:
    """Choose the column of ids if none holds slides: that of patients, or else the first if all its values differ."""
    if patient := chosen["patient"]:
        notes.append(f"slide column: {patient!r}, the only column of ids; each id is its own patient")
        return patient
    first = frame.columns[0]
    if first in chosen.values() or not frame[first].is_unique or "" in set(frame[first]):
        columns = ", ".join(map(repr, frame.columns))
        raise CarmilError(f"{path}: no column of slide ids found among {columns}; name it with --slide")
    notes.append(f"slide column: {first!r} (guessed: the first column, and all its values differ)")
    return first


def _choose_label(
    frame: "pd.DataFrame", path: Path, candidates: list[str], chosen: Mapping[str, str | None]
) -> list[str]:
    """Return the candidates for the label. Several candidates must agree up to renaming, since a wrongly guessed label would
    be the worst error.
    """
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
    rest = [column for column in frame.columns if column not in chosen.values()]
    times = [column for column in rest if _TIME.fullmatch(plain_name(column))]
    events = [column for column in rest if _EVENT.fullmatch(plain_name(column)) and column not in times[:1]]
    if times and events:
        raise CarmilError(
            f"{path}: columns {times[0]!r} and {events[0]!r} look like survival, and there is no label column: "
            f"predict the time with --target {times[0]} --event {events[0]}, or name a column of classes with --label"
        )
    if len(rest) != 1:
        columns = ", ".join(map(repr, frame.columns))
        raise CarmilError(f"{path}: no label column found among {columns}; name it with --label")
    return rest
