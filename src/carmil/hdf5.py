"""The only module that reads and writes HDF5 files: no link is followed, and no array may be larger than its file
allows.

`open_hdf5` opens, `item_of` looks a name up, `attribute_of` and `values_of` read; `new_hdf5` writes.
tests/test_hdf5.py checks that no other module opens HDF5 files.
"""

import io
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
from carmil.files import atomic_file
from carmil.untrusted import AGAIN, MOST_UNFOLDED, SMALL, check_declared_size, one_line_errors
from carmil.words import examples

if TYPE_CHECKING:
    import h5py

MOST_NAMES = 10_000  # groups and arrays in one group
_LARGEST_ATTRIBUTE = 2**20  # bytes
_VARIABLE = 9  # HDF5's class of types of variable length
_HEAP = b"GCOL\1\0\0\0"  # the first bytes of a global heap, which contains strings of variable length
# Validated strings: name, inode, bytes and time of the file, and the attribute ("" for all heaps of the file).
_CHECKED: set[tuple[str, int, int, int, str]] = set()


@contextmanager
def open_hdf5(path: Path) -> "Iterator[h5py.File]":
    """Open a file for reading. Any error inside the block becomes one line that names the file."""
    import h5py

    with one_line_errors(path), h5py.File(path, "r", locking="best-effort") as file:
        yield file


@contextmanager
def new_hdf5(path: Path) -> "Iterator[h5py.File]":
    """Create a file, which appears when it is complete. It is built in memory: HDF5 crashes at exit if a write to disk fails."""
    import h5py

    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        yield file
    with atomic_file(path) as aside:
        aside.write_bytes(content.getbuffer())


def names_of(group: Any) -> tuple[str, ...]:
    """Return the names in a group: arrays, or one group per slide."""
    if len(group) > MOST_NAMES:
        raise CarmilError(
            f"{group.file.filename} has {len(group):,} groups or arrays in one group: expected at most "
            f"{MOST_NAMES:,}; divide it into several files"
        )
    return tuple(group)


def item_of(group: Any, name: str) -> Any:
    """Return the group or array `name` in the file itself. Links are refused, since they can name any other file of the machine."""
    import h5py

    link, where = group.get(name, getlink=True), f"{group.file.filename}: {name}"
    if link is None:
        raise CarmilError(f"{group.file.filename} has no {name}: found {examples(sorted(names_of(group)), 6)}")
    if not isinstance(link, h5py.HardLink):
        raise CarmilError(f"{where} is a link out of the file, which is not followed: copy the data into the file")
    item = group[name]
    if isinstance(item, h5py.Dataset) and (item.external or item.is_virtual):
        raise CarmilError(f"{where} keeps its values in other files, which are not read: copy them into the file")
    return item


def attribute_of(owner: Any, name: str) -> Any:
    """Return an attribute of a group or array, or None. Numbers and text only: HDF5 crashes on damaged attributes of
    other types.
    """
    from h5py import h5s, h5t

    if name not in owner.attrs:
        return None
    attribute, where = owner.attrs.get_id(name), f"{owner.file.filename}: the attribute {name}"
    kind = attribute.get_type()
    if not isinstance(kind, h5t.TypeStringID | h5t.TypeIntegerID | h5t.TypeFloatID):
        raise CarmilError(f"{where} is neither a number nor text: {AGAIN}")
    if attribute.get_space().get_simple_extent_type() == h5s.NULL:
        return None
    if math.prod(attribute.shape) * kind.get_size() > _LARGEST_ATTRIBUTE:
        raise CarmilError(f"{where} is larger than {_LARGEST_ATTRIBUTE:,} bytes: {AGAIN}")
    if isinstance(kind, h5t.TypeStringID) and kind.is_variable_str():
        _check_strings(owner.file, name)
    return owner.attrs[name]


def values_of(dataset: Any) -> np.ndarray:
    """Return all values of an array of numbers."""
    if dataset.dtype.kind not in "biuf":
        raise CarmilError(f"{where_of(dataset)} holds {dataset.dtype}: expected numbers")
    if 0 in dataset.shape:
        return np.empty(dataset.shape, dataset.dtype)
    check_size(dataset)
    return dataset[()]


