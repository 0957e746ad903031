"""Build a store from the files of a cohort in any supported layout.

A plan assigns rows of the store to each bag, workers write them, and a journal lists the bags that are complete. The
store is built in a folder of its own, STORE.building. If the build is interrupted, the same command packs the bags
missing from the journal, and the resulting store has the same bytes.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from carmil.bags.checking import check_bags, check_finite, check_place, remarks_on
from carmil.bags.finding import find_bags
from carmil.bags.geometry import UNKNOWN
from carmil.bags.readers import read_bag, read_header
from carmil.bags.sources import BagHeader, CohortFiles, Source, worker_count
from carmil.bags.store import (
    ITEM_SIZE,
    VERSION,
    Dtype,
    Entry,
    OnBag,
    Store,
    StoreIndex,
    building_folder,
    convert_features,
    fingerprint_of,
    is_store,
    open_store,
)
from carmil.csv_files import csv_text
from carmil.errors import CarmilError
from carmil.files import name_write_errors, write_text
from carmil.locks import folder_lock
from carmil.processes import in_parallel
from carmil.words import examples, plural

_OR_SKIP = "fix the file and run again, or leave it out with `carmil cohort build --skip-broken`"
_LIST = "`carmil cohort check` lists all that differ, --skip-broken leaves them out"


def build_store(
    origin: Path,
    out: Path,
    *,
    dtype: Dtype = "float16",
    truth: str | None = None,
    workers: int | None = None,
    skip_broken: bool = False,
    log: Callable[[str], None] = lambda line: None,
    on_bag: OnBag = lambda done, total: None,
) -> Store:
    """Pack the cohort at `origin` into a store at `out`. If interrupted, the same call resumes."""
    out = out.resolve() if out.is_symlink() else out  # the store replaces the folder, not the link to it
    files = find_bags(origin, truth=truth)
    for line in files.notes:
        log(line)
    build = _Build(
        files, origin, out, _signature(files.sources, origin, dtype), dtype, workers, skip_broken, log, on_bag
    )
    if not is_store(out):
        with folder_lock(lock_file(out), out):
            if not is_store(out):
                build.run()
    store = open_store(out)
    if store.index.signature != build.signature:
        raise CarmilError(
            f"{out} holds another cohort, or {origin} has changed since: choose another --out or remove {out}"
        )
    return store


def lock_file(out: Path) -> Path:
    """Return the lock file for writing the store `out`; it is beside the store, since the store replaces its building folder."""
    return out.with_name(f"{out.name}.lock")


def _signature(sources: Sequence[Source], origin: Path, dtype: str) -> str:
    """Return a checksum over all source files: path relative to `origin`, size and modification time."""
    digest = hashlib.sha256(dtype.encode())
    for source in sources:
        files = [source.path, *(path for _, path in source.companions)]
        facts = [(os.path.relpath(path, origin), *_size_and_time(path)) for path in files]
        digest.update(repr((source.id, source.key, source.label, facts)).encode())
    return digest.hexdigest()


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        facts = path.stat()
    except OSError as error:
        raise CarmilError(
            f"{path} has vanished or cannot be read ({error.strerror}): restore it and run again"
        ) from error
    return facts.st_size, facts.st_mtime_ns


@dataclass(frozen=True)
class _Place:
    """The rows of the store assigned to a bag."""

    source: Source
    first: int
    rows: int
    width: int


@dataclass(frozen=True)
class _Plan:
    places: tuple[_Place, ...]
    empty: tuple[str, ...]
    left_out: tuple[str, ...]
    width: int


@dataclass(frozen=True)
class _Build:
    files: CohortFiles
    origin: Path
    out: Path
    signature: str
    dtype: Dtype
    workers: int | None
    skip_broken: bool
    log: Callable[[str], None]
    on_bag: OnBag

    @property
    def folder(self) -> Path:
        return building_folder(self.out)

    def run(self) -> None:
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise CarmilError(f"{self.out} exists and is not a store: choose another --out")
        if not (self.folder / "index.json").exists():
            plan = self._saved_plan() or self._new_plan()
            self._pack(plan)
            self._finish(plan)
        for name in ("plan.json", "journal.jsonl"):
            (self.folder / name).unlink(missing_ok=True)
        if self.out.is_dir():
            self.out.rmdir()
        os.replace(self.folder, self.out)

    def _saved_plan(self) -> _Plan | None:
        """Read the plan of an interrupted build from the same files, if there is one."""
        try:
            facts = json.loads((self.folder / "plan.json").read_text(encoding="utf-8"))
            if facts["signature"] == self.signature and facts["skip_broken"] == self.skip_broken:
                by_id = {source.id: source for source in self.files.sources}
                places = tuple(_Place(by_id[name], *numbers) for name, *numbers in facts["places"])
                return _Plan(places, tuple(facts["empty"]), tuple(facts["left_out"]), facts["width"])
            self.log(f"{self.folder}: the files or options have changed since this build began; starting again")
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError):
            self.log(f"{self.folder} contains no build to resume; starting again")
        return None

    def _new_plan(self) -> _Plan:
        """Plan a new build, and write the plan into the building folder with empty files of the final size."""
        plan = self._assign_rows()
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "journal.jsonl").unlink(missing_ok=True)
        rows = sum(place.rows for place in plan.places)
        sizes = {
            "features.bin": rows * plan.width * ITEM_SIZE[self.dtype],
            "coordinates.bin": rows * 8,
            "instance_labels.bin": rows * 8,
        }
        for name, size in sizes.items():
            with name_write_errors(self.folder / name), (self.folder / name).open("wb") as file:
                file.truncate(size)
        facts = {
            "signature": self.signature,
            "skip_broken": self.skip_broken,
            "width": plan.width,
            "empty": plan.empty,
            "left_out": plan.left_out,
            "places": [(place.source.id, place.first, place.rows, place.width) for place in plan.places],
        }
        write_text(self.folder / "plan.json", json.dumps(facts))
        return plan

    def _assign_rows(self) -> _Plan:
        broken = self._broken_bags() if self.skip_broken else ()
        places: list[_Place] = []
        empty: list[str] = []
        unknown: list[str] = []  # bags whose tile geometry is not recorded
        first = 0
        common: BagHeader | None = None
        for source in self.files.sources:
            if source.id in broken:
                continue
            try:
                header = read_header(source)
            except CarmilError as error:
                raise CarmilError(f"{error}; {_OR_SKIP}") from None
            if header.rows == 0:
                empty.append(source.id)
                continue
            common = _common_header(common, header, source, places[0].source.id if places else "")
            unknown += [source.id] if header.geometry == UNKNOWN else []
            places.append(_Place(source, first, header.rows, header.width))
            first += header.rows
        if common is None:
            raise CarmilError(f"no bag with instances among {len(self.files.sources)}: expected at least one")
        if unknown and common.geometry != UNKNOWN:
            self.log(
                f"the tile geometry of {len(unknown)} of {plural(len(places), 'bag')} is not recorded ({examples(unknown)}): "
                f"it could not be checked that they have {common.geometry} like the others"
            )
        if empty:
            many = plural(len(empty), "empty slide has no tiles and is", "empty slides have no tiles and are")
            self.log(f"{many} left out: {examples(empty, 3)}")
        return _Plan(tuple(places), tuple(empty), tuple(broken), common.width)

    def _broken_bags(self) -> list[str]:
        check = check_bags(self.files, dtype=self.dtype, workers=self.workers)
        broken = {problem.bag: problem.what for problem in check.problems if problem.kind != "empty"}
        for name, what in broken.items():
            self.log(f"left out: {name}: {what}")
        return list(broken)

    def _pack(self, plan: _Plan) -> None:
        """Write the rows of every bag missing from the journal; a bag is added to the journal when its bytes are on the disk."""
        done = self._read_journal()
        remaining = [place for place in plan.places if place.source.id not in done]
        if done:
            self.log(
                f"{len(done)} of {plural(len(plan.places), 'bag')} already packed; resuming with the remaining ones"
            )
        total, finished = len(plan.places), len(done)
        jobs = ((place.source, (place, self.folder, self.dtype)) for place in remaining)
        count = worker_count(self.workers, [place.source for place in remaining])
        features, journal = self.folder / "features.bin", self.folder / "journal.jsonl"
        with features.open("rb") as rows, journal.open("ab", buffering=0) as lines:
            for _, result in in_parallel(_pack_bag, jobs, count):
                if isinstance(result, CarmilError):
                    raise CarmilError(f"{result}; {finished} of {plural(total, 'bag')} are already packed; {_OR_SKIP}")
                with name_write_errors(features):
                    os.fsync(rows.fileno())
                with name_write_errors(journal):
                    lines.write(f"{json.dumps(asdict(result))}\n".encode())
                finished += 1
                self.on_bag(finished, total)

    def _read_journal(self) -> dict[str, Entry]:
        """Read the entries of the completed bags. An incomplete last line is removed."""
        path, entries, length = self.folder / "journal.jsonl", dict[str, Entry](), 0
        if path.exists():
            for line in path.read_bytes().splitlines(keepends=True):
                try:
                    entry = Entry(**json.loads(line))
                except (ValueError, TypeError):
                    break
                if not line.endswith(b"\n"):
                    break
                entries[entry.id] = entry
                length += len(line)
            with path.open("r+b") as file:
                file.truncate(length)
        return entries

    def _finish(self, plan: _Plan) -> None:
        done = self._read_journal()
        entries = tuple(done[place.source.id] for place in plan.places)
        for line in remarks_on(entries, self.dtype):
            self.log(line)
        if not any(entry.truth for entry in entries):
            (self.folder / "instance_labels.bin").unlink(missing_ok=True)
        labels = {source.id: source.label for source in self.files.sources}
        if all(labels[entry.id] is not None for entry in entries):
            rows = [("slide", "label"), *((entry.id, labels[entry.id]) for entry in entries)]
            write_text(self.folder / "labels.csv", csv_text(rows, for_people=False))
        StoreIndex(
            version=VERSION,
            dtype=self.dtype,
            width=plan.width,
            encoder=entries[0].encoder,
            bags=entries,
            empty=plan.empty,
            left_out=(*plan.left_out, *self.files.hidden),
            origin=self.origin.name,
            fingerprint=fingerprint_of(entries),
            signature=self.signature,
            layout=self.files.layout,
        ).write(self.folder)


def _common_header(common: BagHeader | None, header: BagHeader, source: Source, first: str) -> BagHeader:
    """Update the properties shared by all bags so far. A bag with different features or tiles than the bags before
    it is refused.
    """
    if common is None:
        return header
    if (header.width, header.encoder) != (common.width, common.encoder):
        known = header.encoder is not None or common.encoder is not None
        own, other = (f" by {each.encoder or 'an unknown encoder'}" if known else "" for each in (header, common))
        raise CarmilError(
            f"{source.path}: {header.width} features per tile{own}, {first!r} has {common.width}{other}: "
            f"expected the same features for all slides of a cohort; {_LIST}"
        )
    if common.pooling is not None and header.pooling not in (None, common.pooling):
        raise CarmilError(
            f"{source.path}: features pooled by {header.pooling}, others by {common.pooling}: expected the "
            f"same pooling for all slides of a cohort; {_LIST}"
        )
    if header.geometry.differs_from(common.geometry):
        raise CarmilError(
            f"{source.path}: tiles of {header.geometry}, others have {common.geometry}: expected the same tile "
            f"geometry for all slides of a cohort; {_LIST}"
        )
    geometry = common.geometry.filled_from(header.geometry)
    return BagHeader(0, common.width, common.dtype, common.encoder, common.pooling or header.pooling, geometry)


def _pack_bag(place: _Place, folder: Path, dtype: str) -> Entry | CarmilError:
    try:
        bag = read_bag(place.source)
        check_finite(bag, place.source)
        check_place(bag, place.source)
        if bag.features.shape != (place.rows, place.width):
            raise CarmilError(
                f"{place.source.path} has changed: shape {bag.features.shape}, expected {(place.rows, place.width)}"
            )
        stored, vanished = convert_features(bag, place.source, dtype)
        _write_at(folder / "features.bin", place.first * place.width * ITEM_SIZE[dtype], stored)
        if bag.coordinates is not None:
            _write_at(folder / "coordinates.bin", place.first * 8, bag.coordinates.astype(np.float32))
        if bag.instance_labels is not None:
            _write_at(folder / "instance_labels.bin", place.first * 8, bag.instance_labels.astype(np.int64))
        return Entry.of(bag, stored, vanished)
    except CarmilError as error:
        return error


def _write_at(path: Path, position: int, values: np.ndarray) -> None:
    with name_write_errors(path), path.open("r+b") as file:
        file.seek(position)
        file.write(np.ascontiguousarray(values).data)
