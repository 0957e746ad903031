"""One interface to the arrays in h5, npy, npz, pt and safetensors files of any tool.

Nothing is read before it is needed, links out of the file are not followed, and no pickle is ever executed. Any error
that a library raises for a damaged file becomes one `CarmilError` that names the file. Features are n instances of d
values.
"""

import math
import pickle
import re
import stat
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from carmil.errors import CarmilError
from carmil.hdf5 import attribute_of, check_size, item_of, names_of, open_hdf5, values_of
from carmil.untrusted import AGAIN, MOST_UNFOLDED, SMALL, check_declared_size, one_line_errors
from carmil.words import examples

# The kind of file by its extension.
KINDS = {
    ".h5": "h5",
    ".hdf5": "h5",
    ".npy": "npy",
    ".npz": "npz",
    ".pt": "pt",
    ".pth": "pt",
    ".safetensors": "safetensors",
}

_CONVERT = {
    "pt": "torch.save(torch.as_tensor(torch.load('{name}', weights_only=False)), '{name}')",
    "npy": "numpy.save('{name}', numpy.load('{name}', allow_pickle=True).astype('float32'))",
    "npz": "numpy.savez('{name}', features=numpy.load('{name}', allow_pickle=True)['features'].astype('float32'))",
}
_SAFETENSORS_NAMES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "BOOL": "bool"}


@dataclass(frozen=True)
class StoredArray:
    """One array of a file, not yet read. `where` is for messages; `attribute` returns an attribute by its name, or None."""

    where: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]
    attribute: Callable[[str], Any] = lambda name: None


@dataclass(frozen=True)
class ArrayFile:
    """An open file. `array` returns an array by its name, `attribute` an attribute of the whole file, or None."""

    path: Path
    names: tuple[str, ...]
    array: Callable[[str], StoredArray]
    attribute: Callable[[str], Any] = lambda name: None

    def find(self, names: Iterable[str]) -> StoredArray | None:
        """Return the array of the first of these names in the file, or None."""
        name = next((name for name in names if name in self.names), None)
        return None if name is None else self.array(name)

    def one_of(self, names: Iterable[str]) -> StoredArray:
        """Return the array of the first of these names in the file. Refuse a file without any of them."""
        if (array := self.find(names)) is None:
            raise CarmilError(f"{self.path} has no {next(iter(names))}: found {examples(self.names, 6)}")
        return array


def kind_of(path: Path) -> str | None:
    """Return the kind of file by its name; None for files without arrays."""
    return KINDS.get(path.suffix.lower())


@contextmanager
def open_arrays(path: Path, group: str = "") -> Iterator[ArrayFile]:
    """Open a file of arrays, or a group of an h5 file, for the duration of the block."""
    with one_line_errors(path):
        if not stat.S_ISREG(path.stat().st_mode):
            raise CarmilError(f"{path} is not an ordinary file: expected a file of features")
        with path.open("rb") as stream:
            start = stream.read(8)
        if not start:
            raise CarmilError(f"{path} is empty (0 bytes): copy or extract it again")
        # torchmil keeps instance labels as npy under a name that ends in .h5
        kind = "npy" if start.startswith(np.lib.format.MAGIC_PREFIX) else kind_of(path)
        if kind not in _OPENERS:
            raise CarmilError(f"{path} is not a file of features: expected one of {', '.join(KINDS)}")
        if kind == "npy" and start[:1] == b"\x80":
            raise _needs_pickle(path, "npy")
        with _OPENERS[kind](path, group) as file:
            yield file


def groups_of(path: Path) -> tuple[tuple[str, str | None], ...]:
    """Return the groups at the top of an h5 file with their labels, as ACMIL stores its slides."""
    import h5py

    with open_hdf5(path) as file:
        items = {name: item_of(file, name) for name in names_of(file)}
        groups = {name: item for name, item in items.items() if isinstance(item, h5py.Group)}
        return tuple((name, as_text(attribute_of(group, "label"))) for name, group in groups.items())


def as_text(value: Any) -> str | None:
    """Return an attribute as text; None for an empty value, or the word None."""
    if isinstance(value, np.ndarray | np.generic) and np.size(value) == 1:
        value = np.asarray(value).reshape(()).item()
    if isinstance(value, bytes):
        value = value.decode()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return None if value is None or str(value) in ("", "None") else str(value)


def as_number(value: Any, where: str) -> float | None:
    """Return an attribute as a positive number; the first of (x, y), since tiles are square."""
    if as_text(np.ravel(value)[0] if np.size(value) else None) is None:
        return None
    number = float(np.ravel(value)[0])
    if not (math.isfinite(number) and number > 0):
        raise CarmilError(f"{where} is {number:g}: expected a positive number")
    return number


