"""What is wrong with a cohort: with its files, with the store they were packed into, or between bags and labels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from carmil.bags.conversion import convert_features
from carmil.bags.duplicates import find_duplicates, judge_duplicates, labelled_duplicates
from carmil.bags.geometry import FARTHEST, UNKNOWN, TileGeometry
from carmil.bags.labels import LabelTable, match
from carmil.bags.readers import read_bag
from carmil.bags.sources import Bag, CohortFiles, Source, worker_count
from carmil.bags.store import ITEM_SIZE, Dtype, Entry, OnBag, Store, checksum, fingerprint_of
from carmil.errors import CarmilError
from carmil.processes import in_parallel
from carmil.words import examples, plural

if TYPE_CHECKING:
    from carmil.bags.bags import Unit

LARGEST_TILE = 1e6  # level-0 pixels or micrometres, the side of a tile: larger than any slide
MENTIONED = 0.001  # share of the nonzero features of a slide that become 0, above which there is a remark


@dataclass(frozen=True)
class Problem:
    """Something wrong with a bag, or with the whole cohort (`bag` is then empty)."""

    bag: str
    kind: str
    what: str


@dataclass(frozen=True)
class CohortCheck:
    """Problems and remarks about the files of a cohort, and the checksum of each bag as it would be stored."""

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
    """Read everything once and list what a build would refuse: unreadable, not finite, at impossible coordinates, too large or
    too small for `dtype`, of another width, encoder, pooling or tile geometry than most."""
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
    # Most tools record neither pooling nor geometry; a bag without them contradicts nothing.
    problems += _unusual("pooling", {bag: entry.pooling for bag, (entry, _) in good.items() if entry.pooling})
    recorded = {bag: entry.geometry for bag, (entry, _) in good.items() if entry.geometry != UNKNOWN}
    problems += _unusual("geometry", recorded)
    return CohortCheck(
        tuple(sorted(problems, key=lambda problem: (problem.bag, problem.kind))),
        tuple(remarks_on([entry for entry, _ in good.values()], dtype)),
        {source.id: good[source.id][0].checksum for source in files.sources if source.id in good},
    )


def check_store(store: Store, *, on_bag: OnBag = lambda done, total: None) -> list[Problem]:
    """Compare every bag with the checksum it was written with, and the index with its fingerprint."""
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
    """Problems between bags and labels, and notes: bags without a label, labels without a bag, and the same features under two
    patients."""
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
    """One sentence about bags with equal features whose patients are not known."""
    pairs = find_duplicates((name, "", "", checksum) for name, checksum in checksums.items())
    if not pairs:
        return None
    names = ", ".join(f"{pair.slides[0]!r} and {pair.slides[1]!r}" for pair in pairs[:3])
    return (
        f"{plural(len(pairs), 'pair')} of slides with the same features ({names}{', ...' if len(pairs) > 3 else ''}): "
        "--labels finds out whether they belong to one patient"
    )


def remarks_on(entries: Sequence[Entry], dtype: Dtype) -> list[str]:
    """One sentence each where features became 0 in the store, slides have no coordinates or not all of them in one unit, or
    only some slides have instance labels."""
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
            f"first in {int(bad.argmax())}: extract them again or leave the slide out"
        )


def check_place(bag: Bag, source: Source) -> None:
    """Refuse a bag with coordinates, or a size of its tiles, that no slide has."""
    if bag.coordinates is not None:
        bad = ~(np.abs(bag.coordinates) < FARTHEST).all(axis=1)  # NaN is not below anything
        if bad.any():
            x, y = bag.coordinates[int(bad.argmax())].tolist()
            raise CarmilError(
                f"{source.path}: {plural(int(bad.sum()), 'tile')} of {len(bad):,} at impossible coordinates, first tile "
                f"{int(bad.argmax())} at ({x:g}, {y:g}): expected numbers below {FARTHEST:g}; fix them, or write the features "
                "without coordinates"
            )
    if bag.tile_size is not None and not 0 < bag.tile_size <= LARGEST_TILE:
        raise CarmilError(
            f"{source.path}: tiles of {bag.tile_size:g} {bag.coordinate_unit or 'level0_px'} (patch_size_level0, tile_size): "
            f"expected a side above 0, at most {LARGEST_TILE:g}; fix it, or leave it out of the file"
        )


def _inspect(source: Source, dtype: str) -> tuple[Entry, int] | Problem:
    """The entry that the bag would have in a store, and the width of its features."""
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
    """The bags whose value differs from that of most."""
    usual = max(values.values(), key=list(values.values()).count, default=None)

    def differs(value: object) -> bool:
        if isinstance(value, TileGeometry) and isinstance(usual, TileGeometry):
            return value.differs_from(usual)
        return value != usual

    return [
        Problem(bag, kind, f"{kind} {value}, most bags have {usual}") for bag, value in values.items() if differs(value)
    ]
