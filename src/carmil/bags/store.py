"""The cohort store: all bags of a cohort in one matrix on disk, read through a memory map.

STORE/
  index.json              what is in it: type, width, encoder, and each bag's id, rows, unit, tile size and checksum
  features.bin            (n, d) row by row
  coordinates.bin         (n, 2) float32
  instance_labels.bin     (n) int64, if the cohort has them
  labels.csv              if the cohort's own files know the labels

It is built in STORE.building: a plan says which rows each bag gets, workers write them there, a journal says which are
done. Killed at any moment and started again, a build goes on with what the journal lacks and ends with the same bytes.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from carmil.bags.finding import find_bags
from carmil.bags.readers import peek, read_bag
from carmil.bags.sources import Bag, Found, Header, Source
from carmil.bags.workers import in_parallel, worker_count
from carmil.errors import CarmilError
from carmil.files import whole_folder, write_text

if TYPE_CHECKING:
    from torch import Tensor

    from carmil.bags.bags import Bags

Dtype = Literal["float16", "float32", "bfloat16"]
ITEM_SIZE: dict[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4}
VERSION = 1
OnBag = Callable[[int, int], None]  # bags done, bags in all


@dataclass(frozen=True)
class Entry:
    """One bag of a store."""

    id: str
    rows: int
    unit: str | None
    tile_size: float | None
    encoder: str | None
    truth: bool
    checksum: str


@dataclass(frozen=True)
class Store:
    """A built store. `bags()` costs nothing: features are read when they are looked at."""

    path: Path
    dtype: Dtype
    width: int
    encoder: str | None
    entries: tuple[Entry, ...]
    empty: tuple[str, ...]
    left_out: tuple[str, ...]
    origin: str
    fingerprint: str

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(entry.id for entry in self.entries)

    @property
    def rows(self) -> int:
        return sum(entry.rows for entry in self.entries)

    @property
    def labels(self) -> Path | None:
        """The table of labels that came with the cohort, if its own files knew them."""
        return self.path / "labels.csv" if (self.path / "labels.csv").is_file() else None

    def bags(self) -> "Bags":
        import torch

        from carmil.bags.bags import Bags

        offsets = np.cumsum([0, *(entry.rows for entry in self.entries)])
        units = {entry.unit for entry in self.entries}
        features = self._mapped("features.bin", np.int16 if ITEM_SIZE[self.dtype] == 2 else np.int32, self.width)
        known = len(units) == 1 and None not in units
        coordinates = torch.from_numpy(self._mapped("coordinates.bin", np.float32, 2)) if known else None
        truth = None
        if all(entry.truth for entry in self.entries):
            truth = torch.from_numpy(self._mapped("instance_labels.bin", np.int64, 1)).squeeze(-1)
        return Bags.trusted(
            features=torch.from_numpy(features).view(getattr(torch, self.dtype)),
            offsets=torch.from_numpy(offsets),
            ids=self.ids,
            instance_labels=truth,
            coordinates=coordinates,
            coordinate_unit=units.pop() if known else None,
        )

    def bag(self, position: int) -> Bag:
        """One bag as it would come from a file; for export."""
        bags = self.bags()[position]
        entry = self.entries[position]
        features = bags.features.float() if self.dtype == "bfloat16" else bags.features
        return Bag(
            id=entry.id,
            features=features.numpy(),
            coordinates=None if bags.coordinates is None else bags.coordinates.numpy(),
            coordinate_unit=bags.coordinate_unit,
            tile_size=entry.tile_size,
            encoder=entry.encoder,
            instance_labels=None if bags.instance_labels is None else bags.instance_labels.numpy(),
        )

    def _mapped(self, name: str, dtype: Any, columns: int) -> np.ndarray:
        # Copy-on-write: nobody writes, but torch wants memory that could be written to.
        return np.memmap(self.path / name, dtype=dtype, mode="c", shape=(self.rows, columns))


def is_store(path: Path) -> bool:
    return (path / "index.json").is_file() and (path / "features.bin").is_file()


def open_store(path: str | Path) -> Store:
    """The store that `carmil cohort build` made there, mapped into memory: bags are read as they are asked for."""
    path = Path(path)
    if not is_store(path):
        building = _building(path)
        more = f"; a build of it was begun and not ended: run `carmil cohort build` again ({building})"
        raise CarmilError(
            f"{path} is not a cohort store{more if building.is_dir() else ': build one with `carmil cohort build`'}"
        )
    try:
        facts = json.loads((path / "index.json").read_text(encoding="utf-8"))
        if facts["version"] > VERSION:
            raise CarmilError(f"{path} was written by a newer carmil (store version {facts['version']}): update carmil")
        store = Store(
            path=path,
            dtype=facts["dtype"],
            width=int(facts["width"]),
            encoder=facts["encoder"],
            entries=tuple(Entry(**entry) for entry in facts["bags"]),
            empty=tuple(facts["empty"]),
            left_out=tuple(facts["left_out"]),
            origin=facts["origin"],
            fingerprint=facts["fingerprint"],
        )
        sizes = {"features.bin": store.width * ITEM_SIZE[store.dtype], "coordinates.bin": 8}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CarmilError(f"{path / 'index.json'} cannot be read ({error!r}): build the store again") from error
    if all(entry.truth for entry in store.entries):
        sizes["instance_labels.bin"] = 8
    for name, row in sizes.items():
        found = (path / name).stat().st_size if (path / name).is_file() else 0
        if found != store.rows * row:
            raise CarmilError(
                f"{path / name} has {found:,} bytes, expected {store.rows * row:,}: build the store again"
            )
    return store


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
    found = find_bags(origin, truth=truth)
    for line in found.said:
        say(line)
    signature = _signature(found.sources, origin, dtype)
    if is_store(out):
        return _same_or_refused(out, signature, found, origin, dtype)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CarmilError(f"{out} is there already and is not a store: choose another --out")
    building = _building(out)
    if not (building / "index.json").exists():
        plan = _plan(found, building, signature, dtype, workers, skip_broken, say)
        _fill(plan, building, dtype, workers, say, on_bag)
        _finish(plan, building, found, origin, dtype)
    for name in ("plan.json", "journal.jsonl"):
        (building / name).unlink(missing_ok=True)
    if out.is_dir():
        out.rmdir()
    os.replace(building, out)
    return open_store(out)


def regroup(store: Store, groups: dict[str, str], out: Path) -> Store:
    """A store at `out` whose bags are the groups (bag id -> group id) of this one's; bags without a group are left out."""
    signature = _checksum(repr((store.fingerprint, sorted(groups.items()))).encode())
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
    with whole_folder(out) as aside:
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
            first = store.entries[members[group][0]]
            entries.append(replace(first, id=group, rows=len(part.features), checksum=_checksum(raw)))
        for file in files.values():
            file.close()
        facts = json.loads((store.path / "index.json").read_text(encoding="utf-8"))
        facts |= {
            "bags": [asdict(entry) for entry in entries],
            "fingerprint": _fingerprint(entries),
            "signature": signature,
        }
        write_text(aside / "index.json", json.dumps(facts))
    return open_store(out)


