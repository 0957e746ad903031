"""A store written straight from bags in memory, for cohorts that carmil makes itself. `building` packs other tools' files."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from carmil.bags.conversion import rounded
from carmil.bags.pictures import Pictures
from carmil.bags.sources import Bag
from carmil.bags.store import VERSION, Dtype, Entry, Store, checksum, fingerprint_of, is_store, open_store
from carmil.errors import CarmilError
from carmil.files import atomic_folder, write_text
from carmil.provenance import config_key
from carmil.untrusted import read_json


def write_store(
    bags: Iterable[Bag],
    out: Path,
    *,
    dtype: Dtype = "float16",
    key: object = None,
    truth_classes: Sequence[str] | None = None,
    pictures: Pictures | None = None,
) -> Store:
    """Write a store at `out`, in place of one that is there.

    key: whatever it was made from; see `is_made_from`. truth_classes: the classes of signed truth, in the order in which a study
    numbers them: that of their names.
    """
    entries: list[Entry] = []
    truth: list[np.ndarray] = []
    with atomic_folder(out) as aside:
        with (aside / "features.bin").open("wb") as features, (aside / "coordinates.bin").open("wb") as places:
            for bag in bags:
                stored = rounded(np.ascontiguousarray(bag.features), dtype)
                features.write(stored.data)
                xy = np.zeros((len(stored), 2)) if bag.coordinates is None else bag.coordinates
                places.write(np.ascontiguousarray(xy, dtype=np.float32).data)
                if bag.instance_labels is not None:
                    truth.append(bag.instance_labels)
                entries.append(_entry(bag, stored))
        if not entries:
            raise CarmilError(f"{out}: no bag to write; expected at least one")
        columns = () if truth_classes is None else (len(truth_classes),)
        if truth and (len(truth) < len(entries) or any(one.shape[1:] != columns for one in truth)):
            raise CarmilError(f"{out}: some bags have instance labels of another shape, or none; expected one for all")
        if truth:
            labels = np.concatenate(truth).astype(np.int8 if columns else np.int64)
            (aside / "instance_labels.bin").write_bytes(labels.data)
        if pictures is not None:
            if len(pictures.index) != (rows := sum(entry.rows for entry in entries)):
                raise CarmilError(f"{out}: pictures of {len(pictures.index):,} instances; expected {rows:,}")
            (aside / "pictures.bin").write_bytes(np.ascontiguousarray(pictures.images).data)
            (aside / "picture_index.bin").write_bytes(np.ascontiguousarray(pictures.index, dtype=np.int32).data)
        facts = {
            "version": VERSION,
            "dtype": dtype,
            "width": bag.features.shape[1],
            "encoder": entries[0].encoder,
            "layout": "made by carmil",
            "origin": out.name,
            "signature": config_key({"key": key}),
            "fingerprint": fingerprint_of(entries),
            "truth_classes": None if truth_classes is None else list(truth_classes),
            "pictures": None if pictures is None else list(pictures.images.shape),
            "empty": [],
            "left_out": [],
            "bags": [asdict(entry) for entry in entries],
        }
        write_text(aside / "index.json", json.dumps(facts))
    return open_store(out)


def is_made_from(out: Path, key: object) -> bool:
    """Whether `write_store` wrote the store at `out` with the same key."""
    return is_store(out) and read_json(out / "index.json").get("signature") == config_key({"key": key})


def _entry(bag: Bag, stored: np.ndarray) -> Entry:
    return Entry(
        id=bag.id,
        rows=len(stored),
        unit=bag.coordinate_unit,
        tile_size=bag.tile_size,
        encoder=bag.encoder,
        truth=bag.instance_labels is not None,
        checksum=checksum(stored.tobytes()),
        pooling=bag.pooling,
        tile_pixels=bag.geometry.tile_pixels,
        tile_mpp=bag.geometry.tile_mpp,
        **asdict(bag.slide_file),
    )
