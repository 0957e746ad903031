"""How arrays lie in a file: one view of h5, npy, npz, pt and safetensors, whoever wrote it.

Nothing is read before it is asked for, nothing outside the file is followed and no pickle is ever executed. Whatever
the libraries raise over a damaged file leaves here as one `CarmilError` that names the file. Features are n instances
of d values.
"""

import math
import pickle
import re
import stat
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from carmil.bags.hdf5 import attribute_of, check_size, item_of, names_of, open_hdf5, values_of
from carmil.errors import CarmilError
from carmil.untrusted import AGAIN, MOST_UNFOLDED, SMALL, check_declared_size, one_line_errors
from carmil.words import plural

# How the name of a file ends, and what is in it.
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
class Held:
    """One array of a file, not read yet. `told` gives an attribute of the array, or None."""

    where: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]
    told: Callable[[str], Any]


@dataclass(frozen=True)
class Contents:
    """An open file. `get` gives an array by its name, `told` an attribute of the whole file, or None."""

    path: Path
    names: tuple[str, ...]
    get: Callable[[str], Held]
    told: Callable[[str], Any]


def kind_of(path: Path) -> str | None:
    """What a file of this name holds; None if it is nothing we read arrays from."""
    return KINDS.get(path.suffix.lower())


@contextmanager
def opened(path: Path, inside: str = "") -> Iterator[Contents]:
    """The arrays of a file, or of the group `inside` of an h5 file, as long as the block lasts."""
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
            raise CarmilError(f"{path} is no file of features: expected one of {', '.join(KINDS)}")
        if kind == "npy" and start[:1] == b"\x80":
            raise _needs_pickle(path, "npy")
        with _OPENERS[kind](path, inside) as contents:
            yield contents


def groups_of(path: Path) -> tuple[tuple[str, str | None], ...]:
    """The groups at the top of an h5 file and the label each is given, as ACMIL keeps its slides."""
    import h5py

    found = []
    with open_hdf5(path) as file:
        for name in names_of(file, path=path):
            item = item_of(file, name, path=path)
            if isinstance(item, h5py.Group):
                found.append((name, as_text(attribute_of(item, "label", path=path))))
    return tuple(found)


def has_groups(path: Path) -> bool:
    """Whether there is a group at the top of an h5 file."""
    import h5py

    with open_hdf5(path) as file:
        return any(isinstance(item_of(file, name, path=path), h5py.Group) for name in names_of(file, path=path))


def as_text(value: Any) -> str | None:
    """An attribute as words; None where tools write nothing, or the word None."""
    if isinstance(value, np.ndarray | np.generic) and np.size(value) == 1:
        value = np.asarray(value).reshape(()).item()
    if isinstance(value, bytes):
        value = value.decode()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return None if value is None or str(value) in ("", "None") else str(value)


def as_number(value: Any, where: str) -> float | None:
    """An attribute as a positive number; of (x, y) the first, for tiles are square."""
    if as_text(np.ravel(value)[0] if np.size(value) else None) is None:
        return None
    number = float(np.ravel(value)[0])
    if not (math.isfinite(number) and number > 0):
        raise CarmilError(f"{where} is {number:g}: expected a positive number")
    return number


def one_of(contents: Contents, names: Iterable[str]) -> Held:
    """The first of these names that the file has."""
    name = next((name for name in names if name in contents.names), None)
    if name is None:
        raise CarmilError(f"{contents.path} has no {next(iter(names))}: found {some(contents.names)}")
    return contents.get(name)


def rows_and_width(held: Held) -> tuple[int, int]:
    """n and d of features; some tools write them as (1, n, d)."""
    shape = held.shape[1:] if len(held.shape) == 3 and held.shape[0] == 1 else held.shape
    if len(shape) == 1:
        raise CarmilError(
            f"{held.where} has the shape {held.shape}, one vector for a whole slide: expected one row a tile, "
            "(instances, features)"
        )
    if len(shape) != 2 or shape[1] == 0:
        raise CarmilError(f"{held.where} has the shape {held.shape}: expected (instances, features)")
    return shape[0], shape[1]