@dataclass(frozen=True)
class Problem:
    """Something wrong with a bag, or with the cohort as a whole (`bag` is then empty)."""

    bag: str
    kind: str
    what: str


def check_bags(found: Found, *, workers: int | None = None, on_bag: OnBag = lambda done, total: None) -> list[Problem]:
    """Reads everything once and says what is wrong: unreadable, not finite, another width or encoder than most."""
    problems: list[Problem] = []
    headers: dict[str, Header] = {}
    jobs = ((source, (source,)) for source in found.sources)
    for done, (source, result) in enumerate(in_parallel(_looked_at, jobs, worker_count(workers, found.sources)), 1):
        on_bag(done, len(found.sources))
        if isinstance(result, Header):
            headers[source.id] = result
            if result.rows == 0:
                problems.append(Problem(source.id, "empty", "no tile; it is left out of a store"))
        else:
            problems.append(Problem(source.id, "not finite" if "NaN" in str(result) else "unreadable", str(result)))
    for kind, of in (("width", "width"), ("encoder", "encoder")):
        values = [getattr(header, of) for header in headers.values() if header.rows]
        usual = max(set(values), key=values.count) if values else None
        problems += [
            Problem(bag, kind, f"{kind} {getattr(header, of)}, most bags have {usual}")
            for bag, header in headers.items()
            if header.rows and getattr(header, of) != usual
        ]
    return sorted(problems, key=lambda problem: (problem.bag, problem.kind))


