"""Encode the tiles of one slide: threads read pictures ahead while the device computes, so that it does not wait.

Reading a slide and scaling a picture release Python's lock, so threads read in parallel. Memory holds the pictures of `AHEAD`
batches, however large the slide.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carmil.errors import CarmilError
from carmil.slides.device_encoder import DeviceEncoder
from carmil.slides.slide import Slide, Tiles

AHEAD = 3  # batches: one on the device, two being read
_MOST_READERS = 32


@dataclass(frozen=True)
class Times:
    """Seconds in total, and the seconds that readers (on average) read and the device computed, which overlap."""

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
    """features (n, d) float16, one row per tile."""

    features: NDArray[np.float16]
    times: Times


def encode(
    slide: Slide,
    tiles: Tiles,
    encoder: DeviceEncoder,
    *,
    readers: int | None = None,
    on_tiles: Callable[[int], None] = lambda tiles: None,
) -> EncodedTiles:
    """Return the features of every tile. on_tiles: called with the number of tiles of each batch."""
    size, count = encoder.batch, readers or reader_count()
    features = np.empty((len(tiles), encoder.encoder.width), np.float16)
    starts = range(0, len(tiles), size)
    buffers = [encoder.pictures(min(size, len(tiles)), tiles.pixels) for _ in starts[:AHEAD]]
    read_seconds, computed_seconds, started = 0.0, 0.0, time.perf_counter()
    with ThreadPoolExecutor(count) as threads:
        pending: deque[list[Future[float]]] = deque()

        def submit(number: int) -> None:
            corners = tiles.corners[starts[number] : starts[number] + size]
            pending.append(_submit_reads(threads, slide, tiles, corners, buffers[number % AHEAD].numpy(), count))

        try:
            for number in range(len(buffers)):
                submit(number)
            for number, start in enumerate(starts):
                read_seconds += sum(future.result() for future in pending.popleft())
                rows = slice(start, min(start + size, len(tiles)))
                computed = encoder(buffers[number % AHEAD][: rows.stop - start])
                features[rows] = computed.features
                computed_seconds += computed.seconds
                if number + AHEAD < len(starts):
                    submit(number + AHEAD)
                on_tiles(rows.stop - start)
        finally:
            threads.shutdown(cancel_futures=True)
    if not np.isfinite(features).all():
        raise CarmilError(
            f"{slide.path}: {encoder.encoder.name} gives features that are NaN, infinite or too large for float16"
        )
    return EncodedTiles(
        features, Times(len(tiles), time.perf_counter() - started, read_seconds / count, computed_seconds)
    )


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
    """Fill `pictures`, and return the seconds it took."""
    started = time.perf_counter()
    for (x, y), picture in zip(corners.tolist(), pictures, strict=False):
        picture[:] = slide.read(x, y, tiles.size, tiles.size, (tiles.pixels, tiles.pixels))
    return time.perf_counter() - started