def dtype_when_read(held: Held) -> str:
    """float16 stays what it is; all else that can be features becomes float32."""
    name = held.dtype.lstrip("<>=|").replace("f2", "float16").replace("f4", "float32").replace("f8", "float64")
    if name not in ("float16", "float32", "float64", "bfloat16"):
        if name == "object" and kind_of(Path(held.where.split(": ")[0])) != "h5":
            held.read()  # refuses, and says how to convert
        raise CarmilError(f"{held.where} holds {held.dtype}: expected float16 or float32 features")
    return "float16" if name == "float16" else "float32"


def as_features(held: Held) -> np.ndarray:
    """The whole array, (n, d); what is too large for float32 becomes infinite."""
    shape, dtype = rows_and_width(held), dtype_when_read(held)
    values = held.read()
    with np.errstate(over="ignore"):
        return owned(values if values.shape == shape else values.reshape(shape), dtype)


def whole_numbers(held: Held, rows: int) -> np.ndarray:
    """The whole array as labels, (rows) int64."""
    if held.shape not in ((rows,), (rows, 1), (1, rows)):
        raise CarmilError(f"{held.where} has the shape {held.shape}: expected ({rows},), one whole number each")
    return as_labels(held.read().reshape(rows), held.where)


def as_labels(values: np.ndarray, where: str) -> np.ndarray:
    """Values already read as int64; 1.0 is a label, 0.5 is none."""
    if values.dtype.kind not in "biuf":
        raise CarmilError(f"{where} holds {values.dtype}: expected whole numbers as labels")
    if values.dtype.kind == "f" and not (np.isfinite(values) & (values == np.floor(values))).all():
        raise CarmilError(f"{where} holds fractions or NaN: expected whole numbers as labels")
    return owned(values, "int64")


def owned(values: np.ndarray, dtype: str) -> np.ndarray:
    """In memory of its own, row after row, in this machine's byte order: nothing stays mapped or open."""
    return np.array(values, dtype=dtype, order="C", copy=None if values.flags.owndata else True)


def some(names: Iterable[str]) -> str:
    """The first few of many names, for a sentence."""
    names = [str(name) if str(name).isprintable() else repr(name) for name in names]
    return (", ".join(names[:6]) + (f", and {len(names) - 6} more" if len(names) > 6 else "")) or "nothing"


def hidden_line(names: Sequence[str]) -> str:
    """Say which files were left out because their names begin with a dot."""
    begin = "name begins" if len(names) == 1 else "names begin"
    return f"{plural(len(names), 'hidden file')} left out, whose {begin} with a dot: {some(names)}"


@contextmanager
def _h5(path: Path, inside: str) -> Iterator[Contents]:
    import h5py

    with open_hdf5(path) as file:
        group = item_of(file, inside, path=path) if inside else file
        if not isinstance(group, h5py.Group):
            raise CarmilError(f"{path} has no group {inside!r} any more: look for its bags again")

        def get(name: str) -> Held:
            dataset = item_of(group, name, path=path)
            where = f"{path}: {name}"
            if not isinstance(dataset, h5py.Dataset):
                raise CarmilError(f"{where} is a group: expected an array")
            if dataset.shape is None:
                raise CarmilError(f"{where} has no values: expected an array")
            check_size(dataset, where)
            return Held(
                where,
                dataset.shape,
                str(dataset.dtype),
                lambda: values_of(dataset, where),
                lambda attribute: attribute_of(dataset, attribute, path=path),
            )

        yield Contents(
            path, names_of(group, path=path), get, lambda attribute: attribute_of(group, attribute, path=path)
        )


@contextmanager
def _npy(path: Path, inside: str) -> Iterator[Contents]:
    with path.open("rb") as stream:
        shape, fortran, dtype = _npy_header(stream, f"{path}")
        offset = stream.tell()
    if not dtype.hasobject:
        check_declared_size(f"{path}", math.prod(shape) * dtype.itemsize, path.stat().st_size - offset)

    def read() -> np.ndarray:
        if dtype.hasobject:
            raise _needs_pickle(path, "npy")
        if 0 in shape:
            return np.empty(shape, dtype)
        return np.memmap(path, dtype, "r", offset, shape, "F" if fortran else "C")

    held = Held(f"{path}", shape, str(dtype), read, _nothing_told)
    yield Contents(path, ("",), lambda _: held, _nothing_told)


