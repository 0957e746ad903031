"""A store is built of a cohort's files, in whatever layout they are.

It is built in STORE.building: a plan says which rows each bag gets, workers write them there, a journal says which are
done. Killed at any moment and started again, a build goes on with what the journal lacks and ends with the same bytes.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from carmil.bags.checking import check_bags, coordinates_line, finite, instance_labels_line, plausible
from carmil.bags.conversion import converted, vanished_line
from carmil.bags.finding import find_bags
from carmil.bags.geometry import UNKNOWN
from carmil.bags.readers import peek, read_bag
from carmil.bags.slide_file import NOT_RECORDED
from carmil.bags.sources import Found, Source
from carmil.bags.store import (
    ITEM_SIZE,
    VERSION,
    Dtype,
    Entry,
    OnBag,
    Store,
    building_folder,
    checksum,
    fingerprint_of,
    is_store,
    open_store,
)
from carmil.bags.workers import in_parallel, worker_count
from carmil.csv_files import csv_text
from carmil.errors import CarmilError
from carmil.files import atomic_folder, name_write_errors, write_text
from carmil.locks import folder_lock
from carmil.words import plural

if TYPE_CHECKING:
    from torch import Tensor


_OR_SKIP = "fix the file and run again, or leave it out with --skip-broken (of `carmil cohort build`, if this command has none)"


def build_store(
    origin: Path,
    out: Path,
    *,
    dtype: Dtype = "float16",
    truth: str | None = None,
    workers: int | None = None,
    skip_broken: bool = False,
    say: Callable[[str], None] = lambda line: None,
    on_bag: OnBag = lambda done, total: None,
) -> Store:
    """Packs the cohort at `origin`, in whatever layout it is, into a store at `out`; goes on where it was interrupted."""
    out = out.resolve() if out.is_symlink() else out  # the store takes the place of the folder, not of the link
    found = find_bags(origin, truth=truth)
    for line in found.said:
        say(line)
    signature = _signature(found.sources, origin, dtype)
    if is_store(out):
        return _same_or_refused(out, signature, found, origin, dtype)
    with folder_lock(lock_file(out), out):
        if not is_store(out):
            _build(found, origin, out, signature, dtype, workers, skip_broken, say, on_bag)
        return _same_or_refused(out, signature, found, origin, dtype)


def lock_file(out: Path) -> Path:
    """Held by the process that writes the store `out`; beside it, for the folder in which a store is built takes its name."""
    return out.with_name(f"{out.name}.lock")


def _build(
    found: Found,
    origin: Path,
    out: Path,
    signature: str,
    dtype: Dtype,
    workers: int | None,
    skip_broken: bool,
    say: Callable[[str], None],
    on_bag: OnBag,
) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CarmilError(f"{out} is there already and is not a store: choose another --out")
    building = building_folder(out)
    if not (building / "index.json").exists():
        plan = _plan(found, building, signature, dtype, workers, skip_broken, say)
        _fill(plan, building, dtype, workers, say, on_bag)
        _finish(plan, building, found, origin, dtype, say)
    for name in ("plan.json", "journal.jsonl"):
        (building / name).unlink(missing_ok=True)
    if out.is_dir():
        out.rmdir()
    os.replace(building, out)


def regroup(store: Store, groups: dict[str, str], out: Path) -> Store:
    """A store at `out` whose bags are the groups (bag id -> group id) of this one's; bags without a group are left out."""
    signature = checksum(repr((store.fingerprint, sorted(groups.items()))).encode())
    if is_store(out):
        found = open_store(out)
        if json.loads((out / "index.json").read_text(encoding="utf-8"))["signature"] != signature:
            raise CarmilError(f"{out} holds other bags or other groups of them: choose another --out or remove it")
        return found
    bags, members = store.bags(), dict[str, list[int]]()
    for i, name in enumerate(store.ids):
        if name in groups:
            members.setdefault(groups[name], []).append(i)
    entries = []
    with atomic_folder(out) as aside:
        files = {name: (aside / f"{name}.bin").open("wb") for name in ("features", "coordinates", "instance_labels")}
        for group in sorted(members):
            part = bags[members[group]]
            raw = _bytes_of(part.features)
            files["features"].write(raw)
            coordinates = part.coordinates
            files["coordinates"].write(
                bytes(8 * len(part.features)) if coordinates is None else coordinates.numpy().tobytes()
            )
            if part.instance_labels is not None:
                files["instance_labels"].write(part.instance_labels.numpy().tobytes())
            first = replace(store.entries[members[group][0]], **asdict(NOT_RECORDED))  # a group has no slide file
            unit = None if isinstance(part.coordinate_unit, tuple) else part.coordinate_unit
            truth = any(store.entries[i].truth for i in members[group])
            entries.append(
                replace(first, id=group, rows=len(part.features), unit=unit, truth=truth, checksum=checksum(raw))
            )
        for file in files.values():
            file.close()
        facts = json.loads((store.path / "index.json").read_text(encoding="utf-8"))
        facts |= {
            "version": VERSION,
            "bags": [asdict(entry) for entry in entries],
            "fingerprint": fingerprint_of(entries),
            "signature": signature,
            "pictures": None,
        }
        write_text(aside / "index.json", json.dumps(facts))
    return open_store(out)


