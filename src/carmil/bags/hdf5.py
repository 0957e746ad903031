"""The one way HDF5 files are read and written: links are not followed, and nothing unfolds to more than its file can hold.

`open_hdf5` opens, `item_of` looks a name up, `attribute_of` and `values_of` read; `new_hdf5` writes. No other file of the
package opens HDF5; tests/bags/test_hdf5.py searches for it.
"""

import io
import math
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from carmil.errors import CarmilError
from carmil.files import atomic_file
from carmil.untrusted import AGAIN, MOST_UNFOLDED, SMALL, check_declared_size, one_line_errors

if TYPE_CHECKING:
    import h5py

Check = Callable[[mmap.mmap, int, int], bool]
MOST_NAMES = 10_000  # groups and arrays in one group
_LARGEST_ATTRIBUTE = 2**20  # bytes
_VARIABLE = 9  # the class of types of variable length
_CHECKED: set[tuple[str, int, int, int, str]] = (
    set()
)  # of a file: name, inode, bytes, time, and attribute ("": its heaps)


@contextmanager
def open_hdf5(path: Path) -> "Iterator[h5py.File]":
    """The file, open for reading. Whatever goes wrong inside the block is one line that names it."""
    import h5py

    with one_line_errors(path), h5py.File(path, "r", locking="best-effort") as file:
        yield file


@contextmanager
def new_hdf5(path: Path) -> "Iterator[h5py.File]":
    """A new file to fill, which appears whole. It is made in memory: HDF5 crashes at exit over one that the disk did not take."""
    import h5py

    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        yield file
    with atomic_file(path) as aside:
        aside.write_bytes(content.getbuffer())


def names_of(group: Any, *, path: Path) -> tuple[str, ...]:
    """The names in a group: arrays, or one group per slide."""
    if len(group) > MOST_NAMES:
        raise CarmilError(
            f"{path} has {len(group):,} groups or arrays beside one another: expected at most {MOST_NAMES:,}; "
            "divide it into several files"
        )
    return tuple(group)


def item_of(group: Any, name: str, *, path: Path) -> Any:
    """The group or array `name` of this very file: links can name any other file of the machine, so none is followed."""
    import h5py

    link = group.get(name, getlink=True)
    if link is None:
        raise CarmilError(
            f"{path} has no {name}: found {', '.join(sorted(names_of(group, path=path))[:6]) or 'nothing'}"
        )
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
        _check_words(owner.file, name, path)
    return owner.attrs[name]


def values_of(dataset: Any, where: str) -> np.ndarray:
    """All values of an array of numbers."""
    if dataset.dtype.kind not in "biuf":
        raise CarmilError(f"{where} holds {dataset.dtype}: expected numbers")
    if 0 in dataset.shape:
        return np.empty(dataset.shape, dataset.dtype)
    check_size(dataset, where)
    return dataset[()]


def check_size(dataset: Any, where: str) -> None:
    """Refuse an array that declares more than its file can hold. A chunk may be larger than the array, and is unpacked whole."""
    if 0 in dataset.shape:
        return
    values = max(math.prod(dataset.shape), math.prod(dataset.chunks or ()))
    stored = min(dataset.id.get_storage_size(), os.path.getsize(dataset.file.filename))
    unfolded = max(stored * MOST_UNFOLDED, SMALL if stored else 0)
    packed = dataset.id.get_create_plist().get_nfilters()
    check_declared_size(where, values * dataset.dtype.itemsize, unfolded if packed else stored)


def _check_words(file: Any, name: str, path: Path) -> None:
    """Refuse damaged strings, once while the file is the same: HDF5 walks through a damaged heap for ever, and takes memory for
    whatever length an attribute declares before it looks for the string."""
    state = path.stat()
    version = (str(path), state.st_ino, state.st_size, state.st_mtime_ns)
    known: dict[str, Check] = {"": _heaps_end, name: partial(_lengths_fit, name=name.encode())}
    checks = [(of, check) for of, check in known.items() if (*version, of) not in _CHECKED]
    if not checks or file.id.get_create_plist().get_sizes() != (8, 8):
        return
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as held:
        parts = list(_between_values(file, path, len(held)))
        for of, check in checks:
            if not all(check(held, start, end) for start, end in parts):
                raise CarmilError(f"{path} has damaged attributes: {AGAIN}")
            _CHECKED.add((*version, of))


def _heaps_end(held: mmap.mmap, start: int, end: int) -> bool:
    """Whether the objects of every global heap in a part of a file lead to the heap's end."""
    mark = b"GCOL\1\0\0\0"
    return all(_ends(held, at) for at in _found(held, mark, start, end))


def _lengths_fit(held: mmap.mmap, start: int, end: int, name: bytes) -> bool:
    """Whether all attributes of this name in a part of a file declare strings of at most _LARGEST_ATTRIBUTE bytes.

    An attribute is: version, flags, the sizes of name, type and space, (from version 3 on) the alphabet, then name, type, space
    and values. A value that is a string of variable length is its length and its place in a global heap.
    """
    for at in _found(held, name + b"\0", start, end):
        for head in (8, 9):
            begin = at - head
            if begin < 0 or held[begin] not in ((1, 2) if head == 8 else (3,)):
                continue
            version, flags, *sizes = struct.unpack_from("<BBHHH", held, begin)
            kind, space, value = at + np.cumsum([-(-size // 8) * 8 if version == 1 else size for size in sizes])
            if sizes[0] != len(name) + 1 or value + 16 > len(held) or not (flags & 1 or held[kind] & 15 == _VARIABLE):
                continue
            rank, first = held[space + 1], space + (8 if held[space] == 1 else 4)
            many = math.prod(struct.unpack_from(f"<{rank}Q", held, first)) if first + 8 * rank <= value else 1
            values = range(int(value), int(min(value + 16 * many, len(held) - 16, value + _LARGEST_ATTRIBUTE)) + 1, 16)
            if any(struct.unpack_from("<I", held, place)[0] > _LARGEST_ATTRIBUTE for place in values[:many]):
                return False
    return True


def _found(held: mmap.mmap, mark: bytes, start: int, end: int) -> Iterator[int]:
    at = held.find(mark, start, end)
    while at >= 0:
        yield at
        at = held.find(mark, at + 1, end)


def _between_values(file: Any, path: Path, length: int) -> Iterator[tuple[int, int]]:
    """The parts of the file that are not the values of an array in one piece: a search need not go through those."""
    import h5py

    start = 0
    names = names_of(file, path=path)
    arrays = [file[name] for name in names if isinstance(file.get(name, getlink=True), h5py.HardLink)]
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
