"""Write a PNG from top to bottom, some rows at a time: a picture of any size in little memory."""

import struct
import zlib
from collections.abc import Mapping
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from carmil.slides.slide import Picture

EFFORT = 2  # of zlib, 0 to 9; more is slow and saves little
UP = 2  # PNG's filter: the difference to the row above is written


class PngWriter:
    """An RGB picture of `width` x `height` pixels: `write` all rows, then `close`. `words` become the file's text chunks."""

    def __init__(self, file: BinaryIO, width: int, height: int, *, words: Mapping[str, str], mpp: float | None = None):
        self._file, self._shape, self._rows = file, (height, width, 3), 0
        self._above: NDArray[np.uint8] = np.zeros(3 * width, np.uint8)
        self._packer = zlib.compressobj(EFFORT)
        file.write(b"\x89PNG\r\n\x1a\n")
        self._chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        if mpp is not None:
            a_metre = round(1e6 / mpp)
            self._chunk(b"pHYs", struct.pack(">IIB", a_metre, a_metre, 1))
        for name, text in words.items():
            plain = name.encode("latin-1", "replace")
            self._chunk(b"iTXt", plain + b"\0\0\0\0\0" + text.encode("utf-8"))

    def write(self, rows: Picture) -> None:
        """Write the next rows, (h, width, 3)."""
        flat = rows.reshape(len(rows), -1)
        filtered = np.empty((len(flat), flat.shape[1] + 1), np.uint8)
        filtered[:, 0] = UP
        filtered[0, 1:] = flat[0] - self._above
        np.subtract(flat[1:], flat[:-1], out=filtered[1:, 1:])
        self._above = flat[-1].copy()
        self._rows += len(flat)
        self._data(self._packer.compress(filtered.tobytes()))

    def close(self) -> None:
        assert self._rows == self._shape[0], f"{self._rows} rows of {self._shape[0]}"
        self._data(self._packer.flush())
        self._chunk(b"IEND", b"")

    def _data(self, packed: bytes) -> None:
        if packed:
            self._chunk(b"IDAT", packed)

    def _chunk(self, kind: bytes, data: bytes) -> None:
        self._file.write(struct.pack(">I", len(data)) + kind + data)
        self._file.write(struct.pack(">I", zlib.crc32(data, zlib.crc32(kind))))