@dataclass(frozen=True)
class _Place:
    """Which rows of the store a bag gets."""

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
    signature: str


def _signature(sources: Sequence[Source], origin: Path, dtype: str) -> str:
    """Changes when a file of the cohort does: its name within `origin`, size or time of change. Where that lies is no matter."""
    digest = hashlib.sha256(dtype.encode())
    for source in sources:
        files = [source.path, *(path for _, path in source.companions)]
        facts = [(os.path.relpath(path, origin), *_size_and_time(path)) for path in files]
        digest.update(repr((source.id, source.inside, source.label, facts)).encode())
    return digest.hexdigest()


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        facts = path.stat()
    except OSError as error:
        raise CarmilError(
            f"{path} has vanished or may not be read ({error.strerror}): put it back, then start again"
        ) from error
    return facts.st_size, facts.st_mtime_ns


def _same_or_refused(out: Path, signature: str, found: Found, origin: Path, dtype: str) -> Store:
    store = open_store(out)
    facts = json.loads((out / "index.json").read_text(encoding="utf-8"))
    if facts["signature"] != signature:
        raise CarmilError(
            f"{out} holds another cohort, or {origin} has changed since: choose another --out or remove it"
        )
    return store


def _plan(
    found: Found,
    building: Path,
    signature: str,
    dtype: Dtype,
    workers: int | None,
    skip_broken: bool,
    say: Callable[[str], None],
) -> _Plan:
    """The plan of an interrupted build of the same files, or a new one."""
    try:
        facts = json.loads((building / "plan.json").read_text(encoding="utf-8"))
        if facts["signature"] == signature and facts["skip_broken"] == skip_broken:
            by_id = {source.id: source for source in found.sources}
            places = tuple(_Place(by_id[name], *numbers) for name, *numbers in facts["places"])
            return _Plan(places, tuple(facts["empty"]), tuple(facts["left_out"]), facts["width"], signature)
        say(f"{building}: the cohort's files or the options have changed since this build was begun; it begins anew")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError):
        say(f"{building} holds no build that could go on; it begins anew")
    plan = _new_plan(found, signature, dtype, workers, skip_broken, say)
    building.mkdir(parents=True, exist_ok=True)
    (building / "journal.jsonl").unlink(missing_ok=True)
    rows = sum(place.rows for place in plan.places)
    sizes = {
        "features.bin": rows * plan.width * ITEM_SIZE[dtype],
        "coordinates.bin": rows * 8,
        "instance_labels.bin": rows * 8,
    }
    for name, size in sizes.items():
        with name_write_errors(building / name), (building / name).open("wb") as file:
            file.truncate(size)
    facts = {
        "signature": signature,
        "skip_broken": skip_broken,
        "width": plan.width,
        "empty": plan.empty,
        "left_out": plan.left_out,
        "places": [(place.source.id, place.first, place.rows, place.width) for place in plan.places],
    }
    write_text(building / "plan.json", json.dumps(facts))
    return plan