def feature_layout(array: StoredArray) -> tuple[int, int, str]:
    """Return n, d and the type of the features after reading: float16 stays, other floats become float32.

    Some tools write features as (1, n, d).
    """
    shape = array.shape[1:] if len(array.shape) == 3 and array.shape[0] == 1 else array.shape
    if len(shape) == 1:
        raise CarmilError(
            f"{array.where} has the shape {array.shape}, one vector for a whole slide: expected one row per tile, "
            "(instances, features)"
        )
    if len(shape) != 2 or shape[1] == 0:
        raise CarmilError(f"{array.where} has the shape {array.shape}: expected (instances, features)")
    dtype = array.dtype.lstrip("<>=|").replace("f2", "float16").replace("f4", "float32").replace("f8", "float64")
    if dtype not in ("float16", "float32", "float64", "bfloat16"):
        if dtype == "object" and kind_of(Path(array.where.split(": ")[0])) != "h5":
            array.read()  # raises an error with advice on converting the file
        raise CarmilError(f"{array.where} holds {array.dtype}: expected float16 or float32 features")
    return shape[0], shape[1], "float16" if dtype == "float16" else "float32"


def read_features(array: StoredArray, rows: np.ndarray | None = None) -> np.ndarray:
    """Read features (n, d), or some of their rows, into memory; values too large for float32 become infinite."""
    n, d, dtype = feature_layout(array)
    values = array.read().reshape(n, d)
    with np.errstate(over="ignore"):
        return in_memory(values if rows is None else values[rows], dtype)


def read_instance_labels(array: StoredArray, rows: int) -> np.ndarray:
    """Read labels, (rows) int64."""
    if array.shape not in ((rows,), (rows, 1), (1, rows)):
        raise CarmilError(f"{array.where} has the shape {array.shape}: expected ({rows},), one whole number each")
    return as_labels(array.read().reshape(rows), array.where)


def as_labels(values: np.ndarray, where: str) -> np.ndarray:
    """Convert values to int64 labels: 1.0 becomes 1, 0.5 is refused."""
    if values.dtype.kind not in "biuf":
        raise CarmilError(f"{where} holds {values.dtype}: expected whole numbers as labels")
    if values.dtype.kind == "f" and not (np.isfinite(values) & (values == np.floor(values))).all():
        raise CarmilError(f"{where} holds fractions or NaN: expected whole numbers as labels")
    return in_memory(values, "int64")


