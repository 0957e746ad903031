"""Check a cohort: its files, the store packed from them, and the match of bags and labels.

Equal features under two names mean that a slide was copied or that files were mixed up. Two bags are equal if the
bytes of their features are equal, in the type of the store and in the order of their tiles. Files of different types
or chunk sizes are equal if their stored values are. In a float16 store more pairs are equal than in a float32 store,
where a copy that was once saved in half precision differs. Bags with the same tiles in another order, or encoded
again, are not recognised.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from carmil.bags.geometry import FARTHEST, UNKNOWN, TileGeometry, Unit
from carmil.bags.labels import LabelledBags, LabelTable, match
from carmil.bags.readers import read_bag
from carmil.bags.sources import Bag, CohortFiles, Source, worker_count
from carmil.bags.store import ITEM_SIZE, Dtype, Entry, OnBag, Store, checksum, convert_features, fingerprint_of
from carmil.errors import CarmilError
from carmil.processes import in_parallel
from carmil.words import examples, plural

LARGEST_TILE = 1e6  # level-0 pixels or micrometres, the side of a tile: larger than any slide
MENTIONED = 0.001  # warn above this share of a slide's nonzero features that become 0
_NAMED = 3  # pairs named in one line


@dataclass(frozen=True)
class Problem:
    """A problem with a bag, or with the whole cohort if `bag` is empty."""

    bag: str
    kind: str
    what: str


@dataclass(frozen=True)
class CohortCheck:
    """Problems and notes about the files of a cohort, and the checksum that each bag would have in a store."""

    problems: tuple[Problem, ...]
    remarks: tuple[str, ...]
    checksums: dict[str, str]


def check_bags(
    files: CohortFiles,
    *,
    dtype: Dtype = "float16",
    workers: int | None = None,
    on_bag: OnBag = lambda done, total: None,
) -> CohortCheck:
    """Read all bags once and list the reasons for which a build would refuse them.

    These are unreadable files, features that are not finite or out of the range of `dtype`, impossible coordinates,
    and a width, encoder, pooling or tile geometry that differs from that of most bags."""
    problems: list[Problem] = []
    good: dict[str, tuple[Entry, int]] = {}
    jobs = ((source, (source, dtype)) for source in files.sources)
    for done, (source, result) in enumerate(in_parallel(_inspect, jobs, worker_count(workers, files.sources)), 1):
        on_bag(done, len(files.sources))
        if isinstance(result, Problem):
            problems.append(result)
        elif result[0].rows == 0:
            problems.append(Problem(source.id, "empty", "no tile; it is left out of a store"))
        else:
            good[source.id] = result
    problems += _unusual("width", {bag: width for bag, (_, width) in good.items()})
    problems += _unusual("encoder", {bag: entry.encoder for bag, (entry, _) in good.items()})
    # Most tools record neither pooling nor geometry; a bag without them is compatible with any.
    problems += _unusual("pooling", {bag: entry.pooling for bag, (entry, _) in good.items() if entry.pooling})
    recorded = {bag: entry.geometry for bag, (entry, _) in good.items() if entry.geometry != UNKNOWN}
    problems += _unusual("geometry", recorded)
    return CohortCheck(
        tuple(sorted(problems, key=lambda problem: (problem.bag, problem.kind))),
        tuple(remarks_on([entry for entry, _ in good.values()], dtype)),
        {source.id: good[source.id][0].checksum for source in files.sources if source.id in good},
    )


def check_store(store: Store, *, on_bag: OnBag = lambda done, total: None) -> list[Problem]:
    """Compare the features of every bag with the checksum in its entry, and the index with its fingerprint."""
    problems, first = [], 0
    if fingerprint_of(store.entries) != store.fingerprint:
        problems.append(Problem("", "index", "index.json was changed after the store was built: build again"))
    size = store.width * ITEM_SIZE[store.dtype]
    with (store.path / "features.bin").open("rb") as file:
        for done, entry in enumerate(store.entries, 1):
            file.seek(first * size)
            if checksum(file.read(entry.rows * size)) != entry.checksum:
                problems.append(Problem(entry.id, "checksum", "its bytes are not those that were written: build again"))
            first += entry.rows
            on_bag(done, len(store.entries))
    return problems


def check_labels(
    table: LabelTable, ids: Sequence[str], checksums: Mapping[str, str], *, allow_duplicates: bool = False
) -> tuple[list[Problem], list[str]]:
    """Return the problems between bags and labels, and notes about them.

    Notes are about bags without a label, labels without a bag, and equal features under two patients."""
    matched = match(table, ids)
    pairs = labelled_duplicates(table, matched, ids, checksums)
    refused = [pair for pair in pairs if pair.across_patients and not allow_duplicates]
    allowed = [pair for pair in pairs if pair.across_patients <= allow_duplicates]
    problems = [
        Problem(pair.slides[1], "DIFFERENT LABELS" if pair.labels_differ else "duplicate", f"same features: {pair}")
        for pair in refused
    ]
    empty = f"{table.columns[1]} of {table.path.name} is empty for it"
    problems += [Problem(name, "no label", f"not in {table.path.name}") for name in matched.unlabelled]
    problems += [Problem(name, "empty label", empty) for name in matched.left_out]
    problems += [Problem(name, "no features", f"in {table.path.name}, no such bag") for name in matched.missing]
    return problems, [*table.notes, *matched.notes, *judge_duplicates(allowed, allowed=True)]


def duplicates_note(checksums: Mapping[str, str]) -> str | None:
    """Describe bags with equal features whose patients are unknown, or return None."""
    pairs = find_duplicates((name, "", "", checksum) for name, checksum in checksums.items())
    if not pairs:
        return None
    names = ", ".join(f"{pair.slides[0]!r} and {pair.slides[1]!r}" for pair in pairs[:3])
    return (
        f"{plural(len(pairs), 'pair')} of slides with the same features ({names}{', ...' if len(pairs) > 3 else ''}): "
        "check with --labels whether they belong to one patient"
    )


def remarks_on(entries: Sequence[Entry], dtype: Dtype) -> list[str]:
    """Describe features that became 0 in the store, missing coordinates, mixed units and missing instance labels.

    Each note is one sentence."""
    remarks = []
    vanished = {entry.id: entry.vanished for entry in entries if entry.vanished > MENTIONED}
    if vanished:
        worst = max(vanished, key=lambda name: vanished[name])
        remarks.append(
            f"WARNING: tiny features of {plural(len(vanished), 'slide')} became 0 in {dtype}, up to {vanished[worst]:.1%} of the "
            f"nonzero ones ({worst!r}{', ...' if len(vanished) > 1 else ''}), and others near them lost digits: "
            "pack them with `carmil cohort build --dtype float32`"
        )
    slides: dict[Unit | None, list[str]] = {}
    for entry in entries:
        slides.setdefault(entry.unit, []).append(entry.id)
    if list(slides) == [None]:
        remarks.append(f"no coordinates in {plural(len(entries), 'slide')}: maps cannot be drawn onto slides")
    elif len(slides) > 1:
        parts = [
            f"{plural(len(names), 'slide')} {'without any' if unit is None else f'in {unit}'} ({examples(names)})"
            for unit, names in sorted(slides.items(), key=lambda item: (item[0] is None, item[0] or ""))
        ]
        remarks.append(f"coordinates differ between slides: {', '.join(parts)}; each slide keeps its own")
    without = [entry.id for entry in entries if not entry.truth]
    if 0 < len(without) < len(entries):
        remarks.append(
            f"{len(without)} of {plural(len(entries), 'slide')} without instance labels ({examples(without)}): "
            "the truth about their instances is unknown"
        )
    return remarks


def check_finite(bag: Bag, source: Source) -> None:
    """Refuse a bag with features that are not numbers."""
    bad = ~np.isfinite(bag.features).all(axis=1)
    if bad.any():
        raise CarmilError(
            f"{source.path}: NaN or infinite features in {int(bad.sum())} of {plural(len(bad), 'instance')}, "
            f"the first in instance {int(bad.argmax())}: extract them again or leave the slide out"
        )


def check_place(bag: Bag, source: Source) -> None:
    """Refuse a bag with coordinates or a tile size that are impossible for a slide."""
    if bag.coordinates is not None:
        bad = ~(np.abs(bag.coordinates) < FARTHEST).all(axis=1)  # NaN compares false
        if bad.any():
            x, y = bag.coordinates[int(bad.argmax())].tolist()
            raise CarmilError(
                f"{source.path}: {plural(int(bad.sum()), 'tile')} of {len(bad):,} at impossible coordinates, first tile "
                f"{int(bad.argmax())} at ({x:g}, {y:g}): expected numbers below {FARTHEST:g}; fix them, or write the features "
                "without coordinates"
            )
    if bag.tile_size is not None and not 0 < bag.tile_size <= LARGEST_TILE:
        raise CarmilError(
            f"{source.path}: tiles of {bag.tile_size:g} {bag.coordinate_unit or 'level0_px'} "
            f"(patch_size_level0, tile_size): expected a side above 0, at most {LARGEST_TILE:g}; correct it, "
            "or omit it from the file"
        )


def _inspect(source: Source, dtype: str) -> tuple[Entry, int] | Problem:
    """Return the entry that the bag would have in a store, and the width of its features."""
    kind = "unreadable"
    try:
        bag = read_bag(source)
        kind = "not finite"
        check_finite(bag, source)
        kind = "coordinates"
        check_place(bag, source)
        kind = "does not fit"
        return Entry.of(bag, *convert_features(bag, source, dtype)), bag.features.shape[1]
    except CarmilError as error:
        return Problem(source.id, kind, str(error))


def _unusual(kind: str, values: Mapping[str, object]) -> list[Problem]:
    """Return a problem for each bag whose value differs from that of most bags."""
    usual = max(values.values(), key=list(values.values()).count, default=None)

    def differs(value: object) -> bool:
        if isinstance(value, TileGeometry) and isinstance(usual, TileGeometry):
            return value.differs_from(usual)
        return value != usual

    return [
        Problem(bag, kind, f"{kind} {value}, most bags have {usual}") for bag, value in values.items() if differs(value)
    ]


@dataclass(frozen=True)
class Duplicate:
    """Two slides with equal features, and the patient and label of each."""

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
    """Find pairs of slides with equal checksums, from (slide, patient, label, checksum); pairs with different labels
    come first.

    Of three or more equal slides, each is paired with the first.
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
    """Find the pairs of labelled bags with equal features. `ids` are those of all bags, `checksums` those that are known."""
    return find_duplicates(
        (ids[i], patient, table.classes[label], checksums[ids[i]])
        for i, patient, label in zip(matched.bags, matched.patients, matched.labels, strict=True)
        if ids[i] in checksums
    )


def judge_duplicates(pairs: Sequence[Duplicate], *, allowed: bool) -> list[str]:
    """Refuse equal features under two patients, unless `allowed`; return one sentence per kind of pair."""
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