def _new_plan(
    found: Found,
    signature: str,
    dtype: Dtype,
    workers: int | None,
    skip_broken: bool,
    say: Callable[[str], None],
) -> _Plan:
    broken: dict[str, str] = {}
    if skip_broken:
        checked = check_bags(found, dtype=dtype, workers=workers)
        broken = {problem.bag: problem.what for problem in checked.problems if problem.kind != "empty"}
        for name, what in broken.items():
            say(f"left out: {name}: {what}")
    places: list[_Place] = []
    empty: list[str] = []
    first = 0
    width, encoder, example = 0, None, ""
    pooling, geometry, unknown = None, UNKNOWN, list[str]()
    for source in found.sources:
        if source.id in broken:
            continue
        try:
            header = peek(source)
        except CarmilError as error:
            raise CarmilError(f"{error}; {_OR_SKIP}") from None
        if header.rows == 0:
            empty.append(source.id)
            continue
        if not places:
            width, encoder, example = header.width, header.encoder, source.id
        if (header.width, header.encoder) != (width, encoder):
            known = header.encoder is not None or encoder is not None
            mine, other = (f" by {name or 'an unknown encoder'}" if known else "" for name in (header.encoder, encoder))
            raise CarmilError(
                f"{source.path}: {header.width} features per tile{mine}, {example!r} has {width}{other}: a cohort has the same "
                "features for all slides; `carmil cohort check` lists all that differ, --skip-broken leaves them out"
            )
        if pooling is not None and header.pooling not in (None, pooling):
            raise CarmilError(
                f"{source.path}: features pooled by {header.pooling}, others by {pooling}: a cohort has one pooling; "
                "`carmil cohort check` lists all, --skip-broken leaves them out"
            )
        if header.geometry.differs_from(geometry):
            raise CarmilError(
                f"{source.path}: tiles of {header.geometry}, others have {geometry}: a cohort has one tile geometry; "
                "`carmil cohort check` lists all, --skip-broken leaves them out"
            )
        pooling, geometry = pooling or header.pooling, geometry.completed_by(header.geometry)
        unknown += [source.id] if header.geometry == UNKNOWN else []
        places.append(_Place(source, first, header.rows, header.width))
        first += header.rows
    if not places:
        raise CarmilError(f"no bag with instances among {len(found.sources)} found: expected at least one")
    if unknown and geometry != UNKNOWN:
        say(
            f"the tile geometry of {len(unknown)} of {plural(len(places), 'bag')} is not recorded ({unknown[0]!r}, ...): "
            f"that they have {geometry} like the others could not be checked"
        )
    if empty:
        say(
            f"{plural(len(empty), 'empty slide has no tiles and is', 'empty slides have no tiles and are')} left out: "
            f"{', '.join(empty[:3])}{' ...' if len(empty) > 3 else ''}"
        )
    return _Plan(tuple(places), tuple(empty), tuple(broken), width, signature)


def _fill(
    plan: _Plan, building: Path, dtype: str, workers: int | None, say: Callable[[str], None], on_bag: OnBag
) -> None:
    """Writes the rows of every bag the journal lacks; a bag is in the journal when its bytes are on the disk."""
    done = _journal(building)
    todo = [place for place in plan.places if place.source.id not in done]
    if done:
        say(f"{len(done)} of {plural(len(plan.places), 'bag')} already there; going on with the others")
    total, finished = len(plan.places), len(done)
    jobs = ((place.source, (place, building, dtype)) for place in todo)
    count = worker_count(workers, [place.source for place in todo])
    with (
        (building / "features.bin").open("rb") as written,
        (building / "journal.jsonl").open("ab", buffering=0) as journal,
    ):
        for _, result in in_parallel(_pack, jobs, count):
            if isinstance(result, CarmilError):
                raise CarmilError(f"{result}; {finished} of {plural(total, 'bag')} are packed and kept; {_OR_SKIP}")
            with name_write_errors(building / "features.bin"):
                os.fsync(written.fileno())
            with name_write_errors(building / "journal.jsonl"):
                journal.write(f"{json.dumps(asdict(result))}\n".encode())
            finished += 1
            on_bag(finished, total)


