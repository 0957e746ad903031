"""What is wrong with a cohort: with the files that it comes in, or with the store they were packed into."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from carmil.bags.conversion import converted, vanished_line
from carmil.bags.duplicates import find_duplicates, judge_duplicates, labelled_duplicates
from carmil.bags.geometry import FARTHEST, UNKNOWN, TileGeometry
from carmil.bags.labels import LabelTable, match
from carmil.bags.readers import read_bag
from carmil.bags.sources import Bag, Found, Header, Source
from carmil.bags.store import ITEM_SIZE, Dtype, OnBag, Store, checksum, fingerprint_of
from carmil.bags.tables import an_example
from carmil.bags.workers import in_parallel, worker_count
from carmil.errors import CarmilError
from carmil.words import plural

if TYPE_CHECKING:
    from carmil.bags.bags import Unit

LARGEST_TILE = 1e6  # level-0 pixels or micrometres, the side of a tile: larger than any slide


@dataclass(frozen=True)
class Problem:
    """Something wrong with a bag, or with the cohort as a whole (`bag` is then empty)."""

    bag: str
    kind: str
    what: str


@dataclass(frozen=True)
class Checked:
    """What a look at every file of a cohort found: problems, remarks, and the checksum of each bag as it would be stored."""

    problems: tuple[Problem, ...]
    remarks: tuple[str, ...]
    checksums: dict[str, str]


def check_bags(
    found: Found, *, dtype: Dtype = "float16", workers: int | None = None, on_bag: OnBag = lambda done, total: None
) -> Checked:
    """Read everything once and list what a build would refuse: unreadable, not finite, at impossible coordinates, too large or
    too small for `dtype`, of another width, encoder, pooling or tile geometry than most."""
    problems: list[Problem] = []
    good: dict[str, _Looked] = {}
    jobs = ((source, (source, dtype)) for source in found.sources)
    for done, (source, result) in enumerate(in_parallel(_looked_at, jobs, worker_count(workers, found.sources)), 1):
        on_bag(done, len(found.sources))
        if isinstance(result, Problem):
            problems.append(result)
        elif result.header.rows == 0:
            problems.append(Problem(source.id, "empty", "no tile; it is left out of a store"))
        else:
            good[source.id] = result
    for kind in ("width", "encoder", "pooling", "geometry"):
        values = {bag: getattr(looked.header, kind) for bag, looked in good.items()}
        if kind in ("pooling", "geometry"):  # most tools do not record these; a bag without them contradicts nothing
            values = {bag: value for bag, value in values.items() if value not in (None, UNKNOWN)}
        usual: Any = max(values.values(), key=list(values.values()).count, default=None)
        problems += [
            Problem(bag, kind, f"{kind} {value}, most bags have {usual}")
            for bag, value in values.items()
            if (value.differs_from(usual) if isinstance(value, TileGeometry) else value != usual)
        ]
    remarks = (
        vanished_line({bag: looked.vanished for bag, looked in good.items()}, dtype),
        coordinates_line({bag: looked.unit for bag, looked in good.items()}),
        instance_labels_line({bag: looked.truth for bag, looked in good.items()}),
    )
    return Checked(
        tuple(sorted(problems, key=lambda problem: (problem.bag, problem.kind))),
        tuple(line for line in remarks if line is not None),
        {source.id: good[source.id].checksum for source in found.sources if source.id in good},
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
    """What is wrong between bags and labels, and what is to be told: bags without a label, labels without a bag, and the same
    features under two patients."""
    matched = match(table, ids)
    pairs = labelled_duplicates(table, matched, ids, checksums)
    refused = [pair for pair in pairs if pair.across_patients and not allow_duplicates]
    allowed = [pair for pair in pairs if pair.across_patients <= allow_duplicates]
    problems = [
        Problem(pair.slides[1], "DIFFERENT LABELS" if pair.labels_differ else "duplicate", f"same features: {pair}")
        for pair in refused
    ]
    problems += [Problem(name, "no label", f"not in {table.path.name}") for name in matched.unlabelled]
    problems += [
        Problem(name, "empty label", f"{table.columns[1]} of {table.path.name} is empty for it")
        for name in matched.left_out
    ]
    problems += [Problem(name, "no features", f"in {table.path.name}, no such bag") for name in matched.missing]
    return problems, [*table.said, *matched.said, *judge_duplicates(allowed, allowed=True)]


def duplicates_line(checksums: Mapping[str, str]) -> str | None:
    """One sentence about bags with equal features where nobody knows their patients."""
    pairs = find_duplicates((name, "", "", checksum) for name, checksum in checksums.items())
    if not pairs:
        return None
    named = ", ".join(f"{pair.slides[0]!r} and {pair.slides[1]!r}" for pair in pairs[:3])
    return (
        f"{plural(len(pairs), 'pair')} of slides with the same features ({named}{', ...' if len(pairs) > 3 else ''}): "
        "--labels finds out whether they belong to one patient"
    )


def coordinates_line(units: "Mapping[str, Unit | None]") -> str | None:
    """One sentence where slides have no coordinates, or not all of them in one unit. units: by the slide's name."""
    slides: dict[Unit | None, list[str]] = {}
    for name, unit in units.items():
        slides.setdefault(unit, []).append(name)
    if list(slides) == [None]:
        return f"no coordinates in {plural(len(units), 'slide')}: maps cannot be drawn onto slides"
    if len(slides) < 2:
        return None
    parts = [
        f"{plural(len(names), 'slide')} {'without any' if unit is None else f'in {unit}'} ({an_example(names)})"
        for unit, names in sorted(slides.items(), key=lambda item: (item[0] is None, item[0] or ""))
    ]
    return f"coordinates differ between slides: {', '.join(parts)}; each slide keeps its own"


def instance_labels_line(known: Mapping[str, bool]) -> str | None:
    """One sentence where only some slides have instance labels. known: whether a slide has them, by its name."""
    without = [name for name, has in known.items() if not has]
    if len(without) in (0, len(known)):
        return None
    return (
        f"{len(without)} of {plural(len(known), 'slide')} without instance labels ({an_example(without)}): "
        "the truth about their instances is unknown"
    )


def plausible(bag: Bag, source: Source) -> Bag:
    """The bag, if its coordinates and the size of its tiles can be those of a slide; else it is refused."""
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
    return bag


def finite(bag: Bag, source: Source) -> Bag:
    """The bag, if all its features are numbers; else it is refused."""
    bad = ~np.isfinite(bag.features).all(axis=1)
    if bad.any():
        raise CarmilError(
            f"{source.path}: NaN or infinite features in {int(bad.sum())} of {plural(len(bad), 'instance')}, "
            f"first in {int(bad.argmax())}: extract them again or leave the slide out"
        )
    return bag


@dataclass(frozen=True)
class _Looked:
    header: Header
    vanished: float
    checksum: str
    unit: "Unit | None"
    truth: bool


def _looked_at(source: Source, dtype: str) -> _Looked | Problem:
    kind = "unreadable"
    try:
        bag = read_bag(source)
        kind = "not finite"
        finite(bag, source)
        kind = "coordinates"
        plausible(bag, source)
        kind = "does not fit"
        stored = converted(bag, source, dtype)
    except CarmilError as error:
        return Problem(source.id, kind, str(error))
    rows, width = bag.features.shape
    header = Header(rows, width, str(bag.features.dtype), bag.encoder, bag.pooling, bag.geometry)
    known = bag.instance_labels is not None
    return _Looked(header, stored.vanished, checksum(stored.values.tobytes()), bag.coordinate_unit, known)
