"""Every broken file raises a one-sentence error that names it, without crashing, hanging or running its code."""

import json
import os
import pickle
import struct
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from carmil.bags.finding import find_bags
from carmil.bags.readers import read_bag, read_header
from carmil.bags.sources import Bag, Source
from carmil.bags.writers import write_bag
from carmil.errors import CarmilError

GOOD = np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4)
GRID = np.arange(12).reshape(6, 2)
SUFFIXES = ("h5", "npy", "npz", "pt", "safetensors")


def h5(path: Path, attrs: dict | None = None, **arrays) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file[name] = values
        file.attrs.update(attrs or {})
    return path


def npy(path: Path, values=GOOD, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        np.save(stream, values, **options)
    return path


def npz(path: Path, **arrays) -> Path:
    with path.open("wb") as stream:
        np.savez(stream, **arrays)
    return path


def pt(path: Path, value) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    return path


def raw(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def npy_header(header: str, version: bytes = b"\x01\x00") -> bytes:
    return b"\x93NUMPY" + version + struct.pack("<H", len(header) + 1) + header.encode() + b"\n"


def npy_declares(shape: str, descr: str = "'<f4'") -> bytes:
    return npy_header(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}") + bytes(64)


def safetensors_header(header: dict | bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(96)


def chunks_never_written(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("features", shape=(10**9, 1024), dtype="f4", chunks=(1, 1024))
    return path


def bomb_h5(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        features = file.create_dataset("features", shape=(10**9, 64), dtype="f4", chunks=(64, 64), compression="gzip")
        features[:64] = 0
    return path


def bomb_npz(path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("features.npy", npy_declares("(40000, 512)") + bytes(40000 * 2048))
    return path


def npz_twice(path: Path) -> Path:
    npz(path, features=GOOD)
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("features.npy", archive.read("features.npy"))
    return path


def npz_declares(path: Path, shape: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("features.npy", npy_declares(shape))
    return path


def linked_h5(path: Path, link) -> Path:
    h5(path.parent / "elsewhere" / "other.h5", features=GOOD)
    with h5py.File(path, "w") as file:
        file["features"] = link
    return path


def stored_outside_h5(path: Path) -> Path:
    raw(path.parent / "values.bin", GOOD.tobytes())
    with h5py.File(path, "w") as file:
        file.create_dataset("features", (6, 4), "f4", external=[(str(path.parent / "values.bin"), 0, 96)])
    return path


def virtual_h5(path: Path) -> Path:
    other = h5(path.parent / "elsewhere" / "other.h5", features=GOOD)
    with h5py.File(path, "w") as file:
        layout = h5py.VirtualLayout((6, 4), "f4")
        layout[:] = h5py.VirtualSource(other, "features", (6, 4))
        file.create_virtual_dataset("features", layout)
    return path


def endless_heap(path: Path) -> Path:
    """Write a file whose attributes HDF5 2.0 would read in an endless loop."""
    h5(path, {"encoder": "uni"}, features=GOOD)
    content = bytearray(path.read_bytes())
    heap = content.index(b"GCOL")
    content[heap + 24 : heap + 32] = b"\xff" * 8
    return raw(path, bytes(content))


def rich_attribute(path: Path) -> Path:
    with h5py.File(h5(path, features=GOOD), "a") as file:
        file.attrs["encoder"] = np.zeros(2, "i4,f4")
    return path


def stamp(path: Path, step: float = 256, **attrs) -> Path:
    return h5(path, {"extractor": "uni", **attrs}, feats=GOOD, coords=(GRID * step).astype("f4"))


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def dangling(path: Path) -> Path:
    path.symlink_to(path.parent / "gone")
    return path


# description -> file name, function that writes the broken file, expected words; each file is read on its own
FILES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "empty h5": ("s.h5", lambda p: raw(p, b""), "is empty (0 bytes)"),
    "empty npy": ("s.npy", lambda p: raw(p, b""), "is empty"),
    "empty npz": ("s.npz", lambda p: raw(p, b""), "is empty"),
    "empty pt": ("s.pt", lambda p: raw(p, b""), "is empty"),
    "empty safetensors": ("s.safetensors", lambda p: raw(p, b""), "is empty"),
    "text as h5": ("s.h5", lambda p: raw(p, "version https://git-lfs.github.com/spec/v1\n"), "cannot be read"),
    "text as npy": ("s.npy", lambda p: raw(p, "version https://git-lfs.github.com/spec/v1\n"), "cannot be read"),
    "text as npz": ("s.npz", lambda p: raw(p, "version https://git-lfs.github.com/spec/v1\n"), "cannot be read"),
    "text as pt": (
        "s.pt",
        lambda p: raw(p, "version https://git-lfs.github.com/spec/v1\n"),
        "not written by torch.save",
    ),
    "text as safetensors": (
        "s.safetensors",
        lambda p: raw(p, "version https://git-lfs.github.com\n"),
        "cannot be read",
    ),
    "pt that is an npy": ("s.h5", lambda p: pt(p, torch.ones(2, 2)), "cannot be read"),
    "zip that is no pt": ("s.pt", lambda p: npz(p, features=GOOD), "cannot be read"),
    "pt that is no npz": ("s.npz", lambda p: pt(p, torch.ones(2, 2)), "has no features"),
    "h5 without features": ("s.h5", lambda p: h5(p, coords=GRID, masks=GRID), "found 'coords', 'masks'"),
    "h5 with nothing": ("s.h5", h5, "found nothing"),
    "h5 with a group as features": ("s.h5", lambda p: h5(p, **{"features/x": GOOD}), "is a group"),
    "h5 with a null dataset": ("s.h5", lambda p: h5(p, features=h5py.Empty("f4")), "has no values"),
    "h5 of one vector": ("s.h5", lambda p: h5(p, features=GOOD[0]), "one vector for a whole slide"),
    "h5 of three axes": ("s.h5", lambda p: h5(p, features=GOOD.reshape(2, 3, 4)), "expected (instances, features)"),
    "h5 of no width": ("s.h5", lambda p: h5(p, features=GOOD[:, :0]), "(6, 0)"),
    "h5 scalar": ("s.h5", lambda p: h5(p, features=np.float32(1)), "()"),
    "h5 of integers": ("s.h5", lambda p: h5(p, features=GRID), "holds int64"),
    "h5 of strings": ("s.h5", lambda p: h5(p, features=[["a", "b"], ["c", "d"]]), "expected float16 or float32"),
    "h5 of complex numbers": ("s.h5", lambda p: h5(p, features=GOOD.astype("c8")), "expected float16 or float32"),
    "h5 with fewer coordinates": ("s.h5", lambda p: h5(p, features=GOOD, coords=GRID[:5]), "expected (6, 2)"),
    "h5 with flat coordinates": ("s.h5", lambda p: h5(p, features=GOOD, coords=GRID.ravel()), "expected (6, 2)"),
    "h5 with words as coordinates": (
        "s.h5",
        lambda p: h5(p, features=GOOD, coords=[["a", "b"]] * 6),
        "expected numbers",
    ),
    "h5 with instance labels too few": ("s.h5", lambda p: h5(p, features=GOOD, inst_labels=[1, 0]), "expected (6,)"),
    "h5 with half labels": ("s.h5", lambda p: h5(p, features=GOOD, inst_labels=[0.5] * 6), "fractions or NaN"),
    "h5 in furlongs": ("s.h5", lambda p: h5(p, {"unit": "furlong"}, features=GOOD, coords=GRID), "'furlong'"),
    "h5 of tiles of no size": (
        "s.h5",
        lambda p: h5(p, {"unit": "um", "tile_size": 0.0}, features=GOOD, coords=GRID),
        "expected a positive number",
    ),
    "h5 linked to another file": (
        "s.h5",
        lambda p: linked_h5(p, h5py.ExternalLink("elsewhere/other.h5", "/features")),
        "is not followed",
    ),
    "h5 linked to nothing": ("s.h5", lambda p: linked_h5(p, h5py.SoftLink("/nowhere")), "is not followed"),
    "h5 linked to itself": ("s.h5", lambda p: linked_h5(p, h5py.SoftLink("/features")), "is not followed"),
    "h5 stored outside": ("s.h5", stored_outside_h5, "in other files, which are not read"),
    "h5 of another's data": ("s.h5", virtual_h5, "in other files, which are not read"),
    "h5 never filled": ("s.h5", chunks_never_written, "declares 4,096,000,000,000 bytes"),
    "h5 bomb": ("s.h5", bomb_h5, "declares 256,000,000,000 bytes"),
    "h5 with a heap without end": ("s.h5", endless_heap, "damaged attributes"),
    "h5 with an encoder of numbers": ("s.h5", rich_attribute, "neither a number nor text"),
    "STAMP in pixels": ("s.h5", lambda p: stamp(p, unit="px"), "expected 'um'"),
    "STAMP in level-0 pixels": ("s.h5", lambda p: stamp(p, unit="level0_px"), "expected 'um'"),
    "STAMP of a slide": ("s.h5", lambda p: stamp(p, unit="um", feat_type="slide"), "of a whole slide"),
    "STAMP before units": ("s.h5", lambda p: stamp(p, step=100), "old STAMP file without a unit"),
    "npy of integers": ("s.npy", lambda p: npy(p, GRID), "holds int64"),
    "npy of words": ("s.npy", lambda p: npy(p, np.array([["a", "b"]])), "holds <U1"),
    "npy of records": ("s.npy", lambda p: npy(p, np.zeros((2, 2), "f4,f4")), "expected float16 or float32"),
    "npy of objects": (
        "s.npy",
        lambda p: npy(p, np.array([[1.0, None]], dtype=object), allow_pickle=True),
        "only be read by unpickling",
    ),
    "npy that is a pickle": ("s.npy", lambda p: raw(p, pickle.dumps(GOOD)), "only be read by unpickling"),
    "npy of one vector": ("s.npy", lambda p: npy(p, GOOD[0]), "one vector for a whole slide"),
    "npy of no width": ("s.npy", lambda p: npy(p, GOOD[:, :0]), "(6, 0)"),
    "npy of two slides": ("s.npy", lambda p: npy(p, GOOD.reshape(2, 3, 4)), "(2, 3, 4)"),
    "npy that declares more": ("s.npy", lambda p: raw(p, npy_declares("(1000000000000, 1024)")), "declares"),
    "npy of negative shape": ("s.npy", lambda p: raw(p, npy_declares("(-6, 4)")), "declares the shape (-6, 4)"),
    "npy of both negative": ("s.npy", lambda p: raw(p, npy_declares("(-6, -4)")), "declares the shape"),
    "npy of astronomic shape": ("s.npy", lambda p: raw(p, npy_declares(f"({10**30}, {10**30})")), "declares"),
    "npy with code in its header": (
        "s.npy",
        lambda p: raw(p, npy_header("__import__('os').system('true')") + bytes(64)),
        "cannot be read",
    ),
    "npy with a nested header": ("s.npy", lambda p: raw(p, npy_header("(" * 5000) + bytes(64)), "cannot be read"),
    "npy of an unknown type": ("s.npy", lambda p: raw(p, npy_declares("(2, 2)", "'<q99'")), "cannot be read"),
    "npy of a later version": (
        "s.npy",
        lambda p: raw(p, npy_header("{}", version=b"\x09\x00")),
        "npy of version (9, 0)",
    ),
    "npz without features": ("s.npz", lambda p: npz(p, weights=GOOD), "found 'weights'"),
    "npz of objects": (
        "s.npz",
        lambda p: npz(p, features=np.array([[1.0, None]], dtype=object)),
        "only be read by unpickling",
    ),
    "npz bomb": ("s.npz", bomb_npz, "declares 81,920"),
    "npz that declares more": ("s.npz", lambda p: npz_declares(p, "(1000000000000, 1024)"), "declares"),
    "npz with coordinates too many": ("s.npz", lambda p: npz(p, features=GOOD, coords=GRID[:2]), "expected (6, 2)"),
    "npz matrix with bags too few": ("s.npz", lambda p: npz(p, X=GOOD, bag=[0, 1]), "of each of 6 instances"),
    "npz matrix with labels too few": (
        "s.npz",
        lambda p: npz(p, X=GOOD, bag=[0, 0, 0, 1, 1, 1], y_bag=[1]),
        "expected (2,)",
    ),
    "npz matrix with labels out of order": (
        "s.npz",
        lambda p: npz(p, X=GOOD, bag=[5, 5, 5, 3, 3, 3], y_bag=[1, 0]),
        "sort them",
    ),
    "npz matrix of fractional bags": ("s.npz", lambda p: npz(p, X=GOOD, bag=np.arange(6) / 2), "is float64 of shape"),
    "npz matrix with a huge id": ("s.npz", lambda p: npz(p, X=GOOD, bag=["x" * 300] * 6), "up to 255 bytes"),
    "npz matrix that climbs": ("s.npz", lambda p: npz(p, X=GOOD, bag=["../../etc/passwd"] * 6), "without slashes"),
    "npz matrix with a line break": ("s.npz", lambda p: npz(p, X=GOOD, bag=["a\nb"] * 6), "control characters"),
    "pt of a numpy array": ("s.pt", lambda p: pt(p, GOOD), "torch.save(torch.as_tensor("),
    "pt of a list": ("s.pt", lambda p: pt(p, [torch.ones(2, 2)]), "is a list"),
    "pt of a model": ("s.pt", lambda p: pt(p, torch.nn.Linear(2, 2)), "only be read by unpickling"),
    "pt of a state dict": ("s.pt", lambda p: pt(p, torch.nn.Linear(2, 2).state_dict()), "found 'weight', 'bias'"),
    "pt of integers": ("s.pt", lambda p: pt(p, torch.ones(2, 2, dtype=torch.long)), "holds int64"),
    "pt of one vector": ("s.pt", lambda p: pt(p, torch.ones(4)), "one vector"),
    "pt that is sparse": ("s.pt", lambda p: pt(p, torch.eye(3).to_sparse()), "expected a plain dense one"),
    "pt without values": ("s.pt", lambda p: pt(p, torch.ones(10**6, 10**6, device="meta")), "s.pt"),
    "pt that repeats one value": ("s.pt", lambda p: pt(p, torch.ones(1, 1).expand(10**7, 10**4)), "declares"),
    "safetensors of other names": ("s.safetensors", lambda p: save_file({"weight": GOOD}, p), "found 'weight'"),
    "safetensors of integers": ("s.safetensors", lambda p: save_file({"features": GRID}, p), "holds int64"),
    "safetensors of bytes": ("s.safetensors", lambda p: save_file({"features": GRID.astype("u1")}, p), "holds uint8"),
    "safetensors with an endless header": (
        "s.safetensors",
        lambda p: raw(p, safetensors_header({}, length=2**60)),
        "cannot be read",
    ),
    "safetensors of no JSON": ("s.safetensors", lambda p: raw(p, safetensors_header(b"{'a'")), "cannot be read"),
    "safetensors that declares more": (
        "s.safetensors",
        lambda p: raw(
            p, safetensors_header({"features": {"dtype": "F32", "shape": [10**9, 4], "data_offsets": [0, 96]}})
        ),
        "cannot be read",
    ),
    "safetensors beyond its end": (
        "s.safetensors",
        lambda p: raw(
            p, safetensors_header({"features": {"dtype": "F32", "shape": [60, 4], "data_offsets": [0, 960]}})
        ),
        "cannot be read",
    ),
    "table": ("s.csv", lambda p: raw(p, "slide_id,label\n"), "holds no features"),
    "pipe": ("s.h5", fifo, "is a pipe, socket or device"),
    "folder named as a file": ("s.h5", lambda p: p.mkdir(), "holds no features"),
    "link to nowhere": ("s.npy", dangling, "does not exist"),
}


def read_all(path: Path, **options) -> list[Bag]:
    sources = find_bags(path, **options).sources
    for source in sources:
        read_header(source)
    return [read_bag(source) for source in sources]


def assert_one_sentence_error(path: Path, words: str, **options) -> None:
    with pytest.raises(CarmilError) as raised:
        read_all(path, **options)
    message = str(raised.value)
    assert words in message
    assert path.name in message
    assert "\n" not in message and len(message) < 500


@pytest.mark.parametrize("kind", FILES)
def test_broken_file_raises_an_error_of_one_sentence_naming_it(tmp_path, kind):
    name, make, words = FILES[kind]
    make(tmp_path / name)
    assert_one_sentence_error(tmp_path / name, words)


def write_clam(root: Path) -> Path:
    write_bag(Bag("s", GOOD, GRID.astype("f4"), "level0_px", 256.0), root, "clam")
    return root


def write_torchmil(root: Path) -> Path:
    write_bag(Bag("s", GOOD, GRID.astype("f4"), "level0_px", None, None, GRID[:, 0] % 2), root, "torchmil")
    return root


def write_slideflow(root: Path) -> Path:
    write_bag(Bag("s", GOOD, GRID.astype("f4"), "level0_px", None, "uni"), root, "slideflow")
    return root


def matrix(root: Path, table: bytes | str) -> Path:
    npy(root / "features.npy")
    raw(root / "instances.csv", table)
    return root


SIX = "bag,truth\n" + "a,0\n" * 3 + "b,1\n" * 3

# description -> function that writes the broken folder, expected words
FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing there": (lambda f: f.rmdir(), "does not exist"),
    "empty": (lambda f: None, "holds no features: expected one file per slide"),
    "only tables": (lambda f: raw(f / "labels.csv", "a,b\n"), "holds no features"),
    "only hidden files": (lambda f: npy(f / ".a.npy"), "holds no features"),
    "one id as two kinds": (lambda f: (npy(f / "a.npy"), pt(f / "a.pt", torch.ones(2, 2))), "bag 'a' twice"),
    "one id as two h5": (lambda f: (h5(f / "a.h5", features=GOOD), h5(f / "a.hdf5", features=GOOD)), "bag 'a' twice"),
    "two folders with features": (
        lambda f: (npy(f / "x" / "a.npy"), npy(f / "y" / "a.npy")),
        "several folders ('x', 'y')",
    ),
    "two encoders": (
        lambda f: (h5(f / "features_a" / "s.h5", features=GOOD), h5(f / "features_b" / "s.h5", features=GOOD)),
        "several folders ('features_a', 'features_b')",
    ),
    "two magnifications": (
        lambda f: [h5(f / f"{x}x_256px_0px_overlap" / "features_a" / "s.h5", features=GOOD) for x in (10, 20)],
        "10x_256px_0px_overlap/features_a",
    ),
    "vectors of whole slides": (
        lambda f: h5(f / "slide_features_titan" / "s.h5", features=GOOD[0]),
        "one vector per slide",
    ),
    "two torchmil encoders": (
        lambda f: (npy(f / "coords" / "s.npy"), *(npy(f / "features" / f"features_{e}" / "s.npy") for e in "ab")),
        "several folders",
    ),
    "torchmil coordinates too few": (
        lambda f: npy(write_torchmil(f) / "coords" / "s.npy", GRID[:3]),
        "expected (6, 2)",
    ),
    "torchmil instance labels too many": (
        lambda f: npy(write_torchmil(f) / "inst_labels" / "s.npy", np.ones(9)),
        "expected (6,)",
    ),
    "torchmil label that is a vector": (
        lambda f: npy(write_torchmil(f) / "labels" / "s.npy", np.ones(3)),
        "expected (1,)",
    ),
    "torchmil label that is garbage": (
        lambda f: raw(write_torchmil(f) / "labels" / "s.npy", b"\x93NUMPYx"),
        "cannot be read",
    ),
    "torchmil label of words": (
        lambda f: npy(write_torchmil(f) / "labels" / "s.npy", np.array("tumour")),
        "whole numbers",
    ),
    "CLAM patches that are garbage": (lambda f: raw(write_clam(f) / "patches" / "s.h5", b"nonsense"), "cannot be read"),
    "CLAM patches of another size": (
        lambda f: ((write_clam(f) / "h5_files" / "s.h5").unlink(), h5(f / "patches" / "s.h5", coords=GRID[:3])),
        "expected (6, 2)",
    ),
    "CLAM features cut short": (
        lambda f: os.truncate(write_clam(f) / "h5_files" / "s.h5", 900),
        "cannot be read",
    ),
    "slideflow config of no JSON": (lambda f: raw(write_slideflow(f) / "bags_config.json", "{"), "cannot be read"),
    "slideflow config that is a list": (
        lambda f: raw(write_slideflow(f) / "bags_config.json", "[1]"),
        "cannot be read",
    ),
    "slideflow index of another length": (lambda f: npz(write_slideflow(f) / "s.index.npz", a=GRID), "has no coords"),
    "matrix of other length": (lambda f: matrix(f, "bag\na\n"), "has 6 rows and instances.csv 1"),
    "matrix without a bag": (lambda f: matrix(f, "x\n" + "1\n" * 6), "names no bags"),
    "matrix with an unnamed bag": (lambda f: matrix(f, "bag,x\n" + ",1\n" * 6), "lines without a bag"),
    "matrix with an empty table": (lambda f: matrix(f, ""), "cannot be read"),
    "matrix with a binary table": (lambda f: matrix(f, b"bag\n\xff\xfe\x00\n"), "cannot be read"),
    "matrix of bags that climb": (lambda f: matrix(f, "bag\n" + "../a\n" * 6), "without slashes"),
    "two cohorts": (
        lambda f: [npz(f / f"{n}.npz", X=GOOD, bag=[0, 0, 0, 1, 1, 1]) for n in ("one", "two")],
        "holds a whole cohort",
    ),
    "groups in a damaged h5": (lambda f: raw(f / "all.h5", b"\x89HDF\r\n\x1a\n" + bytes(600)), "cannot be read"),
    "group without features": (lambda f: h5(f / "all.h5", **{"s1/other": GOOD}), "found 'other'"),
}


@pytest.mark.finding(n=14)
def test_npz_with_a_duplicate_array_raises_an_error(tmp_path):
    assert_one_sentence_error(npz_twice(tmp_path / "s.npz"), "has the array 'features' twice: expected each once")


@pytest.mark.finding(n=14)
def test_instance_table_with_too_many_columns_raises_an_error(tmp_path):
    matrix(tmp_path, "bag" + "," * 60_000)
    assert_one_sentence_error(tmp_path, "instances.csv has 60,001 columns: expected at most 50,000")


@pytest.mark.parametrize("kind", FOLDERS)
def test_broken_folder_raises_an_error_of_one_sentence_naming_it(tmp_path, kind):
    folder = tmp_path / "cohort"
    folder.mkdir()
    make, words = FOLDERS[kind]
    make(folder)
    assert_one_sentence_error(folder, words)


@pytest.mark.parametrize(
    ("table", "truth", "words"),
    [
        (SIX, "tumour", "no column 'tumour': found 'bag', 'truth'"),
        (SIX.replace("1", "maybe"), "truth", "holds 'maybe'"),
        (SIX.replace("1", "0.5"), "truth", "fractions or NaN"),
        (SIX.replace("1", ""), "truth", "holds ''"),
        (SIX.replace("1", "nan"), "truth", "holds 'nan'"),
    ],
)
def test_invalid_truth_column_raises_an_error(tmp_path, table, truth, words):
    assert_one_sentence_error(matrix(tmp_path / "cohort", table), words, truth=truth)


def test_truth_column_for_a_file_without_truth_raises_an_error(tmp_path):
    npy(tmp_path / "cohort" / "a.npy")
    assert_one_sentence_error(tmp_path / "cohort", "leave it out", truth="tumour")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_file_deleted_before_reading_raises_an_error_naming_it(tmp_path, suffix):
    path = good_file(tmp_path, suffix)
    (source,) = find_bags(path).sources
    path.unlink()
    for read in (read_header, read_bag):
        with pytest.raises(CarmilError, match=rf"{path.name} does not exist"):
            read(source)


def test_bag_removed_from_instance_table_raises_an_error_naming_it(tmp_path):
    folder = matrix(tmp_path / "cohort", SIX)
    source = find_bags(folder).sources[1]
    raw(folder / "instances.csv", SIX.replace("b,", "c,") + "\n")
    with pytest.raises(CarmilError, match=r"instances\.csv no longer has the bag 'b'"):
        read_bag(source)
    (folder / "instances.csv").unlink()
    with pytest.raises(CarmilError, match=r"instances\.csv does not exist"):
        read_bag(source)


def test_unreadable_file_raises_an_error_naming_it(tmp_path, monkeypatch):
    path = npy(tmp_path / "s.npy")
    (source,) = find_bags(path).sources

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)  # chmod has no effect for root, who may read everything
    with pytest.raises(CarmilError, match=r"s\.npy is not readable by this user"):
        read_bag(source)


def test_file_name_that_is_not_valid_text_raises_an_error(tmp_path):
    folder = tmp_path / "cohort"
    folder.mkdir()
    with open(os.fsencode(folder) + b"/\xff\xfe.npy", "wb") as stream:
        np.save(stream, GOOD)
    assert_one_sentence_error(folder, "control characters")


def test_source_that_is_not_a_feature_file_raises_an_error(tmp_path):
    raw(tmp_path / "s.txt", "hello")
    with pytest.raises(CarmilError, match=r"s\.txt is not a file of features"):
        read_bag(Source("s", tmp_path / "s.txt", "npy"))


def good_file(folder: Path, suffix: str) -> Path:
    path = folder / f"slide.{suffix}"
    if suffix == "h5":
        with h5py.File(path, "w") as file:
            file.create_dataset("features", data=GOOD, chunks=(1, 4), maxshape=(None, 4)).attrs["encoder"] = "uni"
            file.create_dataset("coords", data=GRID, chunks=(2, 2), compression="gzip").attrs["patch_size_level0"] = 512
            file["inst_labels"] = GRID[:, 0] % 2
        return path
    return write_bag(Bag("slide", GOOD, GRID.astype("f4"), "level0_px", 512.0, "uni", GRID[:, 0] % 2), folder, suffix)


def bag_or_none(path: Path) -> Bag | None:
    """Return the bag, or None after a one-sentence error; any other exception fails the test."""
    try:
        (bag,) = read_all(path)
        return bag
    except CarmilError as error:
        message = str(error)
    assert path.name in message and "\n" not in message
    return None


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_truncated_file_never_yields_wrong_features(tmp_path, suffix):
    whole = good_file(tmp_path, suffix).read_bytes()
    path = tmp_path / "cut" / f"slide.{suffix}"
    path.parent.mkdir()
    fine = 1 if len(whole) < 1500 else 16
    for length in sorted({*range(64), *range(64, len(whole), fine), *range(len(whole) - 64, len(whole))}):
        path.write_bytes(whole[:length])
        bag = bag_or_none(path)
        # HDF5 may leave unused space at the end of a file, so that truncation there loses nothing
        assert bag is None or np.array_equal(bag.features, GOOD), length
    path.write_bytes(whole)
    assert bag_or_none(path) is not None


def flipped(whole: bytes, seed: int) -> bytes:
    """Change, zero or fill a few bytes, mostly near the start, where the structure is."""
    rng = np.random.default_rng(seed)
    damaged = bytearray(whole)
    for _ in range(rng.integers(1, 6)):
        end = len(damaged) if rng.random() < 0.7 else min(512, len(damaged))
        at = int(rng.integers(end))
        match int(rng.integers(4)):
            case 0:
                damaged[at] ^= 1 << int(rng.integers(8))
            case 1:
                damaged[at] = int(rng.integers(256))
            case 2:
                damaged[at : at + 8] = b"\xff" * len(damaged[at : at + 8])
            case 3:
                damaged[at : at + 4] = bytes(len(damaged[at : at + 4]))
    return bytes(damaged)


@pytest.mark.parametrize("suffix", ["npy", "npz", "pt", "safetensors"])
def test_corrupted_bytes_give_a_bag_or_an_error_of_one_sentence(tmp_path, suffix):
    whole = good_file(tmp_path, suffix).read_bytes()
    path = tmp_path / "flipped" / f"slide.{suffix}"
    path.parent.mkdir()
    refused = 0
    for seed in range(300):
        path.write_bytes(flipped(whole, seed))
        refused += bag_or_none(path) is None
    assert refused > 20


def test_corrupted_bytes_in_an_h5_file_neither_crash_nor_hang(tmp_path):
    """Runs in a separate process because HDF5 is C code that could crash."""
    good_file(tmp_path, "h5")
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path; import test_broken_files as t; "
        "whole = Path(sys.argv[1]).read_bytes(); folder = Path(sys.argv[1]).parent / 'flipped'; folder.mkdir();\n"
        "for seed in range(400):\n"
        "    path = folder / 'slide.h5'; print(seed, flush=True); path.write_bytes(t.flipped(whole, seed))\n"
        "    t.bag_or_none(path)\n"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path / "slide.h5"), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout.split()[-1:], done.stderr[-2000:])
    assert done.stdout.split()[-1] == "399"


class Payload:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return (open, (str(self.trace), "w"))


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("s.pt", lambda path, payload: torch.save(payload, path)),
        ("s.pt", lambda path, payload: torch.save({"features": torch.ones(2, 2), "x": payload}, path)),
        ("s.pt", lambda path, payload: torch.save(payload, path, _use_new_zipfile_serialization=False)),
        ("s.pt", lambda path, payload: path.write_bytes(pickle.dumps(payload))),
        ("s.npy", lambda path, payload: path.write_bytes(pickle.dumps(payload))),
        ("s.npy", lambda path, payload: np.save(path, np.array([[payload]], dtype=object), allow_pickle=True)),
        ("s.npz", lambda path, payload: np.savez(path, features=np.array([[payload]], dtype=object))),
        ("s.npz", lambda path, payload: np.savez(path, features=GOOD, encoder=np.array([payload], dtype=object))),
    ],
)
def test_pickle_that_would_run_code_raises_an_error_and_runs_nothing(tmp_path, name, save, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    save(tmp_path / name, Payload(tmp_path / "trace"))
    (tmp_path / "trace").unlink(missing_ok=True)
    with pytest.raises(CarmilError, match=rf"{name}.*(unpickling|was not written by torch.save)"):
        read_all(tmp_path / name)
    assert not (tmp_path / "trace").exists()


def test_payload_of_these_tests_runs_when_unpickled(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "trace"))).close()
    assert (tmp_path / "trace").exists()