def check_store(store: Store, *, on_bag: OnBag = lambda done, total: None) -> list[Problem]:
    """Compares every bag with the checksum it was written with."""
    problems, first = [], 0
    size = store.width * ITEM_SIZE[store.dtype]
    with (store.path / "features.bin").open("rb") as file:
        for done, entry in enumerate(store.entries, 1):
            file.seek(first * size)
            if _checksum(file.read(entry.rows * size)) != entry.checksum:
                problems.append(Problem(entry.id, "checksum", "its bytes are not those that were written: build again"))
            first += entry.rows
            on_bag(done, len(store.entries))
    return problems


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


def _building(out: Path) -> Path:
    return out.with_name(out.name + ".building")


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
    dtype: str,
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
    plan = _new_plan(found, signature, workers, skip_broken, say)
    building.mkdir(parents=True, exist_ok=True)
    (building / "journal.jsonl").unlink(missing_ok=True)
    rows = sum(place.rows for place in plan.places)
    sizes = {
        "features.bin": rows * plan.width * ITEM_SIZE[dtype],
        "coordinates.bin": rows * 8,
        "instance_labels.bin": rows * 8,
    }
    for name, size in sizes.items():
        with (building / name).open("wb") as file:
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
    found: Found, signature: str, workers: int | None, skip_broken: bool, say: Callable[[str], None]
) -> _Plan:
    broken: dict[str, str] = {}
    if skip_broken:
        kept_out = ("unreadable", "not finite", "width", "encoder")
        broken = {
            problem.bag: problem.what for problem in check_bags(found, workers=workers) if problem.kind in kept_out
        }
        for name, what in broken.items():
            say(f"left out: {name}: {what}")
    places: list[_Place] = []
    empty: list[str] = []
    first = 0
    width, encoder, example = 0, None, ""
    for source in found.sources:
        if source.id in broken:
            continue
        header = peek(source)
        if header.rows == 0:
            empty.append(source.id)
            continue
        if not places:
            width, encoder, example = header.width, header.encoder, source.id
        if (header.width, header.encoder) != (width, encoder):
            raise CarmilError(
                f"{source.path}: {header.width} features by encoder {header.encoder or 'unknown'}, {example!r} has {width} by "
                f"{encoder or 'unknown'}: a cohort has one encoder; `carmil cohort check` lists all, --skip-broken leaves them out"
            )
        places.append(_Place(source, first, header.rows, header.width))
        first += header.rows
    if not places:
        raise CarmilError(f"no bag with instances among {len(found.sources)} found: expected at least one")
    if empty:
        say(
            f"{len(empty)} empty slides have no tiles and are left out: {', '.join(empty[:3])}{' ...' if len(empty) > 3 else ''}"
        )
    return _Plan(tuple(places), tuple(empty), tuple(broken), width, signature)