def in_memory(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return a contiguous copy in this machine's byte order, so that the file can be closed."""
    return np.array(values, dtype=dtype, order="C", copy=None if values.flags.owndata else True)


@contextmanager
def _open_h5(path: Path, group: str) -> Iterator[ArrayFile]:
    import h5py

    with open_hdf5(path) as file:
        owner = item_of(file, group) if group else file
        if not isinstance(owner, h5py.Group):
            raise CarmilError(f"{path} no longer has the group {group!r}: run the command again")

        def array(name: str) -> StoredArray:
            dataset, where = item_of(owner, name), f"{path}: {name}"
            if not isinstance(dataset, h5py.Dataset):
                raise CarmilError(f"{where} is a group: expected an array")
            if dataset.shape is None:
                raise CarmilError(f"{where} has no values: expected an array")
            check_size(dataset)
            return StoredArray(
                where,
                dataset.shape,
                str(dataset.dtype),
                lambda: values_of(dataset),
                lambda attribute: attribute_of(dataset, attribute),
            )

        yield ArrayFile(path, names_of(owner), array, lambda attribute: attribute_of(owner, attribute))


@contextmanager
def _open_npy(path: Path, group: str) -> Iterator[ArrayFile]:
    with path.open("rb") as stream:
        header = _read_npy_header(stream, f"{path}", path.stat().st_size)

    def read() -> np.ndarray:
        if header.dtype.hasobject:
            raise _needs_pickle(path, "npy")
        if 0 in header.shape:
            return np.empty(header.shape, header.dtype)
        return np.memmap(path, header.dtype, "r", header.bytes, header.shape, header.order)

    array = StoredArray(f"{path}", header.shape, str(header.dtype), read)
    yield ArrayFile(path, ("",), lambda _: array)


@contextmanager
def _open_npz(path: Path, group: str) -> Iterator[ArrayFile]:
    with zipfile.ZipFile(path) as archive:

        def array(name: str) -> StoredArray:
            info, where = archive.getinfo(f"{name}.npy"), f"{path}: {name}"
            with archive.open(info) as stream:
                header = _read_npy_header(stream, where, info.file_size)
            if not header.dtype.hasobject:
                stored = min(info.compress_size, path.stat().st_size)
                check_declared_size(where, info.file_size, max(stored * MOST_UNFOLDED, SMALL))

            def read() -> np.ndarray:
                if header.dtype.hasobject:
                    raise _needs_pickle(path, "npz")
                with archive.open(info) as stream:
                    stream.read(header.bytes)
                    values = np.frombuffer(stream.read(), header.dtype, count=math.prod(header.shape))
                return values.reshape(header.shape, order=header.order)

            return StoredArray(where, header.shape, str(header.dtype), read)

        names = tuple(name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy"))
        if twice := next((name for name, times in Counter(names).items() if times > 1), None):
            raise CarmilError(f"{path} has the array {twice!r} twice: expected each once; write the file again")
        yield ArrayFile(path, names, array, lambda name: array(name).read() if name in names else None)


@contextmanager
def _open_pt(path: Path, group: str) -> Iterator[ArrayFile]:
    import torch

    with warnings.catch_warnings(action="ignore"):  # torch's warnings about files that are refused below
        try:
            # The format of torch before 1.6 is not a zip file, and cannot be mapped.
            loaded = torch.load(path, weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(path))
        except pickle.UnpicklingError as error:
            if not re.search(r"GLOBAL \S+|Unsupported class", str(error)):
                raise CarmilError(f"{path} was not written by torch.save: {AGAIN}") from error
            raise _needs_pickle(path, "pt") from error
    several = isinstance(loaded, dict)
    values = loaded if several else {"": loaded}

    def array(name: str) -> StoredArray:
        tensor, where = values[name], f"{path}: {name}" if several else f"{path}"
        if not isinstance(tensor, torch.Tensor):
            raise CarmilError(f"{where} is a {type(tensor).__name__}: expected one tensor (instances, features)")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise CarmilError(f"{where} is a {tensor.layout} tensor on {tensor.device}: expected a plain dense one")
        # A tensor may repeat one value without limit (stride 0): the file must contain all values of the declared
        # shape.
        check_declared_size(where, tensor.numel() * tensor.element_size(), path.stat().st_size)

        def read() -> np.ndarray:
            plain = tensor.detach().resolve_conj().resolve_neg()
            return (plain.float() if tensor.dtype == torch.bfloat16 else plain).numpy()

        return StoredArray(where, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), read)

    def attribute(name: str) -> Any:
        value = values.get(name)
        return value if isinstance(value, str | int | float) else None

    yield ArrayFile(path, tuple(name for name in values if isinstance(name, str)), array, attribute)


@contextmanager
def _open_safetensors(path: Path, group: str) -> Iterator[ArrayFile]:
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:

        def array(name: str) -> StoredArray:
            part = file.get_slice(name)
            dtype = _SAFETENSORS_NAMES.get(part.get_dtype(), part.get_dtype().replace("I", "int").replace("U", "uint"))

            def read() -> np.ndarray:
                if dtype != "bfloat16":
                    return file.get_tensor(name)
                with safe_open(path, framework="pt") as again:  # numpy has no bfloat16
                    return again.get_tensor(name).float().numpy()

            return StoredArray(f"{path}: {name}", tuple(part.get_shape()), dtype, read)

        yield ArrayFile(path, tuple(file.keys()), array, (file.metadata() or {}).get)


_OPENERS = {"h5": _open_h5, "npy": _open_npy, "npz": _open_npz, "pt": _open_pt, "safetensors": _open_safetensors}


@dataclass(frozen=True)
class _NpyHeader:
    """The declarations in an npy header; bytes: the length of the header."""

    shape: tuple[int, ...]
    order: Literal["C", "F"]
    dtype: np.dtype
    bytes: int


def _read_npy_header(stream: IO[bytes], where: str, size: int) -> _NpyHeader:
    """Read the header, and refuse one that declares more than the `size` bytes of the file."""
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise CarmilError(f"{where} is npy of version {version}: expected 1.0 or 2.0, as numpy.save writes numbers")
    shape, fortran, dtype = readers[version](stream)
    if any(length < 0 for length in shape):
        raise CarmilError(f"{where} declares the shape {shape}: {AGAIN}")
    header = _NpyHeader(shape, "F" if fortran else "C", dtype, stream.tell())
    if not dtype.hasobject:
        check_declared_size(where, math.prod(shape) * dtype.itemsize, size - header.bytes)
    return header


def _needs_pickle(path: Path, kind: str) -> CarmilError:
    return CarmilError(
        f"{path} can only be read by unpickling, which may run any code and is refused: if you trust the file, "
        f"convert it where it was written, python: {_CONVERT[kind].format(name=path.name)}"
    )
