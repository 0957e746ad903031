"""Tensors of files that torch.save wrote, in the zip format or the older one, read without executing anything.

A pickle is a program for a stack machine. Its dangerous instructions import, call, instantiate or set the state of an
object. `_Machine` interprets the program without any of these: an imported name stays a name, torch's functions that
rebuild dictionaries and tensors are recognised by their names, and the result of every other call is an inert object.
"""

import math
import mmap
import pickletools
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from carmil.errors import CarmilError
from carmil.untrusted import AGAIN, check_declared_size, one_line_errors

MOST_INSTRUCTIONS = 1_000_000  # of one pickle; a state dict of a thousand tensors has about 40,000
LARGEST_PICKLE = 64 * 2**20  # bytes; the values of tensors are outside the pickle
MOST_AXES = 16
LONGEST_NAME = 1000  # characters
DEEPEST = 4  # dictionaries in one another: {"model": {"state_dict": {"0.weight": ...}}}
OLD_MAGIC, OLD_VERSION = 0x1950A86A20F9469CFC6C, 1001  # the first two pickles of a file in the older format

_DTYPES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}


def read_state_dicts(path: Path) -> dict[str, dict[str, Tensor]]:
    """Return every dictionary of named tensors in a file by its place there, such as "model_state_dict" or "".

    Values that are not tensors are skipped. Nothing in the file is executed.
    """
    with one_line_errors(path):  # a damaged program raises any error: IndexError, TypeError, KeyError, ...
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        with (_open_zip if is_zip else _open_old)(path) as (content, read):
            states = _state_dicts(content)
            if not states:
                raise CarmilError(f"{path} holds no tensors under names: expected a state dict that torch.save wrote")
            read_once: dict[_Storage, Tensor] = {}
            return {
                place: {name: _tensor(stored, read_once, read) for name, stored in state.items()}
                for place, state in states.items()
            }


@dataclass(frozen=True)
class _Name:
    """An imported name, which is never looked up."""

    name: str


class _Inert(dict):
    """An object of any other class. As some of them are dictionaries, items that are set are kept."""


