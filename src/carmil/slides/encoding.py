"""Tiles of one slide through an encoder: threads read pictures ahead while the device computes, so that it never waits.

Reading a slide and scaling a picture leave Python's lock alone, so threads read side by side. As many pictures are in
memory as `AHEAD` batches hold, however large the slide.
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

AHEAD = 3  # batches: one is computed, two are read
_MOST_READERS = 32


@dataclass(frozen=True)
class Times:
    """Seconds in all, and how many of them the readers (on average) read and the device computed; both go on at once."""

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

    def line(self) -> str:
        """The speed, and whether reading or computing limited it, in a sentence."""
        if not self.tiles or self.seconds <= 0:
            return "nothing was encoded"
        read, computed = (min(1.0, part / self.seconds) for part in (self.reading, self.computing))
        limit = "device" if computed >= read else "readers"
        return (
            f"{self.tiles:,} tiles in {self.seconds:.1f} s, {self.tiles / self.seconds:,.0f} tiles/s; limited by the {limit} "
            f"(computing {computed:.0%} of the time, reading {read:.0%})"
        )


@dataclass(frozen=True, eq=False)
class Encoded:
    """features (n, d) float16, a row a tile."""

    features: NDArray[np.float16]
    times: Times


def encode(
    slide: Slide,
    tiles: Tiles,
    encoder: DeviceEncoder,
    *,
    readers: int | None = None,
    on_tiles: Callable[[int], None] = lambda tiles: None,
) -> Encoded:
    """What `encoder` makes of every tile. on_tiles is told how many more are done."""
    size, count = encoder.batch, readers or reader_count()
    features = np.empty((len(tiles), encoder.encoder.width), np.float16)
    starts = range(0, len(tiles), size)
    shelf = [encoder.pictures(min(size, len(tiles)), tiles.pixels) for _ in starts[:AHEAD]]
    read_for, computed_for, begun = 0.0, 0.0, time.perf_counter()
    with ThreadPoolExecutor(count) as threads:
        waiting: deque[list[Future[float]]] = deque()

        def ask(number: int) -> None:
            corners = tiles.corners[starts[number] : starts[number] + size]
            waiting.append(_asked(threads, slide, tiles, corners, shelf[number % AHEAD].numpy(), count))

        try:
            for number in range(len(shelf)):
                ask(number)
            for number, start in enumerate(starts):
                read_for += sum(future.result() for future in waiting.popleft())
                rows = slice(start, min(start + size, len(tiles)))
                computed = encoder(shelf[number % AHEAD][: rows.stop - start])
                features[rows] = computed.features
                computed_for += computed.seconds
                if number + AHEAD < len(starts):
                    ask(number + AHEAD)
                on_tiles(rows.stop - start)
        finally:
            threads.shutdown(cancel_futures=True)
    if not np.isfinite(features).all():
        raise CarmilError(
            f"{slide.path}: {encoder.encoder.name} gives features that are NaN, infinite or too large for float16"
        )
    return Encoded(features, Times(len(tiles), time.perf_counter() - begun, read_for / count, computed_for))


def reader_count() -> int:
    """As many as this process may use cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_READERS)


def _asked(
    threads: ThreadPoolExecutor, slide: Slide, tiles: Tiles, corners: NDArray[np.int64], pictures: Any, count: int
) -> list[Future[float]]:
    """Neighbours are read by one thread, a few at a time: they share what is decoded."""
    few = max(1, min(8, len(corners) // (2 * count)))
    return [
        threads.submit(_read, slide, tiles, corners[i : i + few], pictures[i : i + few])
        for i in range(0, len(corners), few)
    ]


def _read(slide: Slide, tiles: Tiles, corners: NDArray[np.int64], pictures: NDArray[np.uint8]) -> float:
    """Fills `pictures`, and says how many seconds that took."""
    begun = time.perf_counter()
    for (x, y), picture in zip(corners.tolist(), pictures, strict=False):
        picture[:] = slide.read(x, y, tiles.size, tiles.size, (tiles.pixels, tiles.pixels))
    return time.perf_counter() - begun