@contextmanager
def _npz(path: Path, inside: str) -> Iterator[Contents]:
    with zipfile.ZipFile(path) as archive:

        def get(name: str) -> Held:
            info, where = archive.getinfo(f"{name}.npy"), f"{path}: {name}"
            with archive.open(info) as stream:
                shape, fortran, dtype = _npy_header(stream, where)
                offset = stream.tell()
            if not dtype.hasobject:
                stored = min(info.compress_size, path.stat().st_size)
                check_declared_size(where, info.file_size, max(stored * MOST_UNFOLDED, SMALL))
                check_declared_size(where, math.prod(shape) * dtype.itemsize, info.file_size - offset)

            def read() -> np.ndarray:
                if dtype.hasobject:
                    raise _needs_pickle(path, "npz")
                with archive.open(info) as stream:
                    stream.read(offset)
                    values = np.frombuffer(stream.read(), dtype, count=math.prod(shape))
                return values.reshape(shape, order="F" if fortran else "C")

            return Held(where, shape, str(dtype), read, _nothing_told)

        names = tuple(name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy"))
        if twice := next((name for name, times in Counter(names).items() if times > 1), None):
            raise CarmilError(f"{path} has the array {twice!r} twice: expected each once; write the file again")

        def told(name: str) -> Any:
            return get(name).read() if name in names else None

        yield Contents(path, names, get, told)


@contextmanager
def _pt(path: Path, inside: str) -> Iterator[Contents]:
    import torch

    with warnings.catch_warnings(action="ignore"):  # torch's, about what we refuse a line later
        try:
            # The old format of torch before 1.6 is no zip, and cannot be mapped.
            loaded = torch.load(path, weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(path))
        except pickle.UnpicklingError as error:
            if not re.search(r"GLOBAL \S+|Unsupported class", str(error)):
                raise CarmilError(f"{path} is not as torch.save writes it: {AGAIN}") from error
            raise _needs_pickle(path, "pt") from error
    several = isinstance(loaded, dict)
    values = loaded if several else {"": loaded}

    def get(name: str) -> Held:
        tensor, where = values[name], f"{path}: {name}" if several else f"{path}"
        if not isinstance(tensor, torch.Tensor):
            raise CarmilError(f"{where} is a {type(tensor).__name__}: expected one tensor (instances, features)")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise CarmilError(f"{where} is a {tensor.layout} tensor on {tensor.device}: expected a plain dense one")
        # A tensor may repeat one value without end (stride 0): the file must hold what the tensor declares.
        check_declared_size(where, tensor.numel() * tensor.element_size(), path.stat().st_size)

        def read() -> np.ndarray:
            plain = tensor.detach().resolve_conj().resolve_neg()
            return (plain.float() if tensor.dtype == torch.bfloat16 else plain).numpy()

        return Held(where, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), read, _nothing_told)

    def told(name: str) -> Any:
        value = values.get(name)
        return value if isinstance(value, str | int | float) else None

    yield Contents(path, tuple(name for name in values if isinstance(name, str)), get, told)


@contextmanager
def _safetensors(path: Path, inside: str) -> Iterator[Contents]:
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        told = (file.metadata() or {}).get

        def get(name: str) -> Held:
            part = file.get_slice(name)
            dtype = _SAFETENSORS_NAMES.get(part.get_dtype(), part.get_dtype().replace("I", "int").replace("U", "uint"))

            def read() -> np.ndarray:
                if dtype != "bfloat16":
                    return file.get_tensor(name)
                with safe_open(path, framework="pt") as again:  # numpy has no bfloat16
                    return again.get_tensor(name).float().numpy()

            return Held(f"{path}: {name}", tuple(part.get_shape()), dtype, read, _nothing_told)

        yield Contents(path, tuple(file.keys()), get, told)


_OPENERS = {"h5": _h5, "npy": _npy, "npz": _npz, "pt": _pt, "safetensors": _safetensors}


def _npy_header(stream: IO[bytes], where: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise CarmilError(f"{where} is npy of version {version}: expected 1.0 or 2.0, as numpy.save writes numbers")
    shape, fortran, dtype = readers[version](stream)
    if any(length < 0 for length in shape):
        raise CarmilError(f"{where} declares the shape {shape}: {AGAIN}")
    return shape, fortran, dtype


def _needs_pickle(path: Path, kind: str) -> CarmilError:
    how = _CONVERT[kind].format(name=path.name)
    return CarmilError(
        f"{path} can only be read by unpickling it, which may run any code and is not done: "
        f"if you trust it, convert it where it was written, python: {how}"
    )


def _nothing_told(name: str) -> None:
    return None