@dataclass(frozen=True)
class _Storage:
    """The values of one or more tensors, by their key in the file."""

    key: str
    dtype: torch.dtype
    count: int

    @property
    def bytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class _Stored:
    """A tensor whose values have not been read."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


_Read = Callable[[_Storage], bytes]


@contextmanager
def _open_zip(path: Path) -> Iterator[tuple[Any, _Read]]:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        pickles = [name for name in names if name.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1:
            raise CarmilError(f"{path} is a zip file with {len(pickles)} data.pkl: expected one that torch.save wrote")
        home = pickles[0].removesuffix("data.pkl")
        room = path.stat().st_size

        def member(name: str) -> bytes:
            """Read a member. Together they are no larger than the file, since torch.save does not compress."""
            nonlocal room
            size = archive.getinfo(home + name).file_size
            check_declared_size(f"{path}: {name}", size, room)
            room -= size
            return archive.read(home + name)

        if f"{home}byteorder" in names and member("byteorder") != b"little":
            raise CarmilError(f"{path} was written on a big-endian machine: save it again on another")
        check_declared_size(f"{path}: data.pkl", archive.getinfo(home + "data.pkl").file_size, LARGEST_PICKLE)
        content = _Machine(BytesIO(member("data.pkl"))).run()
        yield content, lambda storage: member(f"data/{storage.key}")


@contextmanager
def _open_old(path: Path) -> Iterator[tuple[Any, _Read]]:
    """Open the older format: five pickles (magic number, version, machine, content, keys), then the storages by key."""
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as file:
        if file[:1] != b"\x80" or _Machine(file).run() != OLD_MAGIC or _Machine(file).run() != OLD_VERSION:
            raise CarmilError(f"{path} was not written by torch.save: {AGAIN}")
        if _Machine(file).run()["little_endian"] is not True:
            raise CarmilError(f"{path} was written on a big-endian machine: save it again on another")
        machine = _Machine(file)
        content, keys = machine.run(), _Machine(file).run()
        sizes = [8 + machine.storages[key].bytes for key in keys]  # the number of values precedes them
        ends = [file.tell()]
        for size in sizes:
            ends.append(ends[-1] + size)
        places = dict(zip(keys, pairwise(ends), strict=True))

        def read(storage: _Storage) -> bytes:
            first, end = places[storage.key]
            if int.from_bytes(file[first : first + 8], "little") != storage.count:
                raise CarmilError(f"{path}: the tensor {storage.key} has another size in the file: {AGAIN}")
            return file[first + 8 : end]

        yield content, read


class _Machine:
    """Interprets the next pickle of a file. storages: those that its tensors refer to, by key."""

    def __init__(self, file: IO[bytes] | mmap.mmap) -> None:
        self.storages: dict[str, _Storage] = {}
        self._file: Any = file
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # what lies under each mark
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        for number, (instruction, argument, _) in enumerate(pickletools.genops(self._file)):
            if number == MOST_INSTRUCTIONS:
                raise ValueError(f"a pickle of more than {MOST_INSTRUCTIONS:,} instructions")
            self._step(instruction.name, argument)
        return self._stack.pop()

    def _step(self, instruction: str, argument: Any) -> None:
        stack = self._stack
        match instruction:
            case "PROTO" | "FRAME" | "STOP" | "READONLY_BUFFER":
                pass
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(instruction == "NEWTRUE")
            case "MARK":
                self._below.append(stack)
                self._stack = []
            case "POP":
                if stack:
                    stack.pop()
                else:
                    self._marked()
            case "POP_MARK":
                self._marked()
            case "DUP":
                stack.append(stack[-1])
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(instruction[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "TUPLE":
                items = self._marked()
                self._stack.append(tuple(items))
            case "EMPTY_LIST":
                stack.append([])
            case "LIST":
                items = self._marked()
                self._stack.append(items)
            case "APPEND":
                self._extend([stack.pop()])
            case "APPENDS":
                self._extend(self._marked())
            case "EMPTY_DICT":
                stack.append({})
            case "DICT":
                items = self._marked()
                self._stack.append({})
                self._set(items)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                self._set([key, value])
            case "SETITEMS":
                self._set(self._marked())
            case "GLOBAL":
                stack.append(_Name(argument.replace(" ", ".")))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_Name(f"{module}.{name}") if type(module) is type(name) is str else _Inert())
            case "PERSID":
                stack.append(_Inert())
            case "BINPERSID":
                stack.append(self._storage(stack.pop()))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(_rebuild(function, arguments))
            case "BUILD":
                stack.pop()  # the state of an object, which is not set
            case "NEWOBJ" | "NEWOBJ_EX":
                del stack[-2 if instruction == "NEWOBJ" else -3 :]
                stack.append(_Inert())
            case "INST" | "OBJ" | "FROZENSET":
                self._marked()
                self._stack.append(_Inert())
            case "ADDITEMS":
                self._marked()
            case "EMPTY_SET" | "EXT1" | "EXT2" | "EXT4" | "NEXT_BUFFER":
                stack.append(_Inert())
            case _:  # the others push their argument: a number, text or bytes
                stack.append(argument)

    def _marked(self) -> list[Any]:
        """Remove and return everything above the last mark."""
        marked, self._stack = self._stack, self._below.pop()
        return marked

    def _extend(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is list:
            self._stack[-1].extend(items)

    def _set(self, items: list[Any]) -> None:
        """Set items of a dictionary. Keys that are not names are left out: hashing nested tuples can take forever."""
        if isinstance(self._stack[-1], dict):
            pairs = zip(items[::2], items[1::2], strict=True)
            named = {key: value for key, value in pairs if type(key) is str and len(key) <= LONGEST_NAME}
            self._stack[-1].update(named)

    def _storage(self, identity: Any) -> Any:
        """Return the storage of a persistent identity: ("storage", type, key, device, count), and None in the older format."""
        match identity:
            case ("storage", _Name(name), str(key), _, int(count), *views) if name in _DTYPES and views in ([], [None]):
                storage = _Storage(key, _DTYPES[name], count)
                self.storages[key] = storage
                return storage
        return _Inert()


def _rebuild(function: Any, arguments: Any) -> Any:
    """Return a dictionary or a tensor, if the function is one of torch's that rebuild them; otherwise an inert object."""
    match function, arguments:
        case _Name("collections.OrderedDict"), ():
            return {}
        case _Name("torch._utils._rebuild_parameter"), (_Stored() as tensor, *_):
            return tensor
        case _Name("torch._utils._rebuild_tensor_v2"), (
            _Storage() as storage,
            int(offset),
            tuple(size),
            tuple(stride),
            *_,
        ):
            return _Stored(storage, offset, size, stride)
    return _Inert()


def _state_dicts(content: Any) -> dict[str, dict[str, _Stored]]:
    """Return the dictionaries that hold tensors, by the names that lead to them. Each is visited once: it may contain itself."""
    found, seen, level = {}, set[int](), [("", content)]
    for _ in range(DEEPEST):
        deeper = []
        for place, one in level:
            if not isinstance(one, dict) or id(one) in seen:
                continue
            seen.add(id(one))
            if state := {name: value for name, value in one.items() if isinstance(value, _Stored)}:
                found[place] = state
            deeper += [(f"{place}.{name}".lstrip("."), value) for name, value in one.items()]
        level = deeper
    return found


def _tensor(stored: _Stored, read_once: dict[_Storage, Tensor], read: _Read) -> Tensor:
    """Return a view of the storage's values, none of which is repeated."""
    storage, size, stride = stored.storage, stored.size, stored.stride
    numbers = (storage.count, stored.offset, *size, *stride)
    if len(size) != len(stride) or len(size) > MOST_AXES or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError("a tensor of an impossible shape")
    if 0 in size:
        return torch.empty(size, dtype=storage.dtype)
    last = stored.offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if max(math.prod(size), last + 1) > storage.count:
        raise ValueError(f"a tensor of the shape {size} in a storage of {storage.count} values")
    if storage not in read_once:
        values = bytearray(read(storage))
        if len(values) != storage.bytes:
            raise ValueError(f"{len(values):,} bytes for {storage.count:,} values")
        read_once[storage] = torch.frombuffer(values, dtype=storage.dtype)
    return read_once[storage].as_strided(size, stride, stored.offset)