def _fill(
    plan: _Plan, building: Path, dtype: str, workers: int | None, say: Callable[[str], None], on_bag: OnBag
) -> None:
    """Writes the rows of every bag the journal lacks; a bag is in the journal when its bytes are on the disk."""
    done = _journal(building)
    todo = [place for place in plan.places if place.source.id not in done]
    if done:
        say(f"{len(done)} of {len(plan.places)} bags are there already; going on with the others")
    total, finished = len(plan.places), len(done)
    jobs = ((place.source, (place, building, dtype)) for place in todo)
    count = worker_count(workers, [place.source for place in todo])
    with (
        (building / "features.bin").open("rb") as written,
        (building / "journal.jsonl").open("a", encoding="utf-8") as journal,
    ):
        for _, result in in_parallel(_pack, jobs, count):
            if isinstance(result, CarmilError):
                raise CarmilError(
                    f"{result}; {finished} of {total} bags are packed and kept: mend it and start again, or --skip-broken"
                )
            os.fsync(written.fileno())
            journal.write(json.dumps(asdict(result)) + "\n")
            journal.flush()
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


def _finish(plan: _Plan, building: Path, found: Found, origin: Path, dtype: str) -> None:
    done = _journal(building)
    entries = [done[place.source.id] for place in plan.places]
    if not all(entry.truth for entry in entries):
        (building / "instance_labels.bin").unlink(missing_ok=True)
    labels = {source.id: source.label for source in found.sources}
    if all(labels[entry.id] is not None for entry in entries):
        lines = [f"{_quoted(entry.id)},{_quoted(str(labels[entry.id]))}" for entry in entries]
        write_text(building / "labels.csv", "\n".join(["slide,label", *lines, ""]))
    facts = {
        "version": VERSION,
        "dtype": dtype,
        "width": plan.width,
        "encoder": entries[0].encoder,
        "layout": found.layout,
        "origin": origin.name,
        "signature": plan.signature,
        "fingerprint": _fingerprint(entries),
        "empty": plan.empty,
        "left_out": plan.left_out,
        "bags": [asdict(entry) for entry in entries],
    }
    write_text(building / "index.json", json.dumps(facts))


def _pack(place: _Place, building: Path, dtype: str) -> Entry | CarmilError:
    try:
        bag = _finite(read_bag(place.source), place.source)
        if bag.features.shape != (place.rows, place.width):
            raise CarmilError(
                f"{place.source.path} has changed: {bag.features.shape}, expected {(place.rows, place.width)}"
            )
        stored = _converted(bag, place.source, dtype)
        _write(building / "features.bin", place.first * place.width * ITEM_SIZE[dtype], stored)
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
            checksum=_checksum(stored.tobytes()),
        )
    except CarmilError as error:
        return error


def _looked_at(source: Source) -> Header | CarmilError:
    try:
        bag = _finite(read_bag(source), source)
        return Header(len(bag.features), bag.features.shape[1], str(bag.features.dtype), bag.encoder)
    except CarmilError as error:
        return error


def _finite(bag: Bag, source: Source) -> Bag:
    bad = ~np.isfinite(bag.features).all(axis=1)
    if bad.any():
        raise CarmilError(
            f"{source.path}: NaN or infinite features in {int(bad.sum())} of {len(bad)} instances, first in {int(bad.argmax())}: "
            "extract them again or leave the slide out"
        )
    return bag


def _converted(bag: Bag, source: Source, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":  # the upper half of a float32, rounded to nearest, ties to even
        bits = np.ascontiguousarray(bag.features, dtype=np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(bag.features, dtype=dtype)
    if not np.isfinite(stored).all():
        raise CarmilError(
            f"{source.path}: values up to {np.abs(bag.features).max():g} do not fit into float16: "
            "pack them with `carmil cohort build --dtype float32`"
        )
    return stored


def _write(path: Path, at: int, values: np.ndarray) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(np.ascontiguousarray(values).data)


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def _bytes_of(features: "Tensor") -> bytes:
    """As they lie in memory; numpy knows no bfloat16."""
    import torch

    return features.contiguous().view(torch.int16 if features.element_size() == 2 else torch.int32).numpy().tobytes()


def _checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _fingerprint(entries: Iterable[Entry]) -> str:
    return _checksum("".join(entry.id + entry.checksum for entry in entries).encode())