def _journal(building: Path) -> dict[str, Entry]:
    """The bags that are done. A last line that was cut off does not count, and is cut away."""
    path = building / "journal.jsonl"
    entries: dict[str, Entry] = {}
    kept = 0
    if path.exists():
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                entry = Entry(**json.loads(line))
            except (ValueError, TypeError):
                break
            if not line.endswith(b"\n"):
                break
            entries[entry.id] = entry
            kept += len(line)
        with path.open("r+b") as file:
            file.truncate(kept)
    return entries


def _finish(plan: _Plan, building: Path, found: Found, origin: Path, dtype: str, say: Callable[[str], None]) -> None:
    done = _journal(building)
    entries = [done[place.source.id] for place in plan.places]
    if line := vanished_line({entry.id: entry.vanished for entry in entries}, dtype):
        say(line)
    if line := coordinates_line({entry.id: entry.unit for entry in entries}):
        say(line)
    if line := instance_labels_line({entry.id: entry.truth for entry in entries}):
        say(line)
    if not any(entry.truth for entry in entries):
        (building / "instance_labels.bin").unlink(missing_ok=True)
    labels = {source.id: source.label for source in found.sources}
    if all(labels[entry.id] is not None for entry in entries):
        rows = [("slide", "label"), *((entry.id, labels[entry.id]) for entry in entries)]
        write_text(building / "labels.csv", csv_text(rows, for_people=False))
    facts = {
        "version": VERSION,
        "dtype": dtype,
        "width": plan.width,
        "encoder": entries[0].encoder,
        "layout": found.layout,
        "origin": origin.name,
        "signature": plan.signature,
        "fingerprint": fingerprint_of(entries),
        "empty": plan.empty,
        "left_out": [*plan.left_out, *found.hidden],
        "bags": [asdict(entry) for entry in entries],
    }
    write_text(building / "index.json", json.dumps(facts))


def _pack(place: _Place, building: Path, dtype: str) -> Entry | CarmilError:
    try:
        bag = plausible(finite(read_bag(place.source), place.source), place.source)
        if bag.features.shape != (place.rows, place.width):
            raise CarmilError(
                f"{place.source.path} has changed: {bag.features.shape}, expected {(place.rows, place.width)}"
            )
        stored = converted(bag, place.source, dtype)
        _write(building / "features.bin", place.first * place.width * ITEM_SIZE[dtype], stored.values)
        if bag.coordinates is not None:
            _write(building / "coordinates.bin", place.first * 8, bag.coordinates.astype(np.float32))
        if bag.instance_labels is not None:
            _write(building / "instance_labels.bin", place.first * 8, bag.instance_labels.astype(np.int64))
        return Entry(
            id=bag.id,
            rows=place.rows,
            unit=bag.coordinate_unit,
            tile_size=bag.tile_size,
            encoder=bag.encoder,
            truth=bag.instance_labels is not None,
            checksum=checksum(stored.values.tobytes()),
            vanished=stored.vanished,
            pooling=bag.pooling,
            tile_pixels=bag.geometry.tile_pixels,
            tile_mpp=bag.geometry.tile_mpp,
            **asdict(bag.slide_file),
        )
    except CarmilError as error:
        return error


def _write(path: Path, at: int, values: np.ndarray) -> None:
    with name_write_errors(path), path.open("r+b") as file:
        file.seek(at)
        file.write(np.ascontiguousarray(values).data)


def _bytes_of(features: "Tensor") -> bytes:
    """As they lie in memory; numpy knows no bfloat16."""
    import torch

    return features.contiguous().view(torch.int16 if features.element_size() == 2 else torch.int32).numpy().tobytes()