def check_size(dataset: Any) -> None:
    """Refuse an array that declares more than its file can contain. A chunk may be larger than the array, and is
    decompressed as a whole.
    """
    if 0 in dataset.shape:
        return
    values = max(math.prod(dataset.shape), math.prod(dataset.chunks or ()))
    stored = min(dataset.id.get_storage_size(), os.path.getsize(dataset.file.filename))
    unfolded = max(stored * MOST_UNFOLDED, SMALL if stored else 0)
    packed = dataset.id.get_create_plist().get_nfilters()
    check_declared_size(where_of(dataset), values * dataset.dtype.itemsize, unfolded if packed else stored)


def where_of(dataset: Any) -> str:
    """Return the file and the name of an array, for messages."""
    return f"{dataset.file.filename}: {dataset.name.rsplit('/', 1)[-1]}"


def attribute_text(text: str) -> str:
    """Return text in a form that an attribute can store: HDF5 ends text at a NUL, and names that are not UTF-8 are escaped."""
    return text.replace("\0", "").encode(errors="backslashreplace").decode()


def _check_strings(file: Any, name: str) -> None:
    """Refuse damaged strings, once per version of the file.

    HDF5 reads a damaged heap in an endless loop, and allocates memory for any length that an attribute declares
    before it looks for the string.
    """
    path = Path(file.filename)
    state = path.stat()
    version = (str(path), state.st_ino, state.st_size, state.st_mtime_ns)
    unchecked = [attribute for attribute in ("", name) if (*version, attribute) not in _CHECKED]
    if not unchecked or file.id.get_create_plist().get_sizes() != (8, 8):
        return
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        parts = list(_between_values(file, len(content)))
        for attribute in unchecked:
            mark = attribute.encode() + b"\0" if attribute else _HEAP
            fits = _lengths_fit if attribute else _heap_ends
            if not all(fits(content, at, mark) for part in parts for at in _positions(content, mark, *part)):
                raise CarmilError(f"{path} has damaged attributes: {AGAIN}")
            _CHECKED.add((*version, attribute))


def _between_values(file: Any, length: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of the file outside the values of contiguous arrays, which are the only parts to be searched."""
    import h5py

    start = 0
    arrays = [file[name] for name in names_of(file) if isinstance(file.get(name, getlink=True), h5py.HardLink)]
    offsets = {item.id.get_offset(): item.id.get_storage_size() for item in arrays if isinstance(item, h5py.Dataset)}
    for offset in sorted(offset for offset in offsets if offset is not None):
        yield start, offset
        start = offset + offsets[offset]
    yield start, length


def _positions(content: mmap.mmap, mark: bytes, start: int, end: int) -> Iterator[int]:
    at = content.find(mark, start, end)
    while at >= 0:
        yield at
        at = content.find(mark, at + 1, end)


def _heap_ends(content: mmap.mmap, heap: int, mark: bytes) -> bool:
    """Return whether the objects of a global heap, each preceded by its length, lead to the end of the heap."""
    (size,) = struct.unpack_from("<Q", content, heap + len(mark))
    at, end = heap + 16, heap + size
    if end > len(content):
        return False
    while at + 16 <= end:
        number, length = struct.unpack_from("<H6xQ", content, at)
        if number == 0 and length < 16:
            return False
        at += length if number == 0 else 16 + -(-length // 8) * 8
    return at <= end


def _lengths_fit(content: mmap.mmap, at: int, mark: bytes) -> bool:
    """Return whether the strings of an attribute have at most _LARGEST_ATTRIBUTE bytes, if its name is at this
    position.

    An attribute is: version, flags, the sizes of name, type and space, (from version 3 on) the alphabet, then
    name, type, space and values. A value that is a string of variable length consists of its length and its
    position in a global heap.
    """
    for head in (8, 9):
        begin = at - head
        if begin < 0 or content[begin] not in ((1, 2) if head == 8 else (3,)):
            continue
        version, flags, *sizes = struct.unpack_from("<BBHHH", content, begin)
        kind, space, value = at + np.cumsum([-(-size // 8) * 8 if version == 1 else size for size in sizes])
        if sizes[0] != len(mark) or value + 16 > len(content) or not (flags & 1 or content[kind] & 15 == _VARIABLE):
            continue
        rank, first = content[space + 1], space + (8 if content[space] == 1 else 4)
        many = math.prod(struct.unpack_from(f"<{rank}Q", content, first)) if first + 8 * rank <= value else 1
        values = range(int(value), int(min(value + 16 * many, len(content) - 16, value + _LARGEST_ATTRIBUTE)) + 1, 16)
        if any(struct.unpack_from("<I", content, place)[0] > _LARGEST_ATTRIBUTE for place in values[:many]):
            return False
    return True
