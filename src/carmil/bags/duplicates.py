"""The same features under two names: a slide that was copied, or a mix-up of files.

Two bags are the same if the bytes of their features are equal, in the type of the store and in the order of their tiles. Files of
different types or chunks are equal if their stored values are: float16 finds more pairs than float32, in which a copy that was
once saved in half precision differs. The same tiles in another order, or encoded again, are not found.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from carmil.bags.labels import LabelledBags, LabelTable
from carmil.errors import CarmilError
from carmil.words import plural

_NAMED = 3  # pairs that one line names


@dataclass(frozen=True)
class Duplicate:
    """Two slides with the same features; patients and labels are of the first and the second."""

    slides: tuple[str, str]
    patients: tuple[str, str]
    labels: tuple[str, str]

    @property
    def across_patients(self) -> bool:
        return self.patients[0] != self.patients[1]

    @property
    def labels_differ(self) -> bool:
        return self.labels[0] != self.labels[1]

    def __str__(self) -> str:
        (first, second), (one, other), (label, otherwise) = self.slides, self.patients, self.labels
        if not self.across_patients:
            words = f"{first!r} and {second!r} of patient {one!r}"
            return f"{words}, labelled {label!r} and {otherwise!r}" if self.labels_differ else words
        if self.labels_differ:
            return f"{first!r} of patient {one!r} labelled {label!r} and {second!r} of patient {other!r} labelled {otherwise!r}"
        return f"{first!r} of patient {one!r} and {second!r} of patient {other!r}"


def find_duplicates(slides: Iterable[tuple[str, str, str, str]]) -> list[Duplicate]:
    """Pairs of slides (slide, patient, label, checksum) with equal checksums, pairs with different labels first.

    Of several equal slides each is paired with the first.
    """
    first: dict[str, tuple[str, str, str, str]] = {}
    pairs = []
    for slide in slides:
        twin = first.setdefault(slide[3], slide)
        if twin is not slide:
            pairs.append(Duplicate(*((twin[k], slide[k]) for k in range(3))))
    return sorted(pairs, key=lambda pair: (not pair.labels_differ, not pair.across_patients))


def labelled_duplicates(
    table: LabelTable, matched: LabelledBags, ids: Sequence[str], checksums: Mapping[str, str]
) -> list[Duplicate]:
    """The pairs of labelled bags with equal features. ids: of all bags; checksums: of those whose features are known."""
    return find_duplicates(
        (ids[i], patient, table.classes[label], checksums[ids[i]])
        for i, patient, label in zip(matched.bags, matched.patients, matched.labels, strict=True)
        if ids[i] in checksums
    )


def judge_duplicates(pairs: Sequence[Duplicate], *, allowed: bool) -> list[str]:
    """Refuse the same features under two patients, unless that is allowed; return one sentence per kind of pair."""
    across = [pair for pair in pairs if pair.across_patients]
    within = [pair for pair in pairs if not pair.across_patients]
    lines = []
    if across:
        line = f"{_pairs(across, 'of different patients')}: {_named(across)}"
        if not allowed:
            raise CarmilError(
                f"{line}: a model would be tested on what it was trained on; remove the copies or correct the patients "
                "(`carmil cohort check --labels` lists every pair), or pass --allow-duplicates if this is intended"
            )
        lines.append(f"WARNING: {line}: a fold may be tested on what it was trained on")
    if within:
        loud = "WARNING: " if any(pair.labels_differ for pair in within) else ""
        lines.append(f"{loud}{_pairs(within, 'of one patient')}: {_named(within)}")
    return lines


def _pairs(pairs: Sequence[Duplicate], of: str) -> str:
    differing = sum(pair.labels_differ for pair in pairs)
    words = f"{plural(len(pairs), 'pair')} of slides {of} {'has' if len(pairs) == 1 else 'have'} the same features"
    if not differing:
        return words
    return f"{words} and DIFFERENT LABELS" if differing == len(pairs) else f"{words}, {differing} with DIFFERENT LABELS"


def _named(pairs: Sequence[Duplicate]) -> str:
    more = f"; and {len(pairs) - _NAMED} more" if len(pairs) > _NAMED else ""
    return "; ".join(map(str, pairs[:_NAMED])) + more
