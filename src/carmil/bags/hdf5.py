"""The one way HDF5 files are read: links are not followed, and nothing unfolds to more than its file can hold.

`open_hdf5` opens, `item_of` looks a name up, `attribute_of` and `values_of` read. No other file of the package opens HDF5
for reading; tests/bags/test_hdf5.py searches for it.
"""

import math
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from carmil.errors import CarmilError
from carmil.untrusted import AGAIN, MOST_UNFOLDED, SMALL, must_hold, one_line_errors

if TYPE_CHECKING:
    import h5py

_LARGEST_ATTRIBUTE = 2**20  # bytes


@contextmanager
def open_hdf5(path: Path) -> "Iterator[h5py.File]":
    """The file, open for reading. Whatever goes wrong inside the block is one line that names it."""
    import h5py

    with one_line_errors(path), h5py.File(path, "r", locking="best-effort") as file:
        yield file


def item_of(group: Any, name: str, *, path: Path) -> Any:
    """The group or array `name` of this very file: links can name any other file of the machine, so none is followed."""
    import h5py

    link = group.get(name, getlink=True)
    if link is None:
        raise CarmilError(f"{path} has no {name}: found {', '.join(sorted(group)[:6]) or 'nothing'}")
    if not isinstance(link, h5py.HardLink):
        raise CarmilError(f"{path}: {name} is a link to elsewhere, which is not followed: copy the data into the file")
    item = group[name]
    if isinstance(item, h5py.Dataset) and (item.external or item.is_virtual):
        raise CarmilError(
            f"{path}: {name} keeps its values in other files, which are not read: copy them into the file"
        )
    return item


def attribute_of(owner: Any, name: str, *, path: Path) -> Any:
    """An attribute of a group or array, or None. Numbers and words only: HDF5 crashes over a damaged one of a richer type."""
    from h5py import h5s, h5t

    if name not in owner.attrs:
        return None
    held = owner.attrs.get_id(name)
    kind = held.get_type()
    if not isinstance(kind, h5t.TypeStringID | h5t.TypeIntegerID | h5t.TypeFloatID):
        raise CarmilError(f"{path}: the attribute {name} is neither number nor words: {AGAIN}")
    if held.get_space().get_simple_extent_type() == h5s.NULL:
        return None
    if math.prod(held.shape) * kind.get_size() > _LARGEST_ATTRIBUTE:
        raise CarmilError(f"{path}: the attribute {name} is larger than {_LARGEST_ATTRIBUTE:,} bytes: {AGAIN}")
    if isinstance(kind, h5t.TypeStringID) and kind.is_variable_str():
        _check_heaps(owner.file, path)
    return owner.attrs[name]


def values_of(dataset: Any, where: str) -> np.ndarray:
    """All values of an array of numbers. Chunks count too: one may be larger than the array, and is unpacked whole."""
    if dataset.dtype.kind not in "biuf":
        raise CarmilError(f"{where} holds {dataset.dtype}: expected numbers")
    if 0 in dataset.shape:
        return np.empty(dataset.shape, dataset.dtype)
    values = max(math.prod(dataset.shape), math.prod(dataset.chunks or ()))
    stored = min(dataset.id.get_storage_size(), os.path.getsize(dataset.file.filename))
    unfolded = max(stored * MOST_UNFOLDED, SMALL if stored else 0)
    packed = dataset.id.get_create_plist().get_nfilters()
    must_hold(where, values * dataset.dtype.itemsize, unfolded if packed else stored)
    return dataset[()]


def _check_heaps(file: Any, path: Path) -> None:
    """HDF5 walks through a damaged heap of strings for ever, so each is walked here first."""
    if file.id.get_create_plist().get_sizes() != (8, 8):
        return
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as held:
        for start, end in _between_values(file, len(held)):
            at = held.find(b"GCOL\1\0\0\0", start, end)
            while at >= 0:
                if not _ends(held, at):
                    raise CarmilError(f"{path} has damaged attributes: {AGAIN}")
                at = held.find(b"GCOL\1\0\0\0", at + 8, end)


def _between_values(file: Any, length: int) -> Iterator[tuple[int, int]]:
    """The parts of the file that are not the values of an array in one piece: a search need not go through those."""
    import h5py

    start = 0
    arrays = [file[name] for name in file if isinstance(file.get(name, getlink=True), h5py.HardLink)]
    offsets = {item.id.get_offset(): item.id.get_storage_size() for item in arrays if isinstance(item, h5py.Dataset)}
    for offset in sorted(offset for offset in offsets if offset is not None):
        yield start, offset
        start = offset + offsets[offset]
    yield start, length


def _ends(held: mmap.mmap, heap: int) -> bool:
    """Whether the objects of a global heap, each with its length in front, lead to the heap's end."""
    (size,) = struct.unpack_from("<Q", held, heap + 8)
    at, end = heap + 16, heap + size
    if end > len(held):
        return False
    while at + 16 <= end:
        number, length = struct.unpack_from("<H6xQ", held, at)
        if number == 0 and length < 16:
            return False
        at += length if number == 0 else 16 + -(-length // 8) * 8
    return at <= end


def attribute_text(text: str) -> str:
    """A text as an attribute may hold it: HDF5's end at a NUL, and a name of a file that is no UTF-8 is written as escapes."""
    return text.replace("\0", "").encode(errors="backslashreplace").decode()
