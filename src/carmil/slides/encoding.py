"""Encode the tiles of one slide.

For a GPU, threads read pictures ahead while it computes, so that it does not wait. On a CPU each core reads and encodes
batches of its own: threads that share an operation wait for the slowest of them after each of its hundred layers, and a
thread that reads delays the others. Reading a slide and scaling a picture release Python's lock, so threads
read in parallel. Memory holds the pictures of `AHEAD` batches, or of one batch per core, however large the slide.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from carmil.errors import CarmilError
from carmil.slides.device_encoder import DeviceEncoder
from carmil.slides.slide import Slide, Tiles

AHEAD = 3  # batches: one on the device, two being read
_MOST_READERS = 32


@dataclass(frozen=True)
class Times:
    """Total seconds, and the seconds of reading (mean over readers) and of computing (mean over cores), which overlap."""

    tiles: int = 0
    seconds: float = 0.0
    reading: float = 0.0
    computing: float = 0.0

    def __add__(self, other: "Times") -> "Times":
        return Times(
            self.tiles + other.tiles,
            self.seconds + other.seconds,
            self.reading + other.reading,
            self.computing + other.computing,
        )

    def summary(self) -> str:
        """Return a sentence with the speed, and whether reading or computing limited it."""
        if not self.tiles or self.seconds <= 0:
            return "nothing was encoded"
        read, computed = (min(1.0, part / self.seconds) for part in (self.reading, self.computing))
        limit = "device" if computed >= read else "readers"
        return (
            f"{self.tiles:,} tiles in {self.seconds:.1f} s, {self.tiles / self.seconds:,.0f} tiles/s; limited by the {limit} "
            f"(computing {computed:.0%} of the time, reading {read:.0%})"
        )


@dataclass(frozen=True, eq=False)
class EncodedTiles:
    """Features (n, d) float16, one row per tile."""

    features: NDArray[np.float16]
    times: Times


def encode(
    slide: Slide,
    tiles: Tiles,
    encoder: DeviceEncoder,
    *,
    readers: int | None = None,
    known: NDArray[np.float16] | None = None,
    on_tiles: Callable[[int], None] = lambda tiles: None,
    on_features: Callable[[NDArray[np.float16]], None] = lambda features: None,
) -> EncodedTiles:
    """Return the features of every tile.

    known: features of the first tiles, from an earlier call. on_tiles: called with the number of tiles of each batch, on_features
    with the features of all tiles so far.
    """
    features = np.empty((len(tiles), encoder.encoder.width), np.float16)
    first = 0
    if known is not None:
        first = len(known)
        features[:first] = known
    rest = replace(tiles, corners=tiles.corners[first:])
    times, started = Times(), time.perf_counter()
    spread = encoder.at_once > 1
    for batch in _on_cores(slide, rest, encoder) if spread else _read_ahead(slide, rest, encoder, readers):
        done = first + batch.rows.stop
        features[first + batch.rows.start : done] = batch.features
        times += batch.times
        on_features(features[:done])
        on_tiles(batch.times.tiles)
    if not np.isfinite(features).all():
        raise CarmilError(
            f"{slide.path}: {encoder.encoder.name} computed features that are NaN, infinite or too large for float16"
        )
    return EncodedTiles(features, replace(times, seconds=time.perf_counter() - started))


@dataclass(frozen=True, eq=False)
class _Batch:
    """The features of some rows, and the times of reading and computing them."""

    rows: slice
    features: NDArray[np.float16]
    times: Times


def _on_cores(slide: Slide, tiles: Tiles, encoder: DeviceEncoder) -> Iterator[_Batch]:
    """Read and encode each batch on one core. The cores never wait for one another."""
    cores = encoder.at_once
    size = max(1, min(encoder.batch, len(tiles) // cores))

    def work(start: int) -> _Batch:
        corners = tiles.corners[start : start + size]
        pictures = encoder.pictures(len(corners), tiles.pixels)
        seconds = _read(slide, tiles, corners, pictures.numpy())
        computed = encoder(pictures)
        times = Times(len(corners), reading=seconds / cores, computing=computed.seconds / cores)
        return _Batch(slice(start, start + len(corners)), computed.features, times)

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as threads:
            yield from threads.map(work, range(0, len(tiles), size))
    finally:
        torch.set_num_threads(before)  # torch starts other threads with the number that was set last


def _read_ahead(slide: Slide, tiles: Tiles, encoder: DeviceEncoder, readers: int | None) -> Iterator[_Batch]:
    """Encode one batch after the other, while threads read the next ones."""
    size, count = encoder.batch, readers or reader_count()
    starts = range(0, len(tiles), size)
    buffers = [encoder.pictures(min(size, len(tiles)), tiles.pixels) for _ in starts[:AHEAD]]
    with ThreadPoolExecutor(count) as threads:
        pending: deque[list[Future[float]]] = deque()

        def submit(number: int) -> None:
            corners = tiles.corners[starts[number] : starts[number] + size]
            pending.append(_submit_reads(threads, slide, tiles, corners, buffers[number % AHEAD].numpy(), count))

        try:
            for number in range(len(buffers)):
                submit(number)
            for number, start in enumerate(starts):
                seconds = sum(future.result() for future in pending.popleft())
                rows = slice(start, min(start + size, len(tiles)))
                computed = encoder(buffers[number % AHEAD][: rows.stop - start])
                times = Times(rows.stop - start, reading=seconds / count, computing=computed.seconds)
                if number + AHEAD < len(starts):
                    submit(number + AHEAD)
                yield _Batch(rows, computed.features, times)
        finally:
            threads.shutdown(cancel_futures=True)


def reader_count() -> int:
    """Return the number of cores that this process may use, at most 32."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_READERS)


def _submit_reads(
    threads: ThreadPoolExecutor, slide: Slide, tiles: Tiles, corners: NDArray[np.int64], pictures: Any, count: int
) -> list[Future[float]]:
    """Submit reads of a few neighbouring tiles each: neighbours share decoded data."""
    few = max(1, min(8, len(corners) // (2 * count)))
    return [
        threads.submit(_read, slide, tiles, corners[i : i + few], pictures[i : i + few])
        for i in range(0, len(corners), few)
    ]


def _read(slide: Slide, tiles: Tiles, corners: NDArray[np.int64], pictures: NDArray[np.uint8]) -> float:
    """Read tiles into `pictures`, and return the time in seconds."""
    started = time.perf_counter()
    for (x, y), picture in zip(corners.tolist(), pictures, strict=False):
        picture[:] = slide.read(x, y, tiles.size, tiles.size, (tiles.pixels, tiles.pixels))
    return time.perf_counter() - started
