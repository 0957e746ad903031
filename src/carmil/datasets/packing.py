"""Write a store from bags in memory, for cohorts that carmil generates. `bags.building` packs the files of other tools."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from carmil.bags.pictures import Pictures
from carmil.bags.sources import Bag
from carmil.bags.store import (
    VERSION,
    Dtype,
    Entry,
    Store,
    StoreIndex,
    checksum,
    fingerprint_of,
    is_store,
    open_store,
    round_features,
)
from carmil.errors import CarmilError
from carmil.files import atomic_folder
from carmil.provenance import config_key
from carmil.truth import UNKNOWN


def write_store(
    bags: Iterable[Bag],
    out: Path,
    *,
    dtype: Dtype = "float16",
    key: object = None,
    truth_classes: Sequence[str] | None = None,
    pictures: Pictures | None = None,
) -> Store:
    """Write a store at `out`, replacing an existing one.

    key: what the bags were made from; see `is_made_from`. truth_classes: the classes of signed truth, sorted by name,
    as a study numbers them.
    """
    index = StoreIndex(
        version=VERSION,
        dtype=dtype,
        width=1,
        encoder=None,
        bags=(),
        empty=(),
        left_out=(),
        origin=out.name,
        fingerprint="",
        signature=config_key({"key": key}),
        layout="made by carmil",
        truth_classes=None if truth_classes is None else tuple(truth_classes),
    )
    return _write(bags, out, index, pictures)


def is_made_from(out: Path, key: object) -> bool:
    """Return whether `write_store` wrote the store at `out` with the same key."""
    return is_store(out) and open_store(out).index.signature == config_key({"key": key})


def regroup(store: Store, groups: dict[str, str], out: Path) -> Store:
    """Write a store at `out` with one bag per group (`groups` maps bag id to group id). Bags without a group are left out."""
    signature = checksum(repr((store.fingerprint, sorted(groups.items()))).encode())
    if is_store(out):
        grouped = open_store(out)
        if grouped.index.signature != signature:
            raise CarmilError(f"{out} holds different bags or groups: choose another --out or remove it")
        return grouped
    members: dict[str, list[int]] = {}
    for i, name in enumerate(store.ids):
        if name in groups:
            members.setdefault(groups[name], []).append(i)
    bags = (store.merged_bag(members[group], group) for group in sorted(members))
    return _write(bags, out, replace(store.index, signature=signature), None)


def _write(bags: Iterable[Bag], out: Path, index: StoreIndex, pictures: Pictures | None) -> Store:
    """Write the bags and the index."""
    entries: list[Entry] = []
    labels: list[np.ndarray | None] = []
    width = 0
    with atomic_folder(out) as aside:
        with (aside / "features.bin").open("wb") as features, (aside / "coordinates.bin").open("wb") as coordinates:
            for bag in bags:
                stored = round_features(np.ascontiguousarray(bag.features), index.dtype)
                features.write(stored.data)
                xy = np.zeros((len(stored), 2)) if bag.coordinates is None else bag.coordinates
                coordinates.write(np.ascontiguousarray(xy, dtype=np.float32).data)
                labels.append(bag.instance_labels)
                entries.append(Entry.of(bag, stored))
                width = stored.shape[1]
        if not entries:
            raise CarmilError(f"{out}: no bags to write; expected at least one")
        _write_truth(aside / "instance_labels.bin", labels, [entry.rows for entry in entries], index.truth_classes)
        if pictures is not None:
            if len(pictures.index) != (rows := sum(entry.rows for entry in entries)):
                raise CarmilError(
                    f"{out}: pictures of {len(pictures.index):,} instances; expected {rows:,}, one per instance"
                )
            (aside / "pictures.bin").write_bytes(np.ascontiguousarray(pictures.images).data)
            (aside / "picture_index.bin").write_bytes(np.ascontiguousarray(pictures.index, dtype=np.int32).data)
        replace(
            index,
            width=width,
            encoder=entries[0].encoder,
            bags=tuple(entries),
            fingerprint=fingerprint_of(entries),
            pictures=None if pictures is None else pictures.images.shape,
        ).write(aside)
    return open_store(out)


def _write_truth(path: Path, labels: list[np.ndarray | None], rows: list[int], classes: tuple[str, ...] | None) -> None:
    """Write the instance labels, UNKNOWN for a bag without them; nothing if no bag has any."""
    if all(known is None for known in labels):
        return
    columns = () if classes is None else (len(classes),)
    filled = []
    for known, n in zip(labels, rows, strict=True):
        if known is not None and known.shape != (n, *columns):
            expected = (n, *columns)
            raise CarmilError(f"{path.parent}: instance labels of the shape {known.shape}: expected {expected}")
        filled.append(np.full((n, *columns), UNKNOWN) if known is None else known)
    path.write_bytes(np.concatenate(filled).astype(np.int8 if columns else np.int64).data)
